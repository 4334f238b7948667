"""The dry run of one rank against real ranks, against itself with all layers, and against the closed forms."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch._dynamo

from lightning_5d.advisor import explain
from lightning_5d.advisor.extrapolate import layer_counts, layer_period, microbatch_counts
from lightning_5d.advisor.model import ModelSpec
from lightning_5d.layout import Layout
from lightning_5d.models import LlamaModule
from lightning_5d.plan import find_plan
from tests.advisor.dry_and_real import assert_same_bytes, dry, dry_rank, real
from tests.parity.models import ROWS, SEQ, HandWritten, own_llama

HEADS, HEAD_WIDTH, LAYERS = 4, 8, 4


def adam_llama() -> LlamaModule:
    module = own_llama()
    module.hparams["optimizer"] = "adamw"
    return module


def compare(layout: str, world_size: int, make: Any, precision: str = "32-true") -> None:
    """Every pipeline stage's first rank: messages one by one, operations, bytes of the state."""
    ranks, resolved = real(layout, world_size, make, precision), Layout.parse(layout).resolve(world_size)
    for pp_rank in range(resolved.pp):
        calls, flops, state = ranks[pp_rank * world_size // resolved.pp]
        dry_calls, dry_flops, dry_state = dry_rank(layout, world_size, make, precision, pp_rank)
        assert dry_calls == calls and calls, (layout, pp_rank, calls - dry_calls, dry_calls - calls)
        assert dry_state == state and state["gradients"], (layout, pp_rank)
        # torch does not count the attention that a CPU takes: two products forward, five backward.
        rows, layers = ROWS // (resolved.dp or 1), LAYERS // resolved.pp
        attention = 7 * 2 * rows * (HEADS // resolved.tp) * SEQ * SEQ * HEAD_WIDTH * layers
        assert dry_flops == flops + attention, (layout, pp_rank)


@pytest.mark.parametrize("layout", ["dp2_zero1_mbs1", "tp2"])
def test_messages_operations_and_state_are_those_of_real_ranks(layout: str) -> None:
    compare(layout, 2, own_llama)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "make", "precision"),
    [
        ("dp2_zero3_mbs2", adam_llama, "bf16-mixed"),
        ("tp2_nosp", adam_llama, "bf16-mixed"),
        ("pp2_mbs2", adam_llama, "bf16-true"),
        ("tp2_mbs2", HandWritten, "32-true"),
    ],
)
def test_more_layouts_are_those_of_real_ranks(layout: str, make: Any, precision: str) -> None:
    compare(layout, 2, make, precision)


@pytest.mark.slow
def test_three_dimensions_are_those_of_real_ranks() -> None:
    compare("dp2_tp2_pp2_zero1_mbs1", 8, own_llama)


CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4000,
}


def llama(**changes: Any) -> LlamaModule:
    return LlamaModule({**CONFIG, **changes}, decay_steps=0)


def long_batch(seq_len: int, rows: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(rows, seq_len, dtype=torch.long) for name in ("input_ids", "labels")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "layers", "split", "microbatches"),
    [
        ("dp4_zero3_mbs1_acsel", 5, None, 2),
        ("dp4_zero2_mbs1_ac2", 8, None, 2),
        ("dp1_tp2_pp2_mbs1", 7, [2, 5], 5),
    ],
)
def test_few_layers_and_micro_batches_tell_of_all(layout: str, layers: int, split: list[int] | None, microbatches: int) -> None:
    make, batch = functools.partial(llama, num_hidden_layers=layers), functools.partial(long_batch, 256)
    rows = microbatches * (Layout.parse(layout).dp or 1)
    options = {"make_batch": batch, "global_batch": rows, "precision": "bf16-mixed", "split": split}
    quick, exact = (dry(layout, 4, make, exact=every, **options) for every in (False, True))
    for a, b in zip(quick, exact, strict=True):
        assert a.peak_gib == pytest.approx(b.peak_gib, rel=1e-3) and a.layers == b.layers
        assert a.memory_gib == pytest.approx(b.memory_gib, rel=1e-3, abs=1e-3 * b.peak_gib)
        assert a.tflops == pytest.approx(b.tflops, rel=1e-9) and a.state_gib == pytest.approx(b.state_gib, rel=1e-6)
        told, counted = ({(t.operation, t.axis): (t.calls, t.nbytes) for t in r.traffic} for r in (a, b))
        assert told.keys() == counted.keys()
        for key, values in counted.items():
            assert told[key] == pytest.approx(values, rel=1e-9), key


