"""What users do with checkpoints in a Trainer, under a layout: each as it works without one."""

import dataclasses
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import nn
from torchmetrics import MeanMetric

from lightning_5d.checkpoint import (
    CheckpointSession,
    PretrainedWeights,
    commit,
    export_huggingface,
    export_lightning,
    latest,
    load_module,
)
from lightning_5d.checkpoint.commit import is_complete
from tests.checkpoint.arranged import assemble, assert_same
from tests.checkpoint.trained import LAYOUTS, Data, Hard, Record, Resuming, run, state_of, trainer_of
from tests.ranks import RankFailed, run_ranks


@dataclasses.dataclass
class Config:
    width: int = 3


class WithConfig(Hard):
    def __init__(self, config: Config, folder: Path) -> None:
        super().__init__()
        self.save_hyperparameters()


def train_with_config(folder: Path, ckpt_path: Path | None, weights_only: bool | None) -> list[float]:
    module = WithConfig(Config(5), folder)
    steps, save_to = (2, folder / "a.ckpt") if ckpt_path is None else (3, None)
    return run("tp2", folder, steps, ckpt_path=ckpt_path, save_to=save_to, weights_only=weights_only, module=module)["losses"]


@pytest.mark.slow
def test_hyper_parameters_of_any_kind(tmp_path: Path) -> None:
    """Resumes with and without ``weights_only=False``; only the latter reads the classes back."""
    path = tmp_path / "a.ckpt"
    run_ranks(2, train_with_config, tmp_path, None, None)
    losses = [run_ranks(2, train_with_config, tmp_path, path, weights_only)[0] for weights_only in (None, True, False)]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 1
    with pytest.warns(UserWarning, match=r"hyper_parameters.*weights_only=False"), pytest.raises(TypeError, match="config"):
        load_module(WithConfig, path)
    assert load_module(WithConfig, path, weights_only=False).hparams["config"] == Config(5)
    assert load_module(WithConfig, path, config=Config(6), folder=tmp_path, strict=True).hparams["config"] == Config(6)


def validate(layout: str, folder: Path, ckpt_path: Path | str | None, then: Path | None = None) -> float:
    trainer = trainer_of(layout, folder, [], limit_val_batches=1.0)
    module = Hard()
    (found,) = trainer.validate(module, datamodule=Data(), ckpt_path=ckpt_path, verbose=False)
    if then is not None:
        trainer.save_checkpoint(then, weights_only=True)
    return found["val_loss"]


@pytest.mark.slow
def test_validate_a_checkpoint_and_save_after(tmp_path: Path) -> None:
    run_ranks(4, run, "tp2_pp2", tmp_path, 3, save_to=tmp_path / "a.ckpt")
    (fresh,) = run_ranks(1, validate, "dp1", tmp_path, None)
    (expected,) = run_ranks(1, validate, "dp1", tmp_path, tmp_path / "a.ckpt")
    assert abs(expected - fresh) > 1e-3
    for value in run_ranks(2, validate, "pp2", tmp_path, tmp_path / "a.ckpt", tmp_path / "b.ckpt"):
        assert value == pytest.approx(expected, rel=1e-6)
    assert run_ranks(1, validate, "dp1", tmp_path, tmp_path / "b.ckpt") == [expected]


def fit_then_validate(folder: Path) -> tuple[bool, float, float]:
    """One trainer resumes, trains on, and validates: what it validates are the trained weights, not those it resumed from."""
    trainer = trainer_of("dp1", folder, [], max_steps=6, limit_val_batches=1.0, check_val_every_n_epoch=100)
    module, data = Hard(), Data()
    trainer.fit(module, datamodule=data, ckpt_path=folder / "a.ckpt")
    before = module.net.norm.weight.clone()
    (found,) = trainer.validate(module, datamodule=data, verbose=False)
    (again,) = trainer.validate(module, datamodule=data, ckpt_path=folder / "a.ckpt", verbose=False)
    return torch.equal(before, module.net.norm.weight), found["val_loss"], again["val_loss"]


def test_a_checkpoint_is_loaded_once(tmp_path: Path) -> None:
    run_ranks(1, run, "dp1", tmp_path, 3, save_to=tmp_path / "a.ckpt")
    (expected,) = run_ranks(1, validate, "dp1", tmp_path, tmp_path / "a.ckpt")
    ((same_after_last, trained, loaded),) = run_ranks(1, fit_then_validate, tmp_path)
    assert loaded == expected and trained != expected and not same_after_last


class WithMore(Hard):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.full((3,), 7.0), requires_grad=False)
        self.metric = MeanMetric()
        self.metric.persistent(True)
        self.strict_loading = False

    def on_train_batch_start(self, *args: Any) -> None:
        super().on_train_batch_start(*args)
        self.metric.update(2.0)


