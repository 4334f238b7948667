"""Runs one rank of one pipeline stage on fake tensors, as the strategy would: set up, a step to warm up, a step to watch.

What is real: the plan, the cut into stages, tensor parallelism, FSDP2 with its flags, micro-batches, torch's pipeline schedule,
the module's own `training_step`, the sums of gradients, clipping, the module's own optimizer. What is not: values (initial
weights, the loss), and logging.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor

from lightning_5d.advisor.one_rank import DryLogs, DrySameCount, FakeMaterializer, one_rank, tied_copies
from lightning_5d.advisor.regions import watch_layers
from lightning_5d.advisor.torch_private import fake_mode
from lightning_5d.advisor.trace import SET_UP, Message, Peak, Trace, users_step
from lightning_5d.gradients import Gradients, find_tied, local_of
from lightning_5d.layout import Layout
from lightning_5d.mesh import AXES, Mesh, build_mesh, host_group
from lightning_5d.parallel.parallelize import Parallelized, parallelize
from lightning_5d.pipeline.microbatch import communicates_each
from lightning_5d.pipeline.step import StepRunner
from lightning_5d.plan import ParallelPlan


@dataclass
class Job:
    """What all ranks of a run share."""

    make_module: Callable[[], nn.Module]
    """Called on the meta device."""
    make_batch: Callable[[int], Any]
    """A batch of so many sequences, of any values; called with fake tensors."""
    layout: Layout
    """Resolved."""
    world_size: int
    precision: str
    plan: ParallelPlan | None
    layers_per_stage: list[int]
    """Empty for a module without a plan."""
    mbs: int
    """Sequences of a micro-batch."""
    num_microbatches: int
    period: int | None = None
    """Layers repeat after so many: 1 when all are alike, None when they never do."""
    clip: bool = False
    """Whether gradients are clipped by their norm."""
    replica_weighting: bool = False
    max_steps: int = 1000
    """Optimizer steps of the whole training, for learning-rate schedules that ask."""


@dataclass
class Measured:
    """One step of one rank."""

    peaks: dict[str, Peak]
    """By part of the step."""
    flops: float
    traffic: dict[tuple[str, tuple[int, ...]], tuple[float, float]]
    """Calls, and bytes sent, by operation and ranks."""
    state_bytes: dict[str, int]
    """Of `parameters`, `gradients` and `optimizer` when the optimizer steps."""
    messages: Counter[Message] = field(default_factory=Counter)
    """One by one, of a step that was run and not carried on from smaller ones."""


def build(job: Job, layers: int | None = None, pp_rank: int = 0) -> Any:
    """The module on the meta device; with ``layers`` given, only the first so many of the stage's layers are left in it."""
    with torch.device("meta"):
        module: Any = job.make_module()
        configure = getattr(module, "configure_model", None)
        if callable(configure):
            configure()
    if layers is not None:
        assert job.plan is not None
        stack: Any = module.get_submodule(job.plan.layers)
        start = sum(job.layers_per_stage[:pp_rank])
        for index in reversed(range(start + layers, start + job.layers_per_stage[pp_rank])):
            del stack[index]
    return module


