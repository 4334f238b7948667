"""Sizes and times of checkpoints: ``python -m tests.benchmarks.checkpoint_times``. Prints the table of docs/checkpoints.md.

The best of several, since the machine is seldom alone with it; on a file system in memory the disk's own speed does not show.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_5d.checkpoint import CheckpointSession
from lightning_5d.models import LlamaModule
from lightning_5d.strategy import LayoutStrategy
from tests.ranks import run_ranks

SHAPE = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
LAYOUTS = {"dp1": 1, "tp2": 2, "pp2": 2, "dp2_zero3": 2, "tp2_pp2": 4}
REPEATS = 3


class Measure(L.Callback):
    """Saves and loads on the first batch, when the optimizer has its state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.best: dict[str, float] = {}

    def timed(self, name: str, trainer: L.Trainer, fn: Any) -> Any:
        trainer.strategy.barrier()
        start = time.perf_counter()
        value = fn()
        self.best[name] = min(self.best.get(name, 1e9), time.perf_counter() - start)
        return value

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        path, own = self.folder / "a.ckpt", CheckpointSession.of(module)
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        background = CheckpointSession(own.layout, background=True)
        background.names = own.names
        for _ in range(REPEATS):
            self.timed("save", trainer, lambda: own.save(checkpoint, path, module, trainer.optimizers))
            self.timed("handed over", trainer, lambda: background.save(checkpoint, path, module, trainer.optimizers, True))
            background.wait()
            own.open(path)
            self.timed("weights", trainer, lambda: own.load_weights(module))
            self.timed("optimizer", trainer, lambda: own.load_optimizers(module, trainer.optimizers))
        own.close()


def measure(layout: str, folder: Path) -> dict[str, float]:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning_5d"):
        logging.getLogger(name).setLevel(logging.ERROR)
    callback = Measure(folder)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "max_steps": 1, "accelerator": "cpu", "devices": LAYOUTS[layout]}
    trainer = L.Trainer(strategy=LayoutStrategy(layout), callbacks=[callback], **quiet)
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(4)]
    trainer.fit(LlamaModule(SHAPE, decay_steps=0), DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    return callback.best


def main() -> None:
    print("| layout | files | size | save | background save returns | load weights | load optimizer |")
    print("|---|---|---|---|---|---|---|")
    for layout, world_size in LAYOUTS.items():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            best = run_ranks(world_size, measure, layout, Path(name), timeout_s=300)[0]
            sizes = [file.stat().st_size for file in (Path(name) / "a.ckpt").iterdir()]
        times = " | ".join(f"{best[key]:.2f} s" for key in ("save", "handed over", "weights", "optimizer"))
        print(f"| `{layout}` | {len(sizes)} | {sum(sizes) / 2**20:.0f} MiB | {times} |", flush=True)


if __name__ == "__main__":
    main()
