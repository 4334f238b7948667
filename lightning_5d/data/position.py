"""One global sample order and one number, ``consumed``, the same on every rank: any layout continues with the samples due.

A global batch of an epoch holds samples ``order[consumed : consumed + G]`` of one permutation of all samples; data-parallel
rank r of d takes the r-th of d equal, contiguous slices. So the position does not depend on d, nor on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_5d.seeding import keyed_seed


@dataclass(frozen=True)
class GlobalOrder:
    """In which order the samples of an epoch come, and which of them a data-parallel rank takes. Pure: it holds no position.

    Raises:
        ValueError: there are no samples, or the global batch is empty.
    """

    num_samples: int
    """Samples in the data set."""
    global_batch_size: int
    """Samples in a batch, over all data-parallel ranks."""
    seed: int = 0
    """Of the permutations; each epoch has its own."""
    shuffle: bool = True
    """Whether an epoch is permuted at all."""
    drop_last: bool = True
    """Whether a last batch that is not full is left out. If it is kept, it is cut to a multiple of the data-parallel size, so
    that every rank gets as many samples and batches as the others."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"the data set must hold at least one sample, got {self.num_samples}.")
        if self.global_batch_size < 1:
            raise ValueError(f"global_batch_size must be at least 1, got {self.global_batch_size}.")

    def permutation(self, epoch: int) -> torch.Tensor:
        """``[num_samples]`` int64: all sample indices in the order of this epoch."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(keyed_seed(self.seed, "sample order", epoch))
        return torch.randperm(self.num_samples, generator=generator)

    def num_batches(self, dp_size: int = 1, consumed: int = 0) -> int:
        """Batches left in an epoch of which ``consumed`` samples were handed out; the same on every rank."""
        full, rest = divmod(max(0, self.num_samples - consumed), self.global_batch_size)
        return full + (0 if self.drop_last or rest < dp_size else 1)

    def batches(self, epoch: int, consumed: int = 0, dp_rank: int = 0, dp_size: int = 1) -> Iterator[list[int]]:
        """The batches of one data-parallel rank, as lists of sample indices, from ``consumed`` to the end of the epoch.

        Raises:
            ValueError: the global batch does not divide by the data-parallel size.
        """
        check_divides(self.global_batch_size, dp_size)
        order = self.permutation(epoch)
        for _ in range(self.num_batches(dp_size, consumed)):
            size = min(self.global_batch_size, self.num_samples - consumed) // dp_size
            start = consumed + dp_rank * size
            yield order[start : start + size].tolist()
            consumed += self.global_batch_size


def check_divides(global_batch_size: int, dp_size: int) -> None:
    """Raises ValueError, naming both, unless each data-parallel rank can take an equal share of the global batch."""
    if global_batch_size % dp_size:
        below = global_batch_size // dp_size * dp_size
        nearest = " or ".join(str(size) for size in (below, below + dp_size) if size)
        raise ValueError(
            f"global_batch_size {global_batch_size} does not divide by the data-parallel size {dp_size}: each rank must get as "
            f"many sequences. Use {nearest}, or another data-parallel size."
        )


class _Batches:
    """A batch sampler: what DataLoader iterates over."""

    def __init__(self, order: GlobalOrder, epoch: int, consumed: int, dp_rank: int, dp_size: int) -> None:
        self._arguments = (order, epoch, consumed, dp_rank, dp_size)

    def __iter__(self) -> Iterator[list[int]]:
        order, epoch, consumed, dp_rank, dp_size = self._arguments
        return order.batches(epoch, consumed, dp_rank, dp_size)

    def __len__(self) -> int:
        order, _, consumed, _, dp_size = self._arguments
        return order.num_batches(dp_size, consumed)


class ShardedLoader:
    """Iterates over this data-parallel rank's share of a data set, each time from the start: for validation.

    It is not a DataLoader but makes one each time it is iterated over, so that Lightning neither builds it anew nor gives it a
    sampler of its own.

    Args:
        dataset: map-style; sized as ``order`` says.
        order: the global order.
        dp_rank, dp_size: this rank's data-parallel coordinate.
        collate_fn, num_workers, pin_memory: as in torch's DataLoader.

    Raises:
        ValueError: the global batch does not divide by the data-parallel size, or no batch could be made.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: GlobalOrder,
        dp_rank: int = 0,
        dp_size: int = 1,
        collate_fn: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        check_divides(order.global_batch_size, dp_size)
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        assert not isinstance(dataset, Sized) or len(dataset) == order.num_samples, (len(dataset), order.num_samples)
        if order.num_batches(dp_size) == 0:
            raise ValueError(
                f"{order.num_samples} samples do not fill one global batch of {order.global_batch_size}: give more data or a "
                "smaller batch."
            )
        self.dataset, self.order = dataset, order
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self._loader_options = {"collate_fn": collate_fn, "num_workers": num_workers, "pin_memory": pin_memory}

    @property
    def batch_size(self) -> int:
        """Sequences in this rank's part of a batch."""
        return self.order.global_batch_size // self.dp_size

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return self.order.num_batches(self.dp_size)

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader(epoch=0, consumed=0)

    def _loader(self, epoch: int, consumed: int) -> DataLoader:
        batches = _Batches(self.order, epoch, consumed, self.dp_rank, self.dp_size)
        # A generator of its own: an iteration would draw from the random numbers of training, and a resumed run once more.
        generator = torch.Generator().manual_seed(keyed_seed(self.order.seed, "workers", epoch, consumed))
        return DataLoader(self.dataset, batch_sampler=batches, generator=generator, **self._loader_options)  # type: ignore[arg-type]


