"""The ranks of a job, under any strategy of Lightning's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer


def data_parallel_size(trainer: Trainer) -> int:
    """Ranks that see different data: the strategy's word, else what it tells the sampler."""
    strategy: Any = trainer.strategy
    size = getattr(strategy, "dp_size", None)
    if size is None:
        size = getattr(strategy, "distributed_sampler_kwargs", {}).get("num_replicas", trainer.world_size)
    return size


def gather(values: list[float], device: torch.device) -> list[list[float]]:
    """``values`` of every rank, by rank: one collective, and the only wait for the device but the stopwatch's."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return [values]
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return torch.stack(rows).tolist()


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
