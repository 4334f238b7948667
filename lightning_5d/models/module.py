"""An ordinary LightningModule around :class:`Llama`: it knows nothing of how it is parallelised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.text import Perplexity

from lightning_5d.models.config import LlamaConfig
from lightning_5d.models.llama import Llama

IGNORE_INDEX = -100


class LlamaModule(LightningModule):
    """Next-token training of a Llama.

    A batch is a dict of ``input_ids`` and ``labels``, both ``[batch, seq]``; labels are already shifted by one, and those of
    -100 are ignored.

    Args:
        config: a preset's name, a Hugging Face ``config.json`` (or its folder), a mapping of :class:`LlamaConfig`'s fields, or
            a LlamaConfig.
        lr: peak learning rate.
        optimizer: ``"adamw"`` or ``"sgd"``.
        betas: of AdamW.
        weight_decay: of matrices and embeddings; norms do not decay.
        momentum: of SGD.
        fused: the fused optimizer, where torch has one for the device; None: for AdamW, whenever it has (SGD's cannot be
            sharded).
        warmup_steps: optimizer steps of linear warm-up.
        decay_steps: optimizer steps at which the cosine ends; None: the trainer's own number of steps; 0: constant after warm-up.
        min_lr_ratio: the cosine ends at this share of lr.
        vocab_size: replaces the configuration's, to fit a tokenizer; None: as configured.

    Raises:
        ValueError: the configuration is unknown or unsupported, or an argument is out of range.
    """

    def __init__(
        self,
        config: str | dict[str, Any] | LlamaConfig = "tiny",
        lr: float = 3e-4,
        optimizer: Literal["adamw", "sgd"] = "adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        momentum: float = 0.0,
        fused: bool | None = None,
        warmup_steps: int = 0,
        decay_steps: int | None = None,
        min_lr_ratio: float = 0.1,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        if optimizer not in ("adamw", "sgd"):
            raise ValueError(f"LlamaModule: optimizer must be 'adamw' or 'sgd', got {optimizer!r}.")
        if warmup_steps < 0 or (decay_steps or 0) < 0 or not 0.0 <= min_lr_ratio <= 1.0:
            raise ValueError(
                "LlamaModule: warmup_steps and decay_steps must not be negative and min_lr_ratio must lie in 0 to 1, "
                f"got {warmup_steps}, {decay_steps} and {min_lr_ratio}."
            )
        self.config = make_config(config, vocab_size)
        # Plain types, so that a checkpoint loads with weights_only=True, and the whole shape, so that it needs no other file.
        config, betas = self.config.to_dict(), (float(betas[0]), float(betas[1]))
        self.save_hyperparameters()
        self.model: Llama | None = None
        self.val_perplexity = Perplexity(ignore_index=IGNORE_INDEX)

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Llama(self.config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits ``[batch, seq, vocab]`` of token ids ``[batch, seq]``."""
        if self.model is None:
            raise RuntimeError("LlamaModule: the model is not built yet; a Trainer builds it, or call configure_model() first.")
        return self.model(input_ids)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = next_token_loss(self(batch["input_ids"]), batch["labels"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self(batch["input_ids"])
        self.log("val_loss", next_token_loss(logits, batch["labels"]), prog_bar=True)
        self.val_perplexity.update(logits.float(), batch["labels"])
        self.log("val_perplexity", self.val_perplexity)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(batch["input_ids"])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        hparams = self.hparams
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": hparams["weight_decay"]},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        fused = _use_fused(hparams["fused"], parameters)
        optimizer: torch.optim.Optimizer
        if hparams["optimizer"] == "adamw":
            optimizer = torch.optim.AdamW(groups, lr=hparams["lr"], betas=hparams["betas"], fused=fused)
        else:
            optimizer = torch.optim.SGD(groups, lr=hparams["lr"], momentum=hparams["momentum"], fused=hparams["fused"])
        scheduler = LambdaLR(optimizer, self._lr_factor(self._decay_steps()))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _decay_steps(self) -> int:
        if self.hparams["decay_steps"] is not None:
            return self.hparams["decay_steps"]
        steps = self.trainer.estimated_stepping_batches
        return 0 if math.isinf(steps) else int(steps)

    def _lr_factor(self, decay_steps: int) -> WarmupCosine:
        return WarmupCosine(self.hparams["warmup_steps"], decay_steps, self.hparams["min_lr_ratio"])


class WarmupCosine:
    """The share of the peak learning rate at an optimizer step: linear warm-up, then a cosine.

    The cosine ends at ``min_ratio`` after ``decay_steps``. With ``decay_steps`` 0 it stays at 1 after the warm-up.
    """

    def __init__(self, warmup_steps: int, decay_steps: int, min_ratio: float) -> None:
        self.warmup_steps, self.decay_steps, self.min_ratio = warmup_steps, decay_steps, min_ratio

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay_steps == 0:
            return 1.0
        progress = (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps)
        return self.min_ratio + (1.0 - self.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats over the labels that are not -100, in float32; zero, not NaN, when there are none.

    Shapes: logits ``[batch, seq, vocab]``, labels ``[batch, seq]``.
    """
    total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return total / (labels != IGNORE_INDEX).sum().clamp(min=1)


def make_config(config: str | Path | Mapping[str, Any] | LlamaConfig, vocab_size: int | None = None) -> LlamaConfig:
    """A LlamaConfig from a preset's name, a path, a mapping or itself, with another vocabulary if ``vocab_size`` is given."""
    if isinstance(config, LlamaConfig):
        made = config
    elif isinstance(config, Mapping):
        made = LlamaConfig.from_dict(config)
    elif isinstance(config, Path) or Path(config).exists() or str(config).endswith(".json"):
        made = LlamaConfig.from_json(config)
    else:
        made = LlamaConfig.from_preset(config)
    return made if vocab_size is None else LlamaConfig.from_dict({**made.to_dict(), "vocab_size": vocab_size})


def _use_fused(wanted: bool | None, parameters: list[nn.Parameter]) -> bool:
    """Whether to ask for torch's fused optimizer: as wanted, or where every parameter's device has one."""
    if wanted is not None:
        return wanted
    return all(p.device.type in ("cpu", "cuda", "xpu", "mps") and p.is_floating_point() for p in parameters)
