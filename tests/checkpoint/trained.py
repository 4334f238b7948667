"""Real Trainer runs of one hard configuration under any layout, and everything that must survive a resume, written down.

Tied weights, two frozen parameters, a group that only the last stage has a parameter for, three learning rates under a recursive
scheduler, a vocabulary that divides by nothing, five batches an epoch.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from lightning_5d.checkpoint import CheckpointSession
from lightning_5d.checkpoint.huggingface_read import Box
from lightning_5d.checkpoint.state import collect
from lightning_5d.data.position import GlobalOrder, PositionedLoader
from lightning_5d.data.resumable import resumable
from lightning_5d.models import Llama, LlamaConfig
from lightning_5d.strategy import LayoutStrategy
from tests.checkpoint.arranged import Pieces, pieces

VOCAB, SEQ, ROWS, BATCH = 67, 8, 40, 8
LAYOUTS = {
    "dp1": 1,
    "tp2": 2,
    "pp2": 2,
    "dp2_zero0": 2,
    "dp2_zero1": 2,
    "dp2_zero3": 2,
    "tp2_pp2": 4,
    "dp2_tp2_pp2_zero1": 8,
    "dp2_tp2_pp2_zero3": 8,
}


class Resuming(LayoutStrategy):
    def process_dataloader(self, dataloader: object) -> object:
        return resumable(dataloader) if self.lightning_module.trainer.training else dataloader  # type: ignore[union-attr]


class Rows(Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCAB, (SEQ + 1,), generator=generator)
        return {"input_ids": tokens[:-1], "labels": tokens[1:], "index": torch.tensor(index)}


class Hard(L.LightningModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.save_hyperparameters()
        self.net = Llama(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                tie_word_embeddings=True,
            )
        )
        self.register_buffer("steps_taken", torch.zeros((), dtype=torch.int64))
        self.net.layers[1].input_layernorm.weight.requires_grad_(False)
        self.net.layers[3].mlp.down_proj.weight.requires_grad_(False)
        if dropout:
            for layer in self.net.layers:
                layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj, nn.Dropout(dropout))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.net(input_ids)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()))

    def on_train_batch_start(self, *args: Any) -> None:
        self.steps_taken += 1

    def configure_optimizers(self) -> Any:
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        last = [p for name, p in named if name == "net.norm.weight"]
        groups = [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for name, p in named if p.ndim == 1 and name != "net.norm.weight"], "weight_decay": 0.0},
            {"params": last, "weight_decay": 0.0, "lr": 3e-3},
        ]
        # eps above the rounding of gradients: an update that divides rounding by itself is another on every layout.
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, foreach=False)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12, eta_min=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Data(L.LightningDataModule):
    def train_dataloader(self) -> PositionedLoader:
        strategy = self.trainer.strategy
        order = GlobalOrder(ROWS, BATCH, seed=5)
        self.loader = PositionedLoader(Rows(), order, getattr(strategy, "dp_rank", 0), getattr(strategy, "dp_size", 1))
        return self.loader

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Record(L.Callback):
    """What a rank sees of a run: losses, sample ids, learning rates, and the state before its first step and at its end."""

    def __init__(self, independent: tuple[dict[str, Tensor], dict[str, Any]] | None = None) -> None:
        self.independent = independent
        self.losses: list[float] = []
        self.indices: list[list[int]] = []
        self.lrs: list[list[float]] = []
        self.first: Pieces = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.independent is not None:
            put(trainer, module, *self.independent)
        self.first = state_of(trainer, module)

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        self.indices.append(batch["index"].tolist())
        self.lrs.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, out: Any, batch: Any, index: int) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


def state_of(trainer: L.Trainer, module: L.LightningModule) -> Pieces:
    session = CheckpointSession.of(module)
    assert session.names is not None
    return pieces(collect(module, trainer.optimizers, session.names))


def put(trainer: L.Trainer, module: L.LightningModule, whole: dict[str, Tensor], rest: dict[str, Any]) -> None:
    """Loads without a checkpoint: cuts this rank's part out of whole tensors by hand, and sets position and learning rates."""
    names = CheckpointSession.of(module).names
    assert names is not None
    (optimizer,) = trainer.optimizers
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        name = names.canonical(fqn)
        _copy(parameter, whole[f"model.{name}"])
        prefix = "optim.0."
        for key, value in whole.items():
            if key.startswith(prefix) and key.split(".", 3)[3] == name:
                slot = key.split(".", 3)[2]
                optimizer.state[parameter][slot] = value.clone() if value.ndim == 0 else torch.empty_like(parameter.detach())
                if value.ndim:
                    _copy(optimizer.state[parameter][slot], value)
    module.steps_taken.copy_(whole["model.steps_taken"])  # type: ignore[operator, union-attr]
    for group, lr in zip(optimizer.param_groups, rest["lrs"], strict=True):
        group["lr"] = lr
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    scheduler.last_epoch, scheduler._step_count = rest["step"], rest["step"] + 1
    loader = trainer.datamodule.loader  # type: ignore[attr-defined]
    loader.epoch, loader.consumed = rest["epoch"], rest["consumed"]


