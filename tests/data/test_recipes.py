"""The recipes: each parses, fits its world size and builds; the small one is run."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from lightning_5d import Layout
from lightning_5d.data import TextDataModule
from lightning_5d.layout import check_model

RECIPES = Path(__file__).parents[2] / "recipes"
# recipe: (tokens in a step, parameters)
EXPECTED = {
    "llama_tiny_cpu.yaml": (2048, 869_504),
    "llama_13b_2k_64xa100.yaml": (4_194_304, 13_998_904_320),
    "llama_13b_8k_128xa100.yaml": (4_194_304, 13_998_904_320),
    "llama_30b_2k_64xa100.yaml": (4_194_304, 33_768_557_056),
    "llama_65b_2k_128xa100.yaml": (4_194_304, 66_858_524_672),
}


class ParsedOnly(LightningCLI):
    """Builds the module and the data, and no Trainer, which would ask for the recipe's devices."""

    def instantiate_trainer(self, **kwargs):
        return None


def test_every_recipe_is_tested():
    assert {file.name for file in RECIPES.glob("*.yaml")} >= set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_recipe_parses_resolves_and_builds(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-5d"])
    cli = ParsedOnly(run=False, args=["--config", str(RECIPES / name)])
    options, config = cli.config.trainer, cli.model.config
    world_size = options.devices * options.num_nodes
    layout = Layout.parse(options.strategy).resolve(world_size)
    assert layout.world_size == world_size
    if "xa100" in name:
        assert str(layout) == options.strategy  # canonical, with dp written out
        assert int(re.search(r"(\d+)xa100", name)[1]) == world_size
    batch = cli.datamodule.global_batch_size
    assert batch % layout.dp == 0
    check_model(
        layout,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        num_layers=config.num_hidden_layers,
        seq_len=cli.datamodule.seq_len,
        batch_size_per_replica=batch // layout.dp,
    )
    assert cli.datamodule.seq_len <= config.max_position_embeddings
    assert (batch * cli.datamodule.seq_len, config.num_parameters) == EXPECTED[name]
    with torch.device("meta"):
        cli.model.configure_model()
    assert sum(p.numel() for p in cli.model.model.parameters()) == config.num_parameters


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tiny_recipe_learns_more_than_frequencies(tmp_path):
    """As a user runs it: four processes that Lightning's own launcher starts."""
    options = [
        "--data.cache_dir", str(tmp_path / "cache"),
        "--trainer.logger.init_args.save_dir", str(tmp_path),
        "--trainer.enable_progress_bar", "false",
    ]  # fmt: skip
    command = [sys.executable, "-m", "lightning_5d", "fit", "--config", str(RECIPES / "llama_tiny_cpu.yaml"), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-4000:]
    (metrics,) = tmp_path.rglob("metrics.csv")
    with metrics.open() as stream:
        losses = [float(row["val_loss"]) for row in csv.DictReader(stream) if row["val_loss"]]
    data = TextDataModule(vocab_size=512, seq_len=256, cache_dir=str(tmp_path / "cache"))
    data.setup()
    assert losses[-1] < losses[0]
    assert losses[-1] < data.val_unigram_entropy_nats() - 1.0
