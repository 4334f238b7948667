"""What each rank measured, and the figures of the whole job that follow from it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_5d.advisor.flops import utilization


@dataclass
class Window:
    """What this rank ran since the last log step. NaN: cannot be told."""

    num_steps: int = 0
    num_tokens: float = 0
    flops: float = 0
    recomputed_flops: float = 0
    microbatches: list[int] = field(default_factory=list)
    """Of each batch."""


class RankFigures(NamedTuple):
    """What a rank tells the others at a log step. NaN: cannot be told."""

    elapsed_s: float
    data_wait_s: float
    num_tokens: float
    flops: float
    recomputed_flops: float
    peak_tflops: float
    peak_memory_gib: float


class Totals:
    """All measured steps of a fit, and the sizes of this rank's batches."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.ranks: list[RankFigures] = []
        self.batches: Counter[tuple[int, int]] = Counter()
        """How often a batch of (sequences, tokens a sequence) was seen."""

    def add(self, ranks: list[RankFigures], num_steps: int) -> None:
        """Adds the figures of all ranks over ``num_steps`` more steps."""
        self.num_steps += num_steps
        self.ranks = [_sum(*pair) for pair in zip(self.ranks, ranks, strict=True)] if self.ranks else ranks


def _sum(before: RankFigures, now: RankFigures) -> RankFigures:
    sums = RankFigures(*(a + b for a, b in zip(before, now, strict=True)))
    return sums._replace(peak_tflops=now.peak_tflops, peak_memory_gib=now.peak_memory_gib)  # the most memory of all time


def job_figures(ranks: list[RankFigures], num_steps: int, dp_size: int) -> dict[str, float]:
    """Figures of the whole job, as `MFUMonitor` logs them; one that cannot be told is left out.

    The slowest rank's time counts, each data-parallel rank's tokens once, the memory of the fullest rank and the wait of
    the one whose data came last.
    """
    num_gpus = len(ranks)
    seconds, copies = max(r.elapsed_s for r in ranks), num_gpus / dp_size  # ranks that see the same tokens
    num_tokens = sum(r.num_tokens for r in ranks) / copies
    flops = sum(r.flops for r in ranks) / copies
    recomputed_flops = sum(r.recomputed_flops for r in ranks) / copies
    figures = {"perf/step_time_s": seconds / num_steps, "perf/peak_memory_gib": max(r.peak_memory_gib for r in ranks)}
    if seconds > 0:
        figures["perf/data_wait"] = max(r.data_wait_s for r in ranks) / seconds
    if seconds > 0 and num_tokens > 0:
        rate, per_token, peak = num_tokens / seconds, flops / num_tokens, mean_peak_tflops(ranks)
        figures["perf/tokens_per_s"] = rate
        figures["perf/tokens_per_s_per_gpu"] = rate / num_gpus
        figures["perf/tflops_per_gpu"] = flops / seconds / num_gpus / 1e12
        figures["perf/mfu"] = utilization(rate, per_token, num_gpus, peak)
        figures["perf/hfu"] = utilization(rate, per_token + recomputed_flops / num_tokens, num_gpus, peak)
    return {key: value for key, value in figures.items() if not math.isnan(value)}


def mean_peak_tflops(ranks: list[RankFigures]) -> float:
    return sum(r.peak_tflops for r in ranks) / len(ranks)