SPEC = ModelSpec("llama", 12, 1024, 16, 8, 2752, 16000)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "rows"), [("zero3_mbs2", 96), ("tp2_nosp_zero2_mbs1_ac", 24), ("tp2_pp2_zero1", 12)])
def test_closed_forms_within_three_percent_and_bytes_exact(layout: str, rows: int) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2752, "num_attention_heads": 16, "num_key_value_heads": 8}
    make = functools.partial(llama, **sizes, vocab_size=16000)
    batch = functools.partial(long_batch, 2048)
    runs = dry(layout, 16, make, make_batch=batch, global_batch=rows, precision="bf16-mixed", clip=True)
    x = explain(SPEC, layout, gpu="h100", num_gpus=16, seq_len=2048, global_batch=rows)
    overhead = x.framework["overhead_gib"]
    for found, closed in zip(runs, x.memory_by_rank.values(), strict=True):
        assert sum(closed.values()) - overhead == pytest.approx(found.peak_gib, rel=0.03), (layout, found, closed)
    assert_same_bytes(runs, x)


@pytest.mark.slow
def test_closed_forms_of_gpipe_within_three_percent() -> None:
    """Its last stage keeps a float32 copy of the logits of every micro-batch."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_hidden_layers": 6}
    make, layout = functools.partial(llama, **sizes, vocab_size=16000), "dp2_tp2_pp2_gpipe_mbs1_acsel"
    batch = functools.partial(long_batch, 512)
    runs = dry(layout, 8, make, make_batch=batch, global_batch=16, precision="bf16-mixed", clip=True)
    spec = ModelSpec("llama", 6, 1024, 16, 4, 2816, 16000)
    x = explain(spec, layout, gpu="h100", num_gpus=8, seq_len=512, global_batch=16)
    for found, closed in zip(runs, x.memory_by_rank.values(), strict=True):
        assert sum(closed.values()) - x.framework["overhead_gib"] == pytest.approx(found.peak_gib, rel=0.03), (found, closed)


def test_which_runs_tell_of_all() -> None:
    assert layer_counts(126, 1) == [3, 4] and layer_counts(4, 1) == [4] and layer_counts(126, None) == [126]
    assert layer_counts(40, 2) == [4, 6] and layer_counts(41, 2) == [5, 7]
    # A full pipeline, and one micro-batch more.
    assert microbatch_counts(64, Layout.parse("pp16")) == [17, 18] and microbatch_counts(17, Layout.parse("pp16")) == [17]
    assert microbatch_counts(64, Layout.parse("pp16_gpipe")) == microbatch_counts(64, Layout.parse("zero1")) == [3, 4]


def test_layers_that_differ_are_seen() -> None:
    module = HandWritten(layers=6)
    plan = find_plan(module)
    assert plan is not None
    period = functools.partial(layer_period, module, plan)
    assert period(Layout.parse("zero1")) == period(Layout.parse("ac")) == 1 and period(Layout.parse("ac3")) == 3
    for block in list(module.blocks)[1::2]:
        block.window = 4
    assert period(Layout.parse("zero1")) == 2 and period(Layout.parse("ac3")) == 6
    module.blocks[0].first = torch.nn.Identity()
    assert period(Layout.parse("zero1")) is None
