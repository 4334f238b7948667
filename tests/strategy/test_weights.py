"""Initial weights: the same under every layout, right on every rank, and never the whole model on one rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_5d.parallel.materialize import Materializer
from tests.parity.harness import Data, difference, trainer_of, whole
from tests.parity.models import VOCAB, HandWritten, HuggingFace, own_llama
from tests.ranks import run_ranks

slow = pytest.mark.slow
TIED = ("tokens.weight", "to_vocab.weight", "lm_head.weight")


class OnMeta(HandWritten):
    """An ordinary module that builds itself in configure_model."""

    def __init__(self) -> None:
        super(HandWritten, self).__init__()
        self.lr = 0.1
        self.mean_loss = MeanMetric()

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            trainer, metric = self.trainer, self.mean_loss
            HandWritten.__init__(self)
            self.trainer, self.mean_loss = trainer, metric


def tied_llama() -> Any:
    return own_llama(tie_word_embeddings=True)


def _initial(layout: str, world_size: int, make: Any, seed: int | None) -> dict[str, Tensor]:
    """Weights before the first step. Without ``seed`` each rank's random state differs, as without seed_everything."""
    torch.manual_seed(seed if seed is not None else torch.seed())
    module = make()
    trainer = trainer_of(layout, world_size, use_distributed_sampler=False, limit_val_batches=1)
    trainer.validate(module, Data(8), verbose=False)
    return {n: whole(p) for n, p in module.named_parameters()}


