"""A module that takes time on a fake clock, what it is trained on, and a fit that returns what was logged and said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_5d.callbacks import MFUMonitor
from lightning_5d.callbacks import mfu as mfu_file
from lightning_5d.models import Llama, LlamaConfig

SEQ_LEN, VOCAB, HIDDEN, LAYERS = 8, 16, 4, 2


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.num_reads = 0

    def __call__(self) -> float:
        self.num_reads += 1
        return self.now_s


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False), nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Timed(LightningModule):
    """Training takes 1 s a sequence, a validation batch 1000 s, saving 500 s."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        self.clock.now_s += len(batch["input_ids"])
        return nn.functional.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def validation_step(self, batch, batch_idx):
        self.clock.now_s += 1000

    def on_save_checkpoint(self, checkpoint):
        self.clock.now_s += 500

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


DECODER = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=40,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)


class TimedLlama(Timed):
    """The same around a model that the advisor knows."""

    def __init__(self, clock: FakeClock) -> None:
        super(Timed, self).__init__()
        self.clock, self.model = clock, Llama(DECODER)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids)


class CountLines(Callback):
    """What is printed on rank 0, text by text."""

    def on_fit_start(self, trainer, pl_module):
        self.lines = []
        pl_module.print = lambda text: self.lines.append(text) if trainer.is_global_zero else None


NUM_PARAMETERS = 2 * VOCAB * HIDDEN + LAYERS * 4 * HIDDEN * HIDDEN
FLOPS_PER_TOKEN = 6 * NUM_PARAMETERS + 12 * LAYERS * HIDDEN * SEQ_LEN


class Tokens(Dataset):
    def __init__(self, size: int, clock: FakeClock | None = None, fetch_s: float = 0.0) -> None:
        self.size, self.clock, self.fetch_s = size, clock, fetch_s

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.clock is not None:
            self.clock.now_s += self.fetch_s
        ids = (torch.arange(SEQ_LEN + 1) + index) % VOCAB
        return {"input_ids": ids[:-1], "labels": ids[1:]}


def make_trainer(callbacks, **kwargs) -> Trainer:
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 4,
        "log_every_n_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**settings, **kwargs}, callbacks=callbacks)


def loader(clock: FakeClock | None = None, size: int = 64, batch_size: int = 4, fetch_s: float = 0.0, **kwargs) -> DataLoader:
    return DataLoader(Tokens(size, clock, fetch_s), batch_size=batch_size, **kwargs)


def fit(
    monitor: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    batches: dict[str, Any] | None = None,
    make_module: Callable[[FakeClock], LightningModule] = Timed,
    callbacks: tuple = (),
    validate: bool = False,
) -> dict[str, Any]:
    """Fits on a fake clock, with a peak of 1 MFLOP/s unless said otherwise; to be called in a forked rank.

    Returns the `perf/` and `prediction/` metrics, what the monitor said as (kind, text), reads of the clock, and
    whether saving is still wrapped.
    """
    said: list[tuple[str, str]] = []
    mfu_file.rank_zero_warn = lambda text: said.append(("warning", text))
    mfu_file.rank_zero_info = lambda text: said.append(("info", text))
    clock = FakeClock()
    callback = MFUMonitor(**{"clock": clock, "peak_tflops": 1e-6, **(monitor or {})})
    the_trainer = make_trainer([callback, *callbacks], **(trainer or {}))
    module = make_module(clock)
    the_trainer.fit(module, loader(clock, **(batches or {})), loader(size=4) if validate else None)
    metrics = {k: v.item() for k, v in the_trainer.callback_metrics.items() if k.startswith(("perf/", "prediction/"))}
    return {
        "metrics": metrics,
        "said": said,
        "num_clock_reads": clock.num_reads,
        "wrapped": "save_checkpoint" in vars(the_trainer),
    }
