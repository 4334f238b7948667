"""A step with all layers and micro-batches, from steps with few of each.

Layers that are alike add the same to every part of the step, and so does every micro-batch once the pipeline is full: peaks of
each part of the step, operations and messages lie on a plane over (layers, micro-batches). Four runs give it; the peak of the
whole step is the highest of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from lightning_5d.advisor.stage_run import Measured
from lightning_5d.advisor.trace import KINDS, Peak
from lightning_5d.layout import Layout
from lightning_5d.plan import ParallelPlan

LONGEST_PERIOD = 12
"""Layers that repeat after more than so many are all run."""


def layer_period(module: nn.Module, plan: ParallelPlan, layout: Layout) -> int | None:
    """After how many layers the model repeats itself, and so what is recomputed; None when it does not.

    Layers are alike when their modules, shapes and plain attributes are (but for their number).
    """
    signatures = [_signature(layer) for layer in module.get_submodule(plan.layers).children()]
    every = layout.ac if isinstance(layout.ac, int) and layout.ac > 1 else 1
    for period in range(1, min(LONGEST_PERIOD, max(1, len(signatures) // 2)) + 1):
        if all(a == b for a, b in zip(signatures, signatures[period:], strict=False)):
            both = math.lcm(period, every)
            return both if both <= LONGEST_PERIOD else None
    return None


def _signature(layer: nn.Module) -> tuple[object, ...]:
    shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in layer.named_parameters())
    attributes = tuple(
        (name, key, value)
        for name, part in layer.named_modules()
        for key, value in sorted(part.__dict__.items())
        if isinstance(value, (str, bool, float, int)) and not key.startswith("_") and key not in ("layer_idx", "layer_id", "idx")
    )
    kinds = tuple((name, type(part)) for name, part in layer.named_modules())
    return shapes, attributes, kinds


def layer_counts(layers: int, period: int | None) -> list[int]:
    """Of how many layers runs are needed: all, or two numbers that end the period where all do."""
    if period is None:
        return [layers]
    fewest = period + 2  # the first and last `period + 1` layers are told apart, and none is both alone
    first = fewest + (layers - fewest) % period
    return [layers] if layers <= first + period else [first, first + period]


def microbatch_counts(count: int, layout: Layout) -> list[int]:
    """Of how many micro-batches: all, or two numbers with a full pipeline. The first, second and last are unlike the others."""
    keeps_all = layout.pp == 1 or layout.schedule == "gpipe" or count < layout.pp
    first = 3 if keeps_all else max(3, layout.pp + 1)
    return [count] if count <= first + 1 else [first, first + 1]


def plane(measure: Callable[[int, list[int]], list[Measured]], ns: list[int], ms: list[int], layers: int, count: int) -> Measured:
    """``measure(layers, micro-batch numbers)`` at the corners ``ns`` x ``ms``, carried on to all layers and micro-batches."""
    rows = []
    for n in ns:
        runs = measure(n, ms)
        rows.append(runs[0] if len(runs) == 1 else _line(runs[0], runs[1], (count - ms[0]) / (ms[1] - ms[0])))
    return rows[0] if len(rows) == 1 else _line(rows[0], rows[1], (layers - ns[0]) / (ns[1] - ns[0]))


def _line(few: Measured, more: Measured, t: float) -> Measured:
    """What lies on the line through two runs: the first at 0, the second at 1, the answer at ``t``."""

    def at(a: float, b: float) -> float:
        return a + (b - a) * t

    peaks = {}
    for region in more.peaks.keys() & few.peaks.keys():
        a, b = few.peaks[region], more.peaks[region]
        by_kind = {k: round(at(a.by_kind.get(k, 0), b.by_kind.get(k, 0))) for k in KINDS}
        peaks[region] = Peak(round(at(a.nbytes, b.nbytes)), by_kind, b.largest, b.made_by)
    traffic = {}
    for key in few.traffic.keys() | more.traffic.keys():
        (calls, nbytes), (more_calls, more_bytes) = few.traffic.get(key, (0.0, 0.0)), more.traffic.get(key, (0.0, 0.0))
        traffic[key] = (at(calls, more_calls), at(nbytes, more_bytes))
    state = {k: round(at(few.state_bytes[k], more.state_bytes[k])) for k in more.state_bytes}
    return Measured(peaks, at(few.flops, more.flops), traffic, state)