def train_more(folder: Path, ckpt_path: Path | None, steps: int) -> tuple[list[float], float, list[float]]:
    module = WithMore()
    losses = run("tp2", folder, steps, ckpt_path=ckpt_path, save_to=folder / f"more{steps}.ckpt", module=module)["losses"]
    return module.extra.full_tensor().tolist(), float(module.metric.mean_value), losses


@pytest.mark.slow
def test_not_strict_and_the_states_of_metrics(tmp_path: Path) -> None:
    run_ranks(2, run, "pp2", tmp_path, 2, save_to=tmp_path / "a.ckpt")
    for extra, total, _ in run_ranks(2, train_more, tmp_path, tmp_path / "a.ckpt", 3):
        assert extra == [7.0] * 3 and total == 2.0
    for extra, total, _ in run_ranks(2, train_more, tmp_path, tmp_path / "more3.ckpt", 5):
        assert extra == [7.0] * 3 and total == 6.0, "the metric went on from its saved state"


def resume_from_weights(folder: Path) -> str:
    with pytest.raises(KeyError) as info:
        run("dp2_zero3", folder, 4, ckpt_path=folder / "step=2.ckpt")
    return str(info.value)


def train_weights_only(folder: Path) -> None:
    callback = ModelCheckpoint(folder, "{step}", save_weights_only=True, every_n_train_steps=2, save_top_k=-1)
    run("dp2_zero3", folder, 2, callbacks=[callback])


def test_weights_alone_can_be_loaded_but_not_resumed(tmp_path: Path) -> None:
    run_ranks(2, train_weights_only, tmp_path)
    for text in run_ranks(2, resume_from_weights, tmp_path):
        assert "save_weights_only" in text
    assert run_ranks(1, validate, "dp1", tmp_path, tmp_path / "step=2.ckpt")[0] > 0


def train_last(layout: str, folder: Path, steps: int) -> tuple[int, list[float]]:
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_last="link", save_top_k=-1)
    found = run(layout, folder, steps, ckpt_path="last", callbacks=[callback])
    return len(found["losses"]), found["losses"]


def test_last_is_where_to_go_on(tmp_path: Path) -> None:
    (whole,) = run_ranks(1, run, "dp1", tmp_path / "whole", 6)
    assert run_ranks(2, train_last, "pp2", tmp_path, 4)[0][0] == 4
    number, losses = run_ranks(1, train_last, "dp1", tmp_path, 6)[0]
    assert number == 2
    torch.testing.assert_close(losses, whole["losses"][4:], rtol=1e-5, atol=0)


# ---- out and in


