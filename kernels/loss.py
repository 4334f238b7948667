"""Cross-entropy of given logits, whole or split over the vocabulary.

    x = logits, or cap tanh(logits / cap)                          (soft-capping, Gemma 2)
    lse = log sum_j exp x_j
    loss = lse - (1 - e) x_target - e mean_j x_j + z lse^2         e = label smoothing, z = weight of the z-loss
    dx_j = dloss (softmax_j (1 + 2 z lse) - (1 - e) [j = target] - e / V),   dlogits = dx (1 - (x / cap)^2)

Label smoothing: Szegedy et al. 2015 (arXiv:1512.00567); z-loss: Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), section 5;
the running maximum and sum: Milakov and Gimelshein 2018 (arXiv:1805.02867); over a split vocabulary: Shoeybi et al. 2019
(Megatron-LM, arXiv:1909.08053), section 3: ranks exchange a maximum and three sums a token, never logits.

Each row is read once for the statistics and once for the gradient. Saved for backward: the logits and 4 bytes a token;
``overwrite_logits`` writes the gradient over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ._library import contiguous_like, define_op
from ._triton import as_rows, cdiv, compute_dtype, kernel, launch, next_power_of_2, runs_on_triton

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 4096
MAXIMUM, SUM_EXP, TARGET_LOGIT, LOGIT_SUM = range(4)
"""Rows of the statistics ``[4, n]``: what a token's loss needs to know of its (part of the) logits."""


@dataclass(frozen=True)
class LossOptions:
    """What the loss of a token depends on; ``vocab_size`` counts the whole vocabulary, without padding."""

    vocab_size: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    """0.0 for none."""


