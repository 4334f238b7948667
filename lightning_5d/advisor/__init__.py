"""Which layout is best for a model on some GPUs, predicted without one: memory, traffic, bubbles, step time and MFU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_5d.advisor.advice import Advice, advise
    from lightning_5d.advisor.explanation import Explanation, explain
    from lightning_5d.advisor.model import ModelSpec
    from lightning_5d.advisor.predict import Estimate, estimate

__all__ = ["Advice", "Estimate", "Explanation", "ModelSpec", "advise", "estimate", "explain"]

_WHERE = {
    "Advice": "advice",
    "advise": "advice",
    "Estimate": "predict",
    "estimate": "predict",
    "Explanation": "explanation",
    "explain": "explanation",
    "ModelSpec": "model",
}


def __getattr__(name: str) -> Any:
    # Nothing is imported before it is used: the figures of MFU live in this package too.
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(f"lightning_5d.advisor.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'lightning_5d.advisor' has no attribute {name!r}")
