"""Notices when the private parts of torch that parallel/ and pipeline/ rely on change."""

from __future__ import annotations

import inspect

from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_5d.parallel.replicate import replicate


def test_replicate_takes_a_mesh_and_a_policy() -> None:
    assert {"mesh", "mp_policy"} <= set(inspect.signature(replicate).parameters)
    assert {"mesh", "mp_policy", "reshard_after_forward"} <= set(inspect.signature(fully_shard).parameters)
    assert {"param_dtype", "reduce_dtype"} <= set(inspect.signature(MixedPrecisionPolicy).parameters)


def test_fsdp_has_the_flags_that_make_its_stages() -> None:
    for name in ("set_requires_gradient_sync", "set_is_last_backward", "set_reshard_after_backward", "reshard"):
        assert callable(getattr(FSDPModule, name))
    for name in ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms"):
        assert callable(getattr(FSDPModule, name))


def test_a_strided_shard_is_not_replicated() -> None:
    """It is what FSDP2 makes of a tensor-parallel weight; the gradient norm counts it as a shard."""
    placement = _StridedShard(0, split_factor=2)
    assert not placement.is_replicate() and not placement.is_partial()


def test_schedules_take_static_shapes() -> None:
    assert {"input_args", "output_args", "group"} <= set(inspect.signature(PipelineStage.__init__).parameters)
    for schedule in (Schedule1F1B, ScheduleGPipe):
        assert {"loss_fn", "scale_grads"} <= set(inspect.signature(schedule.__init__).parameters)
        assert "return_outputs" in inspect.signature(schedule.step).parameters