def merged(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All ranks' weights; those held by several must agree to the bit."""
    out: dict[str, Tensor] = {}
    for rank in ranks:
        for name, value in rank.items():
            assert torch.equal(out.setdefault(name, value), value), name
    return out


@pytest.mark.parametrize("make", [own_llama, pytest.param(OnMeta, marks=slow), pytest.param(tied_llama, marks=slow)])
def test_a_seed_gives_the_same_weights_under_every_layout(make: Any) -> None:
    one = merged(run_ranks(1, _initial, "zero0", 1, make, 3))
    other_seed = merged(run_ranks(1, _initial, "zero0", 1, make, 4))
    assert any(difference(one[n], other_seed[n]) > 0.5 for n in one)
    for layout, world_size in (("dp2_zero3", 2), ("tp2_pp2", 4)):
        weights = merged(run_ranks(world_size, _initial, layout, world_size, make, 3))
        assert one.keys() <= weights.keys() and all(torch.equal(weights[n], one[n]) for n in one)


@pytest.mark.parametrize(("layout", "make"), [("dp2", HandWritten), ("tp2", own_llama)])
def test_ranks_agree_without_a_common_seed(layout: str, make: Any) -> None:
    merged(run_ranks(2, _initial, layout, 2, make, None))


def _peak_parameters(layout: str, world_size: int) -> tuple[int, int]:
    """The most parameter elements alive during setup (whole leaves and shards), and all that the model has."""
    torch.manual_seed(0)
    module = own_llama(num_hidden_layers=16)
    live, peak = 0, 0
    fill, draw = Materializer.fill, Materializer._draw

    def elements() -> int:
        return sum(
            (p.to_local() if hasattr(p, "to_local") else p).untyped_storage().nbytes() // p.element_size()
            for p in module.parameters()
            if not p.is_meta
        )

    def watched_draw(self: Any, origin: Any) -> nn.Module:
        nonlocal live
        twin = draw(self, origin)
        live = sum(p.numel() for p in twin.parameters(recurse=False))
        return twin

    def watched_fill(self: Any, leaf: nn.Module, shard: Any = None) -> None:
        nonlocal peak, live
        live = 0
        before = elements()
        fill(self, leaf, shard)
        peak = max(peak, before + live, elements())

    Materializer.fill, Materializer._draw = watched_fill, watched_draw  # type: ignore[method-assign]
    trainer = trainer_of(layout, world_size, use_distributed_sampler=False, limit_val_batches=1)
    trainer.validate(module, Data(8), verbose=False)
    assert trainer.strategy.model_shape is not None
    return peak, trainer.strategy.model_shape.num_parameters


@pytest.mark.parametrize(
    ("layout", "world_size", "share"), [("dp4_zero3", 4, 0.25), ("pp4", 4, 0.25), ("dp2_tp2_zero3", 4, 0.25)]
)
def test_no_rank_ever_holds_the_whole_model(layout: str, world_size: int, share: float) -> None:
    layer_and_rest = 1.0 / 16 + 0.05
    for peak, total in run_ranks(world_size, _peak_parameters, layout, world_size):
        assert 0 < peak < (share + layer_and_rest) * total, (peak, total)


def _rotary(layout: str, world_size: int, way: str) -> tuple[Tensor, float, dict[str, Tensor]]:
    torch.manual_seed(0)
    trainer = trainer_of(layout, world_size, use_distributed_sampler=False, max_steps=1, limit_val_batches=0)
    if way == "init_module":
        with trainer.init_module(empty_init=True):
            module = HuggingFace()
    else:
        module = HuggingFace(on_meta=True)
    trainer.fit(module, Data(8))
    weights = {n: whole(p) for n, p in module.named_parameters()}
    return module.model.model.rotary_emb.inv_freq.clone(), float(trainer.callback_metrics["train_loss"]), weights


@pytest.mark.parametrize("layout", ["tp2", pytest.param("pp2", marks=slow), pytest.param("dp2_zero3", marks=slow)])
@pytest.mark.parametrize("way", ["configure_model", "init_module"])
def test_hugging_faces_model_built_on_meta(layout: str, way: str) -> None:
    closed_form = 1.0 / 10000.0 ** (torch.arange(0, 8, 2).float() / 8)
    for frequencies, loss, weights in run_ranks(2, _rotary, layout, 2, way):
        assert torch.allclose(frequencies, closed_form)
        assert abs(loss - math.log(VOCAB)) < 0.2
        assert all(v.isfinite().all() for v in weights.values())
        assert all(float(v.std()) < 0.1 for n, v in weights.items() if v.ndim == 2)


def _layer_ids(layout: str, world_size: int) -> list[int]:
    module = HandWritten(layers=30, width=8, heads=2)
    for index, block in enumerate(module.blocks):
        block.register_forward_hook(lambda m, a, o, index=index: seen.append(index))
    seen: list[int] = []
    trainer = trainer_of(layout, world_size, use_distributed_sampler=False, max_steps=1, limit_val_batches=0)
    trainer.fit(module, Data(8))
    assert len(seen) == 8 * len(set(seen))  # once a micro-batch
    return sorted(set(seen))


def test_every_layer_is_on_one_stage() -> None:
    ids = run_ranks(4, _layer_ids, "pp4", 4)
    assert sorted(i for stage in ids for i in stage) == list(range(30))
    assert [len(stage) for stage in ids] == [8, 8, 7, 7]


def _tied_copies(layout: str, world_size: int, make: Any) -> list[Tensor]:
    """The embedding and the head of every rank after ten steps."""
    torch.manual_seed(0)
    module = make()
    trainer = trainer_of(layout, world_size, use_distributed_sampler=False, max_steps=10, limit_val_batches=0)
    trainer.fit(module, Data(80))
    return [whole(p) for n, p in module.named_parameters(remove_duplicate=False) if n.endswith(TIED)]


def tied_hand() -> HandWritten:
    return HandWritten(lr=0.5, tied=True)


@pytest.mark.parametrize(
    ("layout", "make"),
    [
        ("pp2", tied_hand),
        pytest.param("dp2_zero3", tied_hand, marks=slow),
        pytest.param("pp2", tied_llama, marks=slow),
    ],
)
def test_tied_copies_stay_bit_equal(layout: str, make: Any) -> None:
    ranks = run_ranks(2, _tied_copies, layout, 2, make)
    copies = [c for rank in ranks for c in rank]
    assert len(copies) == (2 if layout == "pp2" else 4)
    assert all(torch.equal(copies[0], c) for c in copies)
