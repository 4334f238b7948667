"""The states of the random number generators of one rank, as tensors under ``rng.<rank>.<kind>``.

They go on exactly where they stopped under the same layout; under another one there is nothing they could mean.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch


def rng_tensors(rank: int) -> dict[str, torch.Tensor]:
    """The states of torch (and its current accelerator device), Python and NumPy; copies, on the CPU."""
    states = {"torch": torch.get_rng_state(), "python": _encode(random.getstate()), "numpy": _encode(_numpy_state())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"rng.{rank}.{kind}": state for kind, state in states.items()}


def restore_rng(rank: int, tensors: dict[str, torch.Tensor]) -> None:
    """Puts back what ``rng_tensors`` of the same rank gave."""
    states = {key.split(".", 2)[2]: tensor for key, tensor in tensors.items() if key.startswith(f"rng.{rank}.")}
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "python" in states:
        version, numbers, gauss_next = _decode(states["python"])
        random.setstate((version, tuple(numbers), gauss_next))
    if "numpy" in states:
        name, keys, position, has_gauss, cached = _decode(states["numpy"])
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def _numpy_state() -> list[Any]:
    state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = state
    return [name, keys.tolist(), int(position), int(has_gauss), float(cached)]


def _encode(state: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def _decode(tensor: torch.Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))
