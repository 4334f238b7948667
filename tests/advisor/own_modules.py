"""What users bring to a dry run: modules with batches of their own form, and ones that a dry run must refuse."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.parity.models import VOCAB, HandWritten, HuggingFace

WIDTH_OF_TEXT = 16


class Nested(HandWritten):
    """A batch is ``(tokens, {"targets": ..., "extra": [weights, name]})``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, rest = batch
        weights, _ = rest["extra"]
        losses = F.cross_entropy(self(tokens).flatten(0, 1).float(), rest["targets"].flatten(), reduction="none")
        loss = (losses.view(tokens.shape).mean(1) * weights).mean()
        self.log("train_loss", loss)
        return loss

    def num_targets(self, batch: Any) -> int:
        return batch[0].numel()


class Rows(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        tokens = torch.zeros(WIDTH_OF_TEXT, dtype=torch.long)
        return tokens, {"targets": tokens, "extra": [torch.tensor(1.0), "name"]}


class NestedData(LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rows(), batch_size=self.batch_size, num_workers=2)


class NoData(LightningDataModule):
    def train_dataloader(self) -> Any:
        raise FileNotFoundError("/data/none.bin")


class ReadsLoss(HandWritten):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if loss.item() > 100:
            raise ValueError("diverged")
        return loss


class ChoosesRows(HandWritten):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = batch["labels"].sum(1).nonzero()
        return self.loss({k: v[rows.flatten()] for k, v in batch.items()})


class Broken(HandWritten):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch["no_such_key"]


class Theirs(HuggingFace):
    """A Llama of transformers', from a configuration."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB)
