"""Whether a checkpoint can hold an optimizer, found out before the first step rather than at the first save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from lightning_5d.checkpoint.state import check_slot, name_of


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