class PositionedLoader(ShardedLoader):
    """A training loader that knows its position: each iteration goes on at sample ``consumed`` of ``epoch``.

    It hands out ``len(self)`` batches, as many as an epoch holds, and where the epoch ends it continues with the next one. So no
    sample is skipped or repeated when an iteration is cut short, by ``limit_train_batches``, ``max_steps`` or a restart.

    Lightning saves and restores :meth:`state_dict` with the fit loop. The state is the same on every rank, so the one that
    Lightning saves is enough, and it resumes under any data-parallel size, number of workers and global batch size. Counted are
    the batches handed out, not those that workers have fetched ahead.

    Args:
        fingerprint: of the data set's contents; a checkpoint of other data is refused.
    """

    def __init__(self, dataset: Dataset, order: GlobalOrder, *args: Any, fingerprint: str = "", **kwargs: Any) -> None:
        super().__init__(dataset, order, *args, **kwargs)
        self.fingerprint = fingerprint
        self.epoch = 0
        self.consumed = 0

    def __iter__(self) -> Iterator[Any]:
        # A generator: calling iter() alone, as Lightning does to check that a loader can be iterated over, starts nothing.
        num_left = len(self)
        while num_left:
            for batch in self._loader(self.epoch, self.consumed):
                self.consumed = min(self.consumed + self.order.global_batch_size, self.order.num_samples)
                num_left -= 1
                yield batch
                if num_left == 0:
                    return
            self.epoch, self.consumed = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The position, of plain types; the same on every rank."""
        return {
            "seed": self.order.seed,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "num_samples": self.order.num_samples,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a saved position.

        Raises:
            ValueError: it belongs to other data or to another order; the message names what differs.
        """
        here = self.state_dict()
        for key, meaning in (
            ("num_samples", "number of samples"),
            ("fingerprint", "contents of the data"),
            ("seed", "data seed"),
        ):
            if state[key] != here[key]:
                raise ValueError(
                    f"the checkpoint's data position cannot be continued: its {meaning} ({key}) is {state[key]!r}, here it is "
                    f"{here[key]!r}. Use the data, sequence length, validation share and seed it was trained with; to train on "
                    "other data from these weights, load the weights alone."
                )
        self.epoch, self.consumed = state["epoch"], state["consumed"]
