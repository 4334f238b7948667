"""Shorthands of the advisor's tests."""

from typing import Any

from lightning_5d.advisor import Estimate, estimate

PAPER = {"gpu": "a100-80gb", "num_gpus": 64, "seq_len": 2048, "global_batch": 2048}
"""The layouts paper's 13B on 64 GPUs."""


def predict(layout: str, model: Any = "llama-13b", **changes: Any) -> Estimate:
    """An estimate of the paper's 13B, with changes."""
    return estimate(model, layout, **{**PAPER, **changes})
