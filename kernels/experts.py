"""Moving tokens to their experts and back, and one matrix product a group: the parts of a mixture of experts that are not gates.

    permute     out[slot[t, j]] = x[t]                      dx[t] = sum_j dout[slot[t, j]]
    unpermute   out[t] = sum_j p[t, j] y[slot[t, j]]        dy[slot[t, j]] = p[t, j] dout[t],  dp[t, j] = <dout[t], y[slot[t, j]]>

where slot is the place of a token's j-th copy among all copies sorted by expert. Both directions of both are one of two kernels:
spread (write each copy) and gather (sum the copies); every element is written once, so there are no atomics. Saved for backward:
slot (4 k bytes a token), and for weighted unpermute y and p.
Gale et al., "MegaBlocks", 2022 (arXiv:2211.15841), has the grouping; the grouped product is torch's ``grouped_mm``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ._library import define_op
from ._triton import as_rows, compute_dtype, kernel, launch, next_power_of_2, runs_on_triton

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 2048


@kernel
def _spread_kernel(X, SLOT, P, Y, OUT, DP, copies, width, x_stride, y_stride, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """OUT[slot] = X[t], times p where WEIGHTED, which also sums DP = <X[t], Y[slot]>. One program a copy."""
    copy = tl.program_id(0)
    token = (copy // copies).to(tl.int64)
    slot = tl.load(SLOT + copy).to(tl.int64)
    product = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < width
        x = tl.load(X + token * x_stride + cols, mask=mask, other=0.0)
        if WEIGHTED:
            x = x.to(tl.float32)
            product += x * tl.load(Y + slot * y_stride + cols, mask=mask, other=0.0).to(tl.float32)
            x = x * tl.load(P + copy).to(tl.float32)
        tl.store(OUT + slot * width + cols, x.to(OUT.dtype.element_ty), mask=mask)
    if WEIGHTED:
        tl.store(DP + copy, tl.sum(product, axis=0).to(DP.dtype.element_ty))


@kernel
def _gather_kernel(Y, SLOT, P, OUT, copies, width, y_stride, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """OUT[t] = sum over copies of Y[slot], times p where WEIGHTED. One program a token."""
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < width
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for j in range(copies):
            slot = tl.load(SLOT + token * copies + j).to(tl.int64)
            y = tl.load(Y + slot * y_stride + cols, mask=mask, other=0.0).to(tl.float32)
            if WEIGHTED:
                y = y * tl.load(P + token * copies + j).to(tl.float32)
            total += y
        tl.store(OUT + token * width + cols, total.to(OUT.dtype.element_ty), mask=mask)


def _tile(width: int) -> dict:
    block = min(BLOCK, next_power_of_2(width))
    return {"BLOCK": block, "num_warps": min(8, max(1, block // 256))}


def _launch_spread(x, slot, weights, y, out, dweights) -> None:
    other, p, dp = (x, x, x) if weights is None else (y, weights, dweights)  # what is not read still needs an address
    launch(_spread_kernel, (slot.numel(),), x, slot, p, other, out, dp, slot.shape[1], x.shape[1], x.stride(0), other.stride(0),
           WEIGHTED=weights is not None, **_tile(x.shape[1]))  # fmt: skip


def _launch_gather(y, slot, weights, out) -> None:
    launch(_gather_kernel, (len(slot),), y, slot, y if weights is None else weights, out, slot.shape[1], y.shape[1], y.stride(0),
           WEIGHTED=weights is not None, **_tile(y.shape[1]))  # fmt: skip


def _spread(x, slot):
    x, out = as_rows(x), x.new_empty(slot.numel(), x.shape[1])
    if runs_on_triton(x):
        _launch_spread(x, slot, None, x, out, x)
    else:
        out[slot.flatten().long()] = x.repeat_interleave(slot.shape[1], 0)
    return out


def _spread_weighted(dout, slot, y, weights):
    dout, y, weights = as_rows(dout), as_rows(y), weights.contiguous()
    dy, dweights = torch.empty_like(y, memory_format=torch.contiguous_format), torch.empty_like(weights)
    if runs_on_triton(y):
        _launch_spread(dout, slot, weights, y, dy, dweights)
        return dy, dweights
    dtype = compute_dtype(y)
    copies = dout.to(dtype).unsqueeze(1)
    dy[slot.flatten().long()] = (copies * weights.to(dtype).unsqueeze(-1)).flatten(0, 1).to(y.dtype)
    return dy, (copies * y.to(dtype)[slot.long()]).sum(-1).to(weights.dtype)


def _gather(y, slot, weights):
    y, out = as_rows(y), y.new_empty(len(slot), y.shape[1])
    if runs_on_triton(y):
        _launch_gather(y, slot, None if weights is None else weights.contiguous(), out)
        return out
    copies = y.to(compute_dtype(y))[slot.long()]
    return (copies if weights is None else copies * weights.to(copies.dtype).unsqueeze(-1)).sum(1).to(y.dtype)


_spread_op = define_op(
    "spread_tokens(Tensor x, Tensor slot) -> Tensor", _spread, lambda x, slot: x.new_empty(slot.numel(), x.shape[1])
)
_spread_weighted_op = define_op(
    "spread_tokens_weighted(Tensor dout, Tensor slot, Tensor y, Tensor weights) -> (Tensor, Tensor)",
    _spread_weighted,
    lambda dout, slot, y, weights: (y.new_empty(y.shape), weights.new_empty(weights.shape)),
)
_gather_op = define_op(
    "gather_tokens(Tensor y, Tensor slot, Tensor? weights) -> Tensor",
    _gather,
    lambda y, slot, weights: y.new_empty(slot.shape[0], y.shape[1]),
)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slot):
        ctx.save_for_backward(slot)
        return _spread_op(x, slot)

    @staticmethod
    def backward(ctx, dout):
        return _gather_op(dout, *ctx.saved_tensors, None), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, slot, weights):
        ctx.save_for_backward(slot, *((y, weights) if weights is not None else ()))
        return _gather_op(y, slot, weights)

    @staticmethod
    def backward(ctx, dout):
        slot, *weighted = ctx.saved_tensors
        if not weighted:
            return _spread_op(dout, slot), None, None
        dy, dweights = _spread_weighted_op(dout, slot, *weighted)
        return dy, None, dweights


def permute_tokens(x: torch.Tensor, experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies of ``x [n, h]`` sorted by expert, for ``experts [n, k]``: the experts of each token, of ``num_experts``.

    Returns ``(copies [n k, h], counts [num_experts], slot [n, k])``: how many copies each expert has, and where each one is.
    Raises ValueError on shapes that do not fit.
    """
    if x.dim() != 2 or experts.dim() != 2 or len(x) != len(experts):
        raise ValueError(f"permute_tokens: x {tuple(x.shape)} and experts {tuple(experts.shape)} are not [n, h] and [n, k]")
    order = torch.sort(experts.flatten(), stable=True).indices
    slot = torch.empty_like(order, dtype=torch.int32)
    slot[order] = torch.arange(len(order), dtype=torch.int32, device=x.device)
    slot = slot.view(experts.shape)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, experts.flatten().long(), torch.ones_like(order))
    return _Permute.apply(x, slot), counts, slot


