"""One line a log step, for a person to read: ``step 120 | loss 3.21 | 1.2K tok/s/device | MFU 41.3% | mem 2.1 GiB``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def console_line(step: int, loss: float | None, metrics: Mapping[str, float], measured_peak: bool = False) -> str:
    """The line for ``metrics`` (keys of MFUMonitor); what is not known is left out, and a measured peak is called so."""
    parts = [f"step {step}"]
    if loss is not None:
        parts.append(f"loss {loss:#.4g}")
    if (rate := metrics.get("perf/tokens_per_s_per_gpu")) is not None:
        parts.append(f"{short_number(rate)} tok/s/device")
    else:
        parts.append(f"{metrics['perf/step_time_s']:.3g} s/step")
    if (mfu := metrics.get("perf/mfu")) is not None:
        parts.append(f"MFU {mfu:.1%}" + (" of measured peak" if measured_peak else ""))
    if (memory := metrics.get("perf/peak_memory_gib")) is not None:
        parts.append(f"mem {memory:.1f} GiB")
    return " | ".join(parts)


def short_number(value: float) -> str:
    """``value`` with K, M, G or T and about three figures: 1234 -> "1.23K"."""
    for unit in ("", "K", "M", "G"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"


def loss_of(outputs: Any) -> float | None:
    """The loss in what `training_step` returned; None when there is none."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.item() if isinstance(loss, Tensor) and loss.numel() == 1 else None
