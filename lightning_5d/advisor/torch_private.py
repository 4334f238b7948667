"""The private parts of torch that a dry run stands on. tests/advisor/test_torch_private.py notices when they change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

VALUE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
"""What a fake tensor raises when a shape or a branch depends on values it does not have."""

READ_ON_HOST = torch.ops.aten._local_scalar_dense.default
"""What ``.item()``, ``int(tensor)`` and ``if tensor`` dispatch."""

_CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no values. FSDP2 and DTensor bring real ones along, and may."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def storage_key(storage: torch.UntypedStorage) -> int:
    """The same for all views of one storage, while it lives."""
    return storage._cdata


def in_backward() -> bool:
    """Whether autograd runs a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def group_of(args: tuple[Any, ...]) -> ProcessGroup | None:
    """The process group among the arguments of a ``c10d`` operation."""
    return next((ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject)), None)


def flop_counter(operation: Any) -> Callable[..., float] | None:
    """What counts an operation's floating-point operations; None for one that is not a product.

    torch's own formulas, and the same ones for the attention a CPU takes where a GPU takes flash attention, which torch leaves
    out: both matrix products forward and five backward, at whole length also when causal.
    """
    packet = operation._overloadpacket
    if packet is _CPU_FLASH:
        return lambda q, k, v, *args, out_val=None, **kwargs: sdpa_flop_count(q.shape, k.shape, v.shape)
    if packet is _CPU_FLASH_BACKWARD:
        return lambda grad, q, k, v, *args, out_val=None, **kwargs: sdpa_backward_flop_count(
            grad.shape, q.shape, k.shape, v.shape
        )
    return flop_registry.get(packet)


@contextlib.contextmanager
def fake_process_group(world_size: int, rank: int) -> Iterator[None]:
    """A default process group of which only this rank exists: its collectives return at once and move nothing."""
    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process of its own: a process group exists already")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # its meshes are of groups that are gone, and equal to the next ones


@contextlib.contextmanager
def no_global_shapes() -> Iterator[None]:
    """DTensor learns shapes from fake tensors of GLOBAL shape, which no rank ever holds: inside, no mode sees them."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def without_modes(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return propagate(self, *args, **kwargs)

    ShardingPropagator._propagate_tensor_meta_non_cached = without_modes  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]


@contextlib.contextmanager
def static_pipeline_shapes() -> Iterator[None]:
    """Pipeline stages do not ask their neighbours how shapes are known: they are given, and the neighbours do not exist."""
    warm_up = _PipelineSchedule._warmup_p2p

    def shapes_are_given(self: Any, stages: list[Any], *args: Any, **kwargs: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    _PipelineSchedule._warmup_p2p = shapes_are_given  # type: ignore[method-assign]
    try:
        yield
    finally:
        _PipelineSchedule._warmup_p2p = warm_up  # type: ignore[method-assign]


@contextlib.contextmanager
def watch_resizes(on_resize: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Calls ``on_resize(storage, bytes)`` after each ``resize_``: how FSDP2 gives and takes the memory of gathered parameters."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        out = resize(storage, size)
        on_resize(storage, int(size))
        return out

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
