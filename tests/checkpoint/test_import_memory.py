"""Importing weights into a sharded model needs little more than the shard that is there already."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightning_5d.checkpoint import Names, PretrainedWeights
from lightning_5d.checkpoint.weight_map import find_huggingface_names
from lightning_5d.models import Llama, LlamaConfig
from tests.checkpoint.trained import LAYOUTS, Data, Hard, trainer_of
from tests.ranks import run_ranks

CONFIG = LlamaConfig(
    vocab_size=1000, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4
)


class Large(Hard):
    def __init__(self) -> None:
        super().__init__()
        self.net = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Llama(CONFIG, seed=0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


class Measured(PretrainedWeights):
    """Notes this rank's shard, and by how much the resident memory rises at most while loading."""

    def on_fit_start(self, trainer, pl_module) -> None:  # type: ignore[no-untyped-def]
        self.shard_bytes = sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in pl_module.parameters())
        before = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        super().on_fit_start(trainer, pl_module)
        self.rise_bytes = status_bytes("VmHWM") - before


def import_under(layout: str, folder: Path) -> tuple[int, int, int, float]:
    callback = Measured(folder)
    trainer = trainer_of(layout, folder, [callback], max_steps=0, enable_checkpointing=False)
    module = Large()
    trainer.fit(module, datamodule=Data())
    largest = max(parameter.numel() * 4 for parameter in module.parameters())  # a DTensor's numel is the whole tensor's
    some = next(p for name, p in module.named_parameters() if "down_proj" in name)
    whole = some.full_tensor() if hasattr(some, "full_tensor") else some
    return callback.shard_bytes, callback.rise_bytes, largest, float(whole.detach().mean())


@pytest.mark.slow
@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of resident memory is read from Linux's /proc"
)
@pytest.mark.parametrize("layout", ["tp2_pp2", "dp2_zero3"])
def test_peak_memory_is_the_shard_and_a_fifth_and_a_tensor(tmp_path: Path, layout: str) -> None:
    with torch.device("meta"):
        module = Large()
        module.configure_model()
    names = Names.of(module)
    found = find_huggingface_names(module, names)
    assert found is not None
    content = {
        source.name: torch.full(names.specs[fqn].shape, 0.5) for fqn, sources in found.sources.items() for source in sources
    }
    save_file(content, tmp_path / "model.safetensors")
    del content
    for shard_bytes, rise_bytes, largest_bytes, mean in run_ranks(LAYOUTS[layout], import_under, layout, tmp_path):
        assert mean == 0.5
        assert shard_bytes > 20 * 2**20
        assert shard_bytes + rise_bytes <= 1.2 * shard_bytes + largest_bytes
