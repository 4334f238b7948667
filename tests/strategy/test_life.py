"""What happens around the steps: several runs of one trainer, evaluation, modes, samplers, signals, errors."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.parity.harness import Data, assert_parity, fit, reference, trainer_of, whole
from tests.parity.models import HandWritten, HuggingFace, Tokens, own_llama
from tests.ranks import RankFailed, run_ranks

slow = pytest.mark.slow


def _fit_twice(layout: str | None, world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module, data = HandWritten(lr=0.5), Data(24)
    trainer = trainer_of(
        layout, world_size, use_distributed_sampler=False, max_epochs=1, gradient_clip_val=0.5, inference_mode=False
    )
    (before,) = trainer.validate(module, data, verbose=False)
    trainer.fit(module, data)
    if layout is None or "pp" not in layout:  # what is left gathered would be optimized, and thrown away
        trainer.predict(module, Test(24), return_predictions=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, datamodule=data)
    (after,) = trainer.validate(module, data, verbose=False)
    (test,) = trainer.test(module, Test(24), verbose=False)
    return {
        "metrics": {**{f"before_{n}": v for n, v in before.items()}, **after, **test},
        "weights": {n: whole(p) for n, p in module.named_parameters()},
        "step": trainer.global_step,
    }


class Test(Data):
    __test__ = False

    def test_dataloader(self) -> Any:
        return self._loader(12)

    predict_dataloader = test_dataloader


HandWritten.predict_step = lambda self, batch, batch_idx: self(batch["input_ids"])  # type: ignore[method-assign]
HandWritten.test_step = lambda self, batch, batch_idx: self.log("test_loss", self.loss(batch))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "layout", ["dp2_zero1", "pp2", *(pytest.param(x, marks=slow) for x in ("tp2", "dp2_zero2", "dp2_zero3", "dp2"))]
)
def test_one_trainer_validates_fits_twice_and_tests(layout: str) -> None:
    (expected,) = run_ranks(1, _fit_twice, None, 1)
    ranks = run_ranks(2, _fit_twice, layout, 2)
    for rank in ranks:
        assert rank["step"] == expected["step"] == 9 and rank["metrics"].keys() == expected["metrics"].keys()
        assert all(math.isclose(rank["metrics"][n], v, rel_tol=1e-5) for n, v in expected["metrics"].items())
        for name, value in rank["weights"].items():
            assert torch.allclose(value, expected["weights"][name], rtol=1e-4, atol=1e-6), name


class Modes(HandWritten):
    """Dropout, a layer that stays in eval mode, a step without batch_idx, a user's ``except Exception``."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.feed = nn.Sequential(block.feed, nn.Dropout(0.1))
        self.blocks[0].eval()
        self.modes: list[tuple[bool, ...]] = []

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        self.modes.append(tuple(m.training for m in [self, *self.blocks, self.blocks[3], self.to_vocab]))
        try:
            return super().training_step(batch, 0)
        except Exception:
            return torch.zeros((), requires_grad=True)


def _modes(layout: str, world_size: int) -> Any:
    torch.manual_seed(0)
    module = Modes()
    trainer = trainer_of(layout, world_size, use_distributed_sampler=False, max_epochs=1, val_check_interval=1)
    trainer.fit(module, Data(24))
    return set(module.modes), float(trainer.callback_metrics["train_loss"])


@pytest.mark.parametrize("layout", ["pp2", pytest.param("dp2_zero3", marks=slow)])
def test_modes_after_validation_and_except_exception_in_user_code(layout: str) -> None:
    for modes, loss in run_ranks(2, _modes, layout, 2):
        assert modes == {(True, False, True, True, True, True, True)}
        assert loss > 1


