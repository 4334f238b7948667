"""A user's own DataLoader, where Lightning would give it a sampler: turned into one that knows its position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_5d.data.position import GlobalOrder, PositionedLoader
from lightning_5d.seeding import keyed_seed

_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def resumable(dataloader: Any) -> Any:
    """A loader of the same samples per batch that resumes exactly, under any data-parallel size; or ``dataloader`` itself.

    Replaced is a plain DataLoader over a map-style data set with the DistributedSampler that Lightning (or the user) gave it.
    Shuffling, seed, replicas and ``drop_last`` are the sampler's and the loader's. A last batch that is kept though not full is
    cut to a multiple of the replicas, where the sampler would repeat samples. A data set may have an attribute
    ``fingerprint``, a text that changes with its contents: a checkpoint then refuses other contents, not only another size.
    """
    if type(dataloader) is not DataLoader or type(dataloader.sampler) is not DistributedSampler:
        return dataloader
    dataset, sampler, batch_size = dataloader.dataset, dataloader.sampler, dataloader.batch_size
    if (
        isinstance(dataset, IterableDataset)
        or not isinstance(dataset, Sized)
        or type(dataloader.batch_sampler) is not BatchSampler
    ):
        return dataloader
    assert batch_size is not None, "a loader with torch's batch sampler has a batch size"
    order = GlobalOrder(len(dataset), batch_size * sampler.num_replicas, sampler.seed, sampler.shuffle, dataloader.drop_last)
    if order.num_batches(sampler.num_replicas) == 0:
        return dataloader  # smaller than one sample for each replica, or than a batch: the sampler repeats samples
    return ResumableLoader(dataloader, order, sampler.rank, sampler.num_replicas)


class ResumableLoader(PositionedLoader):
    """A :class:`PositionedLoader` that fetches with a DataLoader like the given one, its workers and all."""

    def __init__(self, like: DataLoader, order: GlobalOrder, dp_rank: int, dp_size: int) -> None:
        fingerprint = str(getattr(like.dataset, "fingerprint", ""))
        super().__init__(like.dataset, order, dp_rank, dp_size, fingerprint=fingerprint)
        self._batches = _Batches(order, dp_rank, dp_size)
        # A generator of its own: else an iteration would draw from training's random numbers, and a resumed run one more.
        self._generator = torch.Generator()
        options = {name: getattr(like, name) for name in _OPTIONS}
        self._fetcher: DataLoader = DataLoader(
            like.dataset,
            batch_sampler=self._batches,
            generator=self._generator,
            **options,  # type: ignore[arg-type]
        )

    @property
    def batch_size(self) -> int:
        """Samples in a full batch of this replica."""
        return self.order.global_batch_size // self.dp_size

    @property
    def num_workers(self) -> int:
        return self._fetcher.num_workers

    @property
    def worker_init_fn(self) -> Callable[[int], None] | None:
        """Lightning sets it for ``seed_everything(workers=True)``."""
        return self._fetcher.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, value: Callable[[int], None] | None) -> None:
        self._fetcher.worker_init_fn = value

    def _loader(self, epoch: int, consumed: int) -> DataLoader:
        self._batches.epoch, self._batches.consumed = epoch, consumed
        self._generator.manual_seed(keyed_seed(self.order.seed, "workers", epoch, consumed))
        return self._fetcher


class _Batches:
    """A batch sampler that starts where it was last told to."""

    def __init__(self, order: GlobalOrder, dp_rank: int, dp_size: int) -> None:
        self.order, self.dp_rank, self.dp_size = order, dp_rank, dp_size
        self.epoch = self.consumed = 0

    def __iter__(self) -> Iterator[list[int]]:
        return self.order.batches(self.epoch, self.consumed, self.dp_rank, self.dp_size)

    def __len__(self) -> int:
        return self.order.num_batches(self.dp_size, self.consumed)
