"""Text for training: corpus, tokenizer, token file, and one global sample order under every layout."""

from lightning_5d.data.position import GlobalOrder, PositionedLoader, ShardedLoader
from lightning_5d.data.stream import ShardedStream
from lightning_5d.data.text import TextDataModule
from lightning_5d.data.tokens import unigram_entropy_nats

__all__ = ["GlobalOrder", "PositionedLoader", "ShardedLoader", "ShardedStream", "TextDataModule", "unigram_entropy_nats"]
