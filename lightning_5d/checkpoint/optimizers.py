"""What optimizers keep, by canonical name: their tensors, their slots before loading, their groups, and what cannot be stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_5d.checkpoint.names import Names, listing

# Of a parameter group: what is not a hyper-parameter.
_NOT_HYPER = {"params", "param_names", "ordered"}


def optimizer_tensors(
    optimizers: Sequence[torch.optim.Optimizer], param_names: Mapping[int, str]
) -> list[tuple[str, torch.Tensor]]:
    """This rank's (``optim.<i>.<slot>.<fqn>``, tensor).

    Raises:
        ValueError: An optimizer has a parameter that the module has not, or state that is neither shaped like its
            parameter nor a single number, and so has no meaning under another layout.
    """
    found = []
    for i, optimizer in enumerate(optimizers):
        for parameter, name in _named(optimizer, param_names):
            for slot, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    check_slot(optimizer, slot, value, parameter, name)
                    found.append((f"optim.{i}.{slot}.{name}", value))
                elif not isinstance(value, (int, float, bool, str, type(None))):
                    raise ValueError(_slot_error(optimizer, slot, name, f"is a {type(value).__name__}"))
    return found


def make_slots(optimizers: Sequence[torch.optim.Optimizer], param_names: Mapping[int, str], saved: Mapping[str, Any]) -> None:
    """Gives every optimizer exactly the slots that a checkpoint has for its parameters, not yet filled.

    torch's own way, a step with learning rate 0, would count as a step. ``saved`` maps keys to torch's ``TensorStorageMetadata``.
    """
    slots: dict[tuple[int, str], dict[str, Any]] = {}
    for key, stored in saved.items():
        if key.startswith("optim."):
            _, index, slot, name = key.split(".", 3)
            slots.setdefault((int(index), name), {})[slot] = stored
    for i, optimizer in enumerate(optimizers):
        groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        for parameter, name in _named(optimizer, param_names):
            wanted = slots.get((i, name), {})
            made = {slot: _empty_slot(slot, stored, parameter, groups[id(parameter)]) for slot, stored in wanted.items()}
            if made:
                optimizer.state[parameter] = made
            else:
                optimizer.state.pop(parameter, None)


def optimizer_groups(optimizers: Sequence[torch.optim.Optimizer], param_names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Of each optimizer this rank's part of: its class, its groups' hyper-parameters and names, its state that is no tensor."""
    described = []
    for optimizer in optimizers:
        groups: list[dict[str, Any]] = []
        scalars: dict[str, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            hyper = {key: value for key, value in group.items() if key not in _NOT_HYPER}
            groups.append({**hyper, "params": [name_of(parameter, param_names, optimizer) for parameter in group["params"]]})
        for parameter, name in _named(optimizer, param_names):
            plain = {
                slot: value for slot, value in optimizer.state.get(parameter, {}).items() if not isinstance(value, torch.Tensor)
            }
            if plain:
                scalars[name] = plain
        described.append({"optimizer": type(optimizer).__name__, "groups": groups, "scalars": scalars})
    return described


def merge_groups(parts: Sequence[Sequence[dict[str, Any]]], names: Names) -> list[dict[str, Any]]:
    """The whole model's description from that of every rank: hyper-parameters of the first, names of all.

    The order of a group's parameters is what configure_optimizers gives in one process, as far as the ranks show it; where the
    parts of several stages cannot be put in order, ``ordered`` is false.
    """
    place = {name: i for i, name in enumerate(names.specs)}
    tied = {shared[0] for shared in names.tied}  # its copy on the last stage stands elsewhere, and shows nothing
    merged = []
    for of_one_optimizer in zip(*parts, strict=True):
        groups = []
        for of_one_group in zip(*(part["groups"] for part in of_one_optimizer), strict=True):
            lists = [group["params"] for group in of_one_group]
            params = list(dict.fromkeys(name for part in lists for name in part))
            whole = next((part for part in lists if len(part) == len(params)), None)
            by_place = sorted(params, key=place.__getitem__)
            shown = [[name for name in part if name not in tied] for part in lists]
            in_place = all(part == sorted(part, key=place.__getitem__) for part in shown)
            ordered = whole or (by_place if in_place else None)
            groups.append({**of_one_group[0], "params": ordered or params, "ordered": ordered is not None})
        scalars = {name: slots for part in of_one_optimizer for name, slots in part["scalars"].items()}
        merged.append({"optimizer": of_one_optimizer[0]["optimizer"], "groups": groups, "scalars": scalars})
    return merged


def check_groups(current: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]) -> None:
    """Raises ``ValueError`` when the whole model's optimizers (``merge_groups``) are not those that were saved."""
    if len(current) != len(saved):
        raise ValueError(f"the checkpoint has {len(saved)} optimizers, configure_optimizers gives {len(current)}")
    for i, (now, then) in enumerate(zip(current, saved, strict=True)):
        if now["optimizer"] != then["optimizer"]:
            raise ValueError(
                f"optimizer {i} was {then['optimizer']} in the checkpoint, and is {now['optimizer']}; its state has no use here"
            )
        if len(now["groups"]) != len(then["groups"]):
            counts = f"{len(then['groups'])} parameter groups in the checkpoint, and has {len(now['groups'])}"
            raise ValueError(f"optimizer {i} ({now['optimizer']}) had {counts}")
        for j, (group_now, group_then) in enumerate(zip(now["groups"], then["groups"], strict=True)):
            added = sorted(set(group_now["params"]) - set(group_then["params"]))
            gone = sorted(set(group_then["params"]) - set(group_now["params"]))
            if added or gone:
                raise ValueError(
                    f"parameter group {j} of optimizer {i} ({now['optimizer']}) is not the one in the checkpoint:"
                    + (f" new in it: {listing(added)}." if added else "")
                    + (f" no longer in it: {listing(gone)}." if gone else "")
                    + " Restore the groups (and what is frozen) as they were, or load the weights alone."
                )


