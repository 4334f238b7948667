"""How good the advisor is on published measurements: in-sample, and with each group left out of the fit in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from lightning_5d.advisor.cases import collect
from lightning_5d.advisor.memory import GIB, limit_gib, total_bytes, worst_gib
from lightning_5d.advisor.parameters import Framework, find_framework
from lightning_5d.advisor.step import mfu, step_time
from tests.benchmarks.advisor_fit import (
    PAPER_MEMORY,
    PAPER_TIME,
    PLAYBOOK_MEMORY,
    PLAYBOOK_TIME,
    RUNS_TIME,
    fit_memory,
    fit_out_of_memory,
    fit_step_time,
)
from tests.benchmarks.advisor_rows import Row, groups, values

Array = NDArray[np.float64]


def starting(name: str) -> Framework:
    """The framework with its fitted parameters back at their starting values."""
    framework = find_framework(name)
    return framework.with_values(**{k: float(p["start"]) for k, p in framework.fits.items()})


def mask(rows: Sequence[Row], keep: Callable[[Row], bool]) -> NDArray[np.bool_]:
    return np.array([keep(r) for r in rows], dtype=bool)


# ---------------------------------------------------------------- fits with something left out


@dataclass
class LeftOut:
    """Fits of the same parameters on all rows, and with one group left out each."""

    all: Framework
    without: dict[str, Framework] = field(default_factory=dict)

    def ranges(self, names: Sequence[str]) -> dict[str, tuple[float, float]]:
        """Smallest and largest value of each parameter over the left-out fits."""
        return {n: (min(f[n] for f in self.without.values()), max(f[n] for f in self.without.values())) for n in names}


def fit_left_out(
    fit: Callable[[Sequence[Row]], Framework], rows: Sequence[Row], key: Callable[[Row], str] = lambda r: r.group
) -> LeftOut:
    """`fit` on all rows, and on those of all other groups for each group that has others."""
    others = {g: [r for r in rows if key(r) != g] for g in groups(rows, key)}
    return LeftOut(fit(rows), {g: fit(some) for g, some in others.items() if some})


def paper_memory_fits(rows: Sequence[Row]) -> LeftOut:
    start = starting("aleph-alpha")
    return fit_left_out(lambda some: fit_out_of_memory(start, some, PAPER_MEMORY), rows)


def paper_time_rows(rows: Sequence[Row], exclude: tuple[str, ...] = ("narrow",)) -> list[Row]:
    """Runs that ran, without the data's anomaly."""
    return [r for r in rows if r.status == "ok" and r.anomaly not in exclude]


def paper_time_fits(rows: Sequence[Row]) -> LeftOut:
    start = starting("aleph-alpha")
    return fit_left_out(lambda some: fit_step_time(start, some, PAPER_TIME), paper_time_rows(rows))


def playbook_memory_fits(rows: Sequence[Row]) -> LeftOut:
    start = starting("nanotron")
    ran = [r for r in rows if r.status == "ok"]
    fits = LeftOut(fit_memory(start, ran, PLAYBOOK_MEMORY))
    for name, out in PLAYBOOK_SPLITS.items():
        others = [r for r in ran if r.model not in out]
        if others:
            fits.without[name] = fit_memory(start, others, PLAYBOOK_MEMORY)
    return fits


PLAYBOOK_SPLITS = {"3B": ("3B",), "1B and 80B": ("1B", "80B")}
"""Models left out of the playbook's fit."""


