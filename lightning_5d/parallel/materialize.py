"""Weights for the modules of this rank: from rank 0 for a model that was built, drawn leaf by leaf for one on the meta device.

A leaf's weights depend on the seed and on the leaf's name or on what its constructor did, so every layout starts from the same
model and no rank ever holds more than its own part and one leaf.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_5d.parallel.deferred import NotRecorded, Place, Record, unset_value
from lightning_5d.seeding import keyed_rng

Shard = Callable[[nn.Module, str, nn.Parameter], nn.Parameter]


@dataclass(frozen=True)
class Origin:
    """Which leaf a parameter or buffer is drawn with: the first that owns it, in the whole model's order."""

    leaf: nn.Module
    path: str
    """Relative to ``owner``."""
    owner: nn.Module | None
    """The outermost module around the leaf that has ``_init_weights``."""
    seed: int
    name: str
    place: Place | None
    """In the record of the constructor; None when the owner initialises the leaf, or nothing was recorded."""


class Materializer:
    """Made from the whole module before it is cut; then asked for one leaf after another of what is left.

    With the ``record`` of how the module was built, what its constructors gave its tensors is what they start from. Without,
    and where a model has ``_init_weights``, that or a leaf's ``reset_parameters`` is called.
    """

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype | None, record: Record | None = None) -> None:
        self.device, self.dtype, self._record = device, dtype, record
        # A model may say its own seed; rank 0's counts, for a run without seed_everything has another on each rank.
        seeds = [(n, getattr(m, "init_seed", None)) for n, m in module.named_modules() if hasattr(m, "_init_weights")]
        box = [(torch.initial_seed(), dict(seeds))]
        dist.broadcast_object_list(box, src=0)
        self._seed, self._owner_seeds = box[0]
        self._origins: dict[int, Origin] = {}
        self._on_meta: list[Tensor] = []  # kept, so that no other tensor takes their ids
        self._done: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}
        named = dict(module.named_modules())
        for leaf_name, leaf in named.items():
            owner_name = next((n for n in _ancestors(leaf_name) if hasattr(named[n], "_init_weights")), None)
            owner = None if owner_name is None else named[owner_name]
            path = leaf_name.removeprefix(owner_name).lstrip(".") if owner_name else leaf_name
            for name, tensor in [*leaf.named_parameters(recurse=False), *leaf.named_buffers(recurse=False)]:
                if tensor.is_meta and id(tensor) not in self._origins:
                    self._on_meta.append(tensor)
                    place = Place.of(tensor) if owner is None and record is not None else None
                    if record is not None and place is not None and not record.knows(place):
                        place = None
                    seed = self._owner_seeds.get(owner_name) or self._seed
                    self._origins[id(tensor)] = Origin(leaf, path, owner, seed, name, place)

    def fill(self, leaf: nn.Module, shard: Shard | None = None) -> None:
        """Gives ``leaf``'s own parameters and buffers real values on the device; ``shard`` then keeps this rank's part.

        Tied parameters stay one object. Raises ``ValueError`` when a tensor on the meta device has no way to be initialised.
        """
        drawn: dict[int, nn.Module] = {}
        for name, parameter in list(leaf.named_parameters(recurse=False)):
            original, final = self._done.get(id(parameter), (None, None))
            if original is not None and final is not None and original() is parameter:
                done = final()
                if done is None:
                    raise ValueError(
                        f"{type(leaf).__name__}.{name} is shared between layers, which cannot be sharded apart: untie it"
                    )
            else:
                done = self._real(parameter, drawn)
                if shard is not None:
                    done = shard(leaf, name, done)
                self._done[id(parameter)] = self._done[id(done)] = (weakref.ref(parameter), weakref.ref(done))
            leaf._parameters[name] = done  # type: ignore[assignment]
        for name, buffer in list(leaf.named_buffers(recurse=False)):
            value = self._value(buffer, drawn) if buffer.is_meta else buffer
            leaf._buffers[name] = value.to(self.device)

    def _real(self, parameter: nn.Parameter, drawn: dict[int, nn.Module]) -> nn.Parameter:
        value = self._value(parameter, drawn) if parameter.is_meta else parameter.detach()
        value = value.to(self.device, self.dtype if value.is_floating_point() else None)
        if not parameter.is_meta and value.data_ptr() == parameter.data_ptr():
            return parameter
        real = nn.Parameter(value, requires_grad=parameter.requires_grad)
        real.__dict__.update(parameter.__dict__)
        return real

    def _value(self, tensor: Tensor, drawn: dict[int, nn.Module]) -> Tensor:
        origin = self._origins[id(tensor)]
        if self._record is not None and origin.place is not None:
            with contextlib.suppress(NotRecorded):
                recorded = self._record.value(origin.place, origin.seed, self.device)
                _refuse_unset(recorded, origin, origin.name)
                return recorded
        if id(origin.leaf) not in drawn:
            drawn[id(origin.leaf)] = self._draw(origin)
        twin = drawn[id(origin.leaf)]
        value = twin._parameters.get(origin.name)
        return (twin._buffers[origin.name] if value is None else value).detach()  # type: ignore[union-attr]

    def _draw(self, origin: Origin) -> nn.Module:
        """A whole twin of the leaf, initialised the way its model initialises it."""
        leaf = origin.leaf
        twin = copy.copy(leaf)
        twin.__dict__["_parameters"] = {
            n: None if p is None else nn.Parameter(_unset(p, self.device), requires_grad=False)
            for n, p in leaf._parameters.items()
        }
        twin.__dict__["_buffers"] = {
            n: None if b is None else (_unset(b, self.device) if b.is_meta else b.to(self.device))
            for n, b in leaf._buffers.items()
        }
        with torch.no_grad(), keyed_rng(origin.seed, origin.path, device=self.device):
            if origin.owner is not None:
                origin.owner._init_weights(twin)  # type: ignore[operator]
            elif callable(getattr(twin, "reset_parameters", None)):
                twin.reset_parameters()  # type: ignore[operator]
        for name, tensor in [*twin.named_parameters(recurse=False), *twin.named_buffers(recurse=False)]:
            _refuse_unset(tensor, origin, name)
        return twin


def _refuse_unset(tensor: Tensor, origin: Origin, name: str) -> None:
    if _is_unset(tensor):
        raise ValueError(
            f"{origin.path}.{name} ({type(origin.leaf).__name__}) is on the meta device and has no initial value: give the "
            "module reset_parameters(), give its model _init_weights(module), or build the model in __init__"
        )


def _unset(like: Tensor, device: torch.device) -> Tensor:
    """An empty tensor that shows when nothing was written to it: garbage weights must not pass for initial ones."""
    return torch.full(like.shape, unset_value(like.dtype), dtype=like.dtype, device=device)


def _is_unset(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype is not torch.bool and bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _ancestors(name: str) -> list[str]:
    """``a.b.c`` -> ``["", "a", "a.b", "a.b.c"]``: the outermost first."""
    parts = name.split(".") if name else []
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]


def broadcast_from_rank_zero(module: nn.Module, device: torch.device) -> None:
    """Every rank starts from rank 0's values, as under DDP: a module built without a common seed differs from rank to rank."""
    seen: set[int] = set()
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_meta or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        staged = tensor.detach().to(device).contiguous()
        dist.broadcast(staged, src=0)
        if staged.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(staged)
