"""What a user's step does that a split batch or module would get wrong, silently: refused, or done right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parity.harness import Data, assert_parity, fit, reference, trainer_of
from tests.parity.models import VOCAB, HandWritten
from tests.ranks import RankFailed, run_ranks


class ShiftsItself(HandWritten):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class CountsItsShift(ShiftsItself):
    def num_targets(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"][:, 1:] != -100).sum()


class IgnoresPadding(HandWritten):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].clamp(min=0).flatten(), ignore_index=0)


class Sums(HandWritten):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum") / 100


class SumsAndDivides(HandWritten):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"].flatten()
        total = F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), labels, None, None, -100, None, "sum")
        return total / (labels != -100).sum().clamp(min=1)


WEIGHTS = torch.linspace(0.5, 1.5, VOCAB)


class ClassWeights(HandWritten):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), WEIGHTS)


class CountsClassWeights(ClassWeights):
    def num_targets(self, batch: dict[str, Tensor]) -> Tensor:
        return WEIGHTS[batch["labels"][batch["labels"] != -100]].sum()


class WithTeacher(HandWritten):
    """A frozen second model with parts of the same shapes, before or behind the first."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = HandWritten(layers=5)
        self.teacher.requires_grad_(False)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hint = self.teacher(batch["input_ids"]).argmax(-1).flatten()
        targets = torch.where(batch["labels"].flatten() == -100, -100, hint)
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), targets)


class Penalty(HandWritten):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 1e-3 * sum(p.square().sum() for p in self.parameters())


class LooksAtTheFirst(HandWritten):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert next(self.parameters()).dtype is torch.float32
        return super().training_step(batch, batch_idx)


class KeepsGradients(HandWritten):
    """Zeroes every second time, in place."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=batch_idx % 4 == 0)


@pytest.mark.parametrize("layout", ["pp2", "dp2_zero1", "zero0_mbs2"])
@pytest.mark.parametrize("make", [ShiftsItself, IgnoresPadding])
def test_other_targets_than_were_counted_are_an_error_at_the_first_step(layout: str, make: Any) -> None:
    with pytest.raises(RankFailed, match=r"averaged over \[\d+\] targets, but \d+ `labels` .* Define `num_targets"):
        run_ranks(1 if layout.startswith("zero0") else 2, fit, layout, 2, make)


@pytest.mark.parametrize(
    ("layout", "make", "said"), [("pp2", Sums, "summed over .* reduction='mean'"), ("dp2_zero1", ClassWeights, "class weights")]
)
def test_a_loss_that_is_no_mean_is_an_error_at_the_first_step(layout: str, make: Any, said: str) -> None:
    with pytest.raises(RankFailed, match=said):
        run_ranks(2, fit, layout, 2, make)


def test_a_sum_that_the_step_divides_is_a_mean() -> None:
    runs = [*run_ranks(2, fit, "dp2_zero1_mbs2", 2, SumsAndDivides), reference(SumsAndDivides)]
    assert_parity(runs[:-1], runs[-1])


@pytest.mark.parametrize("make", [CountsItsShift, CountsClassWeights])
def test_a_step_that_counts_its_targets_itself(make: Any) -> None:
    runs = [*run_ranks(2, fit, "dp2_zero1_mbs2", 2, make), reference(make)]
    for run in runs:
        run["metrics"].pop("val_metric")  # the module weights it by labels that its loss leaves out
    assert_parity(runs[:2], runs[2])


@pytest.mark.parametrize("layout", ["tp2", pytest.param("dp2_zero2", marks=pytest.mark.slow)])
def test_a_second_model_is_left_whole(layout: str) -> None:
    assert_parity(run_ranks(2, fit, layout, 2, WithTeacher), reference(WithTeacher))


def test_a_penalty_over_all_parameters_is_refused_on_a_stage() -> None:
    with pytest.raises(RankFailed, match="goes over all parameters of Penalty, of which a pipeline stage holds only its own"):
        run_ranks(2, fit, "pp2", 2, Penalty)
    run_ranks(2, fit, "pp2", 2, LooksAtTheFirst)


@pytest.mark.parametrize("layout", ["pp2", "dp2_zero1"])
def test_gradients_that_the_users_own_zero_grad_keeps(layout: str) -> None:
    assert_parity(run_ranks(2, fit, layout, 2, KeepsGradients), reference(KeepsGradients))


def _with_sync_batchnorm() -> None:
    trainer_of("zero0", sync_batchnorm=True, max_steps=1).fit(HandWritten(), datamodule=Data(8))


def test_sync_batchnorm_is_not_silently_left_out() -> None:
    with pytest.raises(RankFailed, match=r"sync_batchnorm=True.* is not applied"):
        run_ranks(1, _with_sync_batchnorm)
