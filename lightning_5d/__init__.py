"""Data, tensor, sequence, pipeline, context and expert parallelism for an unmodified LightningModule.

After ``import lightning_5d`` every layout string is a strategy name: ``Trainer(strategy="tp4_pp2_zero1")``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_5d.layout import Layout, LayoutError
from lightning_5d.registry import register

if TYPE_CHECKING:
    from lightning_5d.callbacks import MFUMonitor
    from lightning_5d.plan import ParallelPlan, register_plan
    from lightning_5d.strategy import LayoutStrategy

__all__ = ["Layout", "LayoutError", "LayoutStrategy", "MFUMonitor", "ParallelPlan", "register_plan"]

_WHERE = {
    "LayoutStrategy": "lightning_5d.strategy",
    "MFUMonitor": "lightning_5d.callbacks",
    "ParallelPlan": "lightning_5d.plan",
    "register_plan": "lightning_5d.plan",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'lightning_5d' has no attribute {name!r}")


register()
