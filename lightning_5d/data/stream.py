"""A stream of samples shared out over data-parallel replicas: what a sampler does for data that has an index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info


class ShardedStream(IterableDataset):
    """Of each ``dp_size`` samples of a stream, the one that is this replica's; with workers, each takes every n-th round.

    All ranks of a replica see the same samples, replicas share them out, and all get equally many: samples behind the last
    whole round are left out, since a replica with one batch more would wait for the others for ever.

    Args:
        stream: Gives the same samples in the same order on every rank and in every worker: it must not share them out itself.
        dp_rank, dp_size: ``trainer.strategy.dp_rank`` and ``.dp_size``.
    """

    def __init__(self, stream: Iterable[Any], dp_rank: int, dp_size: int) -> None:
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank={dp_rank} of dp_size={dp_size}: allowed are 0 to dp_size - 1")
        self.stream, self.dp_rank, self.dp_size = stream, dp_rank, dp_size

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        mine = None
        for index, sample in enumerate(self.stream):
            turn, place = divmod(index, self.dp_size)
            if turn % num_workers != worker:
                continue
            if place == self.dp_rank:
                mine = sample
            if place == self.dp_size - 1:
                yield mine
