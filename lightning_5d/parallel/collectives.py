"""The differentiable collectives of tensor and sequence parallelism (Megatron-LM's f, g and their sequence forms).

Activations are plain local tensors ``[batch, seq, ...]``; the sequence is dimension 1. Each function names what happens
forward; the backward is its transpose.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SEQ_DIM = 1

# torch 2.13 renamed them; the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the group, in place."""
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


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A clone: autograd may have given the same buffer to another branch.
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_sequence(grad, ctx.group), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_sequence(grad, ctx.group), None


class _SplitSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return own_part(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_sequence(grad, ctx.group), None


class _MergeSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return own_part(grad, ctx.group), None


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
    return _CopyToGroup.apply(x, group)


def reduce_from_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of each rank's part of a computation (an all-reduce); gradients pass."""
    return _ReduceFromGroup.apply(x, group)


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Parts of the sequence -> whole sequence into each rank's part of a computation; gradients are reduce-scattered."""
    return _GatherSequence.apply(x, group)


def reduce_scatter_from_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of each rank's part of a computation, split over the sequence; gradients are gathered."""
    return _ReduceScatterSequence.apply(x, group)


def split_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Whole sequence, equal on every rank -> this rank's part; gradients are gathered."""
    return _SplitSequence.apply(x, group)


def merge_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Parts of the sequence -> whole sequence for a computation that every rank does alike; gradients are split."""
    return _MergeSequence.apply(x, group)


def gather_last(x: Tensor, group: dist.ProcessGroup, sizes: tuple[int, ...]) -> Tensor:
    """Parts of the last dimension, of possibly different sizes -> the whole; every rank then computes alike."""
    return _GatherLast.apply(x, group, sizes)
