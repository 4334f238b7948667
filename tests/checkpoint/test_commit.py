import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_5d.checkpoint import commit, latest


def make(directory: Path, content: str = "a", global_step: int = 1) -> Path:
    directory.mkdir()
    (directory / ".metadata").write_text(content)
    commit.write_complete(directory, "tp2", global_step)
    return directory


def written(target: Path, content: str = "a") -> Path:
    return make(commit.new_temporary(target), content)


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("before", ["nothing", "checkpoint", "file", "link"])
def test_commit_replaces_whatever_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool, before: str) -> None:
    target, other = tmp_path / "last.ckpt", tmp_path / "other.ckpt"
    make(other, "other")
    if exchange:
        monkeypatch.setattr(commit, "_aside", lambda target: pytest.fail("there was a moment without a checkpoint"))
    else:
        monkeypatch.setattr(commit, "_exchange", lambda a, b: False)
    if before == "checkpoint":
        make(target, "old")
    elif before == "file":
        target.write_text("old")
    elif before == "link":
        target.symlink_to("other.ckpt")
    commit.commit(written(target, "new"), target)
    assert (target / ".metadata").read_text() == "new" and not target.is_symlink()
    assert (other / ".metadata").read_text() == "other"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last.ckpt", "other.ckpt"]


def test_the_exchange_is_one_step_on_linux(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", "a"), make(tmp_path / "b", "b")
    assert commit._exchange(a, b)
    assert (a / ".metadata").read_text() == "b" and (b / ".metadata").read_text() == "a"


def test_a_foreign_directory_is_not_replaced_and_not_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("...")
    for action in (commit.check_replaceable, commit.remove):
        with pytest.raises(ValueError, match="not a checkpoint"):
            action(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter1.tex").exists()
    (tmp_path / "empty").mkdir()
    commit.check_replaceable(tmp_path / "empty")


def test_remove(tmp_path: Path) -> None:
    make(tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    commit.remove(tmp_path / "last.ckpt")
    assert (tmp_path / "a.ckpt").exists()
    commit.remove(tmp_path / "a.ckpt")
    commit.remove(tmp_path / "a.ckpt")
    assert list(tmp_path.iterdir()) == []


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_sweep_takes_what_is_left_behind_and_nothing_else(tmp_path: Path) -> None:
    host, nonce = socket.gethostname(), "0123456789ab"
    for name in (f".tmp-{host}-{dead_pid()}-{nonce}", f".tmp-{host}-{os.getpid()}-{nonce}", ".tmp-other-7-" + nonce):
        make(tmp_path / name)
    for name in (
        f".tmp-{host}-{os.getppid()}-{nonce}",
        ".tmp-fresh-7-" + nonce,
        ".tmp-mine",
        "a.ckpt",
        f".old-{nonce}-gone.ckpt",
    ):
        make(tmp_path / name)
    make(tmp_path / f".old-{nonce}-a.ckpt")
    long_ago = time.time() - 2 * commit.STALE_AFTER_S
    for entry in (tmp_path / (".tmp-other-7-" + nonce), *(tmp_path / (".tmp-other-7-" + nonce)).iterdir()):
        os.utime(entry, (long_ago, long_ago))
    commit.sweep(tmp_path)
    left = sorted(entry.name for entry in tmp_path.iterdir())
    assert left == sorted(
        [f".tmp-{host}-{os.getppid()}-{nonce}", ".tmp-fresh-7-" + nonce, ".tmp-mine", "a.ckpt", f".old-{nonce}-gone.ckpt"]
    )


def test_a_checkpoint_set_aside_is_put_back(tmp_path: Path) -> None:
    make(tmp_path / ".old-0123456789ab-last.ckpt", "old")
    assert commit.recover(tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt" / ".metadata").read_text() == "old"
    assert not commit.recover(tmp_path / "last.ckpt")


def test_errors_name_what_is_wrong_and_what_is_whole(tmp_path: Path) -> None:
    make(tmp_path / "step10.ckpt", global_step=10)
    make(tmp_path / "step9.ckpt", global_step=9)
    (tmp_path / "unfinished.ckpt").mkdir()
    (tmp_path / "unfinished.ckpt" / "__0_0.distcp").write_text("")
    cases = {"gone.ckpt": "there is no checkpoint at", "unfinished.ckpt": "interrupted"}
    for name, text in cases.items():
        with pytest.raises(ValueError, match=text) as info:
            commit.read_complete(tmp_path / name)
        assert str(info.value).endswith("step9.ckpt, step10.ckpt")
    assert [entry.name for entry in commit.complete_checkpoints(tmp_path)] == ["step9.ckpt", "step10.ckpt"]


def test_the_latest_is_the_one_with_the_most_steps_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert latest(tmp_path) is None
    for step in (10, 9):
        make(tmp_path / f"step{step}.ckpt", global_step=step)
    make(tmp_path / "step11.ckpt", global_step=11)
    (tmp_path / "step11.ckpt" / ".metadata").write_text("truncated or not")
    with caplog.at_level("INFO"), pytest.warns(UserWarning, match=r"Not resuming from step11\.ckpt: .*damaged"):
        assert latest(tmp_path) == tmp_path / "step10.ckpt"
    assert "step10.ckpt, at step 10" in caplog.text
