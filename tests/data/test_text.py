"""TextDataModule: what a batch is, who gets which, and what is refused."""

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from lightning_5d.data import TextDataModule
from lightning_5d.models import LlamaModule
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("tokens"))


def module(cache, **options):
    options = {"seq_len": 64, "vocab_size": 300, "cache_dir": cache, **options}
    made = TextDataModule(**options)
    made.prepare_data()
    made.setup()
    return made


class FakeStrategy:
    root_device = torch.device("cpu")

    def __init__(self, rank, size):
        self.distributed_sampler_kwargs = {"rank": rank, "num_replicas": size}


class FakeTrainer:
    lightning_module = None
    overfit_batches = 0.0
    reload_dataloaders_every_n_epochs = 0
    current_epoch = 3

    def __init__(self, rank, size):
        self.strategy = FakeStrategy(rank, size)


def on_rank(cache, rank, size, **options):
    made = module(cache, **options)
    made.trainer = FakeTrainer(rank, size)
    return made


def test_labels_are_the_inputs_one_further_on(cache):
    made = module(cache)
    tokens = made.token_file.tokens
    batch = next(iter(made.train_dataloader()))
    assert set(batch) == {"input_ids", "labels"}
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        assert ids.shape == labels.shape == (64,)
        assert ids.dtype == labels.dtype == torch.int64
        assert torch.equal(ids[1:], labels[:-1])
    index = next(made.train_dataloader().order.batches(0))[0]
    start = made._train.blocks[index] * 64
    assert batch["labels"][0].tolist() == tokens[start + 1 : start + 65].tolist()
    sample = made._train[index]
    assert torch.equal(sample["input_ids"], batch["input_ids"][0])


def test_split_covers_every_block_once_and_ignores_other_options(cache):
    made = module(cache, val_fraction=0.1)
    train, val = made._train.blocks, made._val.blocks
    num_blocks = (made.token_file.meta.num_tokens - 1) // 64
    assert np.array_equal(np.sort(np.concatenate([train, val])), np.arange(num_blocks))
    assert len(val) == round(num_blocks * 0.1)
    assert 0.3 < val.mean() / num_blocks < 0.7  # from the whole text, not from its end
    other = module(cache, val_fraction=0.1, seed=5, global_batch_size=4, num_workers=1)
    assert np.array_equal(other._val.blocks, val)


@pytest.mark.parametrize("loader", ["train_dataloader", "val_dataloader"])
def test_ranks_share_the_global_batch(cache, loader):
    whole = list(getattr(on_rank(cache, 0, 1), loader)())
    parts = [list(getattr(on_rank(cache, rank, 2), loader)()) for rank in range(2)]
    assert len(whole) == len(parts[0]) == len(parts[1]) > 1
    for batch, first, second in zip(whole, *parts, strict=True):
        assert len(first["labels"]) == 4
        assert torch.equal(batch["labels"], torch.cat([first["labels"], second["labels"]]))


def test_reloaded_every_epoch_does_not_begin_with_the_first_one_again(cache):
    made = on_rank(cache, 0, 1)
    assert made.train_dataloader().epoch == 0
    made.trainer.reload_dataloaders_every_n_epochs = 1
    assert made.train_dataloader().epoch == 3


def test_overfitting_sees_the_same_batches_in_each_epoch(cache):
    made = on_rank(cache, 0, 1)
    made.trainer.overfit_batches = 1
    loader = made.train_dataloader()
    assert torch.equal(next(iter(loader))["labels"], next(iter(loader))["labels"])


def test_workers_give_the_same_batches(cache):
    here, there = module(cache).val_dataloader(), module(cache, num_workers=2).val_dataloader()
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a["input_ids"], b["input_ids"])


def test_global_batch_must_divide(cache):
    with pytest.raises(ValueError, match="global_batch_size 8 does not divide by the data-parallel size 3"):
        on_rank(cache, 0, 3).train_dataloader()
    with pytest.raises(ValueError, match="global_batch_size 9 does not divide by the data-parallel size 2"):
        on_rank(cache, 0, 2, val_batch_size=9).val_dataloader()


def test_fingerprint_follows_what_the_samples_are(cache):
    def fingerprint(**options):
        return module(cache, **options).train_dataloader().fingerprint

    same = fingerprint()
    assert fingerprint(global_batch_size=4, num_workers=1) == same
    assert len({same, fingerprint(seq_len=32), fingerprint(val_fraction=0.1), fingerprint(vocab_size=290)}) == 4


def test_too_little_text(tmp_path):
    (tmp_path / "a.txt").write_text("only a few words")
    with pytest.raises(ValueError, match=r"a\.txt: 17 tokens are less than one sequence of seq_len 64"):
        module(str(tmp_path / "cache"), path=str(tmp_path / "a.txt"), vocab_size=257)
    (tmp_path / "a.txt").write_text("x y " * 200)
    with pytest.raises(ValueError, match=r"of 12 sequences of 64 tokens, 1 are for validation .* global batch of 2"):
        module(str(tmp_path / "cache"), path=str(tmp_path / "a.txt"), vocab_size=257, global_batch_size=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len must be at least 1, got 0"),
        ({"global_batch_size": 0}, "global_batch_size must be at least 1"),
        ({"val_fraction": 1.0}, "val_fraction must lie between 0 and 1"),
        ({"vocab_size": 100}, "vocab_size must be at least 257"),
    ],
)
def test_arguments_out_of_range_are_refused_before_any_work(options, message):
    with pytest.raises(ValueError, match=message):
        TextDataModule(**options)


def test_used_before_it_is_ready(cache, tmp_path):
    with pytest.raises(ValueError, match=r"nowhere/tokenizer\.json: no such file"):
        TextDataModule(tokenizer="nowhere/tokenizer.json", cache_dir=cache).prepare_data()
    with pytest.raises(RuntimeError, match="prepare_data"):
        TextDataModule(cache_dir=str(tmp_path)).setup()
    with pytest.raises(RuntimeError, match="prepare_data"):
        TextDataModule(cache_dir=cache).train_dataloader()


def fit(cache, directory, vocab_size):
    torch.manual_seed(0)
    shape = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "vocab_size": vocab_size,
    }
    data = TextDataModule(seq_len=64, vocab_size=300, global_batch_size=16, cache_dir=cache)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=30, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=directory,
    )  # fmt: skip
    model = LlamaModule(shape, lr=1e-2)
    trainer.fit(model, data)
    loss = trainer.validate(model, data, verbose=False)[0]["val_loss"]
    return loss, data.val_unigram_entropy_nats()


def test_a_stock_trainer_learns_more_than_frequencies(cache, tmp_path):
    loss, unigram = run_ranks(1, fit, cache, tmp_path, 300)[0]
    assert loss < unigram + 0.1  # 30 steps of a very small model: about the frequencies; it starts at ln 300 = 5.7
    assert 4.0 < unigram < 5.0


def test_a_vocabulary_that_does_not_fit_the_model(cache, tmp_path):
    with pytest.raises(AssertionError, match="the tokenizer has 300 tokens but the model's vocabulary holds 299"):
        run_ranks(1, fit, cache, tmp_path, 299)
