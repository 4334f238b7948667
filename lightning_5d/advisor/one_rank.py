"""One rank of a big job without the job: a fake process group, and what asks for values told what it needs.

Everything private of torch that a dry run touches is in this file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from lightning_5d.parallel.materialize import Materializer
from lightning_5d.pipeline import schedule


class FakeMaterializer(Materializer):
    """Gives every leaf fake parameters of the right shape; nothing is drawn."""

    def __init__(self, mode: FakeTensorMode, dtype: torch.dtype | None) -> None:
        self.mode, self.as_dtype = mode, dtype
        self.filled: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        """By the id of what was there and of what is there now; both kept, so that no id is taken twice."""

    def fill(self, leaf: nn.Module, shard: Any = None) -> None:
        for name, parameter in list(leaf.named_parameters(recurse=False)):
            if id(parameter) not in self.filled:
                with self.mode:
                    dtype = self.as_dtype or parameter.dtype
                    made = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="cpu"), parameter.requires_grad)
                made = made if shard is None else shard(leaf, name, made)
                self.filled[id(parameter)] = (parameter, made)
                self.filled[id(made)] = (made, made)
            leaf._parameters[name] = self.filled[id(parameter)][1]
        for name, buffer in list(leaf.named_buffers(recurse=False)):
            with self.mode:
                leaf._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


class NoLogs:
    """In the place of the exchange of logged values, which looks at them."""

    host_pp_group = None

    def share_signature(self, items: list[Any], is_last: bool) -> list[Any]:
        return items

    def reduce(self, *args: Any) -> tuple[Tensor, list[Any], list[Any], Tensor, Tensor]:
        zero = torch.zeros(())
        return zero, [], [], zero, zero

    def log(self, *args: Any) -> None:
        pass


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
    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process of its own: a process group exists already")
    propagate, rms_norm, warm_up = ShardingPropagator._propagate_tensor_meta, torch.rms_norm, _PipelineSchedule._warmup_p2p
    forward = schedule._Shell.forward

    def without_modes(self: Any, *args: Any, **kwargs: Any) -> Any:
        # DTensor learns shapes from tensors of GLOBAL shape, which no rank ever holds.
        with _disable_current_modes():
            return propagate(self, *args, **kwargs)

    def fused_rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        return _FusedRMSNorm.apply(x, weight)

    def shapes_are_given(self: Any, stages: list[Any], *args: Any, **kwargs: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    def in_order(self: Any, x: Tensor, index: Tensor | None = None) -> Tensor:
        # The number of the micro-batch is a value; GPipe and 1F1B run them in order.
        number = self.__dict__["number"] = self.__dict__.get("number", -1) + 1
        return self.run(number, None if self.is_first else x)

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    ShardingPropagator._propagate_tensor_meta = without_modes  # type: ignore[method-assign]
    torch.rms_norm = fused_rms_norm  # type: ignore[assignment]
    _PipelineSchedule._warmup_p2p = shapes_are_given  # type: ignore[method-assign]
    schedule._Shell.forward = in_order  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta = propagate  # type: ignore[method-assign]
        torch.rms_norm = rms_norm
        _PipelineSchedule._warmup_p2p = warm_up  # type: ignore[method-assign]
        schedule._Shell.forward = forward  # type: ignore[method-assign]
        dist.destroy_process_group()
