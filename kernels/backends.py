"""Whose kernels an operation runs: ours, Liger's or quack's, by name; each found by importing the exact symbol it needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from . import glu, linear_loss, norm, rope

BACKENDS = ("lightning_5d", "liger", "quack")


def operations(backend: str = "lightning_5d") -> dict[str, Callable]:
    """The operations of a backend under our names and signatures; what it does not have is missing.

    Raises ValueError when the backend is unknown or not installed.
    """
    if backend == "lightning_5d":
        return {
            "rms_norm": norm.rms_norm,
            "swiglu": glu.swiglu,
            "geglu": glu.geglu,
            "rotary": rope.rotary,
            "linear_cross_entropy": linear_loss.linear_cross_entropy,
        }
    if backend == "liger":
        return _liger()
    if backend == "quack":
        return _quack()
    raise ValueError(f"use_kernels: backend={backend!r}, allowed are {', '.join(map(repr, BACKENDS))}")


def _symbol(backend: str, module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"use_kernels: backend {backend!r} needs {module}.{name}, and importing it failed: {error}") from error


def _liger() -> dict[str, Callable]:
    norm_function = _symbol("liger", "liger_kernel.ops.rms_norm", "LigerRMSNormFunction")
    silu_function = _symbol("liger", "liger_kernel.ops.swiglu", "LigerSiLUMulFunction")
    gelu_function = _symbol("liger", "liger_kernel.ops.geglu", "LigerGELUMulFunction")
    rope_function = _symbol("liger", "liger_kernel.ops.rope", "LigerRopeFunction")
    fused_loss = _symbol("liger", "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")

    def rms_norm(x, weight, eps=1e-6, residual=None, *, zero_centred=False):
        total = x if residual is None else x + residual
        # "gemma" casts once, at the end, as ours does; in place it would overwrite the incoming gradient.
        y = norm_function.apply(total, weight, eps, 1.0 if zero_centred else 0.0, "gemma", False)
        return y if residual is None else (y, total)

    def rotary(q, k, cos, sin, *, seq_dim=1):
        return rope_function.apply(q, k, cos, sin, None, 1 if seq_dim == 2 else 2)

    def linear_cross_entropy(hidden, weight, target, ignore_index=-100, *, reduction="mean"):
        loss = fused_loss(hidden.flatten(0, -2), weight, target.flatten(), ignore_index=ignore_index, reduction="sum")
        return loss / (target != ignore_index).sum().clamp(min=1) if reduction == "mean" else loss

    return {
        "rms_norm": rms_norm,
        "swiglu": lambda gate, up: silu_function.apply(gate, up),
        "geglu": lambda gate, up: gelu_function.apply(gate, up),
        "rotary": rotary,
        "linear_cross_entropy": linear_cross_entropy,
    }


def _quack() -> dict[str, Callable]:
    norm_function = _symbol("quack", "quack.rmsnorm", "rmsnorm")

    def rms_norm(x, weight, eps=1e-6, residual=None, *, zero_centred=False):
        return norm_function(
            x, weight, residual=residual, eps=eps, prenorm=residual is not None, weight_offset=float(zero_centred)
        )

    return {"rms_norm": rms_norm}
