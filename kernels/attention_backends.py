"""Who can compute an attention call: each backend says why not, and computes it in its own words.

A backend is found by importing the exact symbol it needs: a package of one generation of FlashAttention makes the name of
another importable. Sources: github.com/Dao-AILab/flash-attention (`flash_attn`, `hopper/flash_attn_interface.py`,
`flash_attn/cute/interface.py`), torch.nn.attention (SDPA backends, varlen, flex_attention).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Call:
    """What choosing depends on: everything about a call but the values in its tensors."""

    device: str
    capability: tuple[int, int] | None
    """Of a CUDA device; None elsewhere, and on AMD."""
    dtype: torch.dtype
    head_dim: int
    same_length: bool
    """Whether there are as many queries as keys."""
    causal: bool
    window: int | None
    documents: bool
    return_lse: bool


class Compute(Protocol):
    """``(q, k, v, call, scale, documents, longest) -> (out [b, sq, h, d], lse [b, h, sq] or None)``; b is 1 with documents."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, documents: Tensor | None, longest: int
    ) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True)
class Backend:
    compute: Compute
    why_not: Callable[[Call], str | None]
    """Why it cannot compute a call, or None when it can."""


@functools.cache
def find_symbol(module: str, name: str) -> Any:
    """The symbol, or None where importing exactly it fails."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception:  # an ImportError, or whatever a package that was built for another machine raises
        return None


# ---- FlashAttention packages


def _flash_refusal(call: Call, module: str, capabilities: range, max_head_dim: int) -> str | None:
    if call.device != "cuda" or call.capability is None:
        return "it needs an NVIDIA GPU"
    if call.capability[0] not in capabilities:
        return f"it is not for compute capability {call.capability[0]}.{call.capability[1]}"
    if call.dtype not in HALVES:
        return f"it takes float16 and bfloat16, not {call.dtype}"
    if call.head_dim > max_head_dim:
        return f"its heads are at most {max_head_dim} wide, not {call.head_dim}"
    if find_symbol(module, "flash_attn_func") is None or find_symbol(module, "flash_attn_varlen_func") is None:
        return f"{module}.flash_attn_func cannot be imported"
    return None


def _flash_package(module: str, no_window: Any, lse_option: str) -> Compute:
    def compute(q, k, v, call, scale, documents, longest):
        # A window of w sees the w - 1 keys before a query and its own.
        window = (no_window, no_window) if call.window is None else (call.window - 1, 0)
        options = {"softmax_scale": scale, "causal": call.causal, "window_size": window, lse_option: call.return_lse}
        if documents is None:
            result = find_symbol(module, "flash_attn_func")(q, k, v, **options)
            return result[:2] if isinstance(result, tuple) else (result, None)
        result = find_symbol(module, "flash_attn_varlen_func")(
            q[0],
            k[0],
            v[0],
            cu_seqlens_q=documents,
            cu_seqlens_k=documents,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            **options,
        )
        out, lse = result[:2] if isinstance(result, tuple) else (result, None)
        return out.unsqueeze(0), None if lse is None else lse.unsqueeze(0)

    return compute


# ---- torch


def _sdpa(q, k, v, call: Call, scale: float) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=call.causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def _sdpa_refusal(call: Call) -> str | None:
    if call.return_lse:
        return "torch's scaled_dot_product_attention returns no log-sum-exp"
    if call.documents or call.window is not None:
        return "torch's scaled_dot_product_attention takes a window or documents only as a mask of all pairs"
    if call.causal and not call.same_length:
        return "torch aligns a causal mask to the first key, where the last query is to see the last key"
    return None


def _compute_sdpa(q, k, v, call, scale, documents, longest):
    if call.device != "cuda":
        return _sdpa(q, k, v, call, scale), None
    backends = torch.nn.attention.SDPBackend
    # Without MATH, which holds all pairs: torch then raises instead of taking it.
    with torch.nn.attention.sdpa_kernel([backends.EFFICIENT_ATTENTION, backends.FLASH_ATTENTION, backends.CUDNN_ATTENTION]):
        return _sdpa(q, k, v, call, scale), None


def _compute_cudnn(q, k, v, call, scale, documents, longest):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        return _sdpa(q, k, v, call, scale), None


def _cudnn_refusal(call: Call) -> str | None:
    if call.device != "cuda" or call.capability is None or call.capability < (8, 0):
        return "it needs an NVIDIA GPU of compute capability 8.0 or newer"
    if call.dtype not in HALVES:
        return f"it takes float16 and bfloat16, not {call.dtype}"
    if call.head_dim > 128 or call.head_dim % 8:
        return f"its heads are at most 128 wide and a multiple of 8, not {call.head_dim}"
    return _sdpa_refusal(call)


def _compute_flash(q, k, v, call, scale, documents, longest):
    """torch's own FlashAttention: by SDPA, or, for documents, windows and log-sum-exp, by its variable-length form."""
    if _sdpa_refusal(call) is None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return _sdpa(q, k, v, call, scale), None
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    (b, sq, h, _), sk = q.shape, k.shape[1]
    ends_q = documents if documents is not None else torch.arange(b + 1, device=q.device, dtype=torch.int32) * sq
    ends_k = documents if documents is not None else torch.arange(b + 1, device=q.device, dtype=torch.int32) * sk
    window = (-1 if call.window is None else call.window - 1, 0) if call.causal else (-1, -1)
    out, lse = varlen_attn(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), ends_q, ends_k,
        longest if documents is not None else sq, longest if documents is not None else sk,
        scale=scale, window_size=window, enable_gqa=h != k.shape[2], return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    lse = lse if lse.shape[0] == h else lse.t()
    return out.view(b, sq, h, -1), lse.reshape(h, b, sq).transpose(0, 1)


