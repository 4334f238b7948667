"""Saves behind the training's back: what is saved is the moment of the call; removals and links wait; errors come out."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_5d.checkpoint import CheckpointSession, CheckpointStore, commit
from lightning_5d.checkpoint import store as store_module
from lightning_5d.checkpoint.background import Background
from lightning_5d.checkpoint.lightning_links import defer_links, restore_links
from lightning_5d.checkpoint.state import collect
from tests.checkpoint.arranged import Arranged, assemble, assert_same, pieces
from tests.checkpoint.test_store import load_errors, save, tensors
from tests.ranks import RankFailed, run_ranks


def hold_commits() -> threading.Event:
    """From now on, in this process, no save is committed before the event is set."""
    event, original = threading.Event(), commit.commit

    def wait_and_commit(temporary: Path, target: Path) -> None:
        assert event.wait(60)
        original(temporary, target)

    store_module.commit.commit = wait_and_commit
    return event


def save_while_training(path: Path) -> Any:
    arranged = Arranged("tp2_pp2")
    session = CheckpointSession("tp2_pp2", background=True)
    session.names = arranged.names
    event = hold_commits()
    arranged.step(0)
    state = pieces(collect(arranged.module, arranged.optimizers, arranged.names))
    entries: dict[str, Any] = {"optimizer_states": [], "global_step": 1, "log": ["before"]}
    session.save(entries, path, arranged.module, arranged.optimizers, background=True)
    exists = path.exists()
    entries["log"].append("after")
    for number in range(1, 4):  # parameters, moments and metadata change; the default group talks
        arranged.step(number)
        dist.all_reduce(torch.ones(1000))
    event.set()
    session.wait()
    return state, exists


def load(path: Path) -> Any:
    arranged = Arranged("tp2_pp2", seed=1)
    session = CheckpointSession("tp2_pp2")
    session.names = arranged.names
    entries = session.open(path)
    session.load_weights(arranged.module)
    session.load_optimizers(arranged.module, arranged.optimizers)
    return pieces(collect(arranged.module, arranged.optimizers, arranged.names)), entries["log"]


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    saved = run_ranks(4, save_while_training, tmp_path / "a.ckpt", init=True)
    assert not any(exists for _, exists in saved)
    loaded = run_ranks(4, load, tmp_path / "a.ckpt", init=True)
    assert_same(assemble(state for state, _ in loaded), assemble(state for state, _ in saved))
    assert loaded[0][1] == ["before"]


def remove_and_link(folder: Path) -> list[bool]:
    store = CheckpointStore(background=True)
    store.save(tensors(1.0), {}, folder / "old.ckpt")
    event = hold_commits()
    store.save(tensors(2.0), {}, folder / "new.ckpt", background=True)
    store.remove(folder / "old.ckpt")
    callback = ModelCheckpoint(save_last="link")
    defer_links([callback], store.after_commit)
    trainer = type("T", (), {"is_global_zero": dist.get_rank() == 0})
    callback._link_checkpoint(trainer, str(folder / "new.ckpt"), str(folder / "last.ckpt"))
    restore_links([callback])
    assert "_link_checkpoint" not in callback.__dict__
    before = [(folder / name).exists() for name in ("old.ckpt", "new.ckpt", "last.ckpt")]
    dist.barrier()
    event.set()
    store.wait()
    dist.barrier()
    return [*before, *((folder / name).exists() for name in ("old.ckpt", "new.ckpt", "last.ckpt"))]


def test_removals_and_links_wait_for_the_commit(tmp_path: Path) -> None:
    os.symlink("old.ckpt", tmp_path / "last.ckpt")
    results = run_ranks(2, remove_and_link, tmp_path, init=True)
    assert results == [[True, False, True, False, True, True]] * 2
    assert os.readlink(tmp_path / "last.ckpt") == "new.ckpt"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last.ckpt", "new.ckpt"]


def train_with_deferred_links(folder: Path) -> bool:
    links: list[Any] = []
    callback = ModelCheckpoint(folder, save_last="link", save_top_k=1, every_n_train_steps=1)
    defer_links([callback], links.append)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", max_steps=1, callbacks=[callback], **quiet)
    trainer.fit(BoringModel(), DataLoader(torch.ones(4, 32), batch_size=4))
    before = (folder / "last.ckpt").exists()
    for link in links:
        link()
    return before


def test_lightning_still_makes_its_links_where_we_expect(tmp_path: Path) -> None:
    """It calls the method on the instance, after a save, with the target first."""
    assert run_ranks(1, train_with_deferred_links, tmp_path) == [False]
    assert (tmp_path / "last.ckpt").resolve() == (tmp_path / "epoch=0-step=1.ckpt").resolve()


def fail_on_rank_1(folder: Path) -> list[str]:
    store = CheckpointStore(background=True)
    store.save(tensors(1.0), {}, folder / "old.ckpt")
    if dist.get_rank() == 1:
        os.fsync = _full  # this forked process alone
    found = []
    assert store.background is not None
    for _ in range(2):
        store.save(tensors(2.0), {}, folder / "new.ckpt", background=True)
        while not store.background.has_failed:
            time.sleep(0.01)
        store.after_commit(lambda: found.append("a link was made"))
        try:
            store.remove(folder / "old.ckpt")
        except RuntimeError as error:
            found.append(str(error))
        assert not store.background.has_failed
    return found


def _full(*args: object) -> None:
    raise OSError(28, "No space left on device")


def test_an_error_comes_out_on_every_rank_and_costs_nothing(tmp_path: Path) -> None:
    results = run_ranks(2, fail_on_rank_1, tmp_path, init=True)
    for texts in results:
        assert len(texts) == 2 and all("failed on rank 1: OSError: [Errno 28] No space left" in text for text in texts)
    assert [entry.name for entry in tmp_path.iterdir()] == ["old.ckpt"]
    assert load_errors(tmp_path / "old.ckpt") == ""


def many_saves(folder: Path) -> None:
    store = CheckpointStore(background=True)
    for i in range(12):
        store.save(tensors(float(i)), {"i": i}, folder / f"{i % 2}.ckpt", background=True)
    store.wait()


def test_saves_one_upon_the_other_wait_for_each_other(tmp_path: Path) -> None:
    run_ranks(4, many_saves, tmp_path, init=True, timeout_s=60)
    for i in (10, 11):
        store, found = CheckpointStore(), tensors(0.0)
        store.load(found, tmp_path / f"{i % 2}.ckpt")
        assert torch.equal(found["model.whole"], tensors(float(i))["model.whole"])
        assert store.read_entries(tmp_path / f"{i % 2}.ckpt") == {"i": i}


def save_in_background_until_killed(folder: Path, delay_s: float) -> None:
    store, content = CheckpointStore(background=True), tensors(2.0)
    dist.barrier()
    if dist.get_rank() == 1:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, delay_s)
    for _ in range(1000):
        store.save(content, {}, folder / "a.ckpt", background=True)


def test_a_rank_killed_while_saving_in_the_background_costs_nothing(tmp_path: Path) -> None:
    for delay_s in (0.005, 0.03, 0.05):
        save(tmp_path / "a.ckpt", 1.0)
        with pytest.raises(RankFailed):
            run_ranks(2, save_in_background_until_killed, tmp_path, delay_s, init=True, timeout_s=30)
        found = tensors(0.0)
        CheckpointStore().load(found, tmp_path / "a.ckpt")
        assert found["model.big"].unique().tolist() in ([1.0], [2.0])


def test_background_alone() -> None:
    background, order = Background(), []
    event = threading.Event()
    background.start(lambda: order.append("saved") if event.wait(10) else None)
    background.after(lambda: order.append("removed"))
    assert background.is_busy and order == []
    event.set()
    background.wait()
    assert order == ["saved", "removed"] and not background.is_busy
    background.after(lambda: order.append("at once"))
    assert order[-1] == "at once"
    background.start(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    background.after(lambda: order.append("never"))
    with pytest.raises(ZeroDivisionError):
        background.wait()
    background.wait()
    assert "never" not in order
