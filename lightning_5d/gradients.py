"""Gradients between the schedule and the optimizer: set aside, made whole, measured, clipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_5d.mesh import Mesh
from lightning_5d.parallel.tensor import sum_partial_gradients


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_copies(tensor: Tensor, mesh: Mesh) -> int:
    """How many ranks of one pipeline stage hold the same elements as this rank."""
    copies = mesh.size("dp") * mesh.size("cp") * mesh.size("tp")
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if placement.is_partial():
                raise AssertionError("a partial gradient must be summed before it is measured")
            if not placement.is_replicate():  # also FSDP2's strided shard over tp, of which is_shard() is false
                copies //= tensor.device_mesh.size(axis)
    return copies


@dataclass
class TiedCopy:
    """A parameter that two pipeline stages hold, an embedding and its head; equal on both, always."""

    parameter: nn.Parameter
    name: str
    peer: int
    """The other stage's rank in the pipeline group."""
    is_second: bool
    """Counted in the norm on the other stage."""


class Gradients:
    """The gradients of one rank. Order of a step: :meth:`clear`, the schedule, :meth:`make_whole`, :meth:`set_aside`,
    zero_grad, :meth:`put_back`, :meth:`clip_by_norm`.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        mesh: Mesh,
        partial: Callable[[], list[nn.Parameter]] | None,
        tied: Sequence[TiedCopy],
        own_zero_grad: bool = False,
    ) -> None:
        self.parameters = list(dict.fromkeys(parameters))
        self._own_zero_grad = own_zero_grad
        """Whether the user decides what zero_grad drops: the last step's gradients are then kept until it has run, and the new
        ones set aside from it. Lightning's own zero_grad is not called: see lightning_quick.py."""
        self._last: list[Tensor | None] | None = None
        self.mesh, self.tied = mesh, list(tied)
        self._find_partial = partial
        self._partial: list[nn.Parameter] | None = None if partial is not None else []
        self._aside: list[Tensor | None] | None = None
        self._second_copies = {id(t.parameter) for t in self.tied if t.is_second}

    def clear(self) -> None:
        """Drops the last step's gradients: zero_grad would come only after the schedule has run."""
        if self._own_zero_grad:
            self._last = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def make_whole(self) -> None:
        """Sums what no data-parallel reduction sums: parts that tensor-parallel ranks saw, and tied copies on two stages."""
        if self._partial is None and self._find_partial is not None:
            self._partial = self._find_partial()
        if self._partial:
            sum_partial_gradients(self._partial, self.mesh.group("tp"))
        for copy in self.tied:
            if copy.parameter.grad is None:
                continue
            own = local_of(copy.parameter.grad)
            other, group = torch.empty_like(own), self.mesh.group("pp")
            receive = dist.P2POp(dist.irecv, other, group=group, group_peer=copy.peer)
            send = dist.P2POp(dist.isend, own.contiguous(), group=group, group_peer=copy.peer)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            own.add_(other)

    def set_aside(self) -> None:
        """Takes the gradients off the parameters, without a copy, so that the user's own zero_grad does not reach them."""
        if not self._own_zero_grad:
            return
        self._aside = [parameter.grad for parameter in self.parameters]
        last, self._last = self._last or [None] * len(self.parameters), None
        for parameter, gradient in zip(self.parameters, last, strict=True):
            parameter.grad = gradient

    def put_back(self) -> None:
        """Gives the parameters their gradients, on top of what the user's own zero_grad has kept."""
        if self._aside is not None:
            for parameter, gradient in zip(self.parameters, self._aside, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient
                elif gradient is not None:
                    parameter.grad = parameter.grad + gradient
            self._aside = None

    def norm(self, parameters: Iterable[nn.Parameter] | None = None) -> Tensor:
        """The 2-norm over the whole model's gradients, each element once; one all-reduce over the world.

        ``parameters`` limits it to some of this rank's. Every rank must call it, also one without gradients.
        """
        by_copies: dict[int, list[Tensor]] = {}
        for parameter in self.parameters if parameters is None else parameters:
            gradient = parameter.grad
            if gradient is not None and id(parameter) not in self._second_copies:
                by_copies.setdefault(num_copies(gradient, self.mesh), []).append(local_of(gradient))
        device = self.mesh.device_mesh.device_type
        total = torch.zeros(
            (), dtype=torch.float32, device=device if device == "cpu" else torch.device(device, torch.cuda.current_device())
        )
        for copies, gradients in by_copies.items():
            norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
            total = total + torch.stack(norms).square().sum() / copies
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total.sqrt()

    def clip_by_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Scales the gradients so that their global norm is at most ``max_norm``; returns the norm before."""
        parameters = list(parameters)
        norm = self.norm(parameters)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        gradients = [local_of(p.grad) for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, scale)
        return norm


def clip_by_value(parameters: Iterable[nn.Parameter], max_value: float) -> None:
    """Clamps every element of the gradients to ``[-max_value, max_value]``."""
    gradients = [local_of(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_clamp_min_(gradients, -max_value)
        torch._foreach_clamp_max_(gradients, max_value)


def find_tied(module: nn.Module) -> list[list[str]]:
    """Names of each parameter that several modules share."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tied_across_stages(module: nn.Module, tied: list[list[str]], mesh: Mesh) -> list[TiedCopy]:
    """Those of ``tied`` that another pipeline stage holds too. ``module`` is cut; every rank of the pipeline must call it."""
    group = mesh.group("pp")
    own = dict(module.named_parameters(remove_duplicate=False))
    held: list[list[int]] = [[] for _ in range(group.size())]
    dist.all_gather_object(held, [i for i, names in enumerate(tied) if any(n in own for n in names)], group=group)
    copies = []
    for index, names in enumerate(tied):
        stages = [stage for stage, indices in enumerate(held) if index in indices]
        if len(stages) < 2 or mesh.pp_rank not in stages:
            continue
        assert len(stages) == 2, f"{names} on stages {stages}"
        peer = next(stage for stage in stages if stage != mesh.pp_rank)
        name = next(n for n in names if n in own)
        copies.append(TiedCopy(own[name], names[0], peer, is_second=mesh.pp_rank > peer))
    return copies
