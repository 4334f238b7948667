"""A dry run: ONE rank of each kind of pipeline stage on fake tensors, by the strategy's own code under a fake process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_5d.advisor.extrapolate import layer_counts, layer_period, microbatch_counts, plane
from lightning_5d.advisor.stage_run import Job, Measured, OneStage, axis_names, build
from lightning_5d.advisor.trace import KINDS
from lightning_5d.layout import Layout, LayoutError, check_model
from lightning_5d.pipeline.stage import split_layers
from lightning_5d.plan import ParallelPlan, find_plan
from lightning_5d.precision import SUPPORTED
from lightning_5d.support import refuse_layout, refuse_module

GIB = float(2**30)


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in a step: calls, and bytes this rank sends by the ring algorithms."""

    operation: str
    axis: str
    group: int
    calls: float
    nbytes: float


@dataclass
class StageRun:
    """What one rank of a pipeline stage needs and does in a step."""

    pp_rank: int
    layers: int
    peak_gib: float
    """Without context and fragmentation, which only a device has."""
    memory_gib: dict[str, float]
    """At the peak: parameters, gradients, optimizer, activations, logits, buffers, temporary."""
    peak_at: str
    """The part of the step that makes the peak, and the tensor whose allocation does."""
    state_gib: dict[str, float]
    """Parameters, gradients and optimizer state on this rank when the optimizer steps."""
    tflops: float
    """Operations of a step on this rank, recomputed ones included, 1e12."""
    traffic: list[Traffic] = field(default_factory=list)
    largest: list[tuple[float, str]] = field(default_factory=list)
    """GiB and description of the largest tensors at the peak."""


def dry_run(
    make_module: Callable[[], nn.Module],
    make_batch: Callable[[int], Any],
    layout: str | Layout,
    world_size: int,
    *,
    global_batch: int,
    precision: str = "bf16-mixed",
    plan: ParallelPlan | None = None,
    split: list[int] | None = None,
    exact: bool = False,
    clip: bool = False,
    replica_weighting: bool = False,
    max_steps: int = 1000,
) -> list[StageRun]:
    """One rank of the first, the second and the last pipeline stage.

    Args:
        make_module: builds the LightningModule; called on the meta device, several times.
        make_batch: `make_batch(rows)` is a batch of so many sequences, of any values.
        layout: what to run; `mbs` and the global batch say how many micro-batches.
        world_size: ranks of the whole job.
        global_batch: sequences of a step.
        precision: `bf16-mixed`, `bf16-true` or `32-true`.
        plan: where things are in the model; found by itself when not given.
        split: layers of each pipeline stage; even when not given.
        exact: run all layers and micro-batches, not few of each.
        clip: gradients are clipped by their norm, which is a message.
        replica_weighting: `loss_weighting="replica"`.
        max_steps: optimizer steps of the whole training, for learning-rate schedules that ask.

    Raises:
        LayoutError: the layout cannot run; ValueError for an unknown precision, or a module that a layout refuses.
    """
    job = make_job(
        make_module,
        make_batch,
        layout,
        world_size,
        global_batch=global_batch,
        precision=precision,
        plan=plan,
        split=split,
        clip=clip,
        replica_weighting=replica_weighting,
        max_steps=max_steps,
    )
    count = job.num_microbatches
    ms = [count] if exact else microbatch_counts(count, job.layout)
    found = []
    for pp_rank in sorted({0, min(1, job.layout.pp - 1), job.layout.pp - 1}):
        layers = job.layers_per_stage[pp_rank] if job.plan is not None else 0
        ns = [layers] if exact else layer_counts(layers, job.period)
        with OneStage(job, pp_rank).entered() as stage:
            measured = plane(stage.measure, ns, ms, layers, count)
            found.append(_told(measured, pp_rank, layers, axis_names(stage.mesh)))
    return found


def make_job(
    make_module: Callable[[], nn.Module],
    make_batch: Callable[[int], Any],
    layout: str | Layout,
    world_size: int,
    *,
    global_batch: int,
    precision: str,
    plan: ParallelPlan | None = None,
    split: list[int] | None = None,
    **options: Any,
) -> Job:
    """What all ranks share, checked as the strategy checks it: arguments and errors as of :func:`dry_run`."""
    if precision not in SUPPORTED:
        raise ValueError(f"precision {precision!r} does not run under a layout; allowed are {', '.join(SUPPORTED)}")
    parsed = (Layout.parse(layout) if isinstance(layout, str) else layout).resolve(world_size)
    refuse_layout(parsed)
    assert parsed.dp is not None
    if global_batch % parsed.dp:
        raise LayoutError(f"layout '{parsed}': a global batch of {global_batch} sequences does not divide over dp{parsed.dp}")
    rows = global_batch // parsed.dp
    check_model(parsed, batch_size_per_replica=rows)
    mbs = min(rows, parsed.mbs or (1 if parsed.pp > 1 else rows))
    job = Job(make_module, make_batch, parsed, world_size, precision, plan, [], mbs, rows // mbs, **options)
    module = build(job)
    refuse_module(module, parsed, fitting=True)
    job.plan = plan or find_plan(module)
    if job.plan is not None:
        job.plan.validate(module)
        num_layers = len(list(module.get_submodule(job.plan.layers).children()))
        check_model(parsed, num_heads=job.plan.num_heads, num_kv_heads=job.plan.num_kv_heads, num_layers=num_layers)
        job.layers_per_stage = [len(r) for r in split_layers(num_layers, parsed.pp, split)]
        job.period = layer_period(module, job.plan, parsed)
    return job


def _told(m: Measured, pp_rank: int, layers: int, axes: dict[tuple[int, ...], str]) -> StageRun:
    region = max(sorted(m.peaks), key=lambda r: m.peaks[r].nbytes)
    peak = m.peaks[region]
    traffic = [
        Traffic(operation, axes.get(ranks, "world"), len(ranks), calls, nbytes)
        for (operation, ranks), (calls, nbytes) in m.traffic.items()
        if operation != "receive" and len(ranks) > 1
    ]
    return StageRun(
        pp_rank=pp_rank,
        layers=layers,
        peak_gib=peak.nbytes / GIB,
        memory_gib={k: peak.by_kind.get(k, 0) / GIB for k in KINDS},
        peak_at=f"{region}: {peak.made_by}",
        state_gib={k: v / GIB for k, v in m.state_bytes.items()},
        tflops=m.flops / 1e12,
        traffic=sorted(traffic, key=lambda t: -t.nbytes),
        largest=peak.largest,
    )
