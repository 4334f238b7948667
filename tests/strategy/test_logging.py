"""What a module logs is on every rank, with one value, and is what one process logs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MaxMetric, MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.parity.harness import Data, fit, trainer_of
from tests.parity.models import VOCAB, HandWritten, own_llama
from tests.ranks import run_ranks


def _watched(layout: str | None, world_size: int, folder: str) -> dict[str, Any]:
    """Everything that reads logged values at once: bar, logger, checkpoint monitor, early stopping, learning-rate monitor."""
    torch.manual_seed(0)
    module = own_llama()
    checkpoint = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, filename="{step}-{val_loss:.4f}")
    stopping = EarlyStopping("train_loss", patience=1, min_delta=100.0)
    trainer = trainer_of(
        layout,
        world_size,
        max_epochs=5,
        use_distributed_sampler=False,
        callbacks=[checkpoint, stopping, LearningRateMonitor()],
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        enable_checkpointing=True,
        enable_progress_bar=True,
    )
    trainer.fit(module, datamodule=Data(24))
    bar = {k: float(v) for k, v in trainer.progress_bar_metrics.items() if k != "v_num"}
    metrics = {n: float(v) for n, v in trainer.callback_metrics.items()}
    best = float(checkpoint.best_model_score)
    return {"metrics": metrics, "best": best, "epochs": trainer.current_epoch, "path": checkpoint.best_model_path, "bar": bar}


@pytest.mark.parametrize("layout", ["pp2", pytest.param("tp2_pp2", marks=pytest.mark.slow)])
def test_monitors_see_one_value_on_every_rank(layout: str, tmp_path: Path) -> None:
    world_size = 2 * layout.count("2") // 1
    ranks = run_ranks(world_size, _watched, layout, world_size, str(tmp_path / "layout"))
    assert all(r == ranks[0] for r in ranks)
    (expected,) = run_ranks(1, _watched, None, 1, str(tmp_path / "one"))
    for name in ("metrics", "bar"):
        assert ranks[0][name].keys() == expected[name].keys()
        assert all(math.isclose(ranks[0][name][k], v, rel_tol=1e-4) for k, v in expected[name].items()), (ranks[0], expected)
    assert ranks[0]["epochs"] == expected["epochs"] == 2  # stopped early, together
    assert Path(ranks[0]["path"]).exists() and Path(ranks[0]["path"]).stem == Path(expected["path"]).stem
    assert (tmp_path / "layout" / "lightning_logs" / "version_0" / "metrics.csv").exists()


class Metrics(HandWritten):
    """Metrics of several kinds: logged objects, one that the user computes and logs, one that is read without being logged."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(VOCAB, average="micro", ignore_index=-100)
        self.train_accuracy = MulticlassAccuracy(VOCAB, average="micro", ignore_index=-100)
        self.targets, self.highest, self.by_hand = SumMetric(), MaxMetric(), MeanMetric()
        self.seen: list[float] = []

    def forward(self, ids: Any) -> Any:
        self.logits = super().forward(ids)
        return self.logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.train_accuracy(self.logits.detach().flatten(0, 1), batch["labels"].flatten())
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        self.log("highest_label", batch["labels"].max().float(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("lowest_label", batch["labels"].min().float(), reduce_fx=torch.min, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        logits, labels = self.logits, batch["labels"]
        self.accuracy.update(logits.flatten(0, 1), labels.flatten())
        self.targets.update((labels != -100).sum())
        self.highest.update(labels.max())
        self.by_hand.update(logits.float().square().mean(), labels.numel())
        self.log("accuracy", self.accuracy)
        self.log("targets", self.targets)
        self.log("highest", self.highest)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(float(self.by_hand.compute()))
        self.log("by_hand", self.seen[-1])
        self.by_hand.reset()


@pytest.mark.parametrize("layout", ["pp2", pytest.param("dp2_pp2", marks=pytest.mark.slow), "dp2_mbs2", "tp2"])
def test_metric_objects_are_those_of_one_process(layout: str) -> None:
    world_size = 4 if layout == "dp2_pp2" else 2
    (expected,) = run_ranks(1, fit, None, 1, Metrics, num_sanity_val_steps=1)
    ranks = run_ranks(world_size, fit, layout, world_size, Metrics, num_sanity_val_steps=1)
    for rank in ranks:
        assert rank["metrics"] == ranks[0]["metrics"] and rank["metrics"].keys() == expected["metrics"].keys()
        for name, value in expected["metrics"].items():
            assert math.isclose(rank["metrics"][name], value, rel_tol=1e-4, abs_tol=1e-6), (name, rank["metrics"][name], value)


class Chatty(HandWritten):
    """Logs a name twice, a dict, and from hooks outside of the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"a": loss, "b": loss.detach() * 2}, on_step=False, on_epoch=True)
        self.log("twice", 1.0)
        self.log("twice", 3.0)
        return {"loss": loss, "extra": loss.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("from_a_hook", float(outputs["loss"]))

    def on_validation_epoch_end(self) -> None:
        self.log("from_an_epoch_hook", 7.0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "dp2_mbs2", "tp2"])
def test_other_ways_to_log(layout: str) -> None:
    (expected,) = run_ranks(1, fit, None, 1, Chatty)
    for rank in run_ranks(2, fit, layout, 2, Chatty):
        assert rank["metrics"].keys() == expected["metrics"].keys()
        assert rank["metrics"]["twice"] == 3.0 and rank["metrics"]["from_an_epoch_hook"] == 7.0
        assert all(math.isclose(rank["metrics"][n], v, rel_tol=1e-4) for n, v in expected["metrics"].items())


def no_targets_in_one_replica(tokens: Any) -> None:
    tokens.labels[:4] = -100


def no_targets_at_all(tokens: Any) -> None:
    tokens.labels[:8] = -100


@pytest.mark.parametrize(("layout", "edit"), [("dp2_mbs2", no_targets_at_all), ("pp2", no_targets_at_all)])
def test_a_batch_without_targets_is_no_step(layout: str, edit: Any) -> None:
    for rank in run_ranks(2, fit, layout, 2, HandWritten, data={"edit": edit}, limit_val_batches=0):
        assert rank["losses"][0] == 0.0 and rank["norms"][0] == 0.0
        assert all(bool((g == 0).all()) for g in rank["gradients"][0].values())
        assert all(math.isfinite(v) and v > 1 for v in rank["losses"][1:]) and all(
            w.isfinite().all() for w in rank["weights"].values()
        )


class OwnMean(HandWritten):
    """A mean that is 0 / 0 without targets, forward and backward."""

    def loss(self, batch: Any) -> Any:
        labels = batch["labels"]
        log_probs = self(batch["input_ids"]).float().log_softmax(-1)
        picked = -log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        valid = labels != -100
        return (picked * valid).sum() / valid.sum()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2_mbs2", "dp2_zero3", "pp2", "tp2_mbs1"])
def test_a_replica_without_targets_does_not_count(layout: str) -> None:
    options: dict[str, Any] = {"data": {"edit": no_targets_in_one_replica}, "limit_val_batches": 0}
    (expected,) = run_ranks(1, fit, None, 1, OwnMean, **options)
    for rank in run_ranks(2, fit, layout, 2, OwnMean, **options):
        assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(rank["losses"], expected["losses"], strict=True))
        assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(rank["norms"], expected["norms"], strict=True))
