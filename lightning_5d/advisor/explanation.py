"""One layout in full: memory of each pipeline rank, time, collectives, the pipeline's picture, what keeps it from fitting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_5d.advisor.cases import Case, collect
from lightning_5d.advisor.collectives import Collective, list_collectives
from lightning_5d.advisor.hardware import Gpu
from lightning_5d.advisor.memory import GIB, memory_parts
from lightning_5d.advisor.parameters import Framework, find_framework
from lightning_5d.advisor.predict import Estimate, estimate_cases, layers_by_rank, live_by_rank, make_case, pipeline_timeline
from lightning_5d.advisor.search import SPACES, Space, search, smallest_layout
from lightning_5d.advisor.simulate import Timeline
from lightning_5d.advisor.step import step_time
from lightning_5d.layout import Layout
from lightning_5d.layout_tokens import read_token
from lightning_5d.support import layout_problem

PICTURED = 16
"""Most micro-batches a pipeline's picture shows."""


@dataclass(frozen=True)
class Explanation:
    """Everything known of one layout before it runs."""

    case: Case
    estimate: Estimate
    framework: Framework
    memory_by_rank: dict[str, dict[str, float]]
    """GiB by part of the first, the second and the last pipeline rank."""
    layers: list[int]
    """Of each pipeline rank."""
    live: tuple[float, ...]
    """Micro-batches alive at once on each pipeline rank."""
    collectives_by_rank: dict[str, list[Collective]]
    """Of the same pipeline ranks, largest first."""
    timeline: Timeline | None
    """A step of few micro-batches; None without a pipeline."""
    pictured: int
    """Micro-batches of the timeline."""
    why_not: str
    """Empty when it fits."""
    nearest: list[Estimate]
    """When it does not fit: the nearest layouts that do."""

    @property
    def collectives(self) -> list[Collective]:
        """Of the first pipeline rank."""
        return self.collectives_by_rank["first"]


def explain(
    model: Any,
    layout: str | Layout,
    *,
    gpu: str | Gpu,
    num_gpus: int,
    seq_len: int,
    global_batch: int,
    framework: str | Framework = "lightning_5d",
    **options: Any,
) -> Explanation:
    """One layout in full; arguments and errors are those of :func:`lightning_5d.advisor.estimate`."""
    rules = framework if isinstance(framework, Framework) else find_framework(framework)
    case = make_case(model, layout, gpu, num_gpus, seq_len, global_batch, rules, **options)
    columns = collect([case], rules)
    found = estimate_cases([case], rules, columns)[0]
    parts = memory_parts(columns, rules)
    ranks = {1: ("first",), 2: ("first", "last")}.get(case.layout.pp, ("first", "middle", "last"))
    memory = {rank: {k: float(v[0]) / GIB for k, v in parts[rank].items()} for rank in ranks}
    numbers = {"first": 0, "middle": 1, "last": case.layout.pp - 1}
    collectives = {rank: list_collectives(case, rules, numbers[rank]) for rank in ranks}
    timeline, pictured = None, 0
    if case.layout.pp > 1:
        pictured = _pictured(case)
        timeline = pipeline_timeline(case, rules, step_time(columns, rules), 0, pictured, keep_events=True)
    why_not, nearest = ("", []) if found.fits else (_why_not(case, found), _nearest(case, rules))
    return Explanation(
        case, found, rules, memory, layers_by_rank(case.model, case.layout, rules), live_by_rank(case),
        collectives, timeline, pictured, why_not, nearest,
    )  # fmt: skip


def _pictured(case: Case) -> int:
    """As many micro-batches as run, or the most that a picture shows and the schedule takes."""
    m, pp = case.num_microbatches, case.layout.pp
    if m <= PICTURED:
        return m
    return max(2 * pp, PICTURED // pp * pp)


def _why_not(case: Case, e: Estimate) -> str:
    parts = sorted(e.memory_parts_gib, key=lambda k: -e.memory_parts_gib[k])[:2]
    told = " and ".join(f"{k} ({e.memory_parts_gib[k]:.1f} GiB)" for k in parts)
    advice = {
        "optimizer": "a higher ZeRO stage or a larger dp shards it",
        "gradients": "zero2 or zero3 shards them, tp and pp divide them",
        "parameters": "zero3 shards them, tp and pp divide them",
        "activations": "a smaller micro-batch, ac, tp or cp makes them smaller",
        "logits": "a smaller micro-batch or cp makes them smaller",
        "buffers": "a smaller micro-batch or tp makes them smaller",
    }[parts[0]]
    stage = f" on pipeline rank {e.worst_stage}" if case.layout.pp > 1 else ""
    return f"{-e.margin_gib:.1f} GiB too much{stage}: mostly {told}; {advice}."


def _nearest(case: Case, framework: Framework) -> list[Estimate]:
    """Layouts of the search that fit: fewest changed tokens first, of equally many the fastest."""
    here = dict(_tokens(case.layout, case.micro_batch))
    own = [
        token
        for token in str(case.layout).split("_")
        if framework.name != "lightning_5d" or layout_problem(smallest_layout(token)) is None
    ]
    space = SPACES.get(framework.name, Space()).with_required(own)
    found = search(
        case.model, case.gpu, case.layout.world_size, case.seq_len, case.global_batch, framework, case.attention,
        case.fused_norm, space=space,
    )  # fmt: skip

    def changes(i: int) -> int:
        other = dict(_tokens(found.cases[i].layout, found.cases[i].micro_batch))
        return sum(here.get(name) != other.get(name) for name in here.keys() | other.keys())

    nearest = sorted(map(int, found.order), key=changes)[:3]
    return estimate_cases([found.cases[i] for i in nearest], framework) if nearest else []


def _tokens(layout: Layout, micro_batch: int) -> Iterator[tuple[str, object]]:
    """Field and value of each token but dp, which follows from the others."""
    for token in str(replace(layout, mbs=micro_batch)).split("_"):
        read = read_token(token)
        if read is not None and read[0] != "dp":
            yield read
