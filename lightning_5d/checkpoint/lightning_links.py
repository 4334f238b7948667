"""``ModelCheckpoint(save_last="link")`` with saves in the background: the link must not point at what is not there yet.

Lightning makes the link right after a save returns. The method that makes it is private; only this file knows it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_5d.checkpoint import commit

_LINK = "_link_checkpoint"


def defer_links(callbacks: Iterable[Callback], after_commit: Callable[[Callable[[], None]], Any]) -> None:
    """Has every link of ``callbacks`` made by ``after_commit``, and replaced in one step."""
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint):
            assert hasattr(ModelCheckpoint, _LINK), "Lightning makes its links elsewhere now"
            callback.__dict__[_LINK] = partial(_link_later, after_commit)


def restore_links(callbacks: Iterable[Callback]) -> None:
    """Undoes :func:`defer_links`."""
    for callback in callbacks:
        callback.__dict__.pop(_LINK, None)


def _link_later(after_commit: Callable[[Callable[[], None]], Any], trainer: Trainer, filepath: str, linkpath: str) -> None:
    if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
        after_commit(partial(replace_link, Path(filepath), Path(linkpath)))


def replace_link(target: Path, link: Path) -> None:
    """``link`` points at ``target`` from one moment to the next; a directory that was there is removed."""
    if link.is_dir() and not link.is_symlink():
        commit.remove(link)
    temporary = commit.new_temporary(link)
    temporary.symlink_to(os.path.relpath(target, link.parent))
    os.replace(temporary, link)
