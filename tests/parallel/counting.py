"""Counts collectives, messages and host synchronisations of one training step, as torch dispatches them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.harness import Data, trainer_of
from tests.ranks import run_ranks

KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
}


@dataclass(frozen=True)
class Call:
    kind: str
    ranks: tuple[int, ...]
    numel: int
    """Of the whole: what an all-gather makes, what a reduce-scatter takes."""

    @property
    def moved(self) -> float:
        """Elements that each rank sends, by the ring algorithms."""
        n = len(self.ranks)
        share = {"all_reduce": 2 * (n - 1) / n, "all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n, "send": 1.0}
        return share.get(self.kind, 0.0) * self.numel


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.num_host_syncs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.num_host_syncs += 1
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            group = next(ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
            flat = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, torch.Tensor)]
            numel = max(t.numel() for t in flat) if flat else 0
            self.calls.append(Call(KINDS.get(name, name), tuple(dist.get_process_group_ranks(group)), numel))
        return func(*args, **(kwargs or {}))


class CountStep(L.Callback):
    """Counts from the third global batch on, for ``num_batches``."""

    def __init__(self, num_batches: int) -> None:
        self.first, self.num_batches = 2 * num_batches, num_batches
        self.mode = Counting()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == self.first:
            self.mode.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, index: int) -> None:
        if index == self.first + self.num_batches - 1:
            self.mode.__exit__(None, None, None)


def _fit(layout: str, world_size: int, make: Callable[[], Any], blind: bool, **options: Any) -> tuple[list[Call], int]:
    torch.manual_seed(0)
    if blind:
        from lightning_5d.pipeline.delayed import DelayedFlag

        DelayedFlag.pop = lambda self: False  # type: ignore[method-assign]
    counter = CountStep(options.get("accumulate_grad_batches", 1))
    options = {"gradient_clip_val": 0.5, "max_epochs": 1, "limit_val_batches": 0, **options}
    trainer = trainer_of(layout, world_size, use_distributed_sampler=False, callbacks=[counter], **options)
    trainer.fit(make(), datamodule=Data(num_rows=32 * counter.num_batches))
    return counter.mode.calls, counter.mode.num_host_syncs


def count(
    layout: str, world_size: int, make: Callable[[], Any], blind: bool = False, **options: Any
) -> list[tuple[list[Call], int]]:
    """``(calls, host synchronisations)`` of the third optimizer step, by rank.

    With ``blind`` the flags that an accelerator reads two steps late, and the CPU at once, are not read.
    """
    return run_ranks(world_size, _fit, layout, world_size, make, blind, **options)


def tally(calls: list[Call]) -> Counter[tuple[str, tuple[int, ...], int]]:
    """How often each (kind, ranks, elements) happened."""
    return Counter((c.kind, c.ranks, c.numel) for c in calls)


def number(calls: list[Call], kind: str, ranks: tuple[int, ...] | None = None, above: int = 0) -> int:
    """Calls of a kind, of more than ``above`` elements."""
    return sum(c.kind == kind and c.numel > above and ranks in (None, c.ranks) for c in calls)
