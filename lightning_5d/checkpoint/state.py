"""A module and its optimizers as one flat dict of canonical names, and back. Pure functions: no files, no communication.

    model.<fqn>                a parameter or persistent buffer
    optim.<i>.<slot>.<fqn>     what optimizer i keeps for a parameter: exp_avg, momentum_buffer, step, ...
    entry.<entry>.<fqn>        what a callback keeps for a parameter or buffer: an average of the weights

Each rank's dict holds what it owns, plain tensors or DTensors; a key that several ranks hold is one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_5d.checkpoint.names import Names, listing, persistent_tensors, plain
from lightning_5d.checkpoint.optimizers import optimizer_tensors


def parameter_names(module: nn.Module, names: Names) -> dict[int, str]:
    """``id`` of each parameter of this rank to its canonical name."""
    return {id(parameter): names.canonical(fqn) for fqn, parameter in module.named_parameters(remove_duplicate=False)}


def model_tensors(module: nn.Module, names: Names) -> list[tuple[str, torch.Tensor]]:
    """This rank's (``model.<fqn>``, tensor), detached; a name twice when a tied parameter has two copies on this rank."""
    nn.Module.state_dict(module)  # for its hooks: FSDP puts the sharded parameters back
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for fqn, tensor in persistent_tensors(module):
        found.setdefault(id(tensor), (f"model.{names.canonical(fqn)}", tensor.detach()))
    return list(found.values())


def collect(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: Names) -> dict[str, torch.Tensor]:
    """Everything this rank writes. The tensors are the live ones, not copies."""
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in [*model_tensors(module, names), *optimizer_tensors(optimizers, parameter_names(module, names))]:
        tensors.setdefault(key, tensor)  # of two copies of a tied parameter, the first
    return tensors


def split_state_dict(state_dict: Mapping[str, Any], names: Names) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The parameters and buffers of a state dict under their keys, and what else is in it: extra states, states of metrics."""
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, Any] = {}
    for fqn, value in state_dict.items():
        if fqn in names and isinstance(value, torch.Tensor):
            tensors.setdefault(f"model.{names.canonical(fqn)}", value)
        else:
            rest[plain(fqn)] = value
    return tensors, rest


def split_entries(entries: Mapping[str, Any], names: Names) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Entries that are dicts of the model's names, as tensors under ``entry.<entry>.<fqn>``, and the other entries.

    Raises:
        ValueError: Another entry holds a DTensor, of which rank 0, whose entries are stored, has a part only.
    """
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}
    for entry, value in entries.items():
        is_named = (
            isinstance(value, Mapping) and value and all(fqn in names and isinstance(t, torch.Tensor) for fqn, t in value.items())
        )
        if is_named and entry != "state_dict":
            for fqn, tensor in value.items():
                tensors.setdefault(f"entry.{entry}.{names.canonical(fqn)}", tensor)
        else:
            others[entry] = value
            if _holds_shard(value):
                raise ValueError(
                    f"the checkpoint entry {entry!r} holds a sharded tensor (DTensor), of which this rank has a part only. Store "
                    "whole tensors (tensor.full_tensor()), or a dict of the model's own names with tensors sharded like its own."
                )
    return tensors, others


def load_rest(module: nn.Module, rest: Mapping[str, Any]) -> None:
    """Gives back what ``split_state_dict`` set apart, to the modules of this rank that have it."""
    own = {plain(name): name for name in nn.Module.state_dict(module)}
    here = {own[name]: value for name, value in rest.items() if name in own}
    if here:
        nn.Module.load_state_dict(module, here, strict=False)


def compare_names(names: Names, saved: Iterable[str]) -> tuple[list[str], list[str]]:
    """The names that the whole model has and the checkpoint has not, and the reverse."""
    stored = {key.removeprefix("model.") for key in saved if key.startswith("model.")}
    return sorted(set(names.specs) - stored), sorted(stored - set(names.specs))


def mismatch(
    path: str, names: Names, missing: Sequence[str], unexpected: Sequence[str], tied_then: Sequence[Sequence[str]]
) -> str:
    """The message for a checkpoint of another model."""
    text = f"{path} is not a checkpoint of this model."
    if missing:
        text += f" Missing in it: {listing(missing)}."
    if unexpected:
        text += f" Not in the model: {listing(unexpected)}."
    for shared in tied_then:
        if set(missing) & set(shared):
            text += f" When it was saved, {' and '.join(shared)} were tied; now they are not."
    for shared in names.tied:
        if set(unexpected) & set(shared):
            text += f" {' and '.join(shared)} are tied now; when it was saved, they were not."
    return text + " To load what fits and keep the rest as it is, set strict_loading=False on the module."


def _holds_shard(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_shard(item) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_holds_shard(item) for item in value)
    return isinstance(value, DTensor)
