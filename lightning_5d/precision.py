"""Precision of a layout: what Lightning's ``precision=`` means here, and clipping that knows the whole model.

``bf16-mixed`` is FSDP2's policy: bf16 compute and communication of parameters, float32 master weights and reduction; no
autocast. ``bf16-true`` keeps everything in bf16, optimizer state included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from torch.optim import Optimizer

from lightning_5d.gradients import Gradients, clip_by_value

SUPPORTED = ("32-true", "bf16-true", "bf16-mixed")


class _GlobalClipping:
    """Clips by the norm over all ranks' gradients; a mixin for Lightning's precision plugins."""

    gradients: Callable[[], Gradients]
    on_norm: Callable[[torch.Tensor], None]

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.on_norm(self.gradients().clip_by_norm(parameters, float(clip_val)))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_value((p for group in optimizer.param_groups for p in group["params"]), float(clip_val))


class FullPrecision(_GlobalClipping, Precision):
    """``32-true``."""

    precision = "32-true"


class MixedBf16Precision(_GlobalClipping, Precision):
    """``bf16-mixed``; the casting is data parallelism's."""

    precision = "bf16-mixed"


class TrueBf16Precision(_GlobalClipping, HalfPrecision):
    """``bf16-true``."""

    def __init__(self) -> None:
        super().__init__("bf16-true")


_CLASSES: dict[str, type] = {"32-true": FullPrecision, "bf16-true": TrueBf16Precision, "bf16-mixed": MixedBf16Precision}


def layout_precision(plugin: Precision, gradients: Callable[[], Gradients], on_norm: Callable[[torch.Tensor], None]) -> Any:
    """Our plugin for the precision that Lightning chose. ``ValueError`` for one that a layout does not run in."""
    if isinstance(plugin, _GlobalClipping):
        ours: Any = plugin
    else:
        name = getattr(plugin, "precision", None)
        if name not in _CLASSES:
            raise ValueError(f"precision={name!r} does not run under a layout; allowed are {', '.join(map(repr, SUPPORTED))}")
        ours = _CLASSES[name]()
    ours.gradients, ours.on_norm = gradients, on_norm
    return ours
