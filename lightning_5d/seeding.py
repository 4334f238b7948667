"""Random numbers that depend on what they are for, and not on who draws them.

A weight drawn from ``keyed_seed(seed, "layers.3.mlp.up_proj")`` is the same on every rank and under every layout.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def keyed_seed(seed: int, *key: str | int) -> int:
    """A 63-bit seed from a base seed and a key; the same on every platform and in every process."""
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextlib.contextmanager
def keyed_rng(seed: int, *key: str | int, device: torch.device | None = None) -> Iterator[None]:
    """Inside, torch's default generators (CPU and, if given, one device's) are seeded by the key; after, they are as before."""
    on_accelerator = device is not None and device.type != "cpu"
    devices = [device] if on_accelerator else []
    with torch.random.fork_rng(devices=devices, device_type=device.type if device is not None and on_accelerator else "cuda"):
        torch.manual_seed(keyed_seed(seed, *key))
        yield
