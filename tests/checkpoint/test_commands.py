"""``lightning-5d export``, ``import`` and ``inspect``, as a user types them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightning_5d.checkpoint import CheckpointSession, load_module
from lightning_5d.checkpoint.inspect import Inspection
from lightning_5d.cli import main
from lightning_5d.models import LlamaModule
from tests.checkpoint.test_huggingface import llama


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    module = llama(tied=True)
    session = CheckpointSession("tp2_pp2")
    session.take_names(module)
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.zero_grad()
    entries = {"optimizer_states": [{}], "epoch": 1, "global_step": 7, "hyper_parameters": dict(module.hparams)}
    entries["pytorch-lightning_version"] = "2.6.0"
    session.save(entries, tmp_path / "a.ckpt", module, [optimizer])
    return tmp_path / "a.ckpt"


def test_inspect(checkpoint: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(checkpoint)]) == 0
    text = capsys.readouterr().out
    assert "complete, format 1" in text and "layout tp2_pp2 on 1 ranks, step 7, epoch 1" in text
    assert "optimizers: AdamW with 1 groups" in text
    assert "tied: model.embed_tokens.weight = model.lm_head.weight" in text
    (line,) = [line for line in text.splitlines() if line.startswith("model.model.embed_tokens.weight ")]
    assert line.split()[1:] == ["67", "x", "16", "float32", "1", "4.2", "KiB"]
    assert "rng.0.torch" not in text
    assert main(["inspect", str(checkpoint), "--all_tensors", "true"]) == 0
    assert "rng.0.torch" in capsys.readouterr().out


def test_inspect_says_what_is_wrong(checkpoint: Path, capsys: pytest.CaptureFixture) -> None:
    (checkpoint / "__0_0.distcp").write_bytes(b"")
    assert main(["inspect", str(checkpoint)]) == 2
    assert "__0_0.distcp has 0 bytes" in capsys.readouterr().err


def test_inspect_reads_no_code(checkpoint: Path) -> None:
    module = llama()
    session = CheckpointSession("dp1")
    session.take_names(module)
    session.save({"callbacks": {"mine": Path("x")}, "epoch": 0}, checkpoint, module)
    assert "callbacks" not in Inspection.of(checkpoint).entries


def test_out_and_in_again(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder, back, one = tmp_path / "hf", tmp_path / "b.ckpt", tmp_path / "one.ckpt"
    assert main(["export", str(checkpoint), "--format", "hf", "--out", str(folder), "--dtype", "bfloat16"]) == 0
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert main(["import", str(folder), "--out", str(back), "--dtype", "float32"]) == 0
    assert load_module(LlamaModule, back).model.norm.weight.dtype is torch.float32  # type: ignore[union-attr]
    assert main(["export", str(checkpoint), "--format", "lightning", "--out", str(one)]) == 0
    assert LlamaModule.load_from_checkpoint(one).config == llama(tied=True).config
    capsys.readouterr()
    assert main(["export", str(checkpoint), "--format", "lightning", "--out", str(one), "--dtype", "float32"]) == 2
    assert "--dtype: for --format hf alone" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--out", str(folder)]) == 2
    assert "is not a checkpoint of lightning_5d" in capsys.readouterr().err
