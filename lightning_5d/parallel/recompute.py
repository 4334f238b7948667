"""Activation checkpointing: ``ac`` (every layer), ``acN`` (every Nth), ``acsel`` (only what is cheap to compute again).

A layer's ``forward`` is wrapped on the instance: names and hooks stay, and the hooks of tensor parallelism and FSDP2 on the
layer itself stay outside of what is computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten
KEPT_OPERATIONS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.linear.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""What ``acsel`` keeps: matrix products and attention. All else in a layer is element-wise or a norm."""


def _keep_expensive(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_layers(layers: Sequence[tuple[int, nn.Module]], ac: int | str) -> int:
    """Wraps the layers that ``ac`` names, by their index in the whole model; returns how many.

    ``ac`` N recomputes the Nth layer, the 2Nth, ... of the whole model, so that every layout recomputes the same ones.
    """
    if ac == 0:
        return 0
    every = 1 if ac == "sel" else int(ac)
    context_fn = functools.partial(create_selective_checkpoint_contexts, _keep_expensive) if ac == "sel" else None
    chosen = [layer for index, layer in layers if (index + 1) % every == 0]
    for layer in chosen:
        _wrap(layer, context_fn)
    return len(chosen)


def _wrap(layer: nn.Module, context_fn: object | None) -> None:
    forward = layer.forward
    options: dict[str, Any] = (
        {"use_reentrant": False} if context_fn is None else {"use_reentrant": False, "context_fn": context_fn}
    )

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not (layer.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    layer.forward = recomputed  # type: ignore[method-assign]
