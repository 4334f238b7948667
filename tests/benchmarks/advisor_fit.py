"""Fits the advisor's parameters to published measurements: few, bounded, from several starts, always the same result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, minimize

from lightning_5d.advisor.cases import Cases, collect
from lightning_5d.advisor.memory import GIB, limit_gib, total_bytes, worst_gib
from lightning_5d.advisor.parameters import PARAMETERS, Framework
from lightning_5d.advisor.step import step_time
from tests.benchmarks.advisor_rows import Row, values

PAPER_MEMORY = ("unfused_norm_bytes", "logit_bytes", "extra_in_flight")
PAPER_TIME = (
    "matmul_efficiency", "operand_traffic", "unfused_norm_traffic", "torch_score_traffic", "fused_score_traffic",
    "tp_bandwidth_share", "tp_latency_s", "dp_bandwidth_gb_s",
)  # fmt: skip
PLAYBOOK_MEMORY = ("gradient_bytes", "unfused_norm_bytes", "logit_bytes")
PLAYBOOK_TIME = (
    "matmul_efficiency", "host_layer_s", "host_layer_tp_s", "host_tp_pp_s",
    "tp_hidden_share", "dp_table_scale",
)  # fmt: skip


RUNS_TIME = ("matmul_efficiency", "operand_traffic", "flash2_efficiency")


class Bounds:
    """Physical bounds of some parameters, as arrays."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.low = np.array([PARAMETERS[n].low for n in names])
        self.high = np.array([PARAMETERS[n].high for n in names])
        self.width = self.high - self.low

    def start(self, framework: Framework) -> NDArray[np.float64]:
        return np.array([framework[n] for n in self.names])

    def apply(self, framework: Framework, x: NDArray[np.float64]) -> Framework:
        clipped = np.clip(x, self.low, self.high)
        return framework.with_values(**{n: float(v) for n, v in zip(self.names, clipped, strict=True)})


def fit_out_of_memory(
    framework: Framework, rows: Sequence[Row], names: Sequence[str] = PAPER_MEMORY, prior: Framework | None = None
) -> Framework:
    """Parameters that tell runs that ran from those out of memory: logistic loss, capped, a weak pull to the start."""
    if not rows:
        return framework
    bounds = Bounds(names)
    cases = collect([r.case for r in rows], framework)
    failed = np.array([r.status != "ok" for r in rows])
    limit = limit_gib(cases, framework)
    start = bounds.start(prior or framework)

    def loss(x: NDArray[np.float64]) -> float:
        margin = (worst_gib(cases, bounds.apply(framework, x))[0] - limit) / 1.5
        each = np.minimum(np.where(failed, np.logaddexp(0, -margin), np.logaddexp(0, margin)), 6)
        outside = np.maximum(0, np.maximum(bounds.low - x, x - bounds.high) / bounds.width * 2) ** 2
        pull = ((x - start) / bounds.width * 2) ** 2
        return float(each.mean() + 10 * outside.sum() + 0.002 * pull.sum())

    best: Any = None
    rng = np.random.default_rng(0)
    for i in range(3):
        x = start if i == 0 else np.clip(start + rng.normal(size=len(start)) * bounds.width * 0.2, bounds.low, bounds.high)
        for _ in range(2):
            found = minimize(
                loss, x, method="Nelder-Mead", options={"maxiter": 600, "xatol": 1e-3, "fatol": 1e-6, "adaptive": True}
            )
            x = found.x
        if best is None or found.fun < best.fun - 1e-9:
            best = found
    return bounds.apply(framework, best.x)


def fit_memory(
    framework: Framework, rows: Sequence[Row], names: Sequence[str] = PLAYBOOK_MEMORY, prior: Framework | None = None
) -> Framework:
    """Parameters that reproduce measured memory of the first pipeline rank; errors beyond 2 GiB weigh less than their square."""
    if not rows:
        return framework
    bounds = Bounds(names)
    cases = collect([r.case for r in rows], framework)
    measured = values(rows, "memory_gib")

    def residual(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return (total_bytes(cases, bounds.apply(framework, x))["first"] / GIB - measured) / 2.0

    start = np.clip(bounds.start(prior or framework), bounds.low + 1e-6, bounds.high - 1e-6)
    found = least_squares(residual, start, bounds=(bounds.low - 1e-9, bounds.high + 1e-9), loss="soft_l1", x_scale=bounds.width)
    return bounds.apply(framework, found.x)


def fit_step_time(
    framework: Framework,
    rows: Sequence[Row],
    names: Sequence[str],
    prior: Framework | None = None,
    loss: str = "soft_l1",
    scale: float = 0.05,
    predict: Callable[[Cases, Framework], NDArray[np.float64]] | None = None,
) -> Framework:
    """Parameters that reproduce the logarithm of the step time, by a robust loss and a weak pull to the start."""
    if not rows:
        return framework
    bounds = Bounds(names)
    cases = collect([r.case for r in rows], framework)
    measured = np.log(np.array([r.measured_step_s for r in rows]))
    prior_values = bounds.start(prior or framework)
    unit = np.where(prior_values > 0, prior_values, 0.3 * bounds.high)
    pull = 0.03 * np.sqrt(len(rows) / len(names))
    seconds = predict or (lambda c, q: step_time(c, q).total_s)

    def residual(z: NDArray[np.float64]) -> NDArray[np.float64]:
        predicted = np.log(seconds(cases, bounds.apply(framework, z * unit)))
        return np.concatenate([(predicted - measured) / scale, pull * (z - prior_values / unit)])

    low, high = bounds.low / unit, bounds.high / unit + 1e-9
    start = np.clip(prior_values / unit, low + 1e-6, high - 1e-6)
    found = least_squares(residual, start, bounds=(low, high), loss=loss, max_nfev=200)
    return bounds.apply(framework, found.x * unit)