def unpermute_tokens(y: torch.Tensor, slot: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """``[n, h]``: each token's copies in ``y [n k, h]`` summed, times ``weights [n, k]``: the way back of permute_tokens.

    Raises ValueError on shapes that do not fit.
    """
    if y.dim() != 2 or slot.dim() != 2 or len(y) != slot.numel() or (weights is not None and weights.shape != slot.shape):
        given = f"y {tuple(y.shape)}, slot {tuple(slot.shape)}" + (
            f", weights {tuple(weights.shape)}" if weights is not None else ""
        )
        raise ValueError(f"unpermute_tokens: {given} are not [n k, h], [n, k] and [n, k]")
    return _Unpermute.apply(y, slot, weights)


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``[m, out]``: the rows of ``x [m, in]`` in groups of ``counts [e]`` rows, each times its own ``weight [e, in, out]``.

    In bfloat16 on a GPU torch's ``grouped_mm``, which needs no counts on the host; elsewhere one product a group.
    Raises ValueError on shapes that do not fit.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1] or counts.shape != weight.shape[:1]:
        raise ValueError(
            f"grouped_matmul: x {tuple(x.shape)}, weight {tuple(weight.shape)} and counts {tuple(counts.shape)} are not "
            "[m, in], [e, in, out] and [e]"
        )
    if x.is_cuda and x.dtype == torch.bfloat16:
        return F.grouped_mm(x, weight, offs=counts.cumsum(0).to(torch.int32))
    sizes = counts.tolist()
    return torch.cat([part @ w for part, w in zip(x.split(sizes), weight, strict=True)])
