"""What cannot be right is refused before a training step, with an error that names the option."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_5d.strategy import LayoutStrategy
from tests.parity.harness import Data, trainer_of
from tests.parity.models import HandWritten, own_llama
from tests.ranks import run_ranks


def _message(
    world_size: int, layout: Any, make: Callable[[], Any], run: str, data: dict[str, Any], options: dict[str, Any]
) -> str:
    """The error of a run in one rank; empty when there is none."""
    torch.manual_seed(0)
    try:
        strategy = layout() if callable(layout) else LayoutStrategy(layout)
        trainer = trainer_of(strategy, world_size, use_distributed_sampler=False, max_steps=1, **options)
        getattr(trainer, run)(make(), datamodule=Data(**{"num_rows": 8, **data}))
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(world_size: int, layout: Any, make: Callable[[], Any], *parts: str, run: str = "fit", **given: Any) -> None:
    data = given.pop("data", {})
    for message in run_ranks(world_size, _message, world_size, layout, make, run, data, given):
        for part in parts:
            assert re.search(part, message), message or "nothing was refused"


class Manual(HandWritten):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(HandWritten):
    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.SGD(parameters[2:], lr=0.1)]


class OwnBackward(HandWritten):
    def backward(self, loss: Any) -> None:
        loss.backward()


class ReturnsNothing(HandWritten):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)


class LogsPerReplica(HandWritten):
    """Another number of names on each data-parallel rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for index in range(self.trainer.strategy.dp_rank):
            self.log(f"only_here_{index}", loss, reduce_fx="max")
        return loss


class LogsSometimes(HandWritten):
    """A name that not every micro-batch logs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not (batch["labels"] == -100).any():
            self.log("rarely", 1.0)
        return super().training_step(batch, batch_idx)


class Triples(HandWritten):
    """Takes a tuple, which has no 'labels' to count."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return (batch["input_ids"], batch["labels"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({"input_ids": batch[0], "labels": batch[1]}, batch_idx)


class ValidatesWithoutModel(HandWritten):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("rows", float(len(batch["input_ids"])))


class ReplicasOfTwoSizes(HandWritten):
    """The first replica's batch is of six sequences, the others' of four."""

    def train_dataloader(self) -> Any:
        ids = torch.arange(6 * 8).reshape(6, 8) % 16
        rows = [{"input_ids": row, "labels": row} for row in ids]
        return DataLoader(rows if self.trainer.strategy.dp_rank == 0 else rows[:4], batch_size=6)  # type: ignore[arg-type]


class ValidatesUnevenly(HandWritten):
    def val_dataloader(self) -> Any:
        return ReplicasOfTwoSizes.train_dataloader(self)  # type: ignore[arg-type]


class TiedByHand(HandWritten):
    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.final(x), self.tokens.weight)


class LateMetric(HandWritten):
    def configure_model(self) -> None:
        self.late = SumMetric()


class NoLayers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(4, 4)

    training_step = HandWritten.training_step
    configure_optimizers = HandWritten.configure_optimizers


class WithPositions(nn.Module):
    """Keeps a parameter of its own beside the layers."""

    def __init__(self) -> None:
        super().__init__()
        whole = HandWritten()
        self.tokens, self.blocks, self.final, self.to_vocab = whole.tokens, whole.blocks, whole.final, whole.to_vocab
        self.positions = nn.Parameter(torch.zeros(64, 32))


class Positions(NoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.model = WithPositions()


def two_kv_heads() -> Any:
    return own_llama(num_key_value_heads=2)


def five_layers() -> Any:
    return HandWritten(layers=5)


def split_of_five() -> LayoutStrategy:
    return LayoutStrategy("pp2", split=[3, 1])


def zero_loss_weighting() -> LayoutStrategy:
    return LayoutStrategy("dp2", loss_weighting="tokens")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("world_size", "layout", "make", "parts"),
    [
        (2, "tp4", HandWritten, ["tp4", "world size 2"]),
        (2, "dp2_tp2", HandWritten, ["dp2", "4", "world size is 2"]),
        (4, "tp4", two_kv_heads, ["tp4", "num_kv_heads = 2"]),
        (2, split_of_five, five_layers, [r"split=\[3, 1\]", "5 layers"]),
        (2, zero_loss_weighting, HandWritten, ["loss_weighting='tokens'"]),
        (2, "dp2", Manual, ["manual optimization"]),
        (2, "dp2", OwnBackward, ["backward"]),
        (2, "dp2", LogsPerReplica, ["different names on different ranks"]),
        (2, "pp2", LogsSometimes, ["'rarely'|different names"]),
        (2, "dp2", Triples, ["num_targets"]),
        (1, "zero0", LateMetric, ["'late'", "in __init__"]),
        (2, "tp2", NoLayers, ["no list of layers"]),
        (2, "pp2", Positions, ["which stage holds model.positions"]),
        (2, "tp2", TiedByHand, ["a sharded weight outside of the module that holds it", "nn.Linear"]),
        (2, "pp2", ValidatesWithoutModel, ["never called the model's embedding 'tokens'", "calls the model, once"]),
    ],
)
def test_refused(world_size: int, layout: Any, make: Any, parts: list[str]) -> None:
    refused(world_size, layout, make, *parts)


