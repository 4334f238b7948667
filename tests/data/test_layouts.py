"""The data under layouts: the validation loss of one process, and a resume under another data-parallel size."""

import pytest
import torch
from lightning.pytorch import Trainer

import lightning_5d  # noqa: F401  (layout strings become strategy names)
from lightning_5d.data import TextDataModule
from lightning_5d.models import LlamaModule
from tests.ranks import run_ranks

SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 300}


def train(root, strategy, devices, steps=4, ckpt_path=None, save_to=None):
    torch.manual_seed(0)
    data = TextDataModule(seq_len=32, vocab_size=300, global_batch_size=8, val_fraction=0.01, cache_dir=str(root / "cache"))
    model = LlamaModule(SHAPE, lr=0.1, optimizer="sgd", decay_steps=0)
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=steps, val_check_interval=steps, num_sanity_val_steps=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=root,
    )  # fmt: skip
    trainer.fit(model, data, ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def one_process(root):
    return run_ranks(1, train, root, "auto", 1)[0]


@pytest.mark.parametrize("layout", ["dp2_zero1", "tp2", "pp2"])
def test_losses_of_one_process(root, one_process, layout):
    for metrics in run_ranks(2, train, root, layout, 2):
        assert metrics == pytest.approx(one_process, rel=1e-5)


@pytest.mark.parametrize(("before", "after"), [("pp2", "dp2"), pytest.param("dp2_zero1", "tp2", marks=pytest.mark.slow)])
def test_resumed_in_the_midst_of_an_epoch_under_another_data_parallel_size(root, one_process, before, after):
    run_ranks(2, train, root, before, 2, steps=2, save_to=root / f"{before}.ckpt")
    for metrics in run_ranks(2, train, root, after, 2, ckpt_path=root / f"{before}.ckpt"):
        assert metrics == pytest.approx(one_process, rel=1e-5)
