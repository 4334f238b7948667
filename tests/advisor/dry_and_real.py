"""The same step thrice: on gloo ranks by the Trainer, one rank of it on fake tensors, and by closed forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_5d.advisor import Explanation
from lightning_5d.advisor.dryrun import StageRun, dry_run, make_job
from lightning_5d.advisor.stage_run import OneStage
from lightning_5d.layout import Layout
from lightning_5d.pipeline.microbatch import communicates_each
from tests.parallel.counting import KINDS
from tests.parity.harness import Data, trainer_of
from tests.parity.models import ROWS, SEQ
from tests.ranks import run_ranks

Count = Counter[tuple[str, tuple[int, ...], int, int]]
"""Operation, ranks, elements, bytes of an element."""


class Counting(TorchDispatchMode):
    """Collectives and messages, as tests/parallel counts them, with the size of an element."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Count = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            group = next(ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
            flat = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, torch.Tensor)]
            if flat:
                largest = max(flat, key=lambda t: t.numel())
                name = KINDS.get(func._schema.name.removeprefix("c10d::"), func._schema.name)
                ranks = tuple(dist.get_process_group_ranks(group))
                self.calls[name, ranks, largest.numel(), largest.element_size()] += 1
        return func(*args, **(kwargs or {}))


def _nbytes(tensors: Any) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


class Watch(L.Callback):
    """The third step's messages and operations, and the bytes of the state when its optimizer steps."""

    def __init__(self) -> None:
        self.counting, self.flops = Counting(), FlopCounterMode(display=False)
        self.state: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 2:
            self.flops.__enter__()
            self.counting.__enter__()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        held = list(dict.fromkeys(module.parameters()))
        state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        gradients = [p.grad for p in held if p.grad is not None]
        self.state = {"parameters": _nbytes(held), "gradients": _nbytes(gradients), "optimizer": _nbytes(state)}

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, index: int) -> None:
        if index == 2:
            self.counting.__exit__(None, None, None)
            self.flops.__exit__(None, None, None)


def _fit(layout: str, world_size: int, make: Callable[[], Any], precision: str) -> tuple[Count, float, dict[str, int]]:
    torch.manual_seed(0)
    watch = Watch()
    options = {"gradient_clip_val": 0.5, "max_epochs": 1, "limit_val_batches": 0, "precision": precision}
    trainer = trainer_of(layout, world_size, use_distributed_sampler=False, callbacks=[watch], **options)
    trainer.fit(make(), datamodule=Data(num_rows=3 * ROWS))
    return watch.counting.calls, watch.flops.get_total_flops(), watch.state


def real(layout: str, world_size: int, make: Callable[[], Any], precision: str) -> list[Any]:
    """Messages, operations and state bytes of every rank."""
    return run_ranks(world_size, _fit, layout, world_size, make, precision)


def batch(rows: int) -> dict[str, Tensor]:
    return {name: torch.zeros(rows, SEQ, dtype=torch.long) for name in ("input_ids", "labels")}


def dry(layout: str, world_size: int, make: Callable[[], Any], **options: Any) -> list[StageRun]:
    """In a rank of its own: a dry run takes the process's only process group."""
    given = {"global_batch": ROWS, "precision": "32-true", **options}
    return run_ranks(1, dry_run, make, given.pop("make_batch", batch), layout, world_size, timeout_s=400, **given)[0]


def _messages(layout: str, world_size: int, make: Callable[[], Any], precision: str, pp_rank: int) -> Any:
    job = make_job(make, batch, layout, world_size, global_batch=ROWS, precision=precision, clip=True)
    with OneStage(job, pp_rank).entered() as stage:
        found = stage.measure(job.layers_per_stage[pp_rank], [job.num_microbatches])[0]
    names = {"all-reduce": "all_reduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter", "receive": "recv"}
    calls = Counter(
        {(names.get(m.operation, m.operation), m.ranks, m.numel, m.element_bytes): n for m, n in found.messages.items()}
    )
    return calls, found.flops, found.state_bytes


def dry_rank(layout: str, world_size: int, make: Callable[[], Any], precision: str, pp_rank: int) -> tuple[Count, float, Any]:
    """Messages, operations and state bytes of the first rank of a pipeline stage, all its layers and micro-batches run."""
    return run_ranks(1, _messages, layout, world_size, make, precision, pp_rank)[0]


def _bookkeeping(layout: Layout) -> Counter[tuple[str, str]]:
    """What `explain` leaves out: counts of targets and of micro-batches over dp, over the world the norm and 64 logged values."""
    found: Counter[tuple[str, str]] = Counter()
    sizes = {"dp": layout.dp or 1, "tp": layout.tp, "pp": layout.pp}
    wide = [axis for axis, size in sizes.items() if size > 1]
    world = wide[0] if len(wide) == 1 else "world"
    of_dp = 5 if communicates_each(layout) else 1  # two of eight bytes more
    for axis, size, numbers in (("dp", sizes["dp"], of_dp), (world, layout.world_size, 65)):
        found["all-reduce", axis] += numbers * 4 * 2 * (size - 1) / size  # type: ignore[assignment]
    return found


def assert_same_bytes(runs: list[StageRun], told: Explanation) -> None:
    """Bytes by operation and axis that a dry run with clipping counts are those that `explain` tells, to the byte."""
    assert len(runs) == len(told.collectives_by_rank)
    for run, (rank, collectives) in zip(runs, told.collectives_by_rank.items(), strict=True):
        expected = _bookkeeping(told.case.layout)
        for c in collectives:
            expected[c.operation, c.axis] += c.bytes_step  # type: ignore[assignment]
        counted = {(t.operation, t.axis): t.nbytes for t in run.traffic if t.nbytes}
        # The ring's (n - 1) / n makes fractions of a byte, which are rounded.
        assert counted == pytest.approx(dict(+expected), rel=1e-12), (told.estimate.layout, rank)
