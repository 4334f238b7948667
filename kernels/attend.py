"""Attention: one function, the fastest backend that can compute the call, reported once and never a silent slow one.

    scores = scale q k^T, hidden where a query may not look,  lse = log sum exp scores,  out = exp(scores - lse) v

Vaswani et al. 2017 (arXiv:1706.03762); computed without all pairs in memory by Dao 2023 (arXiv:2307.08691), whose saved
tensors are q, k, v, out and lse: 2 (2 h d + 2 h_kv d) + 4 h bytes a token in bf16.
"""

from __future__ import annotations

import functools
import logging
import math

import torch

from .attention_backends import BACKENDS, Call, order

_LOG = logging.getLogger("lightning_5d.kernels")


def choose(call: Call, backend: str | None = None) -> str:
    """The backend for ``call``: the one named, or the first in order that can.

    Raises ValueError when the one named cannot, or none can, with each one's reason.
    """
    if backend is not None:
        if backend not in BACKENDS:
            raise ValueError(f"attention: backend={backend!r}, allowed are None and {', '.join(map(repr, BACKENDS))}")
        reason = BACKENDS[backend].why_not(call)
        if reason is not None:
            raise ValueError(f"attention: backend {backend!r} cannot compute this call: {reason}")
        return backend
    reasons = {}
    for name in order(call):
        reason = BACKENDS[name].why_not(call)
        if reason is None:
            return name
        reasons[name] = reason
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ValueError(f"attention: no fast backend can compute this call ({listed}); backend='plain' holds all pairs in memory")


@functools.cache
def _report_once(name: str, call: Call) -> None:
    asked = [f"{call.dtype}".removeprefix("torch."), f"head_dim {call.head_dim}", "causal" if call.causal else "full"]
    asked += [f"window {call.window}"] if call.window is not None else []
    asked += ["documents"] if call.documents else []
    asked += ["log-sum-exp"] if call.return_lse else []
    _LOG.info("attention by %s (%s, on %s)", name, ", ".join(asked), call.device)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and not torch.version.hip else None


def _describe(q, k, causal: bool, window: int | None, documents: bool, return_lse: bool) -> Call:
    same_length = q.shape[1] == k.shape[1]
    return Call(q.device.type, _capability(q.device), q.dtype, q.shape[3], same_length, causal, window, documents, return_lse)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    documents: torch.Tensor | None = None,
    longest_document: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``q [batch, seq, heads, d]`` to ``k, v [batch, seq_k, kv_heads, d]``; kv_heads divides heads (GQA).

    ``causal``: a query sees the keys up to its own, the last query the last key. ``window``: of those only the last
    ``window``, its own among them. ``documents [n + 1]``: int32 cumulative lengths over batch and seq flattened, from 0 to
    batch times seq; a document may run over a row's end. ``longest_document`` saves reading it back from the device.
    ``scale`` is 1 / sqrt(d) by default. With ``return_lse`` returns ``(out, lse [batch, heads, seq])``, the float32
    log-sum-exp of each query's scores, without a gradient: what merging the parts of a ring needs.
    ``backend`` forces one of ``BACKENDS`` by name; None takes the best that is installed and can. Which one was
    taken is logged once for each kind of call.
    Raises ValueError on shapes that do not fit, and when no (or not the named) backend can compute the call.
    """
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"attention: {shapes} are not [batch, seq, heads, d] and twice [batch, seq_k, kv_heads, d]")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"attention: {k.shape[2]} heads of keys do not divide {q.shape[2]} heads of queries")
    if window is not None and (not causal or window < 1):
        raise ValueError(f"attention: window={window} with causal={causal}; a window is at least 1 and causal")
    if documents is not None and (q.shape[1] != k.shape[1] or documents.dtype != torch.int32 or documents.dim() != 1):
        raise ValueError(
            f"attention: documents are int32 cumulative lengths [n + 1] over queries that are the keys, got {documents.dtype} "
            f"{tuple(documents.shape)} for {q.shape[1]} queries and {k.shape[1]} keys"
        )
    call = _describe(q, k, causal, window, documents is not None, return_lse)
    name = choose(call, backend)
    _report_once(name, call)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    batch, seq, heads, _ = q.shape
    longest = 0
    if documents is not None:
        longest = longest_document if longest_document is not None else int(documents.diff().max())
        q, k, v = (t.reshape(1, batch * seq, *t.shape[2:]) for t in (q, k, v))
    out, lse = BACKENDS[name].compute(q, k, v, call, scale, documents, longest)
    out = out.reshape(batch, seq, heads, -1)
    if not return_lse:
        return out
    assert lse is not None, f"{name} returned no log-sum-exp"
    return out, lse.detach().view(heads, batch, seq).transpose(0, 1) if documents is not None else lse.detach()