class OneStage:
    """One rank, the first of its pipeline stage; a process group of its own exists inside :meth:`entered`."""

    def __init__(self, job: Job, pp_rank: int) -> None:
        self.job, self.pp_rank = job, pp_rank

    @contextmanager
    def entered(self) -> Iterator[OneStage]:
        """Several runs share a process group and mesh: of a big world these take a second to make."""
        with one_rank(self.job.world_size, self.pp_rank * (self.job.world_size // self.job.layout.pp)):
            self.mesh = build_mesh(self.job.layout, "cpu")
            yield self

    def measure(self, layers: int, microbatches: list[int]) -> list[Measured]:
        """A step with so many of the stage's layers, for each number of micro-batches."""
        job, mode = self.job, fake_mode()
        module = build(job, layers if job.plan is not None else None, self.pp_rank)
        for part in module.modules():
            if getattr(getattr(part, "config", None), "use_cache", False):
                part.config.use_cache = False
        tied = find_tied(module)
        split = [*job.layers_per_stage]
        if job.plan is not None:
            split[self.pp_rank] = layers
        true_dtype = torch.bfloat16 if job.precision == "bf16-true" else None
        compute = torch.bfloat16 if job.precision == "bf16-mixed" else None
        materializer = FakeMaterializer(mode, true_dtype)
        parts = parallelize(module, job.plan, job.layout, self.mesh, materializer, split or None, compute)
        hidden = true_dtype or compute or torch.float32
        device = torch.device("cpu")
        host_pp = host_group(self.mesh, "pp", "cpu")
        host_dp = host_group(self.mesh, "dp", "cpu") if communicates_each(job.layout) else None
        runner = StepRunner(
            module, parts.stage, job.layout, self.mesh, job.plan, device, hidden, job.replica_weighting, host_pp, host_dp
        )
        runner.same_count = DrySameCount(host_dp)
        logs = DryLogs(module, device, runner.exchange.contributes, self.mesh.size("dp"))
        logs.host_pp_group, logs.last_stage_rank = runner.exchange.host_pp_group, runner.exchange.last_stage_rank
        runner.exchange = logs
        runner._captures = True  # else a single rank's step logs to its trainer
        runner._targets_checked = True  # by values
        gradients = Gradients(module.parameters(), self.mesh, parts.partial_parameters, tied_copies(module, tied, self.mesh))
        try:
            return _Step(job, module, parts, runner, gradients, mode, self.mesh).run(microbatches)
        finally:
            del module, parts, runner, logs, gradients, materializer
            gc.collect()


@dataclass
class _Step:
    job: Job
    module: Any
    parts: Parallelized
    runner: StepRunner
    gradients: Gradients
    mode: FakeTensorMode
    mesh: Mesh

    def run(self, microbatches: list[int]) -> list[Measured]:
        parameters = list(dict.fromkeys(self.parts.stage.parameters()))
        trace = Trace(_weight_shapes(self.module, self.job.layout.tp), self._vocabulary(), [self.mesh.group("dp")])
        optimizers = self._optimizers()
        watch_layers(self.parts.stage, trace, (self.job.period or 1) + 1)
        found = []
        with self.mode:
            trace.register(parameters, "parameters")
            trace.register(self.parts.stage.buffers(), "buffers")
            with trace:
                # What the first step makes and later ones find: optimizer state, buffers of FSDP2, caches of DTensor.
                self._one(trace, optimizers, 1)
                trace.register(_tensors([o.state for o in optimizers]), "optimizer")
                for count in microbatches:
                    trace.restart()
                    state = self._one(trace, optimizers, count)
                    found.append(Measured(dict(trace.peaks), trace.flops, _traffic(trace.messages), state, trace.messages))
        return found

    def _one(self, trace: Trace, optimizers: list[Any], count: int) -> dict[str, int]:
        """What the strategy and Lightning do in a step of so many micro-batches; bytes of the state when the optimizer steps."""
        runner, data_parallel = self.runner, self.parts.data_parallel
        runner.pipeline._schedules.clear()  # of another number of micro-batches
        self.gradients.clear()
        trace.regions = SET_UP
        batch = self.job.make_batch(count * self.job.mbs)
        runner._may_hold_no_target = False
        if data_parallel is not None:
            data_parallel.before_first_backward()

        def before_last_backward() -> None:
            trace.is_last = True
            if data_parallel is not None:
                data_parallel.before_last_backward()

        runner.train((batch, 0), lambda: users_step(trace), loss_scale=1.0, stop=False, before_last_backward=before_last_backward)
        trace.is_last, trace.regions = False, ("after the last backward",)
        if data_parallel is not None:
            data_parallel.launch_rest()
            data_parallel.finish()
        self.gradients.make_whole()
        if self.job.clip:
            self.gradients.clip_by_norm((p for o in optimizers for g in o.param_groups for p in g["params"]), 1.0)
        trace.regions = ("optimizer",)
        for optimizer in optimizers:
            optimizer.step()
        held = self.gradients.parameters
        return {
            "parameters": _nbytes(held),
            "gradients": _nbytes(p.grad for p in held if p.grad is not None),
            "optimizer": _nbytes(_tensors([o.state for o in optimizers])),
        }

    def _vocabulary(self) -> set[int]:
        """Sizes of the last dimension of logits, whole and on a tensor-parallel rank."""
        plan = self.job.plan
        if plan is None or plan.head is None or not self.parts.stage.is_last:
            return set()
        size = self.module.get_submodule(plan.head).get_parameter("weight").shape[0]
        return {size, -(-size // self.job.layout.tp)}

    def _optimizers(self) -> list[Any]:
        self.module.__dict__["_trainer"] = _trainer(self.job.max_steps)
        with self.mode:
            optimizers = [x for x in _leaves(self.module.configure_optimizers()) if isinstance(x, torch.optim.Optimizer)]
        for group in (g for o in optimizers for g in o.param_groups):
            plain = all(type(p) in (Tensor, nn.Parameter) for p in group["params"])
            if plain and group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True  # what torch takes on a GPU
        return optimizers


def _trainer(max_steps: int) -> Any:
    from lightning.pytorch import Trainer

    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return Trainer(accelerator="cpu", devices=1, max_epochs=-1, max_steps=max_steps, barebones=True)
    finally:
        logger.setLevel(level)


def _leaves(made: Any) -> Iterator[Any]:
    if isinstance(made, dict):
        made = list(made.values())
    if isinstance(made, (list, tuple)):
        for item in made:
            yield from _leaves(item)
    else:
        yield made


def _tensors(made: Any) -> Iterator[Tensor]:
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, (list, tuple)):
        for item in made:
            yield from _tensors(item)
    elif hasattr(made, "values"):
        yield from _tensors(list(made.values()))


def _nbytes(tensors: Any) -> int:
    return sum(local_of(t).numel() * t.element_size() for t in tensors)


def _weight_shapes(module: nn.Module, tp: int) -> set[tuple[int, ...]]:
    """Shapes of a rank's gradients before data parallelism shards them."""
    found: set[tuple[int, ...]] = set()
    for parameter in module.parameters():
        shape = list(parameter.shape)
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            for placement, axis in zip(parameter.placements, names, strict=True):
                if axis == "tp" and not placement.is_replicate():
                    dim = getattr(placement, "dim", 0)
                    shape[dim] = -(-shape[dim] // tp)
        found.add(tuple(shape))
    return found


def _traffic(messages: Counter[Message]) -> dict[tuple[str, tuple[int, ...]], tuple[float, float]]:
    found: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = {}
    for message, times in messages.items():
        calls, nbytes = found.get((message.operation, message.ranks), (0.0, 0.0))
        found[message.operation, message.ranks] = (calls + times, nbytes + times * message.moved_bytes)
    return found


def axis_names(mesh: Mesh) -> dict[tuple[int, ...], str]:
    """Which axis a group of ranks lies along."""
    return {tuple(dist.get_process_group_ranks(mesh.group(axis))): axis for axis in AXES if mesh.size(axis) > 1}
