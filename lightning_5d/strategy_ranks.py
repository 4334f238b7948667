"""Where a rank is: what Lightning asks a strategy about processes, their groups, and messages between them."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_5d.layout import Layout
from lightning_5d.lightning_private import (
    SubprocessScriptLauncher,
    default_process_group_backend,
    init_dist_connection,
    sync_ddp_if_available,
)
from lightning_5d.mesh import Mesh, build_mesh
from lightning_5d.pipeline.logs import SYNCHRONISED
from lightning_5d.support import refuse_layout


class RankedStrategy(ParallelStrategy):
    """A layout's ranks: the mesh, a rank's place in it, how processes start and meet. See :class:`LayoutStrategy`."""

    def __init__(
        self,
        layout: str | Layout,
        process_group_backend: str | None,
        timeout_s: float,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        precision_plugin: Precision | None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, precision_plugin=precision_plugin)
        self.layout = Layout.parse(layout) if isinstance(layout, str) else layout
        refuse_layout(self.layout)
        self.num_nodes = 1
        self._backend, self._timeout = process_group_backend, datetime.timedelta(seconds=timeout_s)
        self._mesh: Mesh | None = None

    @property
    def is_distributed(self) -> bool:
        """Asked for by Lightning, which otherwise injects no sampler and switches ``sync_dist`` off."""
        return True

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def mesh(self) -> Mesh:
        if self._mesh is None:
            raise RuntimeError("strategy.mesh exists once the processes have met: in setup(), configure_model() and later")
        return self._mesh

    @property
    def dp_rank(self) -> int:
        return self.mesh.dp_rank

    @property
    def dp_size(self) -> int:
        return self.mesh.size("dp")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.dp_size, "rank": self.dp_rank}

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
            # The first moment at which the number of ranks is known.
            self.layout = self.layout.resolve(self.world_size)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        device = self.root_device
        backend = self._backend or default_process_group_backend(device)
        device_id = device if device.type != "cpu" else None
        init_dist_connection(self.cluster_environment, backend, timeout=self._timeout, device_id=device_id)
        if self._mesh is None:
            self._mesh = build_mesh(self.layout, device.type)

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if dist.get_backend() == "nccl" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if group is SYNCHRONISED or not isinstance(tensor, Tensor):
            return tensor
        return sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
