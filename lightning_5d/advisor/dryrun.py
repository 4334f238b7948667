"""Runs ONE rank of each kind of pipeline stage on fake tensors: the strategy's own code under a fake process group.

What is real: the plan, the cut into stages, tensor parallelism, FSDP2 with its flags, micro-batches, torch's pipeline schedule,
the module's own `training_step`. What is not: values (initial weights, the loss), logging, the optimizer's update; its state is
counted.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor

from lightning_5d.advisor.one_rank import FakeMaterializer, NoLogs, one_rank
from lightning_5d.advisor.trace import Message, Storage, Trace
from lightning_5d.layout import Layout, LayoutError
from lightning_5d.mesh import AXES, Mesh, build_mesh
from lightning_5d.parallel.parallelize import Parallelized, parallelize
from lightning_5d.pipeline.stage import split_layers
from lightning_5d.pipeline.step import StepRunner
from lightning_5d.plan import ParallelPlan, find_plan
from lightning_5d.support import refuse_layout

GIB = float(2**30)
FEWEST = 2
"""Layers a stage of the smallest run."""


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
    """At the peak: parameters, gradients, optimizer, activations, temporary."""
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
    exact: bool = False,
) -> list[StageRun]:
    """One rank of the first, a middle and the last pipeline stage.

    Args:
        make_module: builds the LightningModule; called on the meta device, several times.
        make_batch: `make_batch(rows)` is a batch of so many sequences, of any values.
        layout: what to run; `mbs` and the global batch say how many micro-batches.
        world_size: ranks of the whole job.
        global_batch: sequences of a step.
        precision: `bf16-mixed`, `bf16-true` or `32-true`.
        plan: where things are in the model; found by itself when not given.
        exact: run all layers, not few.

    Raises:
        LayoutError: the layout cannot run; ValueError for an unknown precision.
    """
    if precision not in ("bf16-mixed", "bf16-true", "32-true"):
        raise ValueError(f"precision {precision!r}: a dry run knows bf16-mixed, bf16-true and 32-true")
    parsed = (Layout.parse(layout) if isinstance(layout, str) else layout).resolve(world_size)
    refuse_layout(parsed)
    assert parsed.dp is not None
    if global_batch % parsed.dp:
        raise LayoutError(f"layout '{parsed}': a global batch of {global_batch} sequences does not divide over dp{parsed.dp}")
    with torch.device("meta"):
        module = _build(make_module)
    found = plan or find_plan(module)
    run = _Run(make_module, make_batch, parsed, world_size, precision, plan)
    rows = global_batch // parsed.dp
    mbs = parsed.mbs or (1 if parsed.pp > 1 else rows)
    if rows % mbs:
        raise LayoutError(f"layout '{parsed}': mbs{mbs} does not divide the {rows} sequences of a replica")
    if found is None:
        return [run.stage(0, None, 0, rows)]
    num_layers = len(list(module.get_submodule(found.layers).children()))
    per_stage = [len(r) for r in split_layers(num_layers, parsed.pp, None)]
    return [_whole_stage(run, r, per_stage[r], rows, mbs, exact) for r in sorted({0, min(1, parsed.pp - 1), parsed.pp - 1})]


def _whole_stage(run: _Run, pp_rank: int, layers: int, rows: int, mbs: int, exact: bool) -> StageRun:
    """A stage with all its layers and micro-batches, from runs with few of each when `exact` is not asked for.

    Everything grows by the same amount with each micro-batch once the pipeline is full, and with each layer once the layers weigh
    more than embedding and head: layers are doubled until three runs lie on a line.
    """
    m, pp = rows // mbs, run.layout.pp
    counts = [m] if exact or m <= pp + 2 else [pp + 1, pp + 2]

    def with_layers(n: int | None) -> StageRun:
        few = [run.stage(pp_rank, n, n or layers, mbs * count) for count in counts]
        return few[0] if len(few) == 1 else _line(few[0], few[1], counts[0], counts[1], m)

    done: list[tuple[int, StageRun]] = []
    n = FEWEST
    while not exact and n < layers:
        done.append((n, with_layers(n)))
        if len(done) >= 3:
            (a, first), (b, second), (c, third) = done[-3:]
            expected = _line(first, second, a, b, c)
            if abs(expected.peak_gib - third.peak_gib) < 0.003 * third.peak_gib:
                return replace(_line(second, third, b, c, layers), layers=layers)
        n *= 2
    return with_layers(None)


def _build(make_module: Callable[[], nn.Module]) -> nn.Module:
    module = make_module()
    configure = getattr(module, "configure_model", None)
    if callable(configure):
        configure()
    return module


@dataclass
class _Run:
    """What all stages of a dry run share."""

    make_module: Callable[[], nn.Module]
    make_batch: Callable[[int], Any]
    layout: Layout
    world_size: int
    precision: str
    plan: ParallelPlan | None

    def stage(self, pp_rank: int, few: int | None, layers: int, rows: int) -> StageRun:
        """Runs one stage on a batch of `rows` sequences; of a model that has `few` layers a stage, or all its own."""
        layout = self.layout
        rank = pp_rank * (self.world_size // layout.pp)
        with one_rank(self.world_size, rank):
            mesh = build_mesh(layout, "cpu")
            with torch.device("meta"):
                module: Any = _build(self.make_module)
            plan = self.plan or find_plan(module)
            if few is not None:
                assert plan is not None
                stack = module.get_submodule(plan.layers)
                for index in range(len(stack) - 1, few * layout.pp - 1, -1):
                    del stack[index]
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            true_dtype = torch.bfloat16 if self.precision == "bf16-true" else None
            compute = torch.bfloat16 if self.precision == "bf16-mixed" else None
            parts = parallelize(module, plan, layout, mesh, FakeMaterializer(mode, true_dtype), None, compute)
            hidden = true_dtype or compute or torch.float32
            runner = StepRunner(module, parts.stage, layout, mesh, plan, torch.device("cpu"), hidden, False, None)
            runner.exchange = NoLogs()  # type: ignore[assignment]
            module.log = module.log_dict = lambda *args, **kwargs: None
            try:
                return self._traced(module, parts, runner, mode, mesh, pp_rank, layers, rows)
            finally:
                del module, parts, runner
                gc.collect()

    def _traced(
        self,
        module: Any,
        parts: Parallelized,
        runner: StepRunner,
        mode: FakeTensorMode,
        mesh: Mesh,
        pp_rank: int,
        layers: int,
        rows: int,
    ) -> StageRun:
        parameters = list(dict.fromkeys(parts.stage.parameters()))
        with mode:
            batch = self.make_batch(rows)
            state = [torch.zeros_like(_local(p)) for p in parameters if p.requires_grad for _ in range(2)]
            trace = Trace()
            trace.register(parameters, "parameters")
            trace.register(state, "optimizer")
            with trace:
                _step(parts, runner, batch)  # the first step makes what later ones find: buffers of FSDP2, caches of DTensor
                for p in parameters:
                    p.grad = None
                trace.restart()
                _step(parts, runner, batch)
        return StageRun(
            pp_rank=pp_rank,
            layers=layers,
            peak_gib=trace.peak_bytes / GIB,
            memory_gib=_by_kind(trace.peak, _whole_shapes(module, self.layout)),
            tflops=trace.flops / 1e12,
            traffic=_traffic(trace.messages, mesh),
            largest=[_describe(s) for s in sorted(trace.peak, key=lambda s: -s.nbytes)[:8]],
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _step(parts: Parallelized, runner: StepRunner, batch: Any) -> None:
    """What the strategy does in `training_step`."""
    data_parallel = parts.data_parallel
    runner._may_hold_no_target = False
    for _, shell in runner.pipeline._schedules.values():
        shell.__dict__.pop("number", None)
    if data_parallel is not None:
        data_parallel.before_first_backward()
    before_last = data_parallel.before_last_backward if data_parallel is not None else (lambda: None)
    runner.train((batch, 0), contextlib.nullcontext, loss_scale=1.0, stop=False, before_last_backward=before_last)
    if data_parallel is not None:
        data_parallel.launch_rest()
        data_parallel.finish()


def _whole_shapes(module: nn.Module, layout: Layout) -> set[tuple[int, ...]]:
    """Shapes of a rank's gradients before data parallelism shards them, also flattened."""
    found: set[tuple[int, ...]] = set()
    for parameter in module.parameters():
        shape = list(parameter.shape)
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            for placement, axis in zip(parameter.placements, names, strict=True):
                if axis == "tp" and not placement.is_replicate():
                    dim = getattr(placement, "dim", 0)
                    shape[dim] = -(-shape[dim] // layout.tp)
        found.add(tuple(shape))
    return found


def _by_kind(alive: list[Storage], whole: set[tuple[int, ...]]) -> dict[str, float]:
    kinds: defaultdict[str, float] = defaultdict(float)
    for s in alive:
        if s.kind == "optimizer" or s.kind == "parameters":
            kind = s.kind
        elif s.kind == "gathered":
            kind = "parameters"
        elif s.backward and (s.shape in whole or len(s.shape) == 1):
            kind = "gradients"  # whole, or flat for their reduction
        else:
            kind = "temporary" if s.backward else "activations"
        kinds[kind] += s.nbytes / GIB
    return {k: kinds[k] for k in ("parameters", "gradients", "optimizer", "activations", "temporary")}


def _describe(s: Storage) -> tuple[float, str]:
    when = "backward" if s.backward else "forward"
    return s.nbytes / GIB, f"{s.kind or s.operation} {list(s.shape)} {s.dtype} ({when})"


def _traffic(messages: list[Message], mesh: Mesh) -> list[Traffic]:
    axes = {tuple(dist.get_process_group_ranks(mesh.group(axis))): axis for axis in AXES if mesh.size(axis) > 1}
    calls: Counter[tuple[str, tuple[int, ...]]] = Counter()
    nbytes: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for m in messages:
        calls[m.operation, m.ranks] += 1
        nbytes[m.operation, m.ranks] += m.moved_bytes  # type: ignore[assignment]
    found = [
        Traffic(operation, axes.get(ranks, "world"), len(ranks), calls[operation, ranks], float(nbytes[operation, ranks]))
        for operation, ranks in calls
        if operation not in ("receive", "barrier")
    ]
    return sorted(found, key=lambda t: -t.nbytes)


def _line(few: StageRun, more: StageRun, a: int, b: int, c: int) -> StageRun:
    """What lies on the line through two runs: `few` at a, `more` at b, the answer at c."""

    def line(x: float, y: float) -> float:
        return x + (y - x) / (b - a) * (c - a)

    before = {(t.operation, t.axis): t for t in few.traffic}
    traffic = []
    for t in more.traffic:
        other = before.get((t.operation, t.axis))
        calls, nbytes = (other.calls, other.nbytes) if other is not None else (0.0, 0.0)
        traffic.append(Traffic(t.operation, t.axis, t.group, line(calls, t.calls), line(nbytes, t.nbytes)))
    return StageRun(
        pp_rank=few.pp_rank,
        layers=more.layers,
        peak_gib=line(few.peak_gib, more.peak_gib),
        memory_gib={k: line(few.memory_gib[k], more.memory_gib[k]) for k in few.memory_gib},
        tflops=line(few.tflops, more.tflops),
        traffic=sorted(traffic, key=lambda t: -t.nbytes),
        largest=more.largest,
    )
