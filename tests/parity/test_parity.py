"""Every layout trains the model that one process trains: loss, gradients, weights, norm and logged metrics, step by step."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity.harness import Data, assert_parity, fit, moved, reference, trainer_of
from tests.parity.models import ROWS, HandWritten, HuggingFace, own_llama
from tests.ranks import run_ranks


def hand() -> HandWritten:
    return HandWritten(lr=0.5)


def hand_tied() -> HandWritten:
    return HandWritten(lr=0.5, tied=True)


def llama() -> Any:
    return own_llama(lr=0.5)


def llama_tied() -> Any:
    return own_llama(lr=0.5, tie_word_embeddings=True)


def hugging_face() -> HuggingFace:
    return HuggingFace(lr=0.5)


def hugging_face_tied() -> HuggingFace:
    return HuggingFace(lr=0.5, tied=True)


MODELS = {f.__name__: f for f in (hand, hand_tied, llama, llama_tied, hugging_face, hugging_face_tied)}


def world_size(layout: str) -> int:
    return math.prod(int(n) for n in re.findall(r"(?:dp|tp|pp)(\d+)", layout))


def check(layout: str, make: Any, world: int | None = None, strategy: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    expected = reference(make, **options)
    ranks = run_ranks(world or world_size(layout), fit, layout, world or world_size(layout), make, strategy, **options)
    assert_parity(ranks, expected)
    return ranks


FAST = ["pp2-hand", "tp2-llama_tied", "dp2_zero1_mbs2-hand_tied", "dp2_zero3-hugging_face", "tp2_pp2-hand"]
LAYOUTS = [
    "zero0",
    "tp2",
    "tp2_nosp",
    "pp2",
    "pp2_gpipe",
    "pp4",
    "dp4_zero2",
    "dp2_pp2_zero1",
]
LAYOUTS += ["dp2_tp2_zero3", "tp2_pp2", "tp2_nosp_pp2_gpipe", "tp2_mbs2", "pp2_mbs2", "dp2_zero1_mbs2"]
ALL = [f"{layout}-{('hand', 'llama')[index % 2]}" for index, layout in enumerate(LAYOUTS)]
ALL += [f"{layout}-{m}_tied" for layout in ("tp2", "pp2", "dp2_zero3", "tp2_pp2") for m in ("hand", "llama", "hugging_face")]
ALL += [
    f"{layout}-hugging_face" for layout in ("tp2", "tp2_nosp", "pp2", "dp2_zero1_mbs2", "dp2_zero3", "tp2_pp2", "dp2_pp2_zero1")
]
ALL += [f"dp2_tp2_pp2_zero{z}-{m}" for z in range(4) for m in ("hand", "llama_tied")]


@pytest.mark.parametrize("case", FAST)
def test_parity(case: str) -> None:
    layout, model = case.split("-")
    check(layout, MODELS[model])


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in ALL if c not in FAST])
def test_parity_of_every_kind(case: str) -> None:
    layout, model = case.split("-")
    check(layout, MODELS[model])


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "accumulate"), [("pp2", 1), ("pp2", 2), ("pp4", 3), ("tp2_pp2", 1)])
def test_twenty_batches_have_the_losses_of_one_process(layout: str, accumulate: int) -> None:
    """Losses alone: after a dozen such steps gradients differ by more than the tolerance from rounding."""
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "data": {"num_rows": 20 * ROWS}, "losses_only": True}
    expected = reference(llama, **options)
    assert len(expected["losses"]) == 20
    for rank in run_ranks(world_size(layout), fit, layout, world_size(layout), llama, **options):
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "dp2_zero3"])
def test_ten_steps_of_tied_weights(layout: str) -> None:
    check(layout, hand_tied, data={"num_rows": 10 * ROWS})


def test_what_is_compared_moves() -> None:
    """The learning rate is large enough that a wrong gradient shows, and clipping bites."""
    run = reference(hand)
    torch.manual_seed(0)
    start = {n: p.detach() for n, p in hand().named_parameters()}
    assert moved(run, {"weights": start}) > 0.05
    assert min(run["norms"]) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2_zero0", "dp2_zero1", "dp2_zero2", "dp2_zero3", "pp2", "tp2", "dp2_zero1_mbs2"])
def test_accumulated_batches(layout: str) -> None:
    check(layout, hand, accumulate_grad_batches=2 if layout == "dp2_zero1" else 3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2_zero0", "dp2_zero1", "dp2_zero2", "dp2_zero3", "dp2_pp2_zero1"])
def test_validation_in_the_middle_of_an_accumulation(layout: str) -> None:
    check(layout, hand, accumulate_grad_batches=2, val_check_interval=1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2_zero3", "dp2_tp2_zero1"])
def test_clipping_by_value(layout: str) -> None:
    check(layout, hand, gradient_clip_val=0.003, gradient_clip_algorithm="value")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["tp2_ac2", "tp2_acsel", "dp2_zero3_ac", "dp2_zero3_acsel", "pp2_ac", "pp2_acsel", "tp2_pp2_acsel"]
)
def test_recomputing_is_bit_equal(case: str) -> None:
    world = world_size(case)
    without, with_ac = (run_ranks(world, fit, name, world, llama) for name in (case.rpartition("_")[0], case))
    for a, b in zip(without, with_ac, strict=True):
        for x, y in zip([*a["gradients"], a["weights"]], [*b["gradients"], b["weights"]], strict=True):
            assert x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)


def _forwards(layout: str) -> tuple[list[int], int]:
    """How often each layer's first matrix is used in a step, and the matrix products and attentions of the step."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from lightning_5d.parallel.recompute import KEPT_OPERATIONS

    class Kept(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Kept.count += func in KEPT_OPERATIONS
            return func(*args, **(kwargs or {}))

    module, calls, step = hand(), [0] * 4, Kept()
    for index, block in enumerate(module.blocks):
        block.feed.enter.register_forward_pre_hook(lambda m, a, i=index: calls.__setitem__(i, calls[i] + 1))  # type: ignore[misc]
    module.on_train_batch_start = lambda batch, index: step.__enter__()  # type: ignore[method-assign]
    module.on_train_batch_end = lambda out, batch, index: step.__exit__(None, None, None)  # type: ignore[method-assign]
    trainer_of(layout, 1, max_steps=1, limit_val_batches=0, use_distributed_sampler=False).fit(module, Data(8))
    return calls, Kept.count


def test_what_is_recomputed() -> None:
    none, every, second, selected = (run_ranks(1, _forwards, f"zero0{ac}")[0] for ac in ("", "_ac", "_ac2", "_acsel"))
    assert (none[0], every[0], second[0], selected[0]) == ([1] * 4, [2] * 4, [1, 2, 1, 2], [2] * 4)
    assert selected[1] == none[1] < second[1] < every[1]  # acsel repeats no matrix product and no attention


def hand_frozen() -> HandWritten:
    """The first half and one matrix of the second do not learn: with pp2, nothing on the first stage."""
    module = hand()
    frozen: list[nn.Module] = [module.tokens, module.positions, *module.blocks[:2], module.blocks[3].feed.enter]
    for part in frozen:
        part.requires_grad_(False)
    return module


class PlainHead(HandWritten):
    """A part behind the head that no plan names, and a frozen embedding."""

    def __init__(self) -> None:
        super().__init__(lr=0.5)
        self.scale = nn.Linear(1, 1)
        self.tokens.requires_grad_(False)

    def forward(self, ids: Any) -> Any:
        return super().forward(ids) * self.scale(torch.ones(1))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2_pp2", "dp2_zero0", "dp2_zero2", "dp2_zero3", "dp2_tp2_zero3"])
def test_frozen_parameters(layout: str) -> None:
    check(layout, hand_frozen)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "tp2_nosp", "pp2", "dp2_zero3", "dp2_tp2_zero1"])
