"""A user's own DataLoader and plain dropout: resumed in mid-epoch and between epochs as if nothing had happened."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from lightning_5d.checkpoint import load_module
from lightning_5d.data.resumable import ResumableLoader, resumable
from tests.checkpoint.arranged import assemble, assert_same
from tests.checkpoint.trained import LAYOUTS, Hard, Record, Rows, samples, state_of, trainer_of
from tests.ranks import run_ranks


class Own(L.LightningDataModule):
    """The user's: shuffled, with a last batch that is not full, in the trainer's own way."""

    def __init__(self, rows: int = 38, batch_size: int = 8, **options: Any) -> None:
        super().__init__()
        self.rows, self.batch_size, self.options = rows, batch_size, options

    def train_dataloader(self) -> DataLoader:
        dataset = torch.utils.data.Subset(Rows(), range(self.rows))
        return DataLoader(dataset, batch_size=self.batch_size, shuffle=True, **self.options)


def fit(
    layout: str, folder: Path, max_steps: int, ckpt_path: Path | None = None, save_to: Path | None = None, data: Any = None
) -> Any:
    L.seed_everything(3, verbose=False)
    record, module = Record(), Hard(dropout=0.3)
    trainer = trainer_of(layout, folder, [record], max_steps=max_steps, enable_checkpointing=False)
    trainer.fit(module, datamodule=Own(**(data or {})), ckpt_path=ckpt_path)
    assert isinstance(trainer.train_dataloader, ResumableLoader)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return {
        "losses": record.losses,
        "indices": record.indices,
        "dp_rank": trainer.strategy.dp_rank,  # type: ignore[attr-defined]
        "last": state_of(trainer, module),
    }


@pytest.mark.parametrize("layout", ["dp1", pytest.param("dp2_zero3", marks=pytest.mark.slow)])
def test_the_same_layout_goes_on_bit_for_bit_with_dropout(tmp_path: Path, layout: str) -> None:
    size = 8 // (2 if layout.startswith("dp2") else 1)
    whole = run_ranks(LAYOUTS[layout], fit, layout, tmp_path, 8, data={"batch_size": size})
    for at in (3, 5):  # in mid-epoch, and between two epochs
        path = tmp_path / f"{at}.ckpt"
        first = run_ranks(LAYOUTS[layout], fit, layout, tmp_path, at, save_to=path, data={"batch_size": size})
        second = run_ranks(LAYOUTS[layout], fit, layout, tmp_path, 8, ckpt_path=path, data={"batch_size": size})
        assert samples(first) + samples(second) == samples(whole)
        assert [a["losses"] + b["losses"] for a, b in zip(first, second, strict=True)] == [r["losses"] for r in whole]
        assert_same(assemble(r["last"] for r in second), assemble(r["last"] for r in whole))


@pytest.mark.slow
def test_another_number_of_replicas_and_of_workers_takes_the_samples_that_were_due(tmp_path: Path) -> None:
    (whole,) = run_ranks(1, fit, "dp1", tmp_path, 9)
    order = [index for batch in whole["indices"] for index in batch]
    assert sorted(order[:38]) == list(range(38)) and order[38:] != order[:26]
    run_ranks(1, fit, "dp1", tmp_path, 3, save_to=tmp_path / "a.ckpt")
    data = {"batch_size": 4, "num_workers": 2, "persistent_workers": True}
    second = samples(
        run_ranks(2, fit, "dp2_zero0", tmp_path, 5, ckpt_path=tmp_path / "a.ckpt", save_to=tmp_path / "b.ckpt", data=data)
    )
    (third,) = run_ranks(1, fit, "dp1", tmp_path, 9, ckpt_path=tmp_path / "b.ckpt", data={"num_workers": 1})
    assert [index for batch in second for index in batch] == order[24:38]
    assert [index for batch in third["indices"] for index in batch] == order[38:]


def error_of_other_data(folder: Path) -> str:
    with pytest.raises(ValueError) as info:
        fit("dp1", folder, 9, ckpt_path=folder / "a.ckpt", data={"rows": 37})
    return str(info.value)


def test_a_changed_data_set_is_refused(tmp_path: Path) -> None:
    run_ranks(1, fit, "dp1", tmp_path, 2, save_to=tmp_path / "a.ckpt")
    (text,) = run_ranks(1, error_of_other_data, tmp_path)
    assert "num_samples" in text and "38" in text and "37" in text
    assert load_module(Hard, tmp_path / "a.ckpt").hparams["dropout"] == 0.3


def test_what_is_not_lightnings_to_change_stays() -> None:
    own = DataLoader(Rows(), sampler=RandomSampler(Rows()))
    assert resumable(own) is own and resumable([1, 2]) == [1, 2]
    few = DataLoader(Rows(), batch_size=50, drop_last=True, sampler=DistributedSampler(Rows(), 2, 0))
    assert resumable(few) is few
    given = DataLoader(Rows(), batch_size=4, sampler=DistributedSampler(Rows(), 2, 1, shuffle=False))
    loader = resumable(given)
    assert len(loader) == len(given) == 5
    assert next(iter(loader))["index"].tolist() == [4, 5, 6, 7]
    loader.worker_init_fn = print
    assert loader.worker_init_fn is print
