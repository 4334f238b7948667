"""What the layouts paper's runs show, measured and predicted: pairs of runs that differ in one thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from lightning_5d.advisor.cases import collect
from lightning_5d.advisor.parameters import Framework
from lightning_5d.advisor.step import mfu, step_time
from tests.benchmarks.advisor_rows import Row


@dataclass(frozen=True)
class Finding:
    """An effect over pairs of runs: its median as measured and as predicted."""

    name: str
    unit: str
    pairs: int
    measured: float
    predicted: float
    none: float = 0.0
    """Value of no effect: 0 for differences, 1 for ratios."""
    measured_range: tuple[float, float] = (0.0, 0.0)
    """5th and 95th percentile of the measured median when the pairs are drawn anew (bootstrap)."""
    correlation: float = 0.0
    """Rank correlation of predicted and measured effects over the pairs."""

    @property
    def same_sign(self) -> bool:
        return (self.measured - self.none) * (self.predicted - self.none) > 0

    @property
    def share(self) -> float:
        """Predicted effect as a share of the measured one."""
        measured = self.measured - self.none
        return (self.predicted - self.none) / measured if measured else float("nan")


def _pairs(rows: Sequence[Row], change: Callable[[Row], Any], same: Callable[[Row], Any]) -> Iterator[tuple[Row, Row]]:
    """Pairs with equal `same` whose `change` differs, ordered by it."""
    by_key: dict[Any, list[Row]] = {}
    for r in rows:
        by_key.setdefault(same(r), []).append(r)
    for some in by_key.values():
        for a in some:
            for b in some:
                if change(a) < change(b):
                    yield a, b


def _identity(r: Row) -> dict[str, Any]:
    """What a run is, by name; a pair leaves one out. dp follows from the rest."""
    x = r.case.layout
    return {
        "group": r.group, "tp": x.tp, "sp": x.sp and x.tp > 1, "pp": x.pp, "mbs": x.mbs, "ac": x.ac,
        "attention": r.case.attention, "norm": r.case.fused_norm,
    }  # fmt: skip


def _without(*names: str) -> Callable[[Row], Any]:
    return lambda r: tuple(v for k, v in _identity(r).items() if k not in names)


def finding_cells(finding: dict[str, Any]) -> tuple[str, ...]:
    """Figures of a finding's fields, as tables show them."""
    low, high = finding["measured_range"]
    return (
        str(finding["pairs"]),
        f"{finding['measured']:+.2f}",
        f"{low:+.2f} – {high:+.2f}",
        f"{finding['predicted']:+.2f}",
        "" if np.isnan(finding["correlation"]) else f"{finding['correlation']:+.2f}",
    )


def all_findings(rows: Sequence[Row], framework: Framework) -> list[Finding]:
    """Findings without the data's anomaly, and once more with it where it turns the sign."""
    found = findings([r for r in rows if not r.anomaly], framework)
    turned = next((f for f in findings(rows, framework) if f.name == "pp 1 to 2"), None)
    return found if turned is None else [*found, replace(turned, name="pp 1 to 2, anomaly included")]


def findings(rows: Sequence[Row], framework: Framework) -> list[Finding]:
    """Every finding over those of `rows` that ran."""
    ran = [r for r in rows if r.status == "ok"]
    if not ran:
        return []
    cases = collect([r.case for r in ran], framework)
    seconds = step_time(cases, framework).total_s
    points = 100 * mfu(cases, seconds)
    predicted = {
        id(r): replace(r, step_time_s=float(s), mfu_points=float(p)) for r, s, p in zip(ran, seconds, points, strict=True)
    }

    found: list[Finding] = []

    def difference(name: str, pairs: Sequence[tuple[Row, Row]]) -> None:
        if pairs:
            found.append(_finding(name, "points of MFU", pairs, predicted, lambda a, b: _points(b) - _points(a), 0.0))

    def ratio(name: str, pairs: Sequence[tuple[Row, Row]]) -> None:
        if pairs:
            found.append(_finding(name, "× step time", pairs, predicted, lambda a, b: b.measured_step_s / a.measured_step_s, 1.0))

    swapped = [
        (a, b)
        for a, b in _pairs(ran, lambda r: r.case.layout.pp, _without("tp", "pp", "sp"))
        if a.case.layout.tp == b.case.layout.pp
        and a.case.layout.pp == b.case.layout.tp
        and not a.case.layout.sp
        and not b.case.layout.sp
    ]
    difference("tp and pp swapped, more pp", swapped)
    batches = list(_pairs([r for r in ran if not r.case.layout.ac], lambda r: r.case.layout.mbs, _without("mbs")))
    difference("micro-batch 1 to 2, same layout", [p for p in batches if (p[0].case.layout.mbs, p[1].case.layout.mbs) == (1, 2)])
    ratio("every layer recomputed", list(_pairs(ran, lambda r: bool(r.case.layout.ac), _without("ac"))))
    norms = list(_pairs(ran, lambda r: not r.case.fused_norm, _without("norm")))
    ratio("norm not fused", norms)
    for tp in (1, 2, 4, 8):
        some = [p for p in norms if p[0].case.layout.tp == tp]
        ratio(f"norm not fused, tp {tp}", some)
    parallel = list(_pairs(ran, lambda r: bool(r.case.layout.sp), _without("sp")))
    for tp in (2, 4):
        some = [p for p in parallel if p[0].case.layout.tp == tp]
        difference(f"sequence parallel, tp {tp}", some)
    for axis in ("tp", "pp"):
        pairs = list(
            _pairs([r for r in ran if not r.case.layout.sp], lambda r, axis=axis: getattr(r.case.layout, axis), _without(axis))
        )
        for size in (1, 2, 4):
            some = [p for p in pairs if (getattr(p[0].case.layout, axis), getattr(p[1].case.layout, axis)) == (size, 2 * size)]
            difference(f"{axis} {size} to {2 * size}", some)
    more = [
        (a, b)
        for a, b in _pairs([r for r in ran if r.model == "30B"], lambda r: r.case.layout.world_size, _without("group"))
        if (a.case.layout.world_size, b.case.layout.world_size) == (64, 256)
    ]
    difference("30B, 64 to 256 GPUs", more)
    return found


def _finding(
    name: str,
    unit: str,
    pairs: Sequence[tuple[Row, Row]],
    predicted: dict[int, Row],
    effect: Callable[[Row, Row], float],
    none: float,
) -> Finding:
    measured = np.array([effect(a, b) for a, b in pairs])
    expected = np.array([effect(predicted[id(a)], predicted[id(b)]) for a, b in pairs])
    drawn = np.random.default_rng(0).integers(0, len(pairs), (2000, len(pairs)))
    low, high = np.percentile(np.median(measured[drawn], axis=1), (5, 95))
    correlation = float(spearmanr(measured, expected).statistic) if len(pairs) > 2 else float("nan")
    return Finding(
        name,
        unit,
        len(pairs),
        float(np.median(measured)),
        float(np.median(expected)),
        none,
        (float(low), float(high)),
        correlation,
    )


def _points(r: Row) -> float:
    assert r.mfu_points is not None
    return r.mfu_points