class Ids(Tokens):
    """Sequences that begin with their own number."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.input_ids[:, 0] = torch.arange(num_rows)


class Seen(HandWritten):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.__dict__.setdefault("rows", []).extend(batch["input_ids"][:, 0].tolist())

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if not self.trainer.sanity_checking:
            self.__dict__.setdefault("val_rows", []).extend(batch["input_ids"][:, 0].tolist())


def _sampled(layout: str, world_size: int) -> Any:
    torch.manual_seed(0)
    module, trainer = Seen(), trainer_of(layout, world_size, max_epochs=1)
    trainer.fit(module, DataLoader(Ids(32), batch_size=4, shuffle=True), DataLoader(Ids(16), batch_size=4))
    strategy = trainer.strategy
    return strategy.is_distributed, strategy.dp_rank, strategy.dp_size, module.rows, module.val_rows


@pytest.mark.parametrize(("layout", "world_size"), [("dp2_tp2", 4), pytest.param("dp2_pp2_zero1", 4, marks=slow)])
def test_lightnings_sampler_knows_the_replicas(layout: str, world_size: int) -> None:
    by_replica: dict[int, Any] = {}
    for is_distributed, dp_rank, dp_size, rows, val_rows in run_ranks(world_size, _sampled, layout, world_size):
        assert is_distributed and dp_size == 2
        assert by_replica.setdefault(dp_rank, (rows, val_rows)) == (rows, val_rows)  # model-parallel peers see the same
    for index, total in ((0, 32), (1, 16)):
        first, second = by_replica[0][index], by_replica[1][index]
        assert not set(first) & set(second) and sorted(first + second) == list(range(total))


class Stopped(L.Callback):
    """Sends SIGTERM to the rank named, in its second batch."""

    def __init__(self, rank: int) -> None:
        self.rank, self.batches = rank, 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        if batch_idx == 1 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


def _stopped(layout: str, world_size: int, rank: int) -> tuple[int, float]:
    callback = Stopped(rank)
    trainer = trainer_of(layout, world_size, use_distributed_sampler=False, max_epochs=1, callbacks=[callback])
    start = time.monotonic()
    try:
        trainer.fit(HandWritten(), Data(320))
    except BaseException as error:
        assert "SIGTERM" in type(error).__name__ or isinstance(error, SystemExit), error
    return callback.batches, time.monotonic() - start


@pytest.mark.parametrize(("layout", "rank"), [("pp2", 1), ("dp2_zero1", 0), pytest.param("tp2", 1, marks=slow)])
def test_sigterm_to_one_rank_stops_all_at_the_same_step(layout: str, rank: int) -> None:
    (first, _), (second, _) = run_ranks(2, _stopped, layout, 2, rank, timeout_s=60)
    assert first == second == 2


class Breaks(HandWritten):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.trainer.global_rank == self.rank:
            raise KeyError("a mistake of the user's")
        return loss


def _breaks(layout: str, rank: int) -> None:
    trainer_of(layout, 2, use_distributed_sampler=False, max_epochs=1).fit(Breaks(rank), Data(80))


@pytest.mark.parametrize("layout", ["pp2", pytest.param("tp2", marks=slow), pytest.param("dp2", marks=slow)])
def test_a_rank_that_raises_ends_all(layout: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match="a mistake of the user's"):
        run_ranks(2, _breaks, layout, 1, timeout_s=60)
    assert time.monotonic() - start < 45


class Tuples(HandWritten):
    """Batches are tuples without ignored targets."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return (batch["input_ids"], batch["labels"]) if isinstance(batch, dict) else batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({"input_ids": batch[0], "labels": batch[1]}, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return super().validation_step({"input_ids": batch[0], "labels": batch[1]}, batch_idx)


@slow
@pytest.mark.parametrize("layout", ["pp2", "dp2_zero1_mbs2", "tp2"])
def test_batches_that_are_tuples(layout: str) -> None:
    data = {"data": {"ignored": False}}
    assert_parity(run_ranks(2, fit, layout, 2, Tuples, **data), reference(Tuples, **data))


def _predictions(layout: str | None, world_size: int, make: Any) -> torch.Tensor:
    torch.manual_seed(0)
    trainer = trainer_of(layout, world_size, use_distributed_sampler=False)
    loader = DataLoader(Tokens(4), batch_size=2)
    return torch.cat(trainer.predict(make(), loader))


@slow
@pytest.mark.parametrize("make", [own_llama, HuggingFace])
def test_predict_under_tensor_parallel(make: Any) -> None:
    (expected,) = run_ranks(1, _predictions, "zero0", 1, make)
    for logits in run_ranks(2, _predictions, "tp2", 2, make):
        assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-5)