def stalled(row: Row) -> bool:
    """A fault of the playbook's data: more than 0.4 s a micro-batch above a generous bound (40% of peak, 6 ms a layer)."""
    case = row.case
    layout, m = case.layout, case.num_microbatches
    tokens = case.seq_len * case.micro_batch
    layers = -(-case.model.num_layers // layout.pp)
    host = layers * (6e-3 + (2.9e-3 * layout.tp if layout.pp > 1 and layout.tp > 1 else 0))
    bound = case.model.num_parameters * 6 * tokens / layout.tp / layout.pp * 1.25 / (0.4 * 989e12) + host
    return (row.measured_step_s - bound * (m + layout.pp - 1)) / m > 0.4


def sane(row: Row) -> bool:
    """Rows of the playbook that its time is fitted on."""
    layout = row.case.layout
    network_bound = layout.zero == 0 and layout.pp > 1 and (layout.dp or 1) > 1 and layout.world_size > 8
    return layout.tp <= 8 and (row.memory_gib or 0) <= 66 and not network_bound and not stalled(row)


def playbook_time_fits(rows: Sequence[Row]) -> LeftOut:
    start = starting("nanotron")
    usable = [r for r in rows if r.status == "ok" and sane(r)]

    def fit(some: Sequence[Row]) -> Framework:
        return fit_step_time(start, some, PLAYBOOK_TIME, loss="cauchy", scale=0.15)

    fits = LeftOut(fit(usable))
    for name, out in PLAYBOOK_SPLITS.items():
        others = [r for r in usable if r.model not in out]
        if others:
            fits.without[name] = fit(others)
    return fits


def gpu_family(row: Row) -> str:
    return row.case.gpu.name.split("-")[0]


def runs_time_fits(rows: Sequence[tuple[Row, str]]) -> LeftOut:
    start = starting("lightning_5d")
    ours = [r for r, framework in rows if framework == "lightning_5d"]
    return fit_left_out(lambda some: fit_step_time(start, some, RUNS_TIME, scale=0.1), ours, gpu_family)


# ---------------------------------------------------------------- scores
# Of no rows a score is nan.


def mean(x: NDArray[Any]) -> float:
    return float(x.mean()) if len(x) else float("nan")


def median(x: Array) -> float:
    return float(np.median(x)) if len(x) else float("nan")


def percentile(x: Array, share: float) -> float:
    return float(np.percentile(x, share)) if len(x) else float("nan")


def predicted_oom(rows: Sequence[Row], framework: Framework) -> tuple[NDArray[np.bool_], Array]:
    """Whether each row is called out of memory, and the GiB predicted."""
    if not rows:
        return np.zeros(0, dtype=bool), np.zeros(0)
    cases = collect([r.case for r in rows], framework)
    gib = worst_gib(cases, framework)[0]
    return gib > limit_gib(cases, framework), gib


def predicted_mfu(rows: Sequence[Row], framework: Framework) -> Array:
    """MFU points of each row."""
    if not rows:
        return np.zeros(0)
    cases = collect([r.case for r in rows], framework)
    return 100 * mfu(cases, step_time(cases, framework).total_s)


def left_out(
    rows: Sequence[Row], fits: LeftOut, predict: Callable[[Sequence[Row], Framework], Array], key: Any = lambda r: r.group
) -> Array:
    """Predictions of each group by the fit that has not seen it; nan where no other group was there to fit."""
    out = np.full(len(rows), np.nan)
    for group in groups(rows, key):
        if group in fits.without:
            inside = mask(rows, lambda r, g=group: key(r) == g)  # type: ignore[misc]
            out[inside] = predict([r for r in rows if key(r) == group], fits.without[group])
    return out


def score_paper_memory(rows: Sequence[Row], fits: LeftOut) -> dict[str, Any]:
    """Share of runs told right; `groups` with each left out; the headline run's GiB."""
    failed = mask(rows, lambda r: r.status != "ok")
    called, gib = predicted_oom(rows, fits.all)
    blind = left_out(rows, fits, lambda some, f: predicted_oom(some, f)[0].astype(float))
    told, right = ~np.isnan(blind), blind == failed
    per_group = {g: mean(right[told & mask(rows, lambda r, g=g: r.group == g)]) for g in groups(rows)}  # type: ignore[misc]
    headline = mask(rows, is_headline)
    return {
        "rows": len(rows),
        "in_sample": mean(called == failed),
        "false_oom": int((called & ~failed).sum()),
        "missed_oom": int((~called & failed).sum()),
        "left_out": mean(right[told]),
        "groups": per_group,
        "worst_group": min(per_group.values(), default=float("nan")),
        "headline_gib": float(gib[headline][0]) if headline.any() else float("nan"),
        "headline_fits": bool(not called[headline].any()),
    }


def is_headline(row: Row) -> bool:
    """The paper's best layout: 13B at 2k on 64 GPUs, micro-batch 1, no model parallelism, fused norm."""
    layout = row.case.layout
    return row.group == "13B 2k 64 GPUs" and (layout.tp, layout.pp, layout.mbs, layout.ac) == (1, 1, 1, 0) and row.case.fused_norm


def errors(predicted: Array, rows: Sequence[Row]) -> dict[str, float]:
    """Absolute errors of MFU in points, and rank correlations within groups, over the rows that are predicted."""
    known = ~np.isnan(predicted)
    predicted, rows = predicted[known], [r for r, k in zip(rows, known, strict=True) if k]
    error = np.abs(predicted - values(rows, "mfu_points"))
    ranks = []
    for g in groups(rows):
        inside = mask(rows, lambda r, g=g: r.group == g)  # type: ignore[misc]
        if inside.sum() > 2:
            ranks.append(float(spearmanr(predicted[inside], values(rows, "mfu_points")[inside]).statistic))
    return {
        "rows": len(rows),
        "median": median(error),
        "p90": percentile(error, 90),
        "max": percentile(error, 100),
        "spearman_mean": mean(np.array(ranks)),
        "spearman_min": min(ranks, default=float("nan")),
    }


def score_paper_time(rows: Sequence[Row], fits: LeftOut) -> dict[str, Any]:
    """Errors in points of MFU: `narrow` leaves out the anomaly of formulas, `wide` also its eleven relatives."""
    scores: dict[str, Any] = {}
    for name, exclude in (("narrow", ("narrow",)), ("wide", ("narrow", "wide"))):
        some = paper_time_rows(rows, exclude)
        blind = left_out(some, fits, predicted_mfu)
        scores[name] = {"in_sample": errors(predicted_mfu(some, fits.all), some), "left_out": errors(blind, some)}
        scores[name]["groups"] = {}
        for g in groups(some):
            inside = mask(some, lambda r, g=g: r.group == g)  # type: ignore[misc]
            scores[name]["groups"][g] = errors(blind[inside], [r for r in some if r.group == g])
    return scores


def score_paper_choice(
    rows: Sequence[Row], memory: LeftOut, time: LeftOut, exclude: tuple[str, ...] = ("narrow", "wide")
) -> dict[str, Any]:
    """The whole advisor with the group left out: points of MFU lost by its first choice and by the best of its first three."""
    out: dict[str, Any] = {}
    for g in groups(rows):
        some = [r for r in rows if r.group == g and r.anomaly not in exclude]
        if not some or g not in memory.without or g not in time.without:
            continue
        fits = ~predicted_oom(some, memory.without[g])[0]
        expected = np.where(fits, predicted_mfu(some, time.without[g]), -1)
        order = np.argsort(-expected)[:3]
        measured = np.array([r.mfu_points or 0.0 for r in some])
        best = measured.max()
        out[g] = {
            "oom": some[int(order[0])].status != "ok",
            "lost_first": float(best - measured[order[0]]),
            "lost_three": float(best - measured[order].max()),
            "first": str(some[int(order[0])].case.layout),
        }
    return out


def score_playbook_memory(rows: Sequence[Row], fits: LeftOut) -> dict[str, Any]:
    """Absolute errors in GiB of the first rank, and how failures and runs are told apart."""
    ran = [r for r in rows if r.status == "ok"]

    def error(some: Sequence[Row], framework: Framework) -> dict[str, float]:
        e = np.abs(first_rank_gib(some, framework) - values(some, "memory_gib"))
        return {"rows": len(some), "mean": mean(e), "median": median(e), "p90": percentile(e, 90)}

    scores: dict[str, Any] = {"in_sample": error(ran, fits.all)}
    for name, out in PLAYBOOK_SPLITS.items():
        some = [r for r in ran if r.model in out and name in fits.without]
        scores[f"to {name}"] = error(some, fits.without.get(name, fits.all))
    scores["ran_called_oom"] = mean(predicted_oom(ran, fits.all)[0])
    failed = [r for r in rows if r.status != "ok"]
    scores["failed_called_oom"] = mean(predicted_oom(failed, fits.all)[0])
    return scores


def first_rank_gib(rows: Sequence[Row], framework: Framework) -> Array:
    """GiB of each row's first pipeline rank."""
    if not rows:
        return np.zeros(0)
    return total_bytes(collect([r.case for r in rows], framework), framework)["first"] / GIB


def relative_errors(rows: Sequence[Row], framework: Framework) -> Array:
    """|log ratio| of tokens/s, as a relative error."""
    if not rows:
        return np.zeros(0)
    predicted = step_time(collect([r.case for r in rows], framework), framework).total_s
    return np.exp(np.abs(np.log(predicted / np.array([r.measured_step_s for r in rows])))) - 1


def score_playbook_time(rows: Sequence[Row], fits: LeftOut) -> dict[str, Any]:
    """Relative errors of tokens/s over rows above 10% MFU, and over all."""

    def error(some: Sequence[Row], framework: Framework) -> dict[str, float]:
        e = relative_errors(some, framework)
        fast = e[mask(some, lambda r: (r.mfu_points or 0) > 10)]
        return {
            "rows": len(fast),
            "median": median(fast),
            "p90": percentile(fast, 90),
            "median_all": median(e),
        }

    ran = [r for r in rows if r.status == "ok"]
    scores = {"in_sample": error(ran, fits.all)}
    for name, out in PLAYBOOK_SPLITS.items():
        some = [r for r in ran if r.model in out and name in fits.without]
        scores[f"to {name}"] = error(some, fits.without.get(name, fits.all))
    return scores


def score_runs(rows: Sequence[tuple[Row, str]], fits: LeftOut, nanotron: Framework) -> dict[str, Any]:
    """Relative errors of tokens/s of other published runs, by source."""
    ours = [r for r, f in rows if f == "lightning_5d"]
    theirs = [r for r, f in rows if f == "nanotron"]
    everything = np.concatenate([relative_errors(ours, fits.all), relative_errors(theirs, nanotron)])
    sources = [*(r.group for r in ours), *(r.group for r in theirs)]
    blind = left_out(ours, fits, relative_errors, gpu_family)
    return {
        "rows": len(everything),
        "median": median(everything),
        "p90": percentile(everything, 90),
        "left_out_median": median(blind[~np.isnan(blind)]),
        "sources": {
            s: {"rows": sources.count(s), "median": float(np.median(everything[[x == s for x in sources]]))}
            for s in dict.fromkeys(sources)
        },
    }