def test_a_step_without_the_model_needs_no_pipeline() -> None:
    assert run_ranks(2, _message, 2, "tp2", ValidatesWithoutModel, "fit", {}, {}) == ["", ""]


def _fit_own_batches(layout: str, world_size: int, make: Callable[[], Any]) -> str:
    torch.manual_seed(0)
    module = make()
    trainer = trainer_of(LayoutStrategy(layout), world_size, use_distributed_sampler=False, max_steps=1)
    try:
        if isinstance(module, ValidatesUnevenly):
            trainer.validate(module)
        else:
            trainer.fit(module)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


UNEVEN = "2 to 3 micro-batches; zero2 and zero3 communicate with each.*drop_last=True"


@pytest.mark.parametrize("layout", ["dp2_zero2_mbs2", "dp2_zero3_mbs2"])
def test_replicas_with_other_numbers_of_micro_batches_do_not_wait_for_each_other(layout: str) -> None:
    for message in run_ranks(2, _fit_own_batches, layout, 2, ReplicasOfTwoSizes):
        assert re.search(UNEVEN, message), message or "nothing was refused"


@pytest.mark.slow
def test_replicas_with_other_numbers_of_micro_batches_too() -> None:
    assert run_ranks(2, _fit_own_batches, "dp2_zero1_mbs2", 2, ReplicasOfTwoSizes) == ["", ""]
    assert run_ranks(2, _fit_own_batches, "dp2_zero3", 2, ReplicasOfTwoSizes) == ["", ""]
    for layout, world_size, make in [("dp2_zero3_mbs2", 2, ValidatesUnevenly), ("dp2_pp2_zero3_mbs2", 4, ReplicasOfTwoSizes)]:
        for message in run_ranks(world_size, _fit_own_batches, layout, world_size, make):
            assert re.search(UNEVEN, message), message


@pytest.mark.slow
def test_refused_too() -> None:
    refused(2, "dp2", TwoOptimizers, "optimizer")
    refused(2, "dp2", ReturnsNothing, "must return the loss")
    refused(2, "pp2", HandWritten, "predict", run="predict")
    refused(2, "dp2", HandWritten, "16-true", "bf16-mixed", precision="16-true")  # 16-mixed becomes bf16-mixed on a CPU
    refused(4, "pp4", lambda: HandWritten(layers=3), "pp4", "3")
    refused(2, "tp2", HandWritten, "tp2", "15", data={"seq": 15})


def test_layouts_of_the_grammar_that_do_not_run() -> None:
    for text in ("cp2", "ep2_dp2", "rep2_dp4_zero1", "pp2_zb", "pp2_v2", "pp2_zbv"):
        with pytest.raises(ValueError, match=r"not built yet|run yet") as error:
            LayoutStrategy(text)
        assert "Nearest" in str(error.value)


@pytest.mark.slow
def test_a_module_is_laid_out_once() -> None:
    messages = run_ranks(2, _laid_out_twice)
    assert all("already laid out as dp1_tp2" in m for m in messages), messages


def _laid_out_twice() -> str:
    module = HandWritten()
    trainer_of("tp2", 2, max_steps=1, use_distributed_sampler=False).fit(module, datamodule=Data(8))
    try:
        trainer_of("pp2", 2, max_steps=1, use_distributed_sampler=False).fit(module, datamodule=Data(8))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "rows"), [("pp4", 3), ("pp2_mbs4", 6), ("pp4_mbs3", 8)])
def test_fewer_or_other_micro_batches_than_stages_train(layout: str, rows: int) -> None:
    """Neither a hang nor a wrong buffer: parity is asserted for ragged batches elsewhere."""
    world_size = int(layout[2])
    messages = run_ranks(world_size, _message, world_size, layout, HandWritten, "fit", {"num_rows": rows, "rows": rows}, {})
    assert messages == [""] * world_size


def _accumulate_more_from_epoch_one() -> list[int]:
    seen: list[int] = []
    module = HandWritten()
    module.on_before_optimizer_step = lambda optimizer: seen.append(module.trainer.fit_loop.total_batch_idx)  # type: ignore[method-assign]
    schedule = GradientAccumulationScheduler({1: 2})
    trainer = trainer_of("dp2_zero1", 2, max_epochs=2, use_distributed_sampler=False, callbacks=[schedule], limit_val_batches=0)
    trainer.fit(module, datamodule=Data(32))
    return seen


@pytest.mark.slow
def test_an_accumulation_that_changes() -> None:
    assert run_ranks(2, _accumulate_more_from_epoch_one) == [[0, 1, 2, 3, 5, 7]] * 2
