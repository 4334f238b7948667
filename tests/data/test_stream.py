"""Iterable data under data parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, IterableDataset

from lightning_5d.data import ShardedStream
from tests.parity.harness import trainer_of
from tests.parity.models import HandWritten, Tokens
from tests.ranks import run_ranks


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_replicas_share_out_whole_rounds(dp_size: int, num_workers: int) -> None:
    loaders = [DataLoader(ShardedStream(range(17), r, dp_size), batch_size=None, num_workers=num_workers) for r in range(dp_size)]
    seen = [list(loader) for loader in loaders]
    assert len({len(part) for part in seen}) == 1
    assert sorted(sample for part in seen for sample in part) == list(range(17 - 17 % dp_size))


def test_a_replica_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="dp_rank=2 of dp_size=2"):
        ShardedStream([], 2, 2)


class Rows(IterableDataset):
    """Nine sequences that begin with their own number, without an index."""

    def __iter__(self) -> Any:
        for index, row in enumerate(Tokens(9)):  # type: ignore[arg-type]
            if index == 9:
                return
            yield {**row, "input_ids": torch.cat([torch.tensor([index]), row["input_ids"][1:]])}


class Stream(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        strategy: Any = self.trainer.strategy
        return DataLoader(ShardedStream(Rows(), strategy.dp_rank, strategy.dp_size), batch_size=2)


class Seen(HandWritten):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.__dict__.setdefault("rows", []).extend(batch["input_ids"][:, 0].tolist())


def _seen(layout: str) -> tuple[int, list[int]]:
    module, trainer = Seen(), trainer_of(layout, 4, max_epochs=1, limit_val_batches=0)
    trainer.fit(module, datamodule=Stream())
    return trainer.strategy.dp_rank, module.rows


def test_a_stream_under_data_and_tensor_parallelism() -> None:
    assert run_ranks(4, _seen, "dp2_tp2") == [(0, [0, 2, 4, 6])] * 2 + [(1, [1, 3, 5, 7])] * 2
