"""A directory appears whole or not at all: written under a hidden name, then renamed.

<name>.ckpt                        a checkpoint
.tmp-<host>-<pid>-<nonce>          being written, or already replaced; a hidden sibling
.old-<nonce>-<name>.ckpt           set aside while a file system without an exchanging rename replaces it
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMAT = 1
COMPLETE = "complete.json"
# A temporary directory of another host, whose process cannot be asked, counts as left behind after this long without a write.
STALE_AFTER_S = 3600.0

_TEMPORARY = re.compile(r"^\.tmp-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{12}$")
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def new_temporary(target: Path) -> Path:
    """The hidden sibling of ``target`` to write into; not created here."""
    return target.parent / f".tmp-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def write_complete(directory: Path, layout: str, global_step: int) -> None:
    """The last file of a checkpoint: what it is, and the size of every file that belongs to it."""
    sizes = {entry.name: entry.stat().st_size for entry in sorted(directory.iterdir())}
    write_durably(
        directory / COMPLETE,
        json.dumps({"format": FORMAT, "layout": layout, "global_step": global_step, "files": sizes}, indent=1).encode(),
    )


def read_complete(directory: Path) -> dict[str, Any]:
    """What ``complete.json`` says, after every file it lists was found with its size.

    Raises:
        ValueError: The directory is no checkpoint, is incomplete, damaged or of a newer format; names complete ones beside it.
    """
    try:
        return _read_complete(directory)
    except ValueError as error:
        others = [entry.name for entry in complete_checkpoints(directory.parent) if entry != directory]
        hint = f". Complete checkpoints beside it, newest last: {', '.join(others[-3:])}" if others else ""
        raise ValueError(f"{error}{hint}") from None


def is_complete(directory: Path) -> bool:
    """Whether a checkpoint is there, whole, and of a format known here."""
    try:
        _read_complete(directory)
    except ValueError:
        return False
    return True


def complete_checkpoints(parent: Path) -> list[Path]:
    """The complete checkpoints of a folder, the one with the most steps (then the newest) last; links are left out."""
    if not parent.is_dir():
        return []
    visible = [entry for entry in parent.iterdir() if not entry.name.startswith(".") and not entry.is_symlink()]
    complete = [entry for entry in visible if is_complete(entry)]
    return sorted(complete, key=lambda entry: (_read_complete(entry)["global_step"], (entry / COMPLETE).stat().st_mtime))


def _read_complete(directory: Path) -> dict[str, Any]:
    if not directory.exists():
        raise ValueError(f"there is no checkpoint at {directory}")
    if not directory.is_dir():
        raise ValueError(f"{directory} is a file; a checkpoint written under a layout is a directory that holds {COMPLETE}")
    try:
        complete = json.loads((directory / COMPLETE).read_bytes())
        version, files = complete["format"], complete["files"]
    except FileNotFoundError:
        unfinished = (directory / ".metadata").exists() or any(directory.glob("*.distcp"))
        reason = (
            "its writing was interrupted, or another program wrote it" if unfinished else "it is not a checkpoint of lightning_5d"
        )
        raise ValueError(f"{directory} has no {COMPLETE}: {reason}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{directory / COMPLETE} cannot be read ({error}): the checkpoint is damaged") from None
    if version > FORMAT:
        raise ValueError(
            f"{directory} has format {version}, and this version of lightning_5d reads up to {FORMAT}: use a newer one"
        )
    for name, size in files.items():
        try:
            found = (directory / name).stat().st_size
        except FileNotFoundError:
            raise ValueError(f"{directory} lacks the file {name}: the checkpoint is incomplete") from None
        if found != size:
            raise ValueError(f"{directory / name} has {found} bytes, not {size}: the checkpoint is damaged")
    return complete


def check_local(path: str | Path) -> None:
    """Raises ``ValueError`` for an address such as ``s3://...``: an object store cannot rename, so nothing could be committed."""
    if re.match(r"^[a-z0-9+]+:/", str(path)):  # a Path has one of the two slashes left
        raise ValueError(
            f"{path}: checkpoints are directories of a file system that every rank sees; mount it, or copy them there"
        )


def check_replaceable(target: Path) -> None:
    """Raises ``ValueError`` when a save to ``target`` would destroy a directory that is no checkpoint."""
    if target.is_dir() and not target.is_symlink() and any(target.iterdir()):
        is_ours = (target / COMPLETE).exists() or (target / ".metadata").exists()
        if not is_ours:
            raise ValueError(
                f"{target} is a directory that is not a checkpoint; it is not replaced. Save under another name, or remove it"
            )


def commit(temporary: Path, target: Path) -> None:
    """``temporary`` becomes ``target``, at once; what was there before (a directory, a file, a link) is removed after."""
    _sync_directory(temporary)
    if not target.exists() and not target.is_symlink():
        os.rename(temporary, target)
    elif _exchange(temporary, target):
        _sync_directory(target.parent)
        discard(temporary)
        return
    else:
        aside = _aside(target)
        os.rename(target, aside)
        os.rename(temporary, target)
        discard(aside)
    _sync_directory(target.parent)


def remove(target: Path) -> None:
    """Hides the checkpoint first and deletes it then, so that no half of one is ever seen under its name."""
    if target.is_dir() and not target.is_symlink():
        check_replaceable(target)
        hidden = new_temporary(target)
        os.rename(target, hidden)
        discard(hidden)
    elif target.exists() or target.is_symlink():
        target.unlink()


def recover(target: Path) -> bool:
    """Puts a checkpoint back that was set aside when its replacement was interrupted; whether there was one."""
    if target.exists() or not target.parent.is_dir():
        return False
    for aside in target.parent.glob(f".old-*-{target.name}"):
        if is_complete(aside):
            os.rename(aside, target)
            return True
    return False


def leftovers(parent: Path) -> list[Path]:
    """What interrupted saves and removals left in ``parent``, and the next :func:`sweep` deletes."""
    found = []
    for entry in parent.iterdir() if parent.is_dir() else ():
        match = _TEMPORARY.match(entry.name)
        aside = re.match(r"^\.old-[0-9a-f]{12}-(.+)$", entry.name)
        if (match and _is_left_behind(entry, match["host"], int(match["pid"]))) or (aside and is_complete(parent / aside[1])):
            found.append(entry)
    return found


def sweep(parent: Path) -> list[Path]:
    """Deletes what interrupted saves and removals left in ``parent``; returns what it deleted.

    A directory goes when the process that wrote it is this one or gone, or, if it ran elsewhere, when nothing was written
    for ``STALE_AFTER_S``. One set aside goes when its checkpoint is there again.
    """
    found = leftovers(parent)
    for entry in found:
        discard(entry)
    return found


def write_durably(path: Path, content: bytes) -> None:
    """Writes the file and waits until the disk has it."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _aside(target: Path) -> Path:
    return target.parent / f".old-{uuid.uuid4().hex[:12]}-{target.name}"


def discard(path: Path) -> None:
    """Deletes a file, a link or a directory, as much of it as can be."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two names in one step (Linux's ``renameat2``); False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no fsync of a directory
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_left_behind(directory: Path, host: str, pid: int) -> bool:
    if host == socket.gethostname():
        return pid == os.getpid() or not _is_alive(pid)
    with contextlib.suppress(FileNotFoundError):
        return time.time() - max(entry.stat().st_mtime for entry in _with_content(directory)) > STALE_AFTER_S
    return False


def _with_content(directory: Path) -> Iterator[Path]:
    yield directory
    yield from directory.iterdir()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
