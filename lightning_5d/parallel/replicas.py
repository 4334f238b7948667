"""Plain data parallelism (``zero0``): whole parameters on every replica, one all-reduce a group of gradients and step.

A group is a layer, or several small ones. Groups are reduced in one order, the last layer's first, each as soon as the step's
last backward has its gradients. What is left in the module is reduced last: it holds the embedding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

MIN_GROUP_BYTES = 4 << 20
"""Layers whose gradients are smaller share a group: below some megabytes an all-reduce takes as long as a small one."""


class _Group:
    """The parameters of one layer or a few, or of what no layer holds."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.used: list[nn.Parameter] | None = None
        """Those that get gradients on some replica; known after the first step."""
        self.unused: list[nn.Parameter] = []
        self.num_awaited = 0
        self.flat: Tensor | None = None
        self.work: Any = None

    def launch(self, group: dist.ProcessGroup) -> None:
        assert self.used is not None
        self.flat = torch.cat([_gradient(p).reshape(-1).float() for p in self.used]) if self.used else None
        if self.flat is not None:
            self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def finish(self) -> None:
        if self.flat is None or self.used is None:
            return
        self.work.wait()
        for parameter, part in zip(self.used, self.flat.split([_gradient(p).numel() for p in self.used]), strict=True):
            gradient = _gradient(parameter)
            if gradient is parameter.grad and gradient.dtype == part.dtype:
                parameter.grad = part.view_as(gradient)  # a view of the sum: no copy
            else:
                gradient.copy_(part.view_as(gradient))
        self.flat = self.work = None


class Replicas:
    """The same interface as :class:`DataParallel`, without sharding. Gradients are summed, in float32."""

    def __init__(self, group: dist.ProcessGroup, min_group_bytes: int = MIN_GROUP_BYTES) -> None:
        self.group, self.min_group_bytes = group, min_group_bytes
        self._groups: list[_Group] = []
        self._seen: set[nn.Parameter] = set()
        self._is_last = False
        self._next = 0

    def wrap_layer(self, layer: nn.Module) -> None:
        self._groups.insert(0, self._group_of(layer))

    def wrap_root(self, root: nn.Module) -> None:
        self._groups.append(self._group_of(root))
        self._groups = _merged(self._groups, self.min_group_bytes)
        for group in self._groups[:-1]:  # the last one is complete only when the backward ends: launch_rest
            for parameter in group.parameters:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda p, group=group: self._on_gradient(group))

    def _group_of(self, module: nn.Module) -> _Group:
        parameters = [p for p in dict.fromkeys(module.parameters()) if p not in self._seen]
        self._seen.update(parameters)
        return _Group(parameters)

    def before_first_backward(self) -> None:
        self._is_last = False

    def before_last_backward(self) -> None:
        self._is_last, self._next = True, 0
        for group in self._groups:
            group.num_awaited = len(group.used) if group.used is not None else -1

    def _on_gradient(self, group: _Group) -> None:
        if not self._is_last:
            return
        group.num_awaited -= 1
        # In one order on every rank, whatever order the gradients come in.
        while self._next < len(self._groups) and self._groups[self._next].num_awaited == 0:
            self._groups[self._next].launch(self.group)
            self._next += 1

    def launch_rest(self) -> None:
        """Starts what the last backward could not: groups without a gradient on this rank, and all of them at the first step."""
        self._is_last = False
        for group in self._groups[self._next :]:
            if group.used is None:
                self._agree_on_used(group)
            group.launch(self.group)
        self._next = len(self._groups)
        late = [p for group in self._groups for p in group.unused if p.grad is not None]
        if late:
            raise ValueError(
                f"{len(late)} parameters (the first of shape {tuple(late[0].shape)}) get their first gradient after the first "
                "step, when replicas had agreed on what to reduce: let every parameter take part in the first step"
            )

    def finish(self) -> None:
        """Waits for the sums and puts them into the gradients."""
        for group in self._groups:
            group.finish()

    def reshard(self) -> None:
        """Nothing is gathered."""

    def _agree_on_used(self, group: _Group) -> None:
        """Once: the parameters that get gradients, on any replica. One host synchronisation a group in a run."""
        if not group.parameters:
            group.used = []
            return
        flags = torch.tensor([p.grad is not None for p in group.parameters], dtype=torch.int32, device=group.parameters[0].device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        is_used = [bool(flag) for flag in flags.tolist()]
        group.used = [p for p, used in zip(group.parameters, is_used, strict=True) if used]
        group.unused = [p for p, used in zip(group.parameters, is_used, strict=True) if not used]


def _merged(groups: list[_Group], min_bytes: int) -> list[_Group]:
    """Neighbours together until they have ``min_bytes`` of gradients, in the same order."""
    merged: list[_Group] = []
    size_bytes = min_bytes
    for group in groups:
        if size_bytes >= min_bytes:
            merged.append(_Group([]))
            size_bytes = 0
        merged[-1].parameters += group.parameters
        size_bytes += sum(4 * _numel(p) for p in group.parameters if p.requires_grad)
    return merged


def _numel(parameter: nn.Parameter) -> int:
    """Elements on this rank."""
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The local gradient; zeros when this replica's data did not use the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
