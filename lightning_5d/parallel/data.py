"""Data parallelism and ZeRO 1 to 3 by FSDP2 and its flags; mixed precision, also without sharding (plain ``zero0``: replicas.py).

Collectives a step with G groups (a group per layer, one for the rest) and n micro-batches:

| stage | at rest, sharded                     | all-gather | reduce-scatter | all-reduce |
|-------|--------------------------------------|------------|----------------|------------|
| zero0 | nothing                              |            |                | G          |
| zero1 | optimizer (and parameters)           | G          | G              |            |
| zero2 | + gradients, reduced per micro-batch | G          | G n            |            |
| zero3 | + parameters inside the step         | 2 G n      | G n            |            |

Gradients are summed, never averaged: the loss carries each replica's weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_5d.parallel.replicate import replicate


@dataclass
class DataParallel:
    """Shards or replicates one pipeline stage over the data-parallel mesh and steers its collectives.

    ``compute_dtype`` bf16 with float32 parameters is mixed precision: bf16 compute, float32 master weights and reduction.
    """

    mesh: DeviceMesh
    zero: int
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        self.modules: list[FSDPModule] = []

    @property
    def policy(self) -> MixedPrecisionPolicy:
        if self.compute_dtype is None:
            return MixedPrecisionPolicy(reduce_dtype=torch.float32)
        return MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32)

    def wrap_layer(self, layer: nn.Module) -> None:
        """Makes ``layer`` a group of its own. Its parameters are sharded (and the whole ones freed) at once."""
        self._wrap(layer)

    def wrap_root(self, root: nn.Module) -> None:
        """Makes what is left in ``root`` the last group; ``root``'s forward must be what runs a step."""
        self._wrap(root)
        self.modules = [m for m in root.modules() if isinstance(m, FSDPModule)]
        for module in self.modules:
            module.set_gradient_divide_factor(1.0)
            # Without it, a factor of its own makes FSDP ask for PREMUL_SUM, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)

    def _wrap(self, module: nn.Module) -> None:
        if next(module.parameters(), None) is None:
            return
        if self.zero == 0:
            replicate(module, mesh=self.mesh, mp_policy=self.policy)
        else:
            fully_shard(module, mesh=self.mesh, mp_policy=self.policy, reshard_after_forward=self.zero == 3)

    def before_first_backward(self) -> None:
        """Every backward but the last of a step: what a stage may reduce early, and what it keeps gathered."""
        self._set(sync=self.zero >= 2, is_last=False, reshard=self.zero == 3)

    def before_last_backward(self) -> None:
        """The last backward of a step reduces, overlapped with computing, and leaves the parameters sharded."""
        self._set(sync=True, is_last=True, reshard=True)

    def launch_rest(self) -> None:
        """Nothing: FSDP2 starts every reduction in the backward itself."""

    def finish(self) -> None:
        """Nothing: FSDP2 has waited at the end of the last backward."""

    def reshard(self) -> None:
        """Frees gathered parameters (after a forward pass without a backward)."""
        for module in self.modules:
            module.reshard()

    def _set(self, *, sync: bool, is_last: bool, reshard: bool) -> None:
        for module in self.modules:
            module.set_requires_gradient_sync(sync, recurse=False)
            module.set_is_last_backward(is_last)
            module.set_reshard_after_backward(reshard, recurse=False)
