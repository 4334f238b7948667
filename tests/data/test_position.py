"""One global order: the same samples whatever the data-parallel size, the workers, or where a run was interrupted."""

import dataclasses
from itertools import chain, islice

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_5d.data import GlobalOrder, PositionedLoader, ShardedLoader
from tests.ranks import run_ranks


class Numbers(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return index


def loader(n=22, batch=4, dp_rank=0, dp_size=1, num_workers=0, fingerprint="f", **order):
    return PositionedLoader(
        Numbers(n), GlobalOrder(n, batch, **order), dp_rank, dp_size, num_workers=num_workers, fingerprint=fingerprint
    )


def joined(lists):
    return list(chain.from_iterable(lists))


def samples(batches):
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("consumed", [0, 8, 20])
def test_every_rank_takes_its_contiguous_share(dp_size, consumed):
    order = GlobalOrder(22, 4, seed=3)
    expected = order.permutation(2)[consumed:].split(4)
    expected = [batch.tolist() for batch in expected if len(batch) == 4]
    ranks = [list(order.batches(2, consumed, rank, dp_size)) for rank in range(dp_size)]
    assert [joined(parts) for parts in zip(*ranks, strict=True)] == expected
    assert order.num_batches(dp_size, consumed) == len(expected)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(GlobalOrder(50, 5, seed=seed).permutation(epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert GlobalOrder(5, 5, shuffle=False).permutation(7).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("n", "batch", "dp_size", "last"), [(22, 4, 2, 2), (23, 4, 2, 2), (23, 6, 3, 3), (22, 6, 3, 3), (21, 4, 2, 0), (21, 4, 1, 1)]
)
def test_a_kept_ragged_batch_is_equal_on_every_rank(n, batch, dp_size, last):
    order = GlobalOrder(n, batch, drop_last=False)
    ranks = [list(order.batches(0, 0, rank, dp_size)) for rank in range(dp_size)]
    assert len({tuple(map(len, batches)) for batches in ranks}) == 1
    batches = [joined(parts) for parts in zip(*ranks, strict=True)]
    assert len(batches) == order.num_batches(dp_size)
    assert joined(batches) == order.permutation(0)[: n // batch * batch + last].tolist()


def test_unequal_shares_are_refused_naming_both_numbers():
    with pytest.raises(ValueError, match=r"global_batch_size 6 does not divide by the data-parallel size 4.*Use 4 or 8"):
        loader(batch=6, dp_size=4)
    with pytest.raises(ValueError, match="22 samples do not fill one global batch of 23"):
        loader(batch=23)
    with pytest.raises(ValueError, match="global_batch_size must be at least 1"):
        GlobalOrder(3, 0)
    with pytest.raises(ValueError, match="at least one sample"):
        GlobalOrder(0, 3)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_continues_where_it_stopped_twice_in_an_epoch_and_across_its_end(num_workers):
    whole = loader()
    expected = samples(whole) + samples(whole) + samples(whole)
    assert len(expected) == 15
    got, state = [], loader().state_dict()
    for take in (2, 2, 4, 5, 2):  # 2 and 4 of the first epoch; then over its end
        part = loader(num_workers=num_workers)
        part.load_state_dict(state)
        got += samples(islice(iter(part), take))
        assert part.state_dict()["consumed"] == (len(got) - 1) % 5 * 4 + 4  # handed out, however many the workers have fetched
        state = part.state_dict()
    assert got == expected


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2)])
def test_continues_under_another_data_parallel_size(before, after):
    expected = samples(loader(dp_rank=0, dp_size=1))

    def take(dp_size, state, count):
        parts = [loader(dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
        for part in parts:
            part.load_state_dict(state)
        ranks = [samples(islice(iter(part), count)) for part in parts]
        assert all(part.state_dict() == parts[0].state_dict() for part in parts)
        return [joined(batch) for batch in zip(*ranks, strict=True)], parts[0].state_dict()

    first, state = take(before, loader().state_dict(), 2)
    second, _ = take(after, state, 3)
    assert first + second == expected


def test_continues_under_another_global_batch_size():
    first = loader(batch=4)
    seen = samples(islice(iter(first), 2))
    second = loader(batch=7)
    second.load_state_dict(first.state_dict())
    rest = samples(islice(iter(second), 3))
    epochs = [GlobalOrder(22, 1).permutation(epoch).tolist() for epoch in range(2)]
    assert joined(seen + rest) == epochs[0] + epochs[1][:7]


def test_other_data_is_refused():
    state = loader().state_dict()
    for other, named in ((loader(n=23), "num_samples"), (loader(fingerprint="g"), "fingerprint"), (loader(seed=1), "seed")):
        with pytest.raises(ValueError, match=rf"\({named}\) is"):
            other.load_state_dict(state)


def test_position_is_plain_types():
    assert all(type(value) in (int, str) for value in loader().state_dict().values())


def test_asking_for_an_iterator_starts_nothing():
    it = loader(num_workers=2)
    iter(it)  # Lightning does so to see whether it can be iterated over
    assert it.state_dict()["consumed"] == 0
    assert len(samples(it)) == len(it) == 5


def test_validation_starts_anew_each_time():
    it = ShardedLoader(Numbers(9), GlobalOrder(9, 4, shuffle=False), dp_rank=1, dp_size=2)
    for _ in range(2):
        assert samples(islice(iter(it), 1)) == [[2, 3]]
        assert samples(it) == [[2, 3], [6, 7]]
    assert not hasattr(it, "state_dict")
    assert not isinstance(it, DataLoader)


class Recorder(LightningModule):
    """Records the samples of each training batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, batch.tolist()))
        return self.weight * 1.0

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(directory, steps, ckpt_path=None, save_to=None, **options):
    module = Recorder()
    saver = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, logger=False, callbacks=[saver], enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    validation = ShardedLoader(Numbers(6), GlobalOrder(6, 3, shuffle=False))
    trainer.fit(module, loader(), validation, ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return module.seen


def interrupted_everywhere(directory, options):
    whole = train(directory / "whole", 13, **options)
    for stop in range(1, 13):
        resumed = train(directory / f"from{stop}", 13, ckpt_path=directory / "whole" / f"step={stop}.ckpt", **options)
        assert resumed == whole[stop:], f"stopped after step {stop}: {resumed} instead of {whole[stop:]}"
        # Saved after fit, Lightning takes the epoch for finished; the samples are the ones that were due all the same.
        train(directory / f"until{stop}", stop, save_to=directory / f"after{stop}.ckpt", **options)
        resumed = train(directory / f"again{stop}", 13, ckpt_path=directory / f"after{stop}.ckpt", **options)
        assert [batch for *_, batch in resumed] == [batch for *_, batch in whole[stop:]], f"saved after fit of {stop} steps"
    return whole


@pytest.mark.parametrize(
    "options",
    [{}, {"limit_train_batches": 3}, {"val_check_interval": 2}],
    ids=["whole-epochs", "limit_train_batches", "validation-within-an-epoch"],
)
def test_a_trainer_resumed_after_any_step_sees_the_samples_that_were_due(tmp_path, options):
    whole = run_ranks(1, interrupted_everywhere, tmp_path, options)[0]
    per_epoch = options.get("limit_train_batches", 5)
    assert [epoch for epoch, _, _ in whole] == [step // per_epoch for step in range(13)]
    assert [batch for *_, batch in whole] == joined(GlobalOrder(22, 4).batches(epoch) for epoch in range(3))[:13]


def fit_twice(directory):
    one = loader()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Recorder()
    trainer.fit(module, one)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, one)
    return module.seen


def test_fit_twice_on_one_trainer_goes_on(tmp_path):
    seen = run_ranks(1, fit_twice, tmp_path)[0]
    assert [epoch for epoch, _, _ in seen] == [0] * 5 + [1] * 5 + [2] * 5
    assert [batch for *_, batch in seen] == joined(GlobalOrder(22, 4).batches(epoch) for epoch in range(3))


def test_order_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GlobalOrder(3, 1).seed = 4