def test_clipping_with_a_plain_head_and_a_frozen_part(layout: str) -> None:
    check(layout, PlainHead)


@pytest.mark.slow
def test_uneven_splits_of_layers() -> None:
    check("pp2", hand, strategy={"split": [3, 1]})
    check("pp2", hand, strategy={"split": [1, 3]})
    check("pp4", six_layers)


def six_layers() -> HandWritten:
    return HandWritten(lr=0.5, layers=6)


def vocabulary_67() -> HandWritten:
    return HandWritten(lr=0.5, vocab=67)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "tp2_nosp", "dp2_tp2_zero3", "dp2_tp2_zero1", "tp2_pp2"])
def test_a_vocabulary_that_tp_does_not_divide(layout: str) -> None:
    check(layout, vocabulary_67, data={"vocab": 67})


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "pp2_mbs2", "dp2_pp2_zero1", "pp4", "dp2_zero2_mbs2"])
def test_a_ragged_last_batch_in_an_accumulation(layout: str) -> None:
    check(layout, hand, accumulate_grad_batches=2, data={"num_rows": 30})


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "tp2_pp2", "dp2_zero3"])
@pytest.mark.parametrize("model", ["llama_tied", "hugging_face"])
def test_kernels_change_nothing(layout: str, model: str) -> None:
    check(layout, MODELS[model], strategy={"kernels": "auto"})
