"""Rotary position embedding of queries and keys in one pass.

    For a pair (a, b) of a head's elements and the angle's tables at this position:
        a' = a cos_a - b sin_a          half-split (GPT-NeoX, Llama in transformers): a = x[i], b = x[i + r/2]
        b' = b cos_b + a sin_b          interleaved (GPT-J, Llama's own code):        a = x[2i], b = x[2i + 1]
    Backward is the transpose:  da = da' cos_a + db' sin_b,  db = db' cos_b - da' sin_a
    (for equal tables in both halves, the rotation by the opposite angle).

Su et al., "RoFormer", 2021 (arXiv:2104.09864), equation 34. Only the first r of a head's d elements are rotated (partial rotary).
Saved for backward: the tables alone. Tables are float32 or the dtype of q; the arithmetic is float32, rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._library import define_op
from ._triton import compute_dtype, kernel, launch, next_power_of_2, runs_on_triton

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def _rotate_heads(
    X, OUT, x_head, out_head, num_heads, cos_a, sin_a, cos_b, sin_b, head_dim, half, INTERLEAVED: tl.constexpr, TRANSPOSED:
    tl.constexpr, TAIL: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotates ``num_heads`` heads of one token, ``HEADS`` at a time, and copies what is not rotated."""
    pair = tl.arange(0, BLOCK)
    if INTERLEAVED:
        at_a = 2 * pair
        at_b = 2 * pair + 1
    else:
        at_a = pair
        at_b = pair + half
    for start in range(0, num_heads, HEADS):
        heads = start + tl.arange(0, HEADS)
        mask = (heads < num_heads)[:, None] & (pair < half)[None, :]
        a = tl.load(X + heads[:, None] * x_head + at_a[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(X + heads[:, None] * x_head + at_b[None, :], mask=mask, other=0.0).to(tl.float32)
        if TRANSPOSED:
            new_a = a * cos_a[None, :] + b * sin_b[None, :]
            new_b = b * cos_b[None, :] - a * sin_a[None, :]
        else:
            new_a = a * cos_a[None, :] - b * sin_a[None, :]
            new_b = b * cos_b[None, :] + a * sin_b[None, :]
        tl.store(OUT + heads[:, None] * out_head + at_a[None, :], new_a.to(OUT.dtype.element_ty), mask=mask)
        tl.store(OUT + heads[:, None] * out_head + at_b[None, :], new_b.to(OUT.dtype.element_ty), mask=mask)
        if TAIL > 0:
            rest = 2 * half + tl.arange(0, TAIL)
            tail_mask = (heads < num_heads)[:, None] & (rest < head_dim)[None, :]
            tail = tl.load(X + heads[:, None] * x_head + rest[None, :], mask=tail_mask)
            tl.store(OUT + heads[:, None] * out_head + rest[None, :], tail, mask=tail_mask)


@kernel
def _rotary_kernel(
    Q, K, OUT_Q, OUT_K, COS, SIN, POSITIONS, seq, q_batch, q_seq, q_head, k_batch, k_seq, k_head, oq_batch, oq_seq, oq_head,
    ok_batch, ok_seq, ok_head, table_batch, table_seq, num_q_heads, num_k_heads, head_dim, half, HAS_POSITIONS: tl.constexpr,
    FULL_TABLES: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr, TAIL: tl.constexpr, Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    batch = (token // seq).to(tl.int64)
    position = (token % seq).to(tl.int64)
    row = position
    if HAS_POSITIONS:
        row = tl.load(POSITIONS + token).to(tl.int64)
    table = batch * table_batch + row * table_seq
    pair = tl.arange(0, BLOCK)
    mask = pair < half
    if FULL_TABLES:
        if INTERLEAVED:
            at_a = 2 * pair
            at_b = 2 * pair + 1
        else:
            at_a = pair
            at_b = pair + half
    else:
        at_a = pair
        at_b = pair
    cos_a = tl.load(COS + table + at_a, mask=mask, other=0.0).to(tl.float32)
    sin_a = tl.load(SIN + table + at_a, mask=mask, other=0.0).to(tl.float32)
    cos_b = tl.load(COS + table + at_b, mask=mask, other=0.0).to(tl.float32)
    sin_b = tl.load(SIN + table + at_b, mask=mask, other=0.0).to(tl.float32)
    from_q, from_k = batch * q_batch + position * q_seq, batch * k_batch + position * k_seq
    to_q, to_k = batch * oq_batch + position * oq_seq, batch * ok_batch + position * ok_seq
    _rotate_heads(Q + from_q, OUT_Q + to_q, q_head, oq_head, num_q_heads, cos_a, sin_a, cos_b, sin_b, head_dim, half,
                  INTERLEAVED, TRANSPOSED, TAIL, Q_HEADS, BLOCK)  # fmt: skip
    _rotate_heads(K + from_k, OUT_K + to_k, k_head, ok_head, num_k_heads, cos_a, sin_a, cos_b, sin_b, head_dim, half,
                  INTERLEAVED, TRANSPOSED, TAIL, K_HEADS, BLOCK)  # fmt: skip


def _launch(q, k, out_q, out_k, cos, sin, positions, interleaved: bool, rotary_dim: int, transposed: bool) -> None:
    """All of q, k and outputs are ``[batch, seq, heads, head_dim]`` by strides; tables ``[batch or 1, rows, r or r/2]``."""
    b, s, num_q, d = q.shape
    block = next_power_of_2(rotary_dim // 2)
    heads_at_once = max(1, 2048 // block)
    launch(_rotary_kernel, (b * s,), q, k, out_q, out_k, cos, sin, cos if positions is None else positions.contiguous(), s,
           *q.stride()[:3], *k.stride()[:3], *out_q.stride()[:3], *out_k.stride()[:3],
           cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), num_q, k.shape[2], d, rotary_dim // 2,
           HAS_POSITIONS=positions is not None, FULL_TABLES=cos.shape[-1] == rotary_dim,
           INTERLEAVED=interleaved, TRANSPOSED=transposed,
           TAIL=0 if out_q is q or rotary_dim == d else next_power_of_2(d - rotary_dim),
           Q_HEADS=min(heads_at_once, next_power_of_2(num_q)), K_HEADS=min(heads_at_once, next_power_of_2(k.shape[2])),
           BLOCK=block, num_warps=4)  # fmt: skip


def _reference(x, cos, sin, positions, interleaved: bool, rotary_dim: int, transposed: bool) -> torch.Tensor:
    dtype, half = compute_dtype(x), rotary_dim // 2
    if positions is not None:
        rows = torch.arange(cos.shape[0], device=x.device)[:, None] if cos.shape[0] > 1 else torch.zeros_like(positions)
        cos, sin = cos[rows, positions], sin[rows, positions]
    cos, sin = cos.to(dtype).unsqueeze(2), sin.to(dtype).unsqueeze(2)

    def parts(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (t[..., 0:rotary_dim:2], t[..., 1:rotary_dim:2]) if interleaved else (t[..., :half], t[..., half:rotary_dim])

    (cos_a, cos_b), (sin_a, sin_b) = (parts(cos), parts(sin)) if cos.shape[-1] == rotary_dim else ((cos, cos), (sin, sin))
    a, b = parts(x.to(dtype))
    if transposed:
        new_a, new_b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        new_a, new_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    rotated = torch.stack((new_a, new_b), -1).flatten(-2) if interleaved else torch.cat((new_a, new_b), -1)
    return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), -1)


def _output(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)  # strides of a dense x, so that the transpose around it stays a view


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rotary_impl(q, k, cos, sin, positions, interleaved, rotary_dim, transposed):
    out_q, out_k = _output(q), _output(k)
    if runs_on_triton(q):
        q, k = _unit_stride(q), _unit_stride(k)
        if out_q.stride(-1) == 1 and out_k.stride(-1) == 1:
            _launch(q, k, out_q, out_k, cos, sin, positions, interleaved, rotary_dim, transposed)
        else:  # an exotic layout: through a contiguous copy
            new_q, new_k = torch.empty_like(q), torch.empty_like(k)
            _launch(q, k, new_q, new_k, cos, sin, positions, interleaved, rotary_dim, transposed)
            out_q.copy_(new_q), out_k.copy_(new_k)
        return out_q, out_k
    out_q.copy_(_reference(q, cos, sin, positions, interleaved, rotary_dim, transposed))
    out_k.copy_(_reference(k, cos, sin, positions, interleaved, rotary_dim, transposed))
    return out_q, out_k


def _rotary_inplace_impl(q, k, cos, sin, positions, interleaved, rotary_dim, transposed):
    if runs_on_triton(q) and q.stride(-1) == 1 and k.stride(-1) == 1:
        _launch(q, k, q, k, cos, sin, positions, interleaved, rotary_dim, transposed)
    else:
        q.copy_(_reference(q, cos, sin, positions, interleaved, rotary_dim, transposed))
        k.copy_(_reference(k, cos, sin, positions, interleaved, rotary_dim, transposed))


_OPTIONS = "Tensor cos, Tensor sin, Tensor? positions, bool interleaved, int rotary_dim, bool transposed"
_rotary = define_op(
    f"rotary(Tensor q, Tensor k, {_OPTIONS}) -> (Tensor, Tensor)", _rotary_impl, lambda q, k, *_: (_output(q), _output(k))
)
_rotary_ = define_op(f"rotary_(Tensor(a!) q, Tensor(b!) k, {_OPTIONS}) -> ()", _rotary_inplace_impl, lambda *_: None)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, positions, interleaved, rotary_dim, inplace):
        ctx.save_for_backward(cos, sin, positions)
        ctx.options = (interleaved, rotary_dim)
        if inplace:
            _rotary_(q, k, cos, sin, positions, interleaved, rotary_dim, False)
            ctx.mark_dirty(q, k)
            return q, k
        return _rotary(q, k, cos, sin, positions, interleaved, rotary_dim, False)

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin, positions = ctx.saved_tensors
        return *_rotary(dq, dk, cos, sin, positions, *ctx.options, True), None, None, None, None, None, None


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    position_ids: torch.Tensor | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    seq_dim: int = 1,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates ``q [batch, seq, heads, d]`` and ``k [batch, seq, kv_heads, d]``; returns both, in the layout they came in.

    ``cos`` and ``sin`` are ``[seq, r]`` or ``[batch or 1, seq, r]`` with r = ``rotary_dim`` (both halves, as transformers has
    them) or, when ``rotary_dim`` is given, ``rotary_dim / 2``. With ``position_ids [batch, seq]`` their rows are positions
    and are looked up. ``seq_dim=2`` takes ``[batch, heads, seq, d]``. ``inplace`` overwrites q and k (they must not be
    leaves that need gradients, nor views of one tensor). Tables get no gradient.
    Raises ValueError on shapes that do not fit.
    """
    if seq_dim not in (1, 2):
        raise ValueError(f"rotary: seq_dim={seq_dim}, allowed are 1 ([batch, seq, heads, d]) and 2 ([batch, heads, seq, d])")
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("rotary: cos or sin needs a gradient, and tables get none; detach them")
    if cos.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    rotary_dim = cos.shape[-1] if rotary_dim is None else rotary_dim
    batch, seq, head_dim = q.shape[0], q.shape[seq_dim], q.shape[-1]
    rows_fit = position_ids is not None or cos.shape[1] == seq
    if (
        cos.shape != sin.shape
        or cos.shape[-1] not in (rotary_dim, rotary_dim // 2)
        or cos.shape[0] not in (1, batch)
        or not rows_fit
    ):
        raise ValueError(
            f"rotary: tables have shapes {tuple(cos.shape)} and {tuple(sin.shape)}; expected [1 or {batch}, "
            f"{'positions' if position_ids is not None else seq}, {rotary_dim} or {rotary_dim // 2}] for q {tuple(q.shape)}"
        )
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"rotary: rotary_dim={rotary_dim} must be even and at most the head dimension {head_dim}")
    if k.shape[0] != batch or k.shape[seq_dim] != seq or k.shape[-1] != head_dim or k.dtype != q.dtype:
        raise ValueError(
            f"rotary: q is {q.dtype} {tuple(q.shape)} and k is {k.dtype} {tuple(k.shape)}: only their heads may differ"
        )
    if position_ids is not None:
        position_ids = position_ids.expand(batch, seq)
    cos, sin = _unit_stride(cos), _unit_stride(sin)
    if sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    if seq_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k = _Rotary.apply(q, k, cos, sin, position_ids, interleaved, rotary_dim, inplace)
    return (q.transpose(1, 2), k.transpose(1, 2)) if seq_dim == 2 else (q, k)
