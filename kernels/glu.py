"""Gated linear units: the activation of one projection times another, in one pass.

    SwiGLU   y = silu(g) u,   silu(g) = g sigmoid(g)
    GeGLU    y = gelu(g) u,   gelu(g) = g Phi(g), or its tanh form g sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3))

    du = dy act(g),   dg = dy u act'(g)

Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv:2002.05202); Hendrycks and Gimpel 2016 (arXiv:1606.08415) for the
two forms of gelu. Saved for backward: g and u (4 f bytes a token in bf16); act(g) is recomputed, where unfused code keeps it
(2 f more). Inputs may be halves of one packed projection: rows are strided, nothing is copied.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ._library import contiguous_like, define_op
from ._triton import as_rows, cdiv, compute_dtype, kernel, launch, next_power_of_2, runs_on_triton

if TYPE_CHECKING:
    import triton.language as tl

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
BLOCK = 2048


@kernel
def _activation(g, KIND: tl.constexpr):
    """(act(g), act'(g)) in float32; KIND is the position in ACTIVATIONS."""
    if KIND == 0:
        s = tl.sigmoid(g)
        value = g * s
        slope = s * (1.0 + g * (1.0 - s))
    elif KIND == 1:
        cdf = 0.5 * (1.0 + tl.math.erf(g * 0.7071067811865476))
        value = g * cdf
        slope = cdf + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    else:
        s = tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
        value = g * s
        slope = s + g * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * g * g)
    return value, slope


@kernel
def _forward_kernel(G, U, Y, width, g_stride, u_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    g = tl.load(G + row * g_stride + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(U + row * u_stride + cols, mask=mask, other=0.0).to(tl.float32)
    value, _ = _activation(g, KIND)
    tl.store(Y + row * width + cols, (value * u).to(Y.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(DY, G, U, DG, DU, width, dy_stride, g_stride, u_stride, dg_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    dy = tl.load(DY + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(G + row * g_stride + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(U + row * u_stride + cols, mask=mask, other=0.0).to(tl.float32)
    value, slope = _activation(g, KIND)
    tl.store(DG + row * dg_stride + cols, (dy * u * slope).to(DG.dtype.element_ty), mask=mask)
    tl.store(DU + row * dg_stride + cols, (dy * value).to(DU.dtype.element_ty), mask=mask)


def _block(width: int) -> dict:
    block = min(BLOCK, next_power_of_2(width))
    return {"BLOCK": block, "num_warps": min(8, max(1, block // 256))}


def _launch_forward(gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
    y, g, u = contiguous_like(gate), as_rows(gate), as_rows(up)
    n, f = g.shape
    config = _block(f)
    launch(_forward_kernel, (n * cdiv(f, config["BLOCK"]),), g, u, y, f, g.stride(0), u.stride(0), KIND=kind, **config)
    return y


def _launch_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, dgate: torch.Tensor, dup: torch.Tensor, kind: int
) -> None:
    d, g, u, dg, du = as_rows(dy), as_rows(gate), as_rows(up), as_rows(dgate), as_rows(dup)
    n, f = g.shape
    config = _block(f)
    grid = (n * cdiv(f, config["BLOCK"]),)
    launch(_backward_kernel, grid, d, g, u, dg, du, f, d.stride(0), g.stride(0), u.stride(0), dg.stride(0), KIND=kind, **config)


def _reference_activation(g: torch.Tensor, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == 0:
        s = torch.sigmoid(g)
        return g * s, s * (1 + g * (1 - s))
    if kind == 1:
        cdf = 0.5 * (1 + torch.erf(g * math.sqrt(0.5)))
        return g * cdf, cdf + g * torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
    a = 2 * math.sqrt(2 / math.pi)
    s = torch.sigmoid(a * (g + 0.044715 * g**3))
    return g * s, s + g * s * (1 - s) * a * (1 + 3 * 0.044715 * g * g)


def _forward(gate, up, kind):
    if runs_on_triton(gate):
        return _launch_forward(gate, up, kind)
    dtype = compute_dtype(gate)
    g = gate.to(dtype)
    value = F.silu(g) if kind == 0 else F.gelu(g, approximate="none" if kind == 1 else "tanh")
    return (value * up.to(dtype)).to(gate.dtype).contiguous()


def _backward(dy, gate, up, kind):
    if runs_on_triton(gate):
        dgate, dup = contiguous_like(gate), contiguous_like(up)
        _launch_backward(dy, gate, up, dgate, dup, kind)
        return dgate, dup
    dtype = compute_dtype(gate)
    d, u = dy.to(dtype), up.to(dtype)
    value, slope = _reference_activation(gate.to(dtype), kind)
    return (d * u * slope).to(gate.dtype).contiguous(), (d * value).to(up.dtype).contiguous()


def _packed_backward(dy, packed, kind):
    gate, up = packed.chunk(2, dim=-1)
    if runs_on_triton(packed):
        grad = contiguous_like(packed)
        dgate, dup = grad.chunk(2, dim=-1)
        _launch_backward(dy, gate, up, dgate, dup, kind)
        return grad
    return torch.cat(_backward(dy, gate, up, kind), dim=-1)


_glu = define_op("glu(Tensor gate, Tensor up, int kind) -> Tensor", _forward, lambda gate, up, kind: contiguous_like(gate))
_glu_backward = define_op(
    "glu_backward(Tensor dy, Tensor gate, Tensor up, int kind) -> (Tensor, Tensor)",
    _backward,
    lambda dy, gate, up, kind: (contiguous_like(gate), contiguous_like(up)),
)
_glu_packed_backward = define_op(
    "glu_packed_backward(Tensor dy, Tensor packed, int kind) -> Tensor",
    _packed_backward,
    lambda dy, packed, kind: contiguous_like(packed),
)


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, kind):
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return _glu(gate, up, kind)

    @staticmethod
    def backward(ctx, dy):
        return *_glu_backward(dy, *ctx.saved_tensors, ctx.kind), None


class _PackedGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed, kind):
        ctx.save_for_backward(packed)
        ctx.kind = kind
        return _glu(*packed.chunk(2, dim=-1), kind)

    @staticmethod
    def backward(ctx, dy):
        return _glu_packed_backward(dy, *ctx.saved_tensors, ctx.kind), None


def _gated(name: str, gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    kind = ACTIVATIONS.index(activation)
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(f"{name}: a packed input is gate and up side by side, its last size even; got {tuple(gate.shape)}")
        return _PackedGLU.apply(gate, kind)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"{name}: gate and up differ: {gate.dtype} {tuple(gate.shape)} and {up.dtype} {tuple(up.shape)}")
    return _GLU.apply(gate, up, kind)


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up`` for ``[..., f]``; without ``up``, ``gate`` is packed ``[..., 2 f]``: gate, then up.

    Raises ValueError when the two differ in shape or dtype, or a packed input is odd.
    """
    return _gated("swiglu", gate, up, "silu")


def geglu(gate: torch.Tensor, up: torch.Tensor | None = None, approximate: str = "tanh") -> torch.Tensor:
    """``gelu(gate) * up``, as :func:`swiglu`; ``approximate`` is ``"tanh"`` (Gemma) or ``"none"``, as torch has it."""
    if approximate not in ("tanh", "none"):
        raise ValueError(f"geglu: approximate={approximate!r}, allowed are 'tanh' and 'none'")
    return _gated("geglu", gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")
