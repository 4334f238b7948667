"""The short ways of lightning_quick.py give what Lightning's own give, and leave nothing behind."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import lightning_5d  # noqa: F401
from tests.parity.harness import Data, trainer_of
from tests.parity.models import ROWS, HandWritten
from tests.ranks import run_ranks


class LogsAll(HandWritten):
    """Logs in every way, from several hooks, over several loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        value = loss.detach().clone()
        self.log("step", value, on_step=True, on_epoch=False)
        self.log("both", value, on_step=True, on_epoch=True, prog_bar=True)
        self.log("epoch", value, on_step=False, on_epoch=True)
        value += 100.0  # what was logged is not changed with it
        for reduce_fx in ("max", "min", "sum"):
            self.log(f"with_{reduce_fx}", loss * (batch_idx + 1), on_epoch=True, on_step=True, reduce_fx=reduce_fx)
        self.log_dict({"one": loss, "two": loss.reshape(1) * 2}, batch_size=3)
        self.log("number", batch_idx * 0.5, on_epoch=True)
        self.log("integer", torch.tensor(batch_idx), on_epoch=True)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", torch.tensor(float(10 * dataloader_idx + batch_idx)))
        self.log(f"own/{dataloader_idx}", torch.tensor(float(batch_idx)), add_dataloader_idx=False)

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("both_hooks", torch.tensor(float(self.global_step)))

    def on_train_epoch_end(self) -> None:
        self.log("epoch_end", torch.tensor(float(self.current_epoch)))


class TwoLoaders(Data):
    def val_dataloader(self) -> Any:
        return [DataLoader([{"x": torch.tensor(float(i))} for i in range(n)]) for n in (3, 2)]


def _trainer(layout: str | None, **options: Any) -> L.Trainer:
    return trainer_of(layout, 1, use_distributed_sampler=False, **options)


def _logged(layout: str | None) -> tuple[list[dict[str, float]], dict[str, Any]]:
    torch.manual_seed(0)
    module, lines = LogsAll(), []

    class Collects(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            lines.append({**trainer.logged_metrics, **trainer.progress_bar_metrics})

        def on_validation_epoch_end(self, trainer: Any, *args: Any) -> None:
            lines.append(dict(trainer.callback_metrics))

    trainer = _trainer(layout, max_epochs=2, callbacks=[Collects()])
    with mock.patch.object(L.LightningModule, "log", autospec=True, side_effect=L.LightningModule.log) as long_way:
        trainer.fit(module, TwoLoaders(2 * ROWS))
    lines.append(dict(trainer.callback_metrics))
    return [{k: float(v) for k, v in line.items()} for line in lines], {
        "long": long_way.call_count,
        "left": sorted(set(module.__dict__) & {"log", "optimizer_zero_grad"}),
        "loop": "_build_kwargs" in trainer.fit_loop.epoch_loop.__dict__,
    }


def test_logged_values_are_lightnings_own() -> None:
    (expected, own), (found, quick) = run_ranks(1, _logged, None)[0], run_ranks(1, _logged, "zero0")[0]
    assert found == expected and len(found) == 8
    assert quick["long"] < own["long"] / 2, "the short way is taken"
    assert not quick["left"] and not quick["loop"]


class OwnWays(HandWritten):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.seen.append(name)
        super().log(name, *args, **kwargs)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.seen.append("zero_grad")
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)


def _own() -> list[str]:
    module = OwnWays()
    _trainer("zero0", max_steps=2).fit(module, Data(3 * ROWS))
    return module.seen


def test_a_users_own_log_and_zero_grad_are_called() -> None:
    seen = run_ranks(1, _own)[0]
    assert seen.count("zero_grad") == 2 and len(seen) > 2


class LogsTwice(HandWritten):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("twice", loss, on_epoch=batch_idx == 0)
        return loss


def _twice() -> str:
    with pytest.raises(MisconfigurationException, match="twice") as error:
        _trainer("zero0", max_steps=3).fit(LogsTwice(), Data(3 * ROWS))
    return str(error.value)


def test_lightnings_own_errors_stay() -> None:
    assert "different arguments" in run_ranks(1, _twice)[0]


def test_what_the_short_ways_replace_is_as_it_was() -> None:
    log = inspect.getsource(_ResultCollection.log)
    assert 'key = f"{fx}.{name}"' in log and 'key += f".{self.dataloader_idx}"' in log
    assert "self._extract_batch_size(self[key], batch_size, meta)" in log
    assert "result_metric.forward(value, batch_size)" in inspect.getsource(_ResultCollection.update_metrics)
    assert "self.meta.sync(value.clone())" in inspect.getsource(_ResultMetric.update)
    own = inspect.getsource(L.LightningModule.log)
    assert "should_reset_tensors(self._current_fx_name)" in own and "results.reset(metrics=False" in own
    assert "self._build_kwargs(OrderedDict(), batch, batch_idx)" in inspect.getsource(_TrainingEpochLoop.advance)
    assert "getattr(pl_module, hook_name)" in inspect.getsource(_call_lightning_module_hook)
