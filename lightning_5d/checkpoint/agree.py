"""Ranks that fail together: what one rank finds wrong, every rank raises, so that none waits for the others forever."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded, or a request that cannot be saved; the same text on every rank."""


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank_of(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if is_distributed() else 0


def gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """``value`` of every rank, by rank."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_every_rank(fn: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """``fn()`` here, after every rank's ``fn`` went well.

    Raises:
        CheckpointError: On every rank with one text when ``fn`` raised a ``ValueError`` on any.
        RuntimeError: Likewise, when it raised something else: a fault of the machine or of this program.
    """
    value, error = None, None
    try:
        value = fn()
    except Exception as exception:
        error = _describe(exception)
    _raise_first(gather_objects(error, group))
    return value  # type: ignore[return-value]


def on_first_rank(fn: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """What ``fn()`` returned on rank 0, on every rank; raises like :func:`on_every_rank`."""
    answer: list[Any] = [None, None]
    if rank_of(group) == 0:
        try:
            answer[0] = fn()
        except Exception as exception:
            answer[1] = _describe(exception)
    if is_distributed():
        dist.broadcast_object_list(answer, group=group, group_src=0)
    _raise_first([answer[1]])
    return answer[0]


def _describe(exception: Exception) -> tuple[bool, str]:
    if isinstance(exception, ValueError):
        return True, str(exception)
    return False, "".join(traceback.format_exception(exception)).strip()


def _raise_first(errors: list[tuple[bool, str] | None]) -> None:
    found = [(rank, *error) for rank, error in enumerate(errors) if error is not None]
    if not found:
        return
    rank, is_value_error, text = found[0]
    if is_value_error:
        raise CheckpointError(text)
    raise RuntimeError(f"rank {rank}: {text}")
