"""Idle time of a pipeline by its schedule's closed form."""

from __future__ import annotations

from lightning_5d.layout import Layout


def bubble_share(layout: Layout, num_microbatches: float) -> float:
    """Idle time as a share of the ideal time, from the first forward to the last backward of a step: (T - T_ideal) / T_ideal.

    Every stage takes the same time, sending takes none, and forward, gradient of inputs and gradient of weights take
    as long as each other (F = B/2 = W with B the whole backward). With p pipeline ranks, v stages on each, m micro-batches
    (of several batches their mean, since each idles as long):

    - gpipe, 1f1b: ``(p-1)/m``; interleaved: ``(p-1)/(v m)``
    - zb: ``(p-1)(F+B-2W) / (v m (F+B))`` (ZB-H1; Qi et al. 2023)
    - zbv: the wait of the last stage's first forward, ``(p-1) F / (v m (F+B))``; no rank idles after it
    - dualpipev: ``(S/2-1)(F&B+B-3W) / (v m (F+B))`` over its S = v p stages, no gain from running F and B together
      (DeepSeek-V3 2024)

    Raises ValueError for a schedule without a form, and for fewer than one micro-batch.
    """
    if num_microbatches < 1:
        raise ValueError(f"a step has at least one micro-batch, not {num_microbatches}")
    p, v = layout.pp, layout.v or 1
    if p == 1:
        return 0.0
    forward, backward, weight = 1.0, 2.0, 1.0
    ideal = v * num_microbatches * (forward + backward)
    if layout.schedule in ("gpipe", "1f1b", "interleaved"):
        idle = (p - 1) * (forward + backward)
    elif layout.schedule == "zb":
        idle = (p - 1) * (forward + backward - 2 * weight)
    elif layout.schedule == "zbv":
        idle = (p - 1) * forward
    elif layout.schedule == "dualpipev":
        idle = (v * p / 2 - 1) * ((forward + backward) + backward - 3 * weight)
    else:
        raise ValueError(f"no closed form of the bubble is known for schedule {layout.schedule!r}")
    return idle / ideal