def restore_groups(
    optimizers: Sequence[torch.optim.Optimizer], saved: Sequence[dict[str, Any]], param_names: Mapping[int, str]
) -> None:
    """Gives the groups the saved hyper-parameters (schedulers read them) and the parameters the state that is no tensor."""
    for optimizer, description in zip(optimizers, saved, strict=True):
        for group, then in zip(optimizer.param_groups, description["groups"], strict=True):
            for key, value in then.items():
                if key in _NOT_HYPER:
                    continue
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)  # kept: a captured step or a scheduler may hold on to this tensor
                else:
                    group[key] = value
        for parameter, name in _named(optimizer, param_names):
            if name in description["scalars"]:
                optimizer.state[parameter].update(description["scalars"][name])


def check_slot(optimizer: torch.optim.Optimizer, slot: str, value: torch.Tensor, parameter: torch.Tensor, name: str) -> None:
    """Raises ``ValueError`` when optimizer state can be neither sharded like its parameter nor kept whole as one number."""
    if value.shape != parameter.shape and value.numel() != 1:
        raise ValueError(
            _slot_error(optimizer, slot, name, f"has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}")
        )


def check_shardable(optimizer: torch.optim.Optimizer) -> None:
    """Takes a step with a small copy of the optimizer and looks at the state it keeps.

    Raises:
        ValueError: Parameters are sharded, and the optimizer's state is neither shaped like its parameter nor a single number.
    """
    if not any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"]):
        return
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    parameter.grad = torch.ones(3, 2)
    try:
        probe = type(optimizer)([parameter], **optimizer.defaults)
        probe.step()
    except Exception:
        return  # its constructor or step is its own (a wrapper, a closure); the first save checks the state itself
    for slot, value in probe.state[parameter].items():
        if isinstance(value, torch.Tensor):
            check_slot(optimizer, slot, value, parameter, "every parameter")


def group_indices(optimizers: Sequence[torch.optim.Optimizer], param_names: Mapping[int, str]) -> dict[str, tuple[int, int]]:
    """The (optimizer, group) that each of this rank's parameters is in.

    Raises:
        ValueError: An optimizer has a tensor that is no parameter of the module.
    """
    return {
        name_of(parameter, param_names, optimizer): (i, j)
        for i, optimizer in enumerate(optimizers)
        for j, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def check_tied_groups(indices: Sequence[Mapping[str, tuple[int, int]]], tied: Sequence[Sequence[str]]) -> None:
    """Raises ``ValueError`` when the copies of a tied parameter are in different groups on different ranks, and would drift."""
    for names in tied:
        found = {of_rank[names[0]] for of_rank in indices if names[0] in of_rank}
        if len(found) > 1:
            places = " and ".join(f"group {j} of optimizer {i}" for i, j in sorted(found))
            raise ValueError(
                f"{' and '.join(names)} are one tied parameter, but configure_optimizers put its copies on different pipeline "
                f"stages into {places}. A filter by name sees each stage's own name: sort by shape, or treat both names alike."
            )


def _named(optimizer: torch.optim.Optimizer, param_names: Mapping[int, str]) -> list[tuple[torch.Tensor, str]]:
    return [
        (parameter, name_of(parameter, param_names, optimizer))
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def name_of(parameter: torch.Tensor, param_names: Mapping[int, str], optimizer: torch.optim.Optimizer) -> str:
    """The canonical name of an optimizer's parameter. Raises ``ValueError`` when the module has no such parameter."""
    try:
        return param_names[id(parameter)]
    except KeyError:
        raise ValueError(
            f"{type(optimizer).__name__} optimizes a tensor of shape {tuple(parameter.shape)} that is not the module's. "
            "Under a layout parameters are replaced when the module is cut and sharded: build the optimizer in "
            "configure_optimizers, from self.parameters() or self.named_parameters()."
        ) from None


def _slot_error(optimizer: torch.optim.Optimizer, slot: str, name: str, what: str) -> str:
    return (
        f"{type(optimizer).__name__} keeps a state {slot!r} for {name} that {what}: it cannot be sharded with the parameter, "
        "so it cannot be checkpointed under a layout. Use an optimizer whose state has the parameter's shape, such as AdamW, "
        "SGD, RMSprop or NAdam."
    )


def _empty_slot(slot: str, stored: Any, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    shape, dtype = tuple(stored.size), stored.properties.dtype
    if shape == tuple(parameter.shape) and slot != "step":
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # Where torch's Optimizer.load_state_dict puts single numbers.
    on_device = slot != "step" or group.get("capturable") or group.get("fused")
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return torch.empty(shape, dtype=dtype, device=local.device if on_device else "cpu")
