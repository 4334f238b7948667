"""The names of a model's tensors, taken from the whole module before anything is cut off or sharded.

A checkpoint speaks these names alone, whatever the layout: layer 17 is ``layers.17`` on every pipeline stage, and a
parameter that two modules share has one name, its first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

# Path segments that wrappers insert: torch.compile and activation checkpointing.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def plain(fqn: str) -> str:
    """The name without the segments that ``torch.compile`` and activation checkpointing wrappers insert."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the whole model: its global shape and its dtype when the names were taken."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool


@dataclass(frozen=True)
class Names:
    """Every parameter and persistent buffer of the whole module under its canonical name."""

    specs: dict[str, TensorSpec]
    aliases: dict[str, str] = field(repr=False)
    """Every name to its canonical one; for a tensor that is not shared, itself."""

    @classmethod
    def of(cls, module: nn.Module) -> Names:
        """Takes the names; ``module`` may be on the meta device, and must be whole."""
        specs: dict[str, TensorSpec] = {}
        aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        for fqn, tensor in persistent_tensors(module):
            name = first.setdefault(id(tensor), fqn)
            aliases[fqn] = name
            specs.setdefault(name, TensorSpec(tuple(tensor.shape), tensor.dtype, isinstance(tensor, nn.Parameter)))
        return cls(specs, aliases)

    def canonical(self, fqn: str) -> str:
        """The one name under which ``fqn`` is stored. Raises ``KeyError`` when the whole model has no such tensor."""
        return self.aliases[plain(fqn)]

    def __contains__(self, fqn: object) -> bool:
        return isinstance(fqn, str) and plain(fqn) in self.aliases

    @property
    def tied(self) -> list[list[str]]:
        """The names of each shared tensor, the canonical one first."""
        sets: dict[str, list[str]] = {}
        for fqn, name in self.aliases.items():
            sets.setdefault(name, []).append(fqn)
        return [names for names in sets.values() if len(names) > 1]


def persistent_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (plain name, tensor) that ``module`` has here and a checkpoint holds, shared ones under each of their names."""
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        yield plain(fqn), parameter
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield plain(f"{prefix}.{name}" if prefix else name), buffer


def listing(names: Iterable[str], limit: int = 8) -> str:
    """The names for a message, the first ``limit`` of many."""
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