def _copy(target: Tensor, whole: Tensor) -> None:
    box = Box.of(target)
    local = target.to_local() if isinstance(target, DTensor) else target
    with torch.no_grad():
        local.copy_(whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))])


def trainer_of(layout: str | LayoutStrategy | None, folder: Path, callbacks: list[L.Callback], **options: Any) -> L.Trainer:
    """A quiet trainer under a layout; None is Lightning's own strategy, for one device."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_5d"):
        logging.getLogger(name).setLevel(logging.ERROR)
    strategy = Resuming(layout) if isinstance(layout, str) else layout or "auto"
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"num_sanity_val_steps": 0, "limit_val_batches": 0, "max_epochs": -1, "default_root_dir": folder}
    devices = LAYOUTS[layout] if isinstance(layout, str) else int(os.environ["WORLD_SIZE"])
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=devices, callbacks=callbacks, **{**quiet, **options})


def run(
    layout: str | None,
    folder: Path,
    max_steps: int,
    ckpt_path: Path | str | None = None,
    save_to: Path | None = None,
    every: int | None = None,
    independent: tuple[dict[str, Tensor], dict[str, Any]] | None = None,
    module: L.LightningModule | None = None,
    **options: Any,
) -> dict[str, Any]:
    """One fit, in a rank. Returns what :class:`Record` saw, and what is left at the end."""
    record = Record(independent)
    callbacks: list[L.Callback] = [record, *options.pop("callbacks", [])]
    if every is not None:
        callbacks.append(
            ModelCheckpoint(folder, "{step}", monitor="train_loss", save_top_k=2, every_n_train_steps=every, save_last="link")
        )
    fit_options = {"weights_only": options.pop("weights_only", None)}
    options["enable_checkpointing"] = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = trainer_of(layout, folder, callbacks, max_steps=max_steps, **options)
    module = Hard() if module is None else module
    trainer.fit(module, datamodule=Data(), ckpt_path=ckpt_path, **fit_options)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    found = {
        "losses": record.losses,
        "indices": record.indices,
        "lrs": record.lrs,
        "first": record.first,
        "last": state_of(trainer, module),
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "dp_rank": getattr(trainer.strategy, "dp_rank", 0),
    }
    if every is not None:
        found["top_k"] = {Path(path).name: float(value) for path, value in trainer.checkpoint_callback.best_k_models.items()}  # type: ignore[union-attr]
    return found


def samples(results: list[dict[str, Any]]) -> list[list[int]]:
    """The samples of each global batch, from those of each data-parallel rank; ranks of one replica must agree."""
    by_rank: dict[int, list[list[int]]] = {}
    for result in results:
        assert by_rank.setdefault(result["dp_rank"], result["indices"]) == result["indices"], "one replica, two batches"
    parts = [by_rank[rank] for rank in sorted(by_rank)]
    return [[index for part in of_step for index in part] for of_step in zip(*parts, strict=True)]
