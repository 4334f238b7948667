"""How many tokens a batch holds, told from shapes alone: no value is read, so nothing waits for the accelerator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def find_token_ids(batch: Any, key: str = "input_ids") -> Tensor | None:
    """Token ids of ``batch``: the entry ``key`` of a mapping, or else the first 2-D integer tensor in it; None without either.

    The last dimension is the sequence, padding included.
    """
    if isinstance(batch, Mapping) and isinstance(ids := batch.get(key), Tensor):
        return ids
    return next((t for t in _tensors(batch) if t.ndim == 2 and _is_integer(t.dtype)), None)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for value in batch:
            yield from _tensors(value)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
