"""Text as a LightningDataModule: any text files, or the built-in corpus, packed into sequences of one length."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from lightning_5d.data.corpus import Corpus
from lightning_5d.data.position import GlobalOrder, PositionedLoader, ShardedLoader
from lightning_5d.data.tokenizer import check_vocab_size
from lightning_5d.data.tokens import TokenFile, build_token_file, cache_folder, unigram_entropy_nats
from lightning_5d.seeding import keyed_seed


class TokenBlocks(Dataset):
    """Chosen blocks of a token file. Block i is tokens ``i S .. i S + S``: S inputs, and as labels the same, one further on.

    A batch is read at once (``__getitems__``): a dict of ``input_ids`` and ``labels``, both ``[batch, seq]`` int64.
    """

    def __init__(self, file: TokenFile, blocks: np.ndarray, seq_len: int) -> None:
        self.file, self.blocks, self.seq_len = file, blocks, seq_len

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: rows[0] for name, rows in self.__getitems__([index]).items()}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        starts = self.blocks[indices] * self.seq_len
        tokens = np.stack([self.file.tokens[start : start + self.seq_len + 1] for start in starts])
        rows = torch.from_numpy(tokens.astype(np.int64))
        return {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def _as_read(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch


class TextDataModule(LightningDataModule):
    """Batches of ``input_ids`` and ``labels``, both ``[batch, seq]``, labels shifted by one, from text.

    All text becomes one sequence of tokens with an end-of-text token after each document, cut into blocks of ``seq_len``. A block
    may hold several documents, and attention crosses their boundary; ``token_file.document_starts`` says where each starts.

    A part of the blocks, drawn once and independent of every other option, is kept for validation. Batches that would not be full
    are left out, in validation too, so each batch weighs the same and the validation loss does not depend on the layout.

    Args:
        path: a text file (.txt, .md, .rst, .py), .jsonl, .parquet, or a folder of them; None: the texts of Python's own
            documentation, about 460 kB.
        tokenizer: a tokenizer.json or the folder that holds one; None: a byte-level BPE is trained on the text.
        vocab_size: of the trained tokenizer.
        seq_len: tokens in a sequence.
        global_batch_size: sequences in a batch over ALL data-parallel ranks, so that a recipe means the same under each layout.
        val_batch_size: the same for validation; None: as in training.
        val_fraction: share of the blocks kept for validation.
        field: key or column of .jsonl and .parquet that holds the text.
        end_of_text: the token that ends a document; None: the first usual one that the tokenizer has.
        cache_dir: where token files are kept; built once by one process of each node and reused.
        num_workers: of the loaders. Tokens are memory-mapped: 0 is usually enough.
        seed: of the sample order, on its own so that the order does not change with the weights' seed.

    Raises:
        ValueError: an argument is out of range; the text or the tokenizer is at fault (the file and line are named); there is too
            little text; the model's vocabulary is too small; the global batch does not divide by the data-parallel size.
    """

    def __init__(
        self,
        path: str | None = None,
        tokenizer: str | None = None,
        vocab_size: int = 1024,
        seq_len: int = 256,
        global_batch_size: int = 8,
        val_batch_size: int | None = None,
        val_fraction: float = 0.05,
        field: str = "text",
        end_of_text: str | None = None,
        cache_dir: str = "~/.cache/lightning_5d",
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.path, self.tokenizer_path, self.field, self.end_of_text = path, tokenizer, field, end_of_text
        self.vocab_size, self.seq_len, self.val_fraction, self.seed = vocab_size, seq_len, val_fraction, seed
        self.global_batch_size = global_batch_size
        self.val_batch_size = global_batch_size if val_batch_size is None else val_batch_size
        self.cache_dir, self.num_workers = Path(cache_dir).expanduser(), num_workers
        for name, smallest in (("seq_len", 1), ("global_batch_size", 1), ("val_batch_size", 1), ("num_workers", 0)):
            if getattr(self, name) < smallest:
                raise ValueError(f"TextDataModule: {name} must be at least {smallest}, got {getattr(self, name)}.")
        if not 0.0 < val_fraction < 1.0:
            raise ValueError(f"TextDataModule: val_fraction must lie between 0 and 1, got {val_fraction}.")
        if tokenizer is None:
            check_vocab_size(vocab_size)
        self.save_hyperparameters()
        self._token_file: TokenFile | None = None

    def prepare_data(self) -> None:
        """Builds the token file if it is not there yet; Lightning calls it in one process of each node."""
        corpus = Corpus(self.path, self.field)
        build_token_file(self._folder(corpus), corpus, self.tokenizer_path, self.vocab_size, self.end_of_text)

    def setup(self, stage: str | None = None) -> None:
        """Opens the token file and splits its blocks.

        Raises:
            ValueError: the text is too short for one training and one validation batch, or the model's vocabulary is too small.
        """
        if self._token_file is not None:
            return
        corpus = Corpus(self.path, self.field)
        folder = self._folder(corpus)
        if not (folder / "meta.json").exists():
            raise RuntimeError(f"{folder}: the token file is not built. Call prepare_data() first, on this node; a Trainer does.")
        file = TokenFile(folder)
        self._check_model_vocabulary(file)
        train, val = self._split(file, str(corpus))
        self._train, self._val = TokenBlocks(file, train, self.seq_len), TokenBlocks(file, val, self.seq_len)
        self._token_file = file
        meta = file.meta
        rank_zero_info(
            f"{corpus}: {meta.num_tokens:,} tokens in {meta.num_documents:,} documents, vocabulary {meta.vocab_size:,}; "
            f"{len(train):,} training and {len(val):,} validation sequences of {self.seq_len}; unigram entropy of the "
            f"validation tokens {self.val_unigram_entropy_nats():.3f} nats"
        )

    def train_dataloader(self) -> ShardedLoader:
        file = self.token_file
        # Lightning sets these two attributes from outside the Trainer's class.
        overfit = self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]
        if overfit:  # the same few batches are wanted in each epoch
            order = GlobalOrder(len(self._train), self.global_batch_size, shuffle=False)
            return ShardedLoader(self._train, order, **self._loader_options())
        identity = f"{file.meta.tokens_hash} {self.seq_len} {self.val_fraction}"
        fingerprint = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
        order = GlobalOrder(len(self._train), self.global_batch_size, seed=self.seed)
        loader = PositionedLoader(self._train, order, **self._loader_options(), fingerprint=fingerprint)
        if self.trainer is not None and self.trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            loader.epoch = self.trainer.current_epoch  # each call makes a new loader: do not begin with the first epoch again
        return loader

    def val_dataloader(self) -> ShardedLoader:
        self.token_file  # noqa: B018  (set up, or a clear error)
        order = GlobalOrder(len(self._val), self.val_batch_size, shuffle=False)
        return ShardedLoader(self._val, order, **self._loader_options())

    def test_dataloader(self) -> ShardedLoader:
        """The validation sequences: the text is split in two, not in three."""
        return self.val_dataloader()

    @property
    def token_file(self) -> TokenFile:
        if self._token_file is None:
            raise RuntimeError("TextDataModule: call prepare_data() and setup() first; a Trainer does.")
        return self._token_file

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that was read or trained."""
        return self.token_file.tokenizer

    def val_unigram_entropy_nats(self) -> float:
        """Unigram entropy of the validation labels: a model below it has learnt from the context."""
        labels = self._val.__getitems__(list(range(len(self._val))))["labels"]
        return unigram_entropy_nats(labels.numpy())

    def _folder(self, corpus: Corpus) -> Path:
        return cache_folder(self.cache_dir, corpus, self.tokenizer_path, self.vocab_size, self.end_of_text)

    def _split(self, file: TokenFile, source: str) -> tuple[np.ndarray, np.ndarray]:
        """Training and validation block numbers, each ascending."""
        num_blocks = (file.meta.num_tokens - 1) // self.seq_len  # one token more than the inputs, for the last label
        if num_blocks < 1:
            raise ValueError(
                f"{source}: {file.meta.num_tokens} tokens are less than one sequence of seq_len {self.seq_len} and its last "
                "label. Give more text or a smaller seq_len."
            )
        num_val = max(1, round(num_blocks * self.val_fraction))
        num_train = num_blocks - num_val
        for name, have, need in (("training", num_train, self.global_batch_size), ("validation", num_val, self.val_batch_size)):
            if have < need:
                raise ValueError(
                    f"{source}: of {num_blocks} sequences of {self.seq_len} tokens, {have} are for {name} (val_fraction "
                    f"{self.val_fraction}), which do not fill one global batch of {need}. Give more text, a smaller batch or "
                    "seq_len, or another val_fraction."
                )
        generator = torch.Generator().manual_seed(keyed_seed(0, "validation split"))
        shuffled = torch.randperm(num_blocks, generator=generator).numpy()
        return np.sort(shuffled[num_val:]), np.sort(shuffled[:num_val])

    def _check_model_vocabulary(self, file: TokenFile) -> None:
        module = None if self.trainer is None else self.trainer.lightning_module
        have = getattr(getattr(module, "config", None), "vocab_size", None)
        if isinstance(have, int) and have < file.meta.vocab_size:
            raise ValueError(
                f"the tokenizer has {file.meta.vocab_size} tokens but the model's vocabulary holds {have}: set the model's "
                f"vocab_size to {file.meta.vocab_size} or more, or train a smaller tokenizer (data.vocab_size)."
            )

    def _loader_options(self) -> dict[str, Any]:
        strategy = None if self.trainer is None else self.trainer.strategy
        # The strategy's own word on data parallelism: under tensor, pipeline and context parallelism it is less than the world.
        coordinate = getattr(strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        device = getattr(strategy, "root_device", torch.device("cpu"))
        return {
            "dp_rank": coordinate["rank"],
            "dp_size": coordinate["num_replicas"],
            "collate_fn": _as_read,
            "num_workers": self.num_workers,
            "pin_memory": device.type == "cuda",  # an unpinned copy would make the host wait for the device
        }
