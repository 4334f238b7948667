"""A layer that was split by a guess: helped where its code names global sizes, refused where it would compute something else."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_5d.parallel.local_shapes import local_sizes
from lightning_5d.plan import ParallelPlan, find_plan
from tests.parity.harness import assert_parity, fit, reference
from tests.parity.models import Attention, HandWritten
from tests.ranks import RankFailed, run_ranks


class HeadsLast(Attention):
    """Keeps a head's elements apart: its heads are strided over the width, so that a block of rows is no whole head."""

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (f(x).view(batch, seq, self.head_dim, -1).permute(0, 3, 1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.permute(0, 2, 3, 1).reshape(batch, seq, -1))


class Strided(HandWritten):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = HeadsLast(32, 4)


@pytest.mark.parametrize("layout", ["tp2", "tp2_nosp"])
def test_a_layer_that_splits_wrongly_is_refused_at_its_first_call(layout: str) -> None:
    assert find_plan(Strided()).no_tensor_parallel is None, "names and shapes alone do not show it"
    with pytest.raises(RankFailed, match=r"Block computes something else when it is split over tp2 .*ParallelPlan\(colwise"):
        run_ranks(2, fit, layout, 2, Strided)


class Chunked(Attention):
    """Query, key and value in one matrix, taken apart by blocks: its rows cannot be split as they lie."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        del self.query, self.key, self.value
        self.fused = torch.nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (y.view(batch, seq, -1, self.head_dim).transpose(1, 2) for y in self.fused(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, -1))


class Fused(HandWritten):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = Chunked(32, 4)


def test_a_plan_given_by_hand_is_checked_too() -> None:
    plan = ParallelPlan(
        layers="blocks",
        embedding="tokens",
        norm="final",
        head="to_vocab",
        first_only=("positions",),
        colwise=("attention.fused", "feed.enter"),
        rowwise=("attention.out", "feed.leave"),
    )
    with pytest.raises(RankFailed, match="Block computes something else when it is split over tp2"):
        run_ranks(2, fit, "tp2", 2, Fused, {"plan": plan})


class WidthFromCount(Attention):
    """Computes the width of a head from the number of heads, as nanoGPT does."""

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = (
            f(x).view(batch, seq, self.n_heads, width // self.n_heads).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(batch, seq, width))


class LikeNanoGPT(HandWritten):
    """More positions than tokens, too."""

    def __init__(self) -> None:
        super().__init__(lr=0.5)
        self.positions = torch.nn.Embedding(128, 32)
        for block in self.blocks:
            block.attention = WidthFromCount(32, 4)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_width_of_a_head_computed_from_the_local_count(layout: str) -> None:
    plan = find_plan(LikeNanoGPT())
    assert (plan.embedding, plan.head, plan.first_only) == ("tokens", "to_vocab", ("positions",))
    assert_parity(run_ranks(2, fit, layout, 2, LikeNanoGPT), reference(LikeNanoGPT))


@pytest.mark.parametrize(
    ("shape", "sizes", "expected"),
    [
        ((2, 8, 16), (2, 8, 4, 8), (2, 8, 2, 8)),
        ((2, 8, 2, 8), (2, 8, 32), (2, 8, 16)),
        ((2, 8, 2, 8), (16, 32), (16, 16)),
        ((2, 8, 16), (2, 8, 16, 2), (2, 8, 8, 2)),  # as many heads as the local width
        ((2, 8, 16), (2, 8, 2, 8), None),  # fits already
        ((2, 8, 16), (2, 8, -1, 8), None),  # finds its own
        ((2, 8, 16), (2, 8, 5, 8), None),  # too large by something else: the view's own error
    ],
)
def test_local_sizes(shape: tuple[int, ...], sizes: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
    assert local_sizes(shape, sizes, tp=2) == expected
    assert local_sizes(shape, sizes, tp=2, head_dim=8) == expected


@given(st.integers(1, 5), st.integers(3, 9), st.integers(1, 4), st.integers(1, 8), st.sampled_from([2, 4]), st.booleans())
def test_a_view_of_all_heads_becomes_one_of_the_local_heads(
    batch: int, seq: int, local: int, width: int, tp: int, flat: bool
) -> None:
    heads = local * tp
    lead = (batch * seq,) if flat else (batch, seq)
    assert local_sizes((batch, seq, local * width), (*lead, heads, width), tp) == (*lead, local, width)
    assert local_sizes((batch, seq, local, width), (*lead, heads * width), tp) == (*lead, local * width)
    assert local_sizes((batch, seq, local * width), (*lead, local, width * tp), tp, width) == (*lead, local, width)
    assert math.prod((*lead, local, width)) == batch * seq * local * width


def test_fused_and_unknown_matrices_are_refused_by_name() -> None:
    class Fused(HandWritten):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.attention.query = torch.nn.Linear(32, 96)

    class Unknown(HandWritten):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.attention.mystery = torch.nn.Linear(32, 32)

    assert "attention.query looks fused (96 outputs where 32 are consumed)" in (find_plan(Fused()).no_tensor_parallel or "")
    assert "attention.mystery 32->32" in (find_plan(Unknown()).no_tensor_parallel or "")


@pytest.mark.parametrize(("family", "expected"), [("Llama", False), ("Gemma3", False), ("Bloom", True), ("GPT2", False)])
def test_what_a_layer_returns_is_looked_at_not_read_from_its_annotation(family: str, expected: bool) -> None:
    assert run_ranks(1, _tuple_output, family) == [expected]


def _tuple_output(family: str) -> bool:
    import transformers

    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    if family == "Gemma3":
        config = transformers.Gemma3TextConfig(**sizes, num_key_value_heads=2, head_dim=8)
        return find_plan(transformers.Gemma3ForCausalLM(config)).tuple_output
    if family == "Llama":
        return find_plan(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))).tuple_output
    if family == "Bloom":
        config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
        return find_plan(transformers.BloomForCausalLM(config)).tuple_output
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)
    return find_plan(transformers.GPT2LMHeadModel(config)).tuple_output
