"""The differentiable collectives of tensor and sequence parallelism (Megatron-LM's f, g and their sequence forms).

Activations are plain local tensors ``[batch, seq, ...]``; the sequence is dimension 1. Each function names what happens
forward; the backward is its transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SEQ_DIM = 1

# torch 2.13 renamed them; the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


Run = Callable[[Tensor, dist.ProcessGroup], Tensor]


def same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Nothing happens."""
    return x.view_as(x)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the group. Of a copy: autograd may have given the same buffer to another branch."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def all_gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[batch, seq / n, ...]`` of each rank -> ``[batch, seq, ...]``."""
    n = group.size()
    gathered = x.new_empty((n, *x.shape))
    _all_gather(gathered.flatten(0, 1), x.contiguous(), group=group)
    return gathered.movedim(0, SEQ_DIM).flatten(SEQ_DIM, SEQ_DIM + 1)


def reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the group of ``[batch, seq, ...]``, of which each rank keeps its ``[batch, seq / n, ...]``."""
    n = group.size()
    parts = x.unflatten(SEQ_DIM, (n, x.shape[SEQ_DIM] // n)).movedim(SEQ_DIM, 0).contiguous()
    part = torch.empty_like(parts[0])
    _reduce_scatter(part, parts.flatten(0, 1), group=group)
    return part


def own_part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of a whole sequence."""
    size = x.shape[SEQ_DIM] // group.size()
    return x.narrow(SEQ_DIM, group.rank() * size, size).contiguous()


class _Collective(torch.autograd.Function):
    """``run`` forward, its transpose backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, run: Run, transpose: Run) -> Tensor:
        ctx.group, ctx.transpose = group, transpose
        return run(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.transpose(grad, ctx.group), None, None, None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        widest = max(sizes)
        if x.shape[-1] < widest:
            x = torch.nn.functional.pad(x, (0, widest - x.shape[-1]))
        gathered = x.new_empty((len(sizes), *x.shape))
        _all_gather(gathered.flatten(0, 1), x.contiguous(), group=group)
        return torch.cat([part[..., :size] for part, size in zip(gathered.unbind(0), sizes, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rank = ctx.group.rank()
        return grad.narrow(-1, sum(ctx.sizes[:rank]), ctx.sizes[rank]).contiguous(), None, None


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same whole tensor into each rank's part of a computation; gradients are summed (an all-reduce)."""
    return _Collective.apply(x, group, same, all_reduce)


def reduce_from_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of each rank's part of a computation (an all-reduce); gradients pass."""
    return _Collective.apply(x, group, all_reduce, same)


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Parts of the sequence -> whole sequence into each rank's part of a computation; gradients are reduce-scattered."""
    return _Collective.apply(x, group, all_gather_sequence, reduce_scatter_sequence)


def reduce_scatter_from_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of each rank's part of a computation, split over the sequence; gradients are gathered."""
    return _Collective.apply(x, group, reduce_scatter_sequence, all_gather_sequence)


def split_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Whole sequence, equal on every rank -> this rank's part; gradients are gathered."""
    return _Collective.apply(x, group, own_part, all_gather_sequence)


def merge_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Parts of the sequence -> whole sequence for a computation that every rank does alike; gradients are split."""
    return _Collective.apply(x, group, all_gather_sequence, own_part)


def gather_last(x: Tensor, group: dist.ProcessGroup, sizes: tuple[int, ...]) -> Tensor:
    """Parts of the last dimension, of possibly different sizes -> the whole; every rank then computes alike."""
    return _GatherLast.apply(x, group, sizes)
