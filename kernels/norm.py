"""RMSNorm, with the residual addition before it fused in.

    s = x + residual                      (only with a residual; rounded to the dtype of x, as an unfused add would)
    r = 1 / sqrt(mean(s^2) + eps)
    y = s r w                             w = weight, or 1 + weight (zero-centred, Gemma)

    g = dy w,  c = mean(g s r)
    ds = r (g - s r c) + (gradient that reaches s along the residual stream)
    dw = sum over rows of dy s r

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv:1910.07467), equation 4. Everything is computed in
float32 and rounded once. Saved for backward: s and r (2 h + 4 bytes a token in bf16); s r is recomputed.
The weight gradient is a partial sum a program, added up afterwards: no atomics, so it is the same on every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import torch

from ._library import contiguous_like, define_op
from ._triton import as_rows, cdiv, compute_dtype, kernel, launch, next_power_of_2, num_multiprocessors, runs_on_triton

if TYPE_CHECKING:
    import triton.language as tl

MAX_FORWARD_BLOCK = 16384
"""Widest row that a forward program holds in registers; wider rows go through it in blocks."""
MAX_BACKWARD_BLOCK = 8192
"""The same for backward, which holds four rows (x, dy, w and the weight gradient) at once."""
WIDE_BLOCK = 4096


@kernel
def _forward_kernel(
    X, RES, W, Y, SUM, RSTD, num_rows, width, x_stride, res_stride, eps, OFFSET: tl.constexpr, HAS_RES: tl.constexpr, ROWS:
    tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (cols < width)[None, :]
    x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    out = rows[:, None] * width + cols[None, :]
    if HAS_RES:
        x += tl.load(RES + rows[:, None] * res_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(SUM.dtype.element_ty)
        tl.store(SUM + out, rounded, mask=mask)
        x = rounded.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / width + eps)
    tl.store(RSTD + rows, rstd, mask=rows < num_rows)
    w = tl.load(W + cols, mask=cols < width, other=0.0).to(tl.float32) + OFFSET
    y = x * rstd[:, None] * w[None, :]
    tl.store(Y + out, y.to(Y.dtype.element_ty), mask=mask)


@kernel
def _forward_wide_kernel(
    X, RES, W, Y, SUM, RSTD, width, x_stride, res_stride, eps, OFFSET: tl.constexpr, HAS_RES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * x_stride + cols, mask=cols < width, other=0.0).to(tl.float32)
        if HAS_RES:
            x += tl.load(RES + row * res_stride + cols, mask=cols < width, other=0.0).to(tl.float32)
            rounded = x.to(SUM.dtype.element_ty)
            tl.store(SUM + row * width + cols, rounded, mask=cols < width)
            x = rounded.to(tl.float32)
        squares += x * x
    rstd = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / width + eps)
    tl.store(RSTD + row, rstd)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        if HAS_RES:  # the same thread wrote these elements
            x = tl.load(SUM + row * width + cols, mask=cols < width, other=0.0).to(tl.float32)
        else:
            x = tl.load(X + row * x_stride + cols, mask=cols < width, other=0.0).to(tl.float32)
        w = tl.load(W + cols, mask=cols < width, other=0.0).to(tl.float32) + OFFSET
        tl.store(Y + row * width + cols, (x * rstd * w).to(Y.dtype.element_ty), mask=cols < width)


@kernel
def _backward_kernel(
    DY, DSUM, X, W, RSTD, DX, PARTIAL, num_rows, width, dy_stride, dsum_stride, x_stride, OFFSET: tl.constexpr, HAS_DSUM:
    tl.constexpr, WEIGHT_GRAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    step = tl.num_programs(0) * ROWS
    cols = tl.arange(0, BLOCK)
    col_mask = cols < width
    dw = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(program * ROWS, num_rows, step):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < num_rows)[:, None] & col_mask[None, :]
        rstd = tl.load(RSTD + rows, mask=rows < num_rows, other=0.0)
        xhat = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32) * rstd[:, None]
        dy = tl.load(DY + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        w = tl.load(W + cols, mask=col_mask, other=0.0).to(tl.float32) + OFFSET  # from cache; held it would cost registers
        if HAS_DSUM:  # asked for before the reduction, which hides its latency
            dsum = tl.load(DSUM + rows[:, None] * dsum_stride + cols[None, :], mask=mask, other=0.0)
        if WEIGHT_GRAD:
            dw += dy * xhat
        g = dy * w[None, :]
        c = tl.sum(g * xhat, axis=1) / width
        dx = (g - xhat * c[:, None]) * rstd[:, None]
        if HAS_DSUM:
            dx += dsum.to(tl.float32)
        tl.store(DX + rows[:, None] * width + cols[None, :], dx.to(DX.dtype.element_ty), mask=mask)
    if WEIGHT_GRAD:
        tl.store(PARTIAL + program * width + cols, tl.sum(dw, axis=0), mask=col_mask)


@kernel
def _backward_wide_kernel(
    DY, DSUM, X, W, RSTD, DX, width, dy_stride, dsum_stride, x_stride, OFFSET: tl.constexpr, HAS_DSUM: tl.constexpr, BLOCK:
    tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(RSTD + row)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * x_stride + cols, mask=cols < width, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_stride + cols, mask=cols < width, other=0.0).to(tl.float32)
        w = tl.load(W + cols, mask=cols < width, other=0.0).to(tl.float32) + OFFSET
        products += dy * w * x * rstd
    c = tl.sum(products, axis=0) / width
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * x_stride + cols, mask=cols < width, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_stride + cols, mask=cols < width, other=0.0).to(tl.float32)
        w = tl.load(W + cols, mask=cols < width, other=0.0).to(tl.float32) + OFFSET
        dx = (dy * w - x * rstd * c) * rstd
        if HAS_DSUM:
            dx += tl.load(DSUM + row * dsum_stride + cols, mask=cols < width, other=0.0).to(tl.float32)
        tl.store(DX + row * width + cols, dx.to(DX.dtype.element_ty), mask=cols < width)


@kernel
def _weight_grad_kernel(DY, X, RSTD, PARTIAL, num_rows, width, dy_stride, x_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    dw = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(part * ROWS, num_rows, tl.num_programs(1) * ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < num_rows)[:, None] & (cols < width)[None, :]
        rstd = tl.load(RSTD + rows, mask=rows < num_rows, other=0.0)
        x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dw += dy * x * rstd[:, None]
    tl.store(PARTIAL + part * width + cols, tl.sum(dw, axis=0), mask=cols < width)


def tile(width: int) -> tuple[int, int, int]:
    """(rows, block, warps) of one program: at least 2048 elements, 16 elements a thread."""
    block = next_power_of_2(width)
    rows = max(1, min(16, 2048 // block))
    return rows, block, min(16, max(1, rows * block // 512))


def _launch_forward(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float):
    y, rstd = contiguous_like(x), torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    total = y if residual is None else contiguous_like(x)  # without a residual nothing is written to it
    x2, res2 = as_rows(x), as_rows(x if residual is None else residual)
    (n, h), weight = x2.shape, weight.contiguous()
    args = (x2, res2, weight, y, total, rstd)
    if h <= MAX_FORWARD_BLOCK:
        rows, block, warps = tile(h)
        launch(_forward_kernel, (cdiv(n, rows),), *args, n, h, x2.stride(0), res2.stride(0), eps, OFFSET=offset,
               HAS_RES=residual is not None, ROWS=rows, BLOCK=block, num_warps=warps)  # fmt: skip
    else:
        launch(_forward_wide_kernel, (n,), *args, h, x2.stride(0), res2.stride(0), eps, OFFSET=offset,
               HAS_RES=residual is not None, BLOCK=min(WIDE_BLOCK, MAX_FORWARD_BLOCK), num_warps=8)  # fmt: skip
    return y, total, rstd


def _launch_backward(
    dy: torch.Tensor, dtotal: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, offset: float,
    weight_grad: bool,
):  # fmt: skip
    dx = contiguous_like(x)
    dy2, x2, ds2 = as_rows(dy), as_rows(x), as_rows(dy if dtotal is None else dtotal)
    (n, h), weight = x2.shape, weight.contiguous()
    has_dsum = dtotal is not None
    args, strides = (dy2, ds2, x2, weight, rstd, dx), (dy2.stride(0), ds2.stride(0), x2.stride(0))
    if h <= MAX_BACKWARD_BLOCK:
        rows, block, warps = tile(h)
        programs = min(cdiv(n, rows), 2 * num_multiprocessors(x.device))
        partial = torch.empty(programs, h, dtype=torch.float32, device=x.device)
        launch(_backward_kernel, (programs,), *args, partial, n, h, *strides, OFFSET=offset,
               HAS_DSUM=has_dsum, WEIGHT_GRAD=weight_grad, ROWS=rows, BLOCK=block, num_warps=warps)  # fmt: skip
    else:
        launch(_backward_wide_kernel, (n,), *args, h, *strides, OFFSET=offset,
               HAS_DSUM=has_dsum, BLOCK=min(WIDE_BLOCK, MAX_BACKWARD_BLOCK), num_warps=8)  # fmt: skip
        block = min(128, MAX_BACKWARD_BLOCK)
        parts = max(1, min(cdiv(n, 32), 4 * num_multiprocessors(x.device) // cdiv(h, block)))
        partial = torch.empty(parts, h, dtype=torch.float32, device=x.device)
        if weight_grad:
            launch(_weight_grad_kernel, (cdiv(h, block), parts), dy2, x2, rstd, partial, n, h, dy2.stride(0), x2.stride(0),
                   ROWS=32, BLOCK=block, num_warps=8)  # fmt: skip
    dw = partial.sum(0).to(weight.dtype) if weight_grad else weight.new_empty(0)
    return dx, dw


def _reference_forward(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float):
    total = x if residual is None else x + residual
    s = total.to(compute_dtype(x))
    rstd = torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + eps)
    y = s * rstd * (weight.to(s.dtype) + offset)
    return y.to(x.dtype).contiguous(), total.contiguous(), rstd.squeeze(-1)


def _reference_backward(
    dy: torch.Tensor, dtotal: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, offset: float,
    weight_grad: bool,
):  # fmt: skip
    dtype = compute_dtype(x)
    xhat, dyf = x.to(dtype) * rstd.unsqueeze(-1), dy.to(dtype)
    g = dyf * (weight.to(dtype) + offset)
    dx = (g - xhat * (g * xhat).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    if dtotal is not None:
        dx = dx + dtotal.to(dtype)
    dw = (dyf * xhat).flatten(0, -2).sum(0).to(weight.dtype) if weight_grad else weight.new_empty(0)
    return dx.to(x.dtype).contiguous(), dw


def _forward(x, weight, eps, offset):
    y, _, rstd = (_launch_forward if runs_on_triton(x) else _reference_forward)(x, None, weight, eps, offset)
    return y, rstd


def _add_forward(x, residual, weight, eps, offset):
    return (_launch_forward if runs_on_triton(x) else _reference_forward)(x, residual, weight, eps, offset)


def _backward(dy, dtotal, x, weight, rstd, offset, weight_grad):
    return (_launch_backward if runs_on_triton(x) else _reference_backward)(dy, dtotal, x, weight, rstd, offset, weight_grad)


def _fake_rstd(x):
    return x.new_empty(x.shape[:-1], dtype=compute_dtype(x))


_rms_norm = define_op(
    "rms_norm(Tensor x, Tensor weight, float eps, float offset) -> (Tensor, Tensor)",
    _forward,
    lambda x, weight, eps, offset: (contiguous_like(x), _fake_rstd(x)),
)
_add_rms_norm = define_op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float offset) -> (Tensor, Tensor, Tensor)",
    _add_forward,
    lambda x, residual, weight, eps, offset: (contiguous_like(x), contiguous_like(x), _fake_rstd(x)),
)
_rms_norm_backward = define_op(
    "rms_norm_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor weight, Tensor rstd, float offset, bool weight_grad)"
    " -> (Tensor, Tensor)",
    _backward,
    lambda dy, dtotal, x, weight, rstd, offset, weight_grad: (
        contiguous_like(x),
        weight.new_empty(weight.shape if weight_grad else 0),
    ),
)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset):
        y, rstd = _rms_norm(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        needs_dw = ctx.needs_input_grad[1]
        dx, dw = _rms_norm_backward(dy, None, x, weight, rstd, ctx.offset, needs_dw)
        return dx, dw if needs_dw else None, None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset):
        y, total, rstd = _add_rms_norm(x, residual, weight, eps, offset)
        ctx.save_for_backward(total, weight, rstd)
        ctx.offset = offset
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx, dy, dtotal):
        total, weight, rstd = ctx.saved_tensors
        needs_dw = ctx.needs_input_grad[2]
        if dy is None:  # only the residual stream was used
            return dtotal, dtotal, None, None, None
        dx, dw = _rms_norm_backward(dy, dtotal, total, weight, rstd, ctx.offset, needs_dw)
        return dx, dx, dw if needs_dw else None, None, None


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = ..., residual: None = ..., *, zero_centred: bool = ...
) -> torch.Tensor: ...
@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = ..., *, residual: torch.Tensor, zero_centred: bool = ...
) -> tuple[torch.Tensor, torch.Tensor]: ...


def rms_norm(x, weight, eps=1e-6, residual=None, *, zero_centred=False):
    """RMSNorm of ``x [..., h]`` by ``weight [h]``; the mathematics is in the module's docstring.

    With ``residual`` (shape of ``x``) returns ``(y, x + residual)``: the normalised sum and the new residual stream.
    ``zero_centred`` scales by ``1 + weight`` (Gemma). The result has the dtype of ``x``, whatever that of ``weight``.
    Raises ValueError on shapes that do not fit.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight has shape {tuple(weight.shape)}, expected ({x.shape[-1]},), the last size of x {tuple(x.shape)}"
        )
    offset = 1.0 if zero_centred else 0.0
    if residual is None:
        return _RMSNorm.apply(x, weight, eps, offset)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"rms_norm: residual is {residual.dtype} {tuple(residual.shape)}, expected as x {x.dtype} {tuple(x.shape)}"
        )
    return _AddRMSNorm.apply(x, residual, weight, eps, offset)
