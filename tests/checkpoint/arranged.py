"""A small model under any arrangement of dp, tp and pp by hand, with made-up gradients: no forward pass, no strategy.

It has what makes checkpoints hard: a tied weight on the first and the last stage, a vocabulary that divides by nothing, frozen
parameters, a parameter group that is empty on some stages, a persistent and a non-persistent buffer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_5d.checkpoint import Names
from lightning_5d.checkpoint.state import parameter_names

VOCAB, HIDDEN, NUM_LAYERS = 67, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 12)


class Model(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.0, 2.0]))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.layers[1].norm.weight.requires_grad_(False)
        self.layers[3].up.weight.requires_grad_(False)


def axes(layout: str) -> dict[str, int]:
    sizes = {"dp": 1, "tp": 1, "pp": 1, "zero": 0}
    for name, value in re.findall(r"(dp|tp|pp|zero)(\d+)", layout):
        sizes[name] = int(value)
    return sizes


def world_size(layout: str) -> int:
    sizes = axes(layout)
    return sizes["dp"] * sizes["tp"] * sizes["pp"]


class Arranged:
    """The part of the model that this rank has under ``layout``, and its optimizers."""

    def __init__(
        self, layout: str, seed: int = 0, make_optimizers: Callable[[nn.Module], list] | None = None, tied: bool = True
    ) -> None:
        torch.manual_seed(seed)
        self.layout, sizes = layout, axes(layout)
        self.module = Model(tied)
        self.names = Names.of(self.module)
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (sizes["dp"], sizes["pp"], sizes["tp"]), mesh_dim_names=("dp", "pp", "tp"))
            _keep_stage(self.module, mesh.get_local_rank("pp"), sizes["pp"])
            if sizes["tp"] > 1:
                _shard_tensors(self.module, mesh["tp"])
            if sizes["dp"] > 1 and sizes["zero"]:
                for layer in self.module.layers._modules.values():
                    fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=sizes["zero"] == 3)
                fully_shard(self.module, mesh=mesh["dp"], reshard_after_forward=sizes["zero"] == 3)
        self.optimizers = (make_optimizers or adamw_groups)(self.module)

    def step(self, number: int) -> None:
        """One optimizer step on gradients that depend on the name and the step alone."""
        names = parameter_names(self.module, self.names)
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.grad = _like(parameter, _draw(names[id(parameter)], number, parameter.shape))
        for optimizer in self.optimizers:
            optimizer.step()


def adamw_groups(module: nn.Module) -> list[torch.optim.Optimizer]:
    """Decayed, not decayed, and the head's bias alone: a group that only the last stage has a parameter for."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for name, p in named if p.ndim == 1 and name != "head.bias"], "weight_decay": 0.0},
        {"params": [p for name, p in named if name == "head.bias"], "weight_decay": 0.0, "lr": 3e-3},
    ]
    return [torch.optim.AdamW(groups, lr=1e-2, foreach=False)]


# Of numpy: a torch tensor in a multiprocessing queue dies with the process that sent it.
Piece = tuple[tuple[int, ...], np.ndarray]
Pieces = dict[str, tuple[tuple[int, ...], Piece]]


def pieces(tensors: dict[str, torch.Tensor]) -> Pieces:
    """Of each tensor its global shape, and the offset and a copy of what this rank has of it."""
    found = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            offset = _offset(tensor)
            found[key] = (tuple(tensor.shape), (offset, tensor.to_local().detach().numpy().copy()))
        else:
            found[key] = (tuple(tensor.shape), ((0,) * tensor.ndim, tensor.detach().numpy().copy()))
    return found


def assemble(of_ranks: Iterable[Pieces]) -> dict[str, torch.Tensor]:
    """The whole tensors from the pieces of all ranks; replicas must be equal, and nothing may be left open."""
    whole: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    for of_rank in of_ranks:
        for key, (shape, (offset, array)) in of_rank.items():
            local = torch.from_numpy(array)
            full = whole.setdefault(key, torch.zeros(shape, dtype=local.dtype))
            done = written.setdefault(key, torch.zeros(shape, dtype=torch.bool))
            box = tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))
            assert torch.equal(full[box][done[box]], local[done[box]]), f"replicas of {key} differ"
            full[box] = local
            done[box] = True
    assert all(bool(done.all()) for done in written.values()), "some pieces are on no rank"
    return whole


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 0.0) -> None:
    assert sorted(found) == sorted(expected)
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        torch.testing.assert_close(found[key], tensor, rtol=rtol, atol=0.0, msg=lambda text, key=key: f"{key}: {text}")


def _keep_stage(module: Model, stage: int, num_stages: int) -> None:
    per_stage = NUM_LAYERS // num_stages
    for i in range(NUM_LAYERS):
        if i // per_stage != stage:
            del module.layers._modules[str(i)]
    if stage > 0:
        del module._modules["embed"]
    if stage < num_stages - 1:
        del module._modules["norm"], module._modules["head"]


def _shard_tensors(module: nn.Module, mesh: DeviceMesh) -> None:
    replaced: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is None:
                continue
            placement = Shard(0) if isinstance(child, (nn.Linear, nn.Embedding)) else Replicate()
            if id(parameter) not in replaced:
                tensor = distribute_tensor(parameter.detach(), mesh, [placement])
                replaced[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            child._parameters[name] = replaced[id(parameter)]


def _offset(tensor: DTensor) -> tuple[int, ...]:
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(min(o, n) for o, n in zip(offset, tensor.shape, strict=True))


def _like(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return full
    local = parameter.to_local()
    box = tuple(slice(o, o + n) for o, n in zip(_offset(parameter), local.shape, strict=True))
    return DTensor.from_local(
        full[box].clone(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _draw(name: str, number: int, shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()) * 1000 + number)
    return torch.randn(shape, generator=generator)
