"""The head's projection and its cross-entropy in one operation that never holds the logits.

    logits = hidden weight^T,  loss = cross-entropy(logits, target)          as in loss.py, with all its options

Forward goes over the vocabulary in tiles: logits of a tile, their statistics, and away with them. Backward does each tile's
logits again (2 n h V more operations, a third of what the head costs without), turns them into their gradient in place, and
multiplies: the tile's rows of the weight gradient are finished by ONE product over all tokens, so they are rounded once,
where tiles over tokens would add rounded pieces up; the gradient of hidden is summed over tiles in float32.
Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024 (arXiv:2411.09009), has the recomputation.

Peak: one tile of logits (n V / 16 elements) and the float32 sum n h, beside the weight gradient itself. Saved for backward:
hidden and 4 bytes a token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ._library import contiguous_like, define_op
from ._triton import as_rows, cdiv, compute_dtype
from .loss import LossOptions, add_statistics, check_targets, combine, options_of, reduce, shard_of, write_gradient

NUM_TILES = 16
MIN_TILE = 2048


def tile_size(width: int) -> int:
    """Entries of the vocabulary in a tile: a sixteenth, in whole multiples of 256 for the matrix units, not under 2048."""
    return max(MIN_TILE, cdiv(cdiv(width, NUM_TILES), 256) * 256)


def _statistics_op(hidden, weight, target, first, num_cols, softcap, tile):
    stats = torch.empty(4, len(hidden), dtype=compute_dtype(hidden), device=hidden.device)
    for start in range(0, len(weight), tile):
        logits = hidden @ weight[start : start + tile].t()
        entries = max(0, min(logits.shape[1], num_cols - start))
        add_statistics(logits, target, stats, first + start, entries, softcap, continued=start > 0)
    return stats


def _float32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` of halves, not rounded back to halves: the matrix units add up in float32 anyway."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _gradient_op(
    hidden, weight, target, lse, dloss, first, num_cols, vocab_size, smoothing, z_loss, softcap, tile, hidden_grad, weight_grad
):
    options = LossOptions(vocab_size, 0, smoothing, z_loss, softcap)
    dhidden = torch.zeros_like(hidden, dtype=compute_dtype(hidden)) if hidden_grad else None
    dweight = contiguous_like(weight) if weight_grad else weight.new_empty(0)
    for start in range(0, len(weight), tile):
        part = weight[start : start + tile]
        dlogits = hidden @ part.t()
        entries = max(0, min(dlogits.shape[1], num_cols - start))
        write_gradient(dlogits, dlogits, target, lse, dloss, first + start, entries, options)
        if weight_grad:
            torch.mm(dlogits.t(), hidden, out=dweight[start : start + tile])
        if dhidden is not None:
            if dhidden.dtype == hidden.dtype:
                dhidden.addmm_(dlogits, part)
            else:
                dhidden += _float32_product(dlogits, part)
    return hidden.new_empty(0) if dhidden is None else dhidden.to(hidden.dtype), dweight


_statistics = define_op(
    "linear_cross_entropy_statistics(Tensor hidden, Tensor weight, Tensor target, int first, int num_cols, float softcap, "
    "int tile) -> Tensor",
    _statistics_op,
    lambda hidden, *_: hidden.new_empty(4, hidden.shape[0], dtype=compute_dtype(hidden)),
)
_gradient = define_op(
    "linear_cross_entropy_gradient(Tensor hidden, Tensor weight, Tensor target, Tensor lse, Tensor dloss, int first, "
    "int num_cols, int vocab_size, float smoothing, float z_loss, float softcap, int tile, bool hidden_grad, bool weight_grad)"
    " -> (Tensor, Tensor)",
    _gradient_op,
    lambda hidden, weight, *rest: (
        contiguous_like(hidden) if rest[-2] else hidden.new_empty(0),
        contiguous_like(weight) if rest[-1] else weight.new_empty(0),
    ),
)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, first, num_cols, options, group, partial_hidden_grad):
        tile = tile_size(len(weight))
        stats = _statistics(hidden, weight, target, first, num_cols, options.softcap, tile)
        losses, lse = combine(stats, target, options, group)
        ctx.save_for_backward(hidden, weight, target, lse)
        ctx.options = (first, num_cols, options, tile, None if partial_hidden_grad else group)
        return losses

    @staticmethod
    def backward(ctx, dlosses):
        hidden, weight, target, lse = ctx.saved_tensors
        first, num_cols, o, tile, group = ctx.options
        needs_h, needs_w = ctx.needs_input_grad[:2]
        dloss = torch.where(target != o.ignore_index, dlosses, 0.0)
        dhidden, dweight = _gradient(
            hidden,
            weight,
            target,
            lse,
            dloss,
            first,
            num_cols,
            o.vocab_size,
            o.label_smoothing,
            o.z_loss,
            o.softcap,
            tile,
            needs_h,
            needs_w,
        )
        if needs_h and group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(dhidden, group=group)  # each rank has the part that came through its own entries
        return dhidden if needs_h else None, dweight if needs_w else None, None, None, None, None, None, None


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    partial_hidden_grad: bool = False,
) -> torch.Tensor:
    """``cross_entropy(hidden @ weight.T, target)`` for ``[..., h]``, ``[V, h]``, ``[...]``, without the logits.

    Options are those of :func:`cross_entropy`. With ``group``, ``weight`` is this rank's rows of a vocabulary split over the
    group and ``hidden`` is the same on all of it; the gradient of ``hidden`` is summed over the group, so it is whole on every
    rank. ``partial_hidden_grad`` leaves that sum to the caller: to a reduce-scatter, where ``hidden`` was gathered from
    sequence shards, or to whatever else sums partial gradients. Under autocast the product is in autocast's dtype.
    Raises ValueError on shapes that do not fit, unknown options, and, on the CPU, targets outside the vocabulary.
    """
    if hidden.shape[:-1] != target.shape or hidden.shape[-1] != weight.shape[-1] or weight.dim() != 2:
        raise ValueError(
            f"linear_cross_entropy: shapes {tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(target.shape)} do not fit; "
            "expected hidden [..., h], weight [V, h] and target [...]"
        )
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    whole, first, num_cols = shard_of(len(weight), vocab_size, vocab_start, group)
    options = options_of(whole, ignore_index, label_smoothing, z_loss, softcap)
    flat = target.reshape(-1)
    check_targets(flat, options)
    losses = _LinearCrossEntropy.apply(as_rows(hidden), weight, flat, first, num_cols, options, group, partial_hidden_grad)
    return reduce(losses, target, ignore_index, reduction)
