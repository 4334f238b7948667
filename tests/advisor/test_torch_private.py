"""Notices when the private parts of torch that advisor/torch_private.py stands on change."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from lightning_5d.advisor import torch_private
from lightning_5d.advisor.trace import Trace
from tests.ranks import run_ranks


def _one_of_many() -> tuple[int, int, int]:
    """A world of 4,096, of which only this rank exists: its collectives return. A second world of the same shape after it."""
    seen = []
    for rank in (0, 4095):
        with torch_private.fake_process_group(4096, rank):
            mesh = torch.distributed.init_device_mesh("cpu", (2048, 2), mesh_dim_names=("dp", "tp"))
            whole = torch.zeros(8, 8)
            dist.all_reduce(whole, group=mesh.get_group("dp"))
            distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None).detach().full_tensor()
            seen.append(dist.get_rank())
    return (*seen, int(dist.is_initialized()))


def test_a_fake_world_can_be_left_and_another_entered() -> None:
    assert run_ranks(1, _one_of_many) == [(0, 4095, 0)]


def _a_second_world_inside() -> str:
    with torch_private.fake_process_group(2, 0), pytest.raises(RuntimeError, match="a process of its own"):
        with torch_private.fake_process_group(2, 0):
            pass
    return "refused"


def test_a_process_group_that_exists_is_left_alone() -> None:
    assert run_ranks(1, _a_second_world_inside) == ["refused"]


def _largest_seen(guarded: bool) -> int:
    """Elements of the largest tensor that is seen when a split matrix is scaled, 8 of its 8,192 elements here."""
    with torch_private.fake_process_group(1024, 0):
        mesh = torch.distributed.init_device_mesh("cpu", (1024,))
        mode = torch_private.fake_mode()
        with mode:
            local = torch.zeros(1, 8)
        matrix = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        trace = Trace(set(), set(), [])
        with torch_private.no_global_shapes() if guarded else contextlib.nullcontext(), mode, trace:
            scaled = matrix.double()
            assert scaled.shape == (1024, 8)
    return max(peak.nbytes for peak in trace.peaks.values()) // 8


def test_dtensors_global_shapes_are_kept_out() -> None:
    assert run_ranks(1, _largest_seen, False)[0] > 1024, "DTensor makes no tensors of global shape any more: drop the guard"
    assert run_ranks(1, _largest_seen, True) == [8]
    assert list(inspect.signature(ShardingPropagator._propagate_tensor_meta_non_cached).parameters)[:2] == ["self", "op_schema"]


def test_pipeline_schedules_warm_up_where_it_is_replaced() -> None:
    assert "self._warmup_p2p(" in inspect.getsource(torch.distributed.pipelining.schedules)
    assert list(inspect.signature(_PipelineSchedule._warmup_p2p).parameters)[:2] == ["self", "stages"]
    own = _PipelineSchedule._warmup_p2p
    with torch_private.static_pipeline_shapes():
        assert _PipelineSchedule._warmup_p2p is not own
    assert _PipelineSchedule._warmup_p2p is own


def test_fsdp_frees_by_resizing_storages() -> None:
    assert ".resize_(" in inspect.getsource(_fsdp_param.alloc_storage) + inspect.getsource(_fsdp_param.free_storage)
    seen: list[int] = []
    with torch_private.watch_resizes(lambda storage, nbytes: seen.append(nbytes)):
        torch.zeros(4).untyped_storage().resize_(64)
    torch.zeros(4).untyped_storage().resize_(32)
    assert seen == [64]


def test_storages_are_known_by_their_key() -> None:
    tensor, other = torch.zeros(4, 4), torch.zeros(4, 4)
    key = torch_private.storage_key(tensor.untyped_storage())
    assert key == torch_private.storage_key(tensor[1:].T.untyped_storage())
    assert key != torch_private.storage_key(other.untyped_storage())


def _is_in_backward() -> list[bool]:
    seen = [torch_private.in_backward()]
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: seen.append(torch_private.in_backward()))
    x.sum().backward()
    return [*seen, torch_private.in_backward()]


def test_a_backward_pass_is_seen() -> None:
    assert run_ranks(1, _is_in_backward) == [[False, True, False]]


def test_reads_of_values_are_this_operation() -> None:
    seen: list[Any] = []

    class Note(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(1)
    with Note():
        bool(x), int(x), x.item()
    assert seen.count(torch_private.READ_ON_HOST) == 3


def test_values_that_do_not_exist_are_these_errors() -> None:
    with torch_private.fake_mode(), pytest.raises(torch_private.VALUE_ERRORS):
        torch.zeros(4).nonzero()
    with torch_private.fake_mode(), pytest.raises(torch_private.VALUE_ERRORS):
        torch.zeros(1).item()


def _attention_operations() -> tuple[float, float, bool]:
    mine = 0.0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal mine
            out = func(*args, **(kwargs or {}))
            counter = torch_private.flop_counter(func)
            mine += counter(*args, **(kwargs or {}), out_val=out) if counter is not None else 0
            return out

    with Count():
        q, k, v = (torch.zeros(2, 3, 16, 8, requires_grad=True) for _ in range(3))
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        with FlopCounterMode(display=False) as theirs:
            (torch.zeros(4, 5) @ torch.zeros(5, 6)).sum()
    is_counted = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry
    return mine, theirs.get_total_flops(), is_counted


def test_attention_is_counted_as_on_a_gpu() -> None:
    ((mine, theirs, is_counted),) = run_ranks(1, _attention_operations)
    assert mine == 7 * 2 * 2 * 3 * 16 * 16 * 8 + 2 * 4 * 5 * 6 and theirs == 2 * 4 * 5 * 6
    assert not is_counted, "torch counts the CPU's flash attention now: use its formula"
