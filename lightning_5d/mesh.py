"""Layout -> DeviceMesh: which rank sits where, and which ranks talk to which.

Axes from the outside in: ``pp``, ``dp``, ``cp``, ``tp``. Tensor-parallel ranks are neighbours, so that the most talkative
group stays inside a node; pipeline stages, which say least, are farthest apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_5d.layout import Layout

AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """The device mesh of a resolved layout, and this rank's place in it."""

    device_mesh: DeviceMesh
    pp_rank: int
    dp_rank: int
    cp_rank: int
    tp_rank: int

    def __getitem__(self, axis: str) -> DeviceMesh:
        return self.device_mesh[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along one axis."""
        return self.device_mesh.get_group(axis)

    def size(self, axis: str) -> int:
        return self.device_mesh.size(AXES.index(axis))


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """The mesh of a resolved layout. Every rank of the world must call it, after the process group exists."""
    assert layout.dp is not None, "resolve(world_size) comes first"
    sizes = (layout.pp, layout.dp, layout.cp, layout.tp)
    device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None, "every rank of the world is in the mesh"
    return Mesh(device_mesh, *coordinate)


def host_group(mesh: Mesh, axis: str, device_type: str) -> dist.ProcessGroup | None:
    """A gloo group of this rank along one axis, for what the host must know; None where it is alone.

    Every rank of the world must call it.
    """
    if mesh.size(axis) == 1:
        return None
    if device_type == "cpu":
        return mesh.group(axis)
    lines = mesh.device_mesh.mesh.movedim(AXES.index(axis), -1).flatten(0, -2).tolist()
    groups = {tuple(line): dist.new_group(line, backend="gloo") for line in lines}
    return next(group for line, group in groups.items() if dist.get_rank() in line)