def _flash_torch_refusal(call: Call) -> str | None:
    if call.device != "cuda" or (call.capability is not None and call.capability < (8, 0)):
        return "it needs a GPU of compute capability 8.0 or newer"
    if call.dtype not in HALVES:
        return f"it takes float16 and bfloat16, not {call.dtype}"
    if call.head_dim > 256:
        return f"its heads are at most 256 wide, not {call.head_dim}"
    if _sdpa_refusal(call) is not None and find_symbol("torch.nn.attention.varlen", "varlen_attn") is None:
        return "this torch has no torch.nn.attention.varlen"
    return None


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _compute_flex(q, k, v, call, scale, documents, longest):
    from torch.nn.attention.flex_attention import create_block_mask

    (b, sq), sk = q.shape[:2], k.shape[1]
    of_position = document_of(documents, b, sq)

    def visible(batch, head, query, key):
        seen = query >= 0
        if call.causal:
            seen = seen & (key <= query + (sk - sq))
        if call.window is not None:
            seen = seen & (key > query + (sk - sq) - call.window)
        if of_position is not None:
            seen = seen & (of_position[batch, query] == of_position[batch, key])
        return seen

    block_mask = create_block_mask(visible, b if documents is not None else None, None, sq, sk, device=q.device)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out, lse = _compiled_flex()(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=gqa, return_lse=True)
    return out.transpose(1, 2), lse


def _flex_refusal(call: Call) -> str | None:
    if call.device != "cuda":
        return "compiled flex_attention is for GPUs"
    if find_symbol("triton", "jit") is None:
        return "flex_attention is compiled by Triton, which is not installed"
    return None


# ---- the plain one


def document_of(documents: Tensor | None, batch: int, seq: int) -> Tensor | None:
    """``[batch, seq]``: the number of the document each position is in."""
    if documents is None:
        return None
    position = torch.arange(batch * seq, device=documents.device, dtype=documents.dtype)
    return torch.searchsorted(documents, position, right=True).view(batch, seq)


def _compute_plain(q, k, v, call, scale, documents, longest):
    (b, sq, h, _), (sk, kv_heads) = q.shape, k.shape[1:3]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(dtype).view(b, sq, kv_heads, h // kv_heads, -1)
    scores = torch.einsum("bqhgd,bkhd->bhgqk", grouped, k.to(dtype)) * scale
    query = torch.arange(sk - sq, sk, device=q.device)[:, None]
    key = torch.arange(sk, device=q.device)
    hidden = torch.zeros(1, sq, sk, dtype=torch.bool, device=q.device)
    if call.causal:
        hidden = hidden | (key > query)
    if call.window is not None:
        hidden = hidden | (key <= query - call.window)
    of_position = document_of(documents, b, sq)
    if of_position is not None:
        hidden = hidden | (of_position[:, :, None] != of_position[:, None, :])
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.unsqueeze(-1).masked_fill(lse.isneginf().unsqueeze(-1), 0.0))  # nothing seen: zero, not NaN
    out = torch.einsum("bhgqk,bkhd->bqhgd", weights, v.to(dtype))
    return out.reshape(b, sq, h, -1).to(q.dtype), lse.view(b, h, sq)


BACKENDS: dict[str, Backend] = {
    "flash4": Backend(
        _flash_package("flash_attn.cute", None, "return_lse"),
        lambda call: _flash_refusal(call, "flash_attn.cute", range(9, 12), 128),
    ),
    "flash3": Backend(
        _flash_package("flash_attn_interface", -1, "return_attn_probs"),
        lambda call: _flash_refusal(call, "flash_attn_interface", range(9, 10), 256),
    ),
    "cudnn": Backend(_compute_cudnn, _cudnn_refusal),
    "flash2": Backend(
        _flash_package("flash_attn", -1, "return_attn_probs"),
        lambda call: _flash_refusal(call, "flash_attn", range(8, 13), 256),
    ),
    "flash": Backend(_compute_flash, _flash_torch_refusal),
    "flex": Backend(_compute_flex, _flex_refusal),
    "sdpa": Backend(_compute_sdpa, _sdpa_refusal),
    "plain": Backend(_compute_plain, lambda call: None),
}
"""By name, best first where several can: by generation on the GPU they were written for, then what torch carries itself."""


def order(call: Call) -> tuple[str, ...]:
    """The backends to try, best first. ``plain`` holds all pairs, so that on a GPU it is taken by name alone."""
    if call.device != "cuda":
        return ("sdpa", "plain")
    newest = call.capability is not None and call.capability[0] >= 10
    hopper = ("flash4", "flash3", "cudnn") if newest else ("flash3", "flash4", "cudnn")
    if call.capability is not None and call.capability[0] < 9:
        hopper = ("flash2", "flash", "cudnn")
    return (*dict.fromkeys((*hopper, "flash2", "flash", "sdpa", "flex")),)
