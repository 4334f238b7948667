"""Copies of modules that cost no memory, to look at what a module does without running it on data."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def meta_copy(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on the meta device."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
    memo |= {id(b): b.to("meta") for b in module.buffers()}
    return copy.deepcopy(module, memo)


class _Seen(BaseException):
    def __init__(self, out: Any) -> None:
        super().__init__()
        self.out = out


def layer_returns_tuple(model: nn.Module, layers: str) -> bool | None:
    """Whether the first layer of ``model(input_ids)`` gives a tuple; None when the model does not run on the meta device."""
    twin = meta_copy(model)

    def see(module: nn.Module, args: Any, out: Any) -> None:
        raise _Seen(out)

    next(iter(twin.get_submodule(layers).children())).register_forward_hook(see)
    try:
        with torch.no_grad():
            twin(input_ids=torch.zeros(1, 4, dtype=torch.long, device="meta"))
    except _Seen as seen:
        return isinstance(seen.out, tuple)
    except Exception:  # whatever a model of someone else's does without data; the caller has another way to tell
        return None
    return None
