"""One rank of a big job without the job: fake weights, a fake process group, and what asks for values told what it needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lightning_5d.advisor.torch_private import fake_process_group, no_global_shapes, static_pipeline_shapes
from lightning_5d.gradients import TiedCopy
from lightning_5d.mesh import Mesh
from lightning_5d.parallel.materialize import Materializer
from lightning_5d.pipeline import schedule
from lightning_5d.pipeline.logs import LogExchange
from lightning_5d.pipeline.microbatch import SameCount


class FakeMaterializer(Materializer):
    """Gives every leaf fake parameters of the right shape; nothing is drawn."""

    def __init__(self, mode: FakeTensorMode, dtype: torch.dtype | None) -> None:
        self.mode, self.as_dtype = mode, dtype
        self.filled: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        """By the id of what was there and of what is there now; both kept, so that no id is taken twice."""

    def fill(self, leaf: nn.Module, shard: Any = None) -> None:
        for name, parameter in list(leaf.named_parameters(recurse=False)):
            if id(parameter) not in self.filled:
                made = nn.Parameter(self._fake(parameter), parameter.requires_grad)
                made = made if shard is None else shard(leaf, name, made)
                self.filled[id(parameter)] = (parameter, made)
                self.filled[id(made)] = (made, made)
            leaf._parameters[name] = self.filled[id(parameter)][1]
        for name, buffer in list(leaf.named_buffers(recurse=False)):
            leaf._buffers[name] = self._fake(buffer)

    def _fake(self, like: Tensor) -> Tensor:
        dtype = self.as_dtype if self.as_dtype is not None and like.is_floating_point() else like.dtype
        with self.mode:
            return torch.empty(like.shape, dtype=dtype, device="cpu")


class DrySameCount(SameCount):
    """The replicas' message of their micro-batches. There are no replicas, and so nothing to read."""

    def _read(self) -> tuple[int, int]:
        return 0, 0


class DryLogs(LogExchange):
    """The exchange of logged values with its messages, and nothing logged. Names of other stages are not known here."""

    def share_signature(self, items: list[Any], is_last_stage: bool) -> list[Any]:
        if self.host_pp_group is not None:
            dist.broadcast(torch.zeros(2, dtype=torch.long), group=self.host_pp_group, group_src=self.last_stage_rank)
        return items

    def log(self, *args: Any) -> None:
        pass


def tied_copies(module: nn.Module, tied: list[list[str]], mesh: Mesh) -> list[TiedCopy]:
    """What this stage shares with another: of the tied names some are held here, and the others on the first or last stage."""
    own = dict(module.named_parameters(remove_duplicate=False))
    copies = []
    for names in tied:
        here = [name for name in names if name in own]
        if here and len(here) < len(names) and mesh.size("pp") > 1:
            peer = mesh.size("pp") - 1 if mesh.pp_rank == 0 else 0
            copies.append(TiedCopy(own[here[0]], names[0], peer, is_second=mesh.pp_rank > peer))
    return copies


class _FusedRMSNorm(torch.autograd.Function):
    """Keeps what a GPU's kernel keeps: the input and a number a row. A CPU takes the norm apart, with copies in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


@contextlib.contextmanager
def one_rank(world_size: int, rank: int) -> Iterator[None]:
    """A process group of which only this rank exists: its collectives do nothing, and nothing is agreed on by values."""
    rms_norm, forward = torch.rms_norm, schedule._Shell.forward

    def fused_rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        return _FusedRMSNorm.apply(x, weight)

    def in_order(self: Any, x: Tensor, index: Tensor | None = None) -> Tensor:
        # The number of the micro-batch is a value; GPipe and 1F1B run them in order.
        number = self.__dict__["number"] = self.__dict__.get("number", -1) + 1
        return self.run(number, None if self.is_first else x)

    with fake_process_group(world_size, rank), no_global_shapes(), static_pipeline_shapes():
        torch.rms_norm = fused_rms_norm  # type: ignore[assignment]
        schedule._Shell.forward = in_order  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.rms_norm = rms_norm
            schedule._Shell.forward = forward  # type: ignore[method-assign]