def test_saved_by_stages_loads_as_a_module_and_as_hugging_faces(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    results = run_ranks(2, run, "pp2", tmp_path, 3, save_to=tmp_path / "a.ckpt")
    whole = assemble(result["last"] for result in results)
    module = load_module(Hard, tmp_path / "a.ckpt")
    assert_same({f"model.{k}": v for k, v in module.state_dict().items() if k != "net.lm_head.weight"}, model_part(whole))
    export_huggingface(tmp_path / "a.ckpt", tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.randint(0, 67, (2, 8))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, module(ids), rtol=1e-5, atol=1e-5)


def model_part(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in whole.items() if key.startswith("model.")}


def resume_stock(folder: Path) -> Any:
    """A stock Trainer on one device goes on from the exported file."""
    record, module = Record(), Hard()
    trainer = trainer_of(None, folder, [record], max_steps=8)
    trainer.fit(module, datamodule=Data(), ckpt_path=folder / "one.ckpt")
    return {"losses": record.losses, "first": record.first, "lrs": record.lrs, "indices": record.indices}


@pytest.mark.parametrize("layout", ["tp2_pp2", pytest.param("dp2_tp2_pp2_zero3", marks=pytest.mark.slow)])
def test_one_file_for_a_stock_trainer(tmp_path: Path, layout: str) -> None:
    results = run_ranks(LAYOUTS[layout], run, layout, tmp_path, 3, save_to=tmp_path / "a.ckpt")
    whole = assemble(result["last"] for result in results)
    export_lightning(tmp_path / "a.ckpt", tmp_path / "one.ckpt")
    (expected,) = run_ranks(1, run, None, tmp_path, 8)
    (resumed,) = run_ranks(1, resume_stock, tmp_path)
    assert_same(assemble([resumed["first"]]), whole)
    assert resumed["lrs"] == expected["lrs"][3:] and resumed["indices"] == expected["indices"][3:]
    torch.testing.assert_close(resumed["losses"], expected["losses"][3:], rtol=1e-5, atol=0)
    module = Hard.load_from_checkpoint(tmp_path / "one.ckpt")
    assert torch.equal(module.net.norm.weight, whole["model.net.norm.weight"])
    assert module.net.lm_head.weight is module.net.embed_tokens.weight


def start_from(layout: str, folder: Path, source: str) -> list[float]:
    """The first loss with weights from a Hugging Face folder, a checkpoint, or loaded by hand into the module."""
    module = Hard()
    if source == "by hand":
        module.load_state_dict(torch.load(folder / "one.ckpt")["state_dict"])
        return run(layout, folder, 1, module=module)["losses"]
    return run(layout, folder, 1, callbacks=[PretrainedWeights(folder / source)])["losses"]


@pytest.mark.slow
def test_pretrained_weights_give_the_same_first_loss_every_way(tmp_path: Path) -> None:
    run_ranks(1, run, "dp1", tmp_path, 3, save_to=tmp_path / "a.ckpt")
    export_huggingface(tmp_path / "a.ckpt", tmp_path / "hf")
    export_lightning(tmp_path / "a.ckpt", tmp_path / "one.ckpt")
    (expected,) = run_ranks(1, start_from, "dp1", tmp_path, "by hand")
    (scratch,) = run_ranks(1, run, "dp1", tmp_path, 1)
    assert scratch["losses"] != expected
    for source in ("hf", "a.ckpt", "by hand"):
        for losses in run_ranks(4, start_from, "tp2_pp2", tmp_path, source):
            assert losses == pytest.approx(expected, rel=1e-6)


def from_and_to_huggingface(layout: str, folder: Path) -> None:
    trainer = trainer_of(layout, folder, [PretrainedWeights(folder / "hf")], max_steps=0, enable_checkpointing=False)
    trainer.fit(Hard(), datamodule=Data())
    trainer.save_checkpoint(folder / f"{layout}.ckpt")


@pytest.mark.parametrize(
    "layout", ["tp2_pp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp2", "pp2", "dp2_zero3"))]
)
def test_hugging_faces_weights_come_back_bit_equal(tmp_path: Path, layout: str) -> None:
    run_ranks(1, run, "dp1", tmp_path, 2, save_to=tmp_path / "a.ckpt")
    export_huggingface(tmp_path / "a.ckpt", tmp_path / "hf", max_file_gib=5000 / 2**30)
    run_ranks(LAYOUTS[layout], from_and_to_huggingface, layout, tmp_path)
    export_huggingface(tmp_path / f"{layout}.ckpt", tmp_path / "again", max_file_gib=5000 / 2**30)
    files = sorted(file.name for file in (tmp_path / "hf").iterdir())
    assert len(files) > 4 and files == sorted(file.name for file in (tmp_path / "again").iterdir())
    for file in files:
        assert (tmp_path / "hf" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


# ---- in the background


class InBackground(Resuming):
    def setup_environment(self) -> None:
        super().setup_environment()
        self._checkpoints = CheckpointSession(str(self.layout), background=True)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        assert self._checkpoints is not None and self.lightning_module is not None
        training = self.lightning_module.trainer.training
        self._checkpoints.save(checkpoint, filepath, self.lightning_module, self.optimizers, background=training)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self._checkpoints is not None and self._sigterm is not None
        if self._checkpoints.save_has_failed:
            self._sigterm._connector.was_asked = True  # the step's own all-reduce tells the others

    def _stop_if_asked(self) -> None:
        assert self._checkpoints is not None and self._runner is not None
        if self._runner.is_stop_requested():
            self._checkpoints.wait()

    def teardown(self) -> None:
        assert self._checkpoints is not None
        self._checkpoints.close()
        super().teardown()


def train_in_background(folder: Path) -> tuple[list[float], int]:
    """Every save takes as long as three steps; top-k removes what is older meanwhile."""
    original, steps_meanwhile = commit.commit, 0

    def slow(temporary: Path, target: Path) -> None:
        deadline, start = time.monotonic() + 20, record.steps
        while record.steps < min(start + 3, 11) and time.monotonic() < deadline:
            time.sleep(0.005)
        nonlocal steps_meanwhile
        steps_meanwhile = max(steps_meanwhile, record.steps - start)
        original(temporary, target)

    class Count(L.Callback):
        steps = 0

        def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
            self.steps = trainer.global_step

    record, losses = Count(), Record()
    commit.commit = slow
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=1, monitor="step", mode="max")
    trainer = trainer_of(InBackground("tp2_pp2"), folder, [callback, losses, record], max_steps=12)
    trainer.fit(Hard(), datamodule=Data())
    commit.commit = original
    return losses.losses, steps_meanwhile


