"""What is wrong with a checkpoint is said on every rank, in words, without a hang; a killed save costs nothing."""

import json
import os
import pickle
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_5d.checkpoint import CheckpointError, CheckpointStore
from lightning_5d.checkpoint.commit import complete_checkpoints
from lightning_5d.checkpoint.torch_metadata import read_metadata
from tests.ranks import RankFailed, run_ranks

ROWS, COLUMNS = 64, 32


def tensors(value: float, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    whole = torch.arange(5, dtype=dtype) + value
    if not dist.is_initialized():
        return {"model.big": torch.full((ROWS, COLUMNS), value, dtype=dtype), "model.whole": whole}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.full((ROWS // dist.get_world_size(), COLUMNS), value, dtype=dtype)
    return {"model.big": DTensor.from_local(local, mesh, [Shard(0)]), "model.whole": whole}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save(path: Path, value: float = 1.0, dtype: torch.dtype = torch.float32, entries: dict | None = None) -> None:
    CheckpointStore().save(tensors(value, dtype), entries or {"a": 1}, path, layout="dp2_zero3", global_step=3)


def error_of(fn, *args, **kwargs) -> str:
    try:
        fn(*args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return ""


def load_errors(path: Path, dtype: torch.dtype = torch.float32, extra: str | None = None, rows: int | None = None) -> str:
    targets = tensors(0.0, dtype)
    if extra:
        targets[extra] = torch.zeros(3)
    if rows:
        targets["model.whole"] = torch.zeros(rows)
    before = {key: local(tensor).clone() for key, tensor in targets.items()}
    start = time.monotonic()
    text = error_of(CheckpointStore().load, targets, path)
    assert time.monotonic() - start < 10
    if text and path.name != "garbled shard":  # which only shows when it is read
        assert all(torch.equal(local(targets[key]), tensor) for key, tensor in before.items()), "a refused load changed something"
    return text


def test_one_process_without_a_group(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.ckpt"
    save(path)
    store, found = CheckpointStore(), tensors(0.0)
    store.load(found, path)
    assert torch.equal(found["model.big"], torch.full((ROWS, COLUMNS), 1.0))
    assert store.read_entries(path) == {"a": 1}
    assert json.loads((path / "complete.json").read_text()) == {
        "format": 1,
        "layout": "dp2_zero3",
        "global_step": 3,
        "files": {entry.name: entry.stat().st_size for entry in path.iterdir() if entry.name != "complete.json"},
    }
    assert sorted(entry.name for entry in path.iterdir()) == [".metadata", "__0_0.distcp", "complete.json", "meta.pt"]
    assert store.is_complete(path)
    store.remove(path)
    assert not path.exists() and not store.is_complete(path)


def test_an_existing_checkpoint_is_replaced(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        run_ranks(2, save, tmp_path / "a.ckpt", value, init=True)
    found = tensors(0.0)
    CheckpointStore().load(found, tmp_path / "a.ckpt")
    assert torch.equal(found["model.big"], torch.full((ROWS, COLUMNS), 2.0))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]


def truncate(path: Path) -> None:
    shard = path / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-10])


def newer(path: Path) -> None:
    complete = json.loads((path / "complete.json").read_text())
    (path / "complete.json").write_text(json.dumps({**complete, "format": 2}))


def garble_metadata(path: Path) -> None:
    content = bytearray((path / ".metadata").read_bytes())
    content[2:200] = bytes(198)
    (path / ".metadata").write_bytes(content)


def garble_shard(path: Path) -> None:
    shard = path / "__1_0.distcp"
    shard.write_bytes(bytes(len(shard.read_bytes())))


DAMAGES = {
    "truncated": (truncate, "__1_0.distcp has .* bytes, not .*: the checkpoint is damaged"),
    "missing file": (lambda path: (path / "__0_0.distcp").unlink(), "lacks the file __0_0.distcp"),
    "no complete.json": (lambda path: (path / "complete.json").unlink(), "interrupted"),
    "bad complete.json": (lambda path: (path / "complete.json").write_text("{"), "cannot be read"),
    "newer format": (newer, "has format 2, and this version of lightning_5d reads up to 1"),
    "garbled metadata": (garble_metadata, r"\.metadata cannot be read"),
    "garbled shard": (garble_shard, "cannot be read"),
}


def test_damage_is_named_on_every_rank(tmp_path: Path) -> None:
    paths = {}
    for name in DAMAGES:
        paths[name] = tmp_path / name
    run_ranks(2, lambda: [save(path) for path in paths.values()], init=True)
    for name, (damage, _) in DAMAGES.items():
        damage(paths[name])
    results = run_ranks(2, lambda: {name: load_errors(path) for name, path in paths.items()}, init=True)
    for errors in results:
        for name, (_, expected) in DAMAGES.items():
            assert re.search(expected, errors[name]), (name, errors[name])


def misfits(path: Path, folder: Path) -> dict[str, str]:
    rank = dist.get_rank()
    return {
        "fits": load_errors(path),
        "dtype": load_errors(path, dtype=torch.bfloat16),
        "missing on one rank": load_errors(path, extra="model.unknown" if rank == 1 else None),
        "shape on one rank": load_errors(path, rows=6 if rank == 0 else None),
        "no directory": load_errors(folder / "nothing.ckpt"),
        "foreign directory": load_errors(folder),
        "a file": load_errors(folder / "file.ckpt"),
    }


def test_a_checkpoint_that_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "file.ckpt").write_bytes(b"x")
    run_ranks(2, save, tmp_path / "a.ckpt", init=True)
    results = run_ranks(2, misfits, tmp_path / "a.ckpt", folder, init=True)
    assert results[0] == results[1]
    texts = results[0]
    assert texts["fits"] == ""
    assert "model.big is float32 in the checkpoint and bfloat16 in the model" in texts["dtype"]
    assert "model.unknown is missing" in texts["missing on one rank"]
    assert "model.whole has shape (5,) in the checkpoint and (6,) in the model" in texts["shape on one rank"]
    assert "there is no checkpoint at" in texts["no directory"]
    assert "it is not a checkpoint of lightning_5d" in texts["foreign directory"]
    assert "is a file" in texts["a file"]


def test_not_strict_leaves_what_is_missing_alone(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    targets = {**tensors(0.0), "model.new": torch.full((2,), 7.0)}
    assert CheckpointStore().load(targets, tmp_path / "a.ckpt", strict=False) == ["model.new"]
    assert torch.equal(targets["model.new"], torch.full((2,), 7.0))
    assert torch.equal(targets["model.whole"], torch.arange(5.0) + 1)


def save_badly(path: Path) -> str:
    """Rank 1 cannot write: its disk is full."""
    if dist.get_rank() == 1:
        os.write = os.fsync = _full  # this forked process alone
    with pytest.raises(RuntimeError, match=r"failed on rank 1: OSError.*No space left.*What was there before is untouched"):
        save(path, 2.0)
    return "raised"


def _full(*args: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_on_one_rank_is_an_error_on_all_and_leaves_the_old_one(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 1.0)
    assert run_ranks(2, save_badly, tmp_path / "a.ckpt", init=True) == ["raised", "raised"]
    assert load_errors(tmp_path / "a.ckpt") == ""
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]


def test_saving_over_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        save(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def test_metadata_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"posix\.system"):
        read_metadata(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93.")
    with pytest.raises(ValueError, match=r"os\.system"):
        read_metadata(tmp_path)


def save_until_killed(folder: Path, name: str, victim: int, delay_s: float, background: bool) -> None:
    store = CheckpointStore(background=background)
    content = tensors(2.0)
    dist.barrier()
    if dist.get_rank() == victim:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, delay_s)
    for _ in range(1000):
        store.save(content, {"a": 2}, folder / name, background=background)


def check_kills(folder: Path, number: int) -> int:
    """Kills a rank at a random moment of saving, over a name or anew, in the background or not.

    Returns how many kills left temporary files.
    """
    rng, interrupted = random.Random(number), 0
    save(folder / "first.ckpt", 1.0)
    for i in range(number):
        name = "first.ckpt" if i % 2 else f"new{i}.ckpt"
        with pytest.raises(RankFailed):
            run_ranks(2, save_until_killed, folder, name, i % 2, rng.uniform(0.001, 0.06), i % 4 > 1, init=True, timeout_s=30)
        interrupted += any(entry.name.startswith(".tmp-") for entry in folder.iterdir())
        newest = complete_checkpoints(folder)
        assert folder / "first.ckpt" in newest
        for path in newest:
            found = tensors(0.0)
            CheckpointStore().load(found, path)
            value = found["model.big"][0, 0].item()
            assert value in (1.0, 2.0) and torch.equal(found["model.big"], torch.full((ROWS, COLUMNS), value))
            assert torch.equal(found["model.whole"], torch.arange(5.0) + value), "two saves are mixed"
        save(folder / "first.ckpt", 1.0)
        assert not any(entry.name.startswith(".") for entry in folder.iterdir()), "the next save sweeps"
    return interrupted


def test_a_killed_save_costs_nothing(tmp_path: Path) -> None:
    check_kills(tmp_path, 4)


@pytest.mark.slow
def test_twenty_killed_saves_cost_nothing(tmp_path: Path) -> None:
    assert check_kills(tmp_path, 20) > 3, "the kills all came between saves and prove nothing"


def test_an_object_store_is_refused() -> None:
    for action in (save, CheckpointStore().read_entries):
        with pytest.raises(CheckpointError, match="a file system that every rank sees"):
            action("s3://bucket/a.ckpt")  # type: ignore[operator]
