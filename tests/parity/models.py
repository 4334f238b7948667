"""Small modules and batches for parity tests: ours, and ones that know nothing of us."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_5d.models import LlamaConfig, LlamaModule

VOCAB, SEQ, ROWS = 64, 16, 8


class Tokens(Dataset):
    """``num_rows`` sequences, 30% of whose labels are ignored, most of them in every third row."""

    def __init__(self, num_rows: int, vocab: int = VOCAB, seq: int = SEQ, ignored: bool = True) -> None:
        generator = torch.Generator().manual_seed(11)
        tokens = torch.randint(0, vocab, (num_rows, seq + 1), generator=generator)
        self.input_ids, self.labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if ignored:
            share = torch.tensor([0.85, 0.05, 0.0]).repeat(num_rows)[:num_rows, None]
            self.labels[torch.rand(self.labels.shape, generator=generator) < share] = -100

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


class OwnRows:
    """A batch sampler: of each global batch of ``rows``, this replica's equal part, in order."""

    def __init__(self, total: int, rows: int, dp_rank: int = 0, dp_size: int = 1) -> None:
        self.batches = [list(range(i, min(i + rows, total))) for i in range(0, total, rows)]
        self.dp_rank, self.dp_size = dp_rank, dp_size

    def __iter__(self) -> Any:
        for batch in self.batches:
            part = len(batch) // self.dp_size
            yield batch[self.dp_rank * part : (self.dp_rank + 1) * part]

    def __len__(self) -> int:
        return len(self.batches)


def loader(trainer: Any, num_rows: int, rows: int = ROWS, **options: Any) -> DataLoader:
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
    return DataLoader(Tokens(num_rows, **options), batch_sampler=OwnRows(num_rows, rows, kwargs["rank"], kwargs["num_replicas"]))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_heads, self.head_dim = heads, width // heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = (f(x).view(batch, seq, self.n_heads, self.head_dim).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(batch, seq, width))


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(F.gelu(self.enter(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.second, self.feed = nn.LayerNorm(width), Feed(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))


class HandWritten(LightningModule):
    """Learned positions, LayerNorm with biases, GELU, its own loss and logging: nothing in it knows of layouts."""

    def __init__(
        self, width: int = 32, heads: int = 4, layers: int = 4, vocab: int = VOCAB, tied: bool = False, lr: float = 0.1
    ) -> None:
        super().__init__()
        self.lr = lr
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.final = nn.LayerNorm(width)
        self.to_vocab = nn.Linear(width, vocab, bias=False)
        if tied:
            self.to_vocab.weight = self.tokens.weight
        self.mean_loss = MeanMetric()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.to_vocab(self.final(x))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1).float(), batch["labels"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_loss_epoch_mean", loss, on_step=False, on_epoch=True)
        self.log(
            "num_valid", (batch["labels"] != -100).float().sum(), on_step=True, on_epoch=True, reduce_fx="sum", sync_dist=True
        )
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean_loss.update(loss.detach(), (batch["labels"] != -100).sum())
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_metric", self.mean_loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def own_llama(lr: float = 0.1, **changes: Any) -> LlamaModule:
    config = LlamaConfig(
        **{
            **dict(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
            ),
            **changes,
        }
    )
    return LlamaModule(config, lr=lr, optimizer="sgd", weight_decay=0.0, decay_steps=0)


class HuggingFace(LightningModule):
    """A model of transformers' that computes its own loss: ``labels`` are the ids themselves, shifted by the model."""

    def __init__(self, tied: bool = False, lr: float = 0.1, on_meta: bool = False, **changes: Any) -> None:
        super().__init__()
        self.lr, self.tied, self.changes = lr, tied, changes
        self.model: Any = None
        if not on_meta:
            self.build()

    def build(self) -> None:
        from transformers import LlamaConfig as TheirConfig
        from transformers import LlamaForCausalLM

        sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
        config = TheirConfig(**{**sizes, "vocab_size": VOCAB, "tie_word_embeddings": self.tied, **self.changes})
        self.model = LlamaForCausalLM(config)

    def configure_model(self) -> None:
        if self.model is None:
            self.build()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(batch["input_ids"], labels=batch["labels"]).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(batch["input_ids"], labels=batch["labels"]).loss)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"]).logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)