@kernel
def _statistics_kernel(
    LOGITS, TARGET, STATS, num_rows, row_stride, first, num_cols, softcap,
    CONTINUED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(TARGET + row) - first
    largest, total, logit_sum, target_logit = -float("inf"), 0.0, 0.0, 0.0
    if CONTINUED:
        largest = tl.load(STATS + row)
        total = tl.load(STATS + num_rows + row)
        target_logit = tl.load(STATS + 2 * num_rows + row)
        logit_sum = tl.load(STATS + 3 * num_rows + row)
    for start in range(0, num_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < num_cols
        x = tl.load(LOGITS + row * row_stride + cols, mask=mask, other=0.0).to(tl.float32)
        if CAPPED:
            x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)
        new_largest = tl.maximum(largest, tl.max(tl.where(mask, x, -float("inf")), axis=0))
        total = total * tl.where(largest == -float("inf"), 0.0, tl.exp(largest - new_largest))
        total += tl.sum(tl.where(mask, tl.exp(x - new_largest), 0.0), axis=0)
        largest = new_largest
        logit_sum += tl.sum(tl.where(mask, x, 0.0), axis=0)
        target_logit += tl.sum(tl.where(mask & (cols == target), x, 0.0), axis=0)
    tl.store(STATS + row, largest)
    tl.store(STATS + num_rows + row, total)
    tl.store(STATS + 2 * num_rows + row, target_logit)
    tl.store(STATS + 3 * num_rows + row, logit_sum)


@kernel
def _gradient_kernel(
    LOGITS, OUT, TARGET, LSE, DLOSS, width, row_stride, out_stride, first, num_cols, softcap, z_loss, on_target, on_all,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    dloss = tl.load(DLOSS + row).to(tl.float32)
    lse = tl.load(LSE + row)
    target = tl.load(TARGET + row) - first
    x = tl.load(LOGITS + row * row_stride + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
    slope = 1.0
    if CAPPED:
        y = 2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0
        slope = 1.0 - y * y
        x = softcap * y
    dx = tl.exp(x - lse) * (1.0 + 2.0 * z_loss * lse) - on_all
    dx = tl.where(cols == target, dx - on_target, dx) * slope * dloss
    # A padded column and an ignored row get exact zeros, whatever is in them.
    dx = tl.where(cols < num_cols, dx, 0.0)
    dx = tl.where(dloss == 0.0, 0.0, dx)
    tl.store(OUT + row * out_stride + cols, dx.to(OUT.dtype.element_ty), mask=cols < width)


def _launch_statistics(logits, target, stats, first: int, num_cols: int, softcap: float, continued: bool) -> None:
    block = min(BLOCK, next_power_of_2(max(1, num_cols)))
    n = len(logits)
    launch(_statistics_kernel, (n,), logits, target, stats, n, logits.stride(0), first, num_cols, float(softcap),
           CONTINUED=continued, CAPPED=softcap > 0, BLOCK=block, num_warps=max(1, min(8, block // 512)))  # fmt: skip


def _launch_gradient(logits, out, target, lse, dloss, first: int, num_cols: int, options: LossOptions) -> None:
    (n, width), e = logits.shape, options.label_smoothing
    block = min(2048, next_power_of_2(width))
    launch(_gradient_kernel, (n * cdiv(width, block),), logits, out, target, lse, dloss, width, logits.stride(0), out.stride(0),
           first, num_cols, float(options.softcap), float(options.z_loss), 1.0 - e, e / options.vocab_size,
           CAPPED=options.softcap > 0, BLOCK=block, num_warps=max(1, min(8, block // 256)))  # fmt: skip


def _capped(x: torch.Tensor, softcap: float) -> torch.Tensor:
    return softcap * torch.tanh(x / softcap) if softcap > 0 else x


def _reference_statistics(logits, target, stats, first: int, num_cols: int, softcap: float, continued: bool) -> None:
    x = _capped(logits[:, :num_cols].to(stats.dtype), softcap)
    largest = x.amax(1) if num_cols > 0 else torch.full_like(stats[0], -torch.inf)
    if continued:
        largest = torch.maximum(largest, stats[MAXIMUM])
    total = torch.exp(x - largest[:, None]).sum(1)
    here = target - first
    inside = (here >= 0) & (here < num_cols)
    target_logit = stats.new_zeros(len(x))
    if num_cols > 0:
        target_logit = torch.where(inside, x.gather(1, here.clamp(0, num_cols - 1)[:, None])[:, 0], target_logit)
    if continued:
        total += stats[SUM_EXP] * torch.exp(stats[MAXIMUM] - largest).nan_to_num(0.0)
    new = torch.stack([largest, total, target_logit, x.sum(1)])
    if continued:
        new[TARGET_LOGIT:] += stats[TARGET_LOGIT:]
    stats.copy_(new)


def _reference_gradient(logits, out, target, lse, dloss, first: int, num_cols: int, options: LossOptions) -> None:
    x = _capped(logits[:, :num_cols].to(lse.dtype), options.softcap)
    dx = torch.exp(x - lse[:, None]) * (1 + 2 * options.z_loss * lse)[:, None] - options.label_smoothing / options.vocab_size
    on_target = torch.arange(num_cols, device=x.device) == (target - first)[:, None]
    dx = torch.where(on_target, dx - (1 - options.label_smoothing), dx)
    if options.softcap > 0:
        dx = dx * (1 - (x / options.softcap) ** 2)
    out[:, :num_cols] = torch.where(dloss[:, None] != 0, dx * dloss[:, None], 0)
    out[:, num_cols:] = 0


def add_statistics(logits, target, stats, first: int, num_cols: int, softcap: float, continued: bool) -> None:
    """Writes into ``stats [4, n]`` those of ``logits [n, width]``, whose column 0 is entry ``first`` of the vocabulary and whose
    columns from ``num_cols`` on are padding; ``continued`` adds to what an earlier part of the vocabulary left there."""
    step = _launch_statistics if runs_on_triton(logits) else _reference_statistics
    step(logits, target, stats, first, num_cols, softcap, continued)


def write_gradient(logits, out, target, lse, dloss, first: int, num_cols: int, options: LossOptions) -> None:
    """Writes into ``out`` (which may be ``logits``) the gradient of the loss by ``logits``; ``dloss [n]`` is 0 where ignored."""
    step = _launch_gradient if runs_on_triton(logits) else _reference_gradient
    step(logits, out, target, lse, dloss, first, num_cols, options)


def combine(
    stats: torch.Tensor, target: torch.Tensor, options: LossOptions, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the log-sum-exp of each token, ``[n]`` each, from the statistics of this rank's part of the vocabulary."""
    largest, sums = stats[MAXIMUM], stats[SUM_EXP:]
    if group is not None and dist.get_world_size(group) > 1:
        local, largest = largest, largest.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        sums = sums.clone()
        sums[0] *= torch.exp(local - largest)
        dist.all_reduce(sums, group=group)
    lse = largest + torch.log(sums[0])
    loss = lse - (1 - options.label_smoothing) * sums[1]
    if options.label_smoothing:
        loss = loss - options.label_smoothing / options.vocab_size * sums[2]
    if options.z_loss:
        loss = loss + options.z_loss * lse**2
    return torch.where(target != options.ignore_index, loss, 0.0), lse


def check_targets(target: torch.Tensor, options: LossOptions) -> None:
    """A target outside the vocabulary would silently count as a logit of zero. On a GPU the check does not wait."""
    fine = ((target == options.ignore_index) | ((target >= 0) & (target < options.vocab_size))).all()
    if target.device.type == "cpu" and not fine:
        allowed = f"0 to {options.vocab_size - 1}, or ignore_index {options.ignore_index}"
        raise ValueError(f"cross-entropy: targets lie from {target.min().item()} to {target.max().item()}; allowed are {allowed}")
    torch._assert_async(fine, "cross-entropy: a target is outside the vocabulary and not ignore_index")


def options_of(vocab_size: int, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None) -> LossOptions:
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"cross-entropy: label_smoothing={label_smoothing}, allowed are 0 to 1")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"cross-entropy: softcap={softcap}, allowed are positive numbers, or None for no cap")
    return LossOptions(vocab_size, ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0))


def shard_of(
    width: int, vocab_size: int | None, vocab_start: int | None, group: dist.ProcessGroup | None
) -> tuple[int, int, int]:
    """(whole vocabulary, first entry here, entries here that are not padding) of a shard of ``width`` entries."""
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    first = rank * width if vocab_start is None else vocab_start
    whole = size * width if vocab_size is None else vocab_size
    return whole, first, max(0, min(width, whole - first))


def reduce(losses: torch.Tensor, target: torch.Tensor, ignore_index: int, reduction: str) -> torch.Tensor:
    if reduction == "none":
        return losses.view(target.shape)
    if reduction == "sum":
        return losses.sum()
    if reduction == "mean":  # without a target: zero, where torch gives NaN
        return losses.sum() / (target != ignore_index).sum().clamp(min=1)
    raise ValueError(f"cross-entropy: reduction={reduction!r}, allowed are 'mean', 'sum' and 'none'")


def _statistics_op(logits, target, first, num_cols, softcap):
    rows = as_rows(logits)
    stats = torch.empty(4, len(rows), dtype=compute_dtype(rows), device=rows.device)
    add_statistics(rows, target, stats, first, num_cols, softcap, continued=False)
    return stats


def _gradient_op(logits, target, lse, dloss, first, num_cols, vocab_size, smoothing, z_loss, softcap):
    out = contiguous_like(logits)
    write_gradient(
        as_rows(logits), out, target, lse, dloss, first, num_cols, LossOptions(vocab_size, 0, smoothing, z_loss, softcap)
    )
    return out


def _gradient_op_(logits, target, lse, dloss, first, num_cols, vocab_size, smoothing, z_loss, softcap):
    write_gradient(logits, logits, target, lse, dloss, first, num_cols, LossOptions(vocab_size, 0, smoothing, z_loss, softcap))


_TAIL = (
    "Tensor target, Tensor lse, Tensor dloss, int first, int num_cols, int vocab_size, "
    "float smoothing, float z_loss, float softcap"
)
_statistics = define_op(
    "cross_entropy_statistics(Tensor logits, Tensor target, int first, int num_cols, float softcap) -> Tensor",
    _statistics_op,
    lambda logits, target, *_: logits.new_empty(4, logits.shape[0], dtype=compute_dtype(logits)),
)
_gradient = define_op(
    f"cross_entropy_gradient(Tensor logits, {_TAIL}) -> Tensor", _gradient_op, lambda logits, *_: contiguous_like(logits)
)
_gradient_ = define_op(f"cross_entropy_gradient_(Tensor(a!) logits, {_TAIL}) -> ()", _gradient_op_, lambda *_: None)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, first, num_cols, options, group, overwrite):
        stats = _statistics(logits, target, first, num_cols, options.softcap)
        losses, lse = combine(stats, target, options, group)
        ctx.save_for_backward(logits, target, lse)
        ctx.options = (first, num_cols, options, overwrite)
        return losses

    @staticmethod
    def backward(ctx, dlosses):
        logits, target, lse = ctx.saved_tensors
        first, num_cols, options, overwrite = ctx.options
        dloss = torch.where(target != options.ignore_index, dlosses, 0.0)
        args = (target, lse, dloss, first, num_cols, options.vocab_size, options.label_smoothing, options.z_loss, options.softcap)
        if overwrite:
            _gradient_(logits.detach(), *args)
            grad = logits.detach()
        else:
            grad = _gradient(logits, *args)
        return grad, None, None, None, None, None, None


def cross_entropy(
    logits: torch.Tensor,
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
    overwrite_logits: bool = False,
) -> torch.Tensor:
    """Cross-entropy of ``logits [..., V]`` with ``target [...]``, in float32 (float64 for float64).

    With ``group``, the logits are this rank's columns of a vocabulary split over the group: entries from ``vocab_start`` on
    (by default equal shards in rank order), ``vocab_size`` of them on all ranks together (the rest is padding, and
    counts for nothing). Every rank gets the same loss, and the gradient of its own columns.
    ``reduction`` is ``"mean"`` over the targets that count (zero if none does), ``"sum"``, or ``"none"`` (shape of ``target``).
    ``overwrite_logits`` lets backward write the gradient over the logits, which nothing may read after it.
    Raises ValueError on shapes that do not fit, unknown options, and, on the CPU, targets outside the vocabulary.
    """
    if logits.shape[:-1] != target.shape:
        raise ValueError(f"cross_entropy: logits {tuple(logits.shape)} do not fit targets {tuple(target.shape)}")
    whole, first, num_cols = shard_of(logits.shape[-1], vocab_size, vocab_start, group)
    options = options_of(whole, ignore_index, label_smoothing, z_loss, softcap)
    flat = target.reshape(-1)
    check_targets(flat, options)
    losses = _CrossEntropy.apply(as_rows(logits), flat, first, num_cols, options, group, overwrite_logits)
    return reduce(losses, target, ignore_index, reduction)
