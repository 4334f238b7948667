"""Token embedding of a vocabulary that may be split: each rank looks its own rows up, and its gradient is its rows alone.

    out[t] = weight[ids[t] - first]   for first <= ids[t] < first + rows,  else 0
    dweight[r] = sum over t with ids[t] = first + r of dout[t]

Backward sorts the ids and gives each run of equal ones to one program, which sums in float32: no atomics, the same result on
every run, and never the gradient of the whole vocabulary, which a sharded tensor's own backward allocates on every rank
(2 GiB at Llama-70B). Saved for backward: the ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._library import define_op
from ._triton import as_rows, cdiv, compute_dtype, kernel, launch, next_power_of_2, runs_on_triton

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def _embedding_backward_kernel(DY, SORTED, ORDER, ENDS, DW, num_rows, width, dy_stride, BLOCK: tl.constexpr):
    start = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    row = tl.load(SORTED + start)
    before = tl.load(SORTED + start - 1, mask=start > 0, other=-1)
    # The first of a run of equal ids sums the run; foreign ids are sorted behind all rows.
    end = tl.where((row != before) & (row < num_rows), tl.load(ENDS + start), start)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for position in range(start, end):
        token = tl.load(ORDER + position)
        total += tl.load(DY + token * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(DW + row * width + cols, total.to(DW.dtype.element_ty), mask=mask & (end > start))


def _launch_backward(dy: torch.Tensor, local: torch.Tensor, rows: int) -> torch.Tensor:
    (n, h), block = dy.shape, min(1024, next_power_of_2(dy.shape[1]))
    in_order, order = torch.sort(local, stable=True)
    ends = torch.searchsorted(in_order, in_order, right=True, out_int32=True)
    dw = torch.zeros(rows, h, dtype=dy.dtype, device=dy.device)
    grid = (n, cdiv(h, block))
    launch(_embedding_backward_kernel, grid, dy, in_order, order, ends, dw, rows, h, dy.stride(0), BLOCK=block, num_warps=4)
    return dw


def _backward(dout, ids, rows, first):
    dy, local = as_rows(dout), ids.reshape(-1) - first
    local = torch.where((local >= 0) & (local < rows), local, rows)
    if runs_on_triton(dy):
        return _launch_backward(dy, local, rows)
    total = torch.zeros(rows + 1, dy.shape[1], dtype=compute_dtype(dy), device=dy.device)
    return total.index_add_(0, local, dy.to(total.dtype))[:rows].to(dy.dtype).contiguous()


def _forward(weight, ids, first):
    local = ids - first
    foreign = (local < 0) | (local >= len(weight))
    if len(weight) == 0:
        return weight.new_zeros(*ids.shape, weight.shape[1])
    return torch.nn.functional.embedding(local.masked_fill(foreign, 0), weight).masked_fill_(foreign.unsqueeze(-1), 0)


_embedding = define_op(
    "embedding(Tensor weight, Tensor ids, int first) -> Tensor",
    _forward,
    lambda weight, ids, first: weight.new_empty(*ids.shape, weight.shape[1]),
)
_embedding_backward = define_op(
    "embedding_backward(Tensor dout, Tensor ids, int rows, int first) -> Tensor",
    _backward,
    lambda dout, ids, rows, first: dout.new_empty(rows, dout.shape[-1]),
)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids, first):
        ctx.save_for_backward(ids)
        ctx.options = (len(weight), first, weight.dtype)
        return _embedding(weight, ids, first)

    @staticmethod
    def backward(ctx, dout):
        rows, first, dtype = ctx.options
        return _embedding_backward(dout, *ctx.saved_tensors, rows, first).to(dtype), None, None


def embedding(ids: torch.Tensor, weight: torch.Tensor, *, vocab_start: int = 0) -> torch.Tensor:
    """Rows ``[..., h]`` of ``weight [rows, h]`` for ``ids [...]``, where ``weight`` begins at entry ``vocab_start`` of the
    vocabulary; zeros for ids that are not here. Over a split vocabulary the sum of all ranks' results is the embedding.

    With the whole vocabulary here an id outside it is a mistake that this cannot tell from a foreign one: check ids before.
    Raises ValueError when ``ids`` are no integers.
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"embedding: ids are {ids.dtype}, expected integers")
    return _Embedding.apply(weight, ids, vocab_start)
