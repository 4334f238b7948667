"""Lets attention code that was written for all heads run on a rank that holds some of them.

Code such as ``q.view(batch, seq, self.n_heads, self.head_dim)`` or ``y.reshape(batch, seq, self.d_model)`` names global
sizes. Head counts kept as attributes are divided; a view whose sizes are too large by exactly the tensor-parallel size has
the leading size of its sharded part divided. Code that computes the width of a head from a divided count,
``self.n_embd // self.n_heads``, gets it too large: there the width is divided. Only views that would raise are changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HEAD_COUNTS = (
    *("num_heads", "n_heads", "n_head", "heads", "num_attention_heads", "nheads", "n_q_heads", "num_q_heads"),
    *("num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "num_key_value_heads", "n_local_heads", "n_local_kv_heads"),
)


def use_local_head_counts(part: nn.Module, tp: int, width: int) -> None:
    """Divides the head counts among ``part``'s attributes, and adapts views to local sizes inside its forward.

    ``width`` is the whole query's: number of heads times width of a head.
    """
    largest = 0
    for name in HEAD_COUNTS:
        count = part.__dict__.get(name)
        if isinstance(count, int) and not isinstance(count, bool) and count % tp == 0:
            part.__dict__[name], largest = count // tp, max(largest, count)
    modes: list[_LocalViews] = []

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        mode = _LocalViews(tp, width // largest if largest else None)
        mode.__enter__()
        modes.append(mode)

    def leave(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if modes:
            modes.pop().__exit__(None, None, None)

    part.register_forward_pre_hook(enter)
    part.register_forward_hook(leave, always_call=True)


class _LocalViews(TorchFunctionMode):
    def __init__(self, tp: int, head_dim: int | None) -> None:
        super().__init__()
        self.tp, self.head_dim = tp, head_dim

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.view, Tensor.reshape, torch.reshape):
            sizes = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list, torch.Size)) else args[1:]
            if sizes and all(isinstance(s, int) for s in sizes):
                local = local_sizes(args[0].shape, sizes, self.tp, self.head_dim)
                if local is not None:
                    return func(args[0], local)
        return func(*args, **(kwargs or {}))


def local_sizes(shape: Sequence[int], sizes: Sequence[int], tp: int, head_dim: int | None = None) -> tuple[int, ...] | None:
    """``sizes`` with the one global size divided by ``tp``, or None when they already fit or cannot be made to.

    A last size of ``tp`` times ``head_dim`` is the width of a head, computed from an already local number of heads.

    >>> local_sizes((2, 8, 16), (2, 8, 4, 8), tp=2)
    (2, 8, 2, 8)
    >>> local_sizes((2, 8, 2, 8), (2, 8, 32), tp=2)
    (2, 8, 16)
    >>> local_sizes((2, 8, 16), (2, 8, 2, 16), tp=2, head_dim=8)
    (2, 8, 2, 8)
    """
    numel = math.prod(shape)
    if -1 in sizes or numel == 0 or math.prod(sizes) != numel * tp:
        return None
    if len(sizes) > 1 and head_dim is not None and sizes[-1] == head_dim * tp and shape[-1] == sizes[-2] * head_dim:
        return (*sizes[:-1], head_dim)
    # Equal leading products belong to batch and sequence; the first size behind the last agreement is the sharded one.
    prefixes, product = {1}, 1
    for size in shape[:-1]:
        product *= size
        prefixes.add(product)
    product, sharded = 1, 0
    for index, size in enumerate(sizes):
        if product in prefixes:
            sharded = index
        product *= size
    if sizes[sharded] % tp:
        return None
    return tuple(size // tp if index == sharded else size for index, size in enumerate(sizes))
