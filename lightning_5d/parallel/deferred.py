"""What a constructor does to tensors on the meta device, written down, and done again for one tensor at a time with real values.

So a module that gives its own parameters their values (``nn.init.normal_(self.out.weight, std=0.02)``, a leaf without
``reset_parameters``) starts from those values, though no rank ever builds it whole. Random numbers are keyed by the seed and the
place of the draw in the record, which is the same on every rank: every layout starts from the same weights, and a tensor that
was copied from another equals it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_5d.seeding import keyed_rng

_LEAVES_UNSET = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class NotRecorded(Exception):
    """A value depends on a tensor of which the record does not say where it came from."""


@dataclass(frozen=True)
class Place:
    """Where in which storage a tensor lies: what stays of it when modules move or cast their parameters."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        storage = tensor.untyped_storage()._cdata
        return cls(storage, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


@dataclass(frozen=True)
class _Call:
    function: Any
    args: Any
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]  # kept, so that no other tensor takes their storage's place


class Record(TorchDispatchMode):
    """A mode: while it is on, operations that make or change tensors on the meta device are written down."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._writers: dict[int, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        out = func(*args, **kwargs)
        outputs = tuple(leaf for leaf in tree_leaves(out) if _on_meta(leaf))
        if outputs:
            names = {argument.name for argument in func._schema.arguments}
            if "dtype" in names and kwargs.get("dtype") is None and len(outputs) == 1:
                kwargs["dtype"] = outputs[0].dtype  # the default dtype may be another when it is done again
            for storage in {Place.of(output).storage for output in outputs}:
                self._writers.setdefault(storage, []).append(len(self._calls))
            self._calls.append(_Call(func, args, kwargs, outputs))
        return out

    def knows(self, place: Place) -> bool:
        return place.storage in self._writers

    def value(self, place: Place, seed: int, device: torch.device) -> Tensor:
        """A tensor on ``device`` with the values that were given to the one at ``place``.

        What was given none is NaN, or the smallest integer.
        Raises :class:`NotRecorded` when they depend on data that went to the meta device.
        """
        real: dict[int, Tensor] = {}  # storage -> all of it, flat

        def at(where: Place) -> Tensor:
            flat = real.get(where.storage)
            if flat is None or flat.dtype != where.dtype:
                raise NotRecorded
            return flat.as_strided(where.shape, where.stride, where.offset)

        def made_real(leaf: Any) -> Any:
            if _on_meta(leaf):
                return at(Place.of(leaf))
            if isinstance(leaf, torch.device) and leaf.type == "meta":
                return device
            return leaf.to(device) if isinstance(leaf, Tensor) else leaf

        for index in sorted(self._needed(place.storage)):
            call = self._calls[index]
            args, kwargs = tree_map(made_real, (call.args, call.kwargs))
            draws = torch.Tag.nondeterministic_seeded in call.function.tags
            keyed = keyed_rng(seed, f"draw {index}", device=device) if draws else contextlib.nullcontext()
            with torch.no_grad(), keyed:
                out = call.function(*args, **kwargs)
            for meta, made in zip(call.outputs, (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)), strict=True):
                where = Place.of(meta)
                if where.storage in real:
                    continue  # changed in place, or a view
                if where.offset or not meta.is_contiguous() or made.stride() != where.stride:
                    raise NotRecorded
                if call.function._schema.name.removeprefix("aten::") in _LEAVES_UNSET:
                    made.fill_(unset_value(made.dtype))
                real[where.storage] = made.view(-1)
        return at(place)

    def _needed(self, storage: int) -> set[int]:
        """The calls that the values in ``storage`` depend on."""
        needed: set[int] = set()
        ahead, seen = [storage], {storage}
        while ahead:
            for index in self._writers.get(ahead.pop(), ()):
                if index in needed:
                    continue
                needed.add(index)
                inputs = [leaf for leaf in tree_leaves((self._calls[index].args, self._calls[index].kwargs)) if _on_meta(leaf)]
                new = {Place.of(leaf).storage for leaf in [*inputs, *self._calls[index].outputs]} - seen
                seen |= new
                ahead += new
        return needed


def _on_meta(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def unset_value(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).min