@pytest.mark.slow
def test_training_goes_on_while_a_save_is_written(tmp_path: Path) -> None:
    (whole,) = run_ranks(1, run, "dp1", tmp_path / "whole", 12)
    results = run_ranks(4, train_in_background, tmp_path)
    torch.testing.assert_close(results[0][0], whole["losses"], rtol=1e-5, atol=0)
    assert results[0][1] >= 3
    left = [entry.name for entry in tmp_path.iterdir() if entry.name != "whole"]
    assert left == ["step=12.ckpt"]


def train_with_a_full_disk(folder: Path) -> tuple[str, int]:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    if os.environ["RANK"] == "1":
        os.fsync = full  # this forked process alone
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = trainer_of(InBackground("tp2"), folder, [callback], max_steps=1000)
    with pytest.raises(RuntimeError) as info:
        trainer.fit(Hard(), datamodule=Data())
    return str(info.value), trainer.global_step


def test_a_save_that_fails_in_the_background_stops_all_ranks_and_says_why(tmp_path: Path) -> None:
    results = run_ranks(2, train_with_a_full_disk, tmp_path)
    assert results[0] == results[1], "the same error at the same step"
    text, step = results[0]
    assert "step=2.ckpt failed on rank 1: OSError: [Errno 28] No space left on device" in text and 2 <= step <= 4
    assert list(tmp_path.iterdir()) == []


# ---- interrupted


def train_until_killed(folder: Path, steps: int, victim: int | None) -> dict[str, Any]:
    class Kill(L.Callback):
        seen = 0

        def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
            self.seen += 1
            if trainer.global_rank == victim and self.seen == 3:
                signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.05, 0.4))

    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=2, monitor="train_loss")
    return run("tp2", folder, steps, ckpt_path=latest(folder), callbacks=[callback, Kill()])


@pytest.mark.slow
def test_a_killed_run_goes_on_from_the_latest_complete_checkpoint(tmp_path: Path) -> None:
    (whole,) = run_ranks(1, run, "dp1", tmp_path / "whole", 40)
    for attempt in range(3):
        with pytest.raises(RankFailed):
            run_ranks(2, train_until_killed, tmp_path, 10_000, attempt % 2, timeout_s=60)
    start = latest(tmp_path)
    assert start is not None
    done = int(start.stem.removeprefix("step="))
    results = run_ranks(2, train_until_killed, tmp_path, done + 2, None)
    assert all(len(result["losses"]) == 2 for result in results)
    assert results[0]["lrs"][0] == (whole["lrs"][done] if done < 40 else results[0]["lrs"][0])


def train_under_slurm(folder: Path, signal_at: int | None) -> tuple[list[float], list[int]]:
    rank = os.environ["RANK"]
    os.environ.update(SLURM_NTASKS="2", SLURM_JOB_ID="7", SLURM_JOB_NAME="train", SLURM_NODELIST="127.0.0.1", SLURM_NODEID="0")
    os.environ.update(SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NTASKS_PER_NODE="2")
    at_step: list[int] = []

    class Requeue(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
            at_step.append(trainer.global_step)
            if trainer.global_step == signal_at:
                os.kill(os.getpid(), signal.SIGUSR1)
                trainer.should_stop = True

    record = Record()
    environment = SLURMEnvironment(requeue_signal=signal.SIGUSR1)
    trainer = trainer_of("tp2", folder, [record, Requeue()], max_steps=6, plugins=[environment], enable_checkpointing=False)
    trainer.fit(Hard(), datamodule=Data())
    return record.losses, at_step


@pytest.mark.slow
def test_a_signal_from_slurm_saves_and_the_requeued_job_goes_on(tmp_path: Path) -> None:
    run_ranks(2, train_under_slurm, tmp_path, 3)
    assert is_complete(tmp_path / "hpc_ckpt_1.ckpt")
    results = run_ranks(2, train_under_slurm, tmp_path, None)
    assert all(steps == [3, 4, 5] for _, steps in results)


def train_again(folder: Path) -> None:
    """Two states of one rank must not be mixed: saving twice over one name, then loading, gives the second."""
    found = run("tp2", folder, 2, save_to=folder / "a.ckpt")
    assert found["global_step"] == 2
    trainer = trainer_of("tp2", folder, [], max_steps=3)
    module = Hard()
    trainer.fit(module, datamodule=Data(), ckpt_path=folder / "a.ckpt")
    trainer.save_checkpoint(folder / "a.ckpt")
    expected = state_of(trainer, module)
    again = run("tp2", folder, 3, ckpt_path=folder / "a.ckpt")
    for key, (_, (_, array)) in expected.items():
        assert (again["last"][key][1][1] == array).all(), key


@pytest.mark.slow
def test_saving_over_the_checkpoint_one_resumed_from(tmp_path: Path) -> None:
    run_ranks(2, train_again, tmp_path)
