"""Compares, once, a layer that was split over tp with the whole layer it was made from.

A plan that was found by names and shapes can be wrong in ways that raise nothing: heads of another width, a matrix split
against its order. So at the first call the stage's first layer is also computed whole, on the same input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_5d.layout import LayoutError
from lightning_5d.parallel.collectives import all_gather_sequence

CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""Arguments that a call changes: the call that is repeated must not see them."""


def verify_first_call(layer: nn.Module, whole: nn.Module, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
    """At ``layer``'s first call compares it with ``whole``, a :func:`meta_copy` of it from before it was split.

    To be called after all other hooks are installed. The check raises :class:`LayoutError` on every rank of the group alike.
    """
    seen: dict[str, Any] = {}

    def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.setdefault("call", (args, kwargs))

    def compare(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        for handle in handles:
            handle.remove()
        args, kwargs = seen.pop("call")
        kwargs = {name: None if name in CACHES else value for name, value in kwargs.items()}
        training = {m: m.training for m in layer.modules()}
        try:
            layer.eval()
            with torch.no_grad():
                split = _first_tensor(layer.forward(*args, **kwargs))
                expected = _first_tensor(_whole_forward(layer, whole, args, kwargs, group, sequence_parallel))
                if sequence_parallel:
                    split = all_gather_sequence(split, group)
                error = (split.float() - expected.float()).norm() / expected.float().norm()
        finally:
            for m, mode in training.items():
                m.training = mode
        tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 5e-2
        if split.shape != expected.shape or (error > tolerance).item():
            raise LayoutError(
                f"{type(whole).__name__} computes something else when it is split over tp{group.size()} "
                f"(relative difference {error:.1e}): say how it splits in LayoutStrategy(plan=ParallelPlan(colwise=..., "
                "rowwise=...)), or use pp, zero3 or ac instead of tp"
            )

    handles = [layer.register_forward_pre_hook(capture, with_kwargs=True), layer.register_forward_hook(compare)]


def _whole_forward(
    layer: nn.Module,
    whole: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    group: dist.ProcessGroup,
    sequence_parallel: bool,
) -> Any:
    state: dict[str, Tensor] = {}
    for name, parameter in layer.named_parameters():
        data = parameter.data
        state[name] = data.full_tensor() if isinstance(data, DTensor) else data
    state |= dict(layer.named_buffers())
    if sequence_parallel:
        if args:
            args = (all_gather_sequence(args[0], group), *args[1:])
        else:
            name = next(n for n, v in kwargs.items() if isinstance(v, Tensor) and v.is_floating_point() and v.ndim == 3)
            kwargs = {**kwargs, name: all_gather_sequence(kwargs[name], group)}
    return torch.func.functional_call(whole.eval(), state, args, kwargs)


def _first_tensor(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out
