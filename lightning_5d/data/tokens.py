"""The token file: a corpus as one memory-mapped array of token ids, built once and reused.

A cache entry is a folder, written under a temporary name and renamed when complete, so that one which exists is whole:

    tokens.bin      uint16 or uint32, all documents one after the other, each followed by the end-of-text token
    documents.npy   int64, where each document starts, and at last the number of tokens
    tokenizer.json
    meta.json       sizes, dtype, a hash of the tokens, the source's fingerprint
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from lightning_5d.data.corpus import Corpus, Piece
from lightning_5d.data.tokenizer import end_of_text_id, load_tokenizer, tokenizer_hash, train_tokenizer

_FORMAT = 1
_ENCODE_CHARACTERS = 4 << 20  # of text at a time: enough for every core, little memory


@dataclass(frozen=True)
class TokenMeta:
    """What ``meta.json`` holds."""

    format: int
    num_tokens: int
    num_documents: int
    vocab_size: int
    end_of_text: int
    """Id of the token between documents."""
    dtype: str
    tokens_hash: str
    """Of the token ids: the same data has the same hash wherever it lies."""
    source: dict[str, Any]


class TokenFile:
    """A built cache entry, memory-mapped when first read (in each process for itself)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = TokenMeta(**json.loads((folder / "meta.json").read_text(encoding="utf-8")))

    @cached_property
    def tokens(self) -> np.ndarray:
        """``[num_tokens]`` token ids."""
        return np.memmap(self.folder / "tokens.bin", dtype=self.meta.dtype, mode="r", shape=(self.meta.num_tokens,))

    @cached_property
    def document_starts(self) -> np.ndarray:
        """``[num_documents + 1]`` positions in ``tokens``."""
        return np.load(self.folder / "documents.npy")

    @property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "meta": self.meta}  # a memory map would be copied whole into each worker


def cache_folder(cache_dir: Path, corpus: Corpus, tokenizer: str | Path | None, vocab_size: int, end_of_text: str | None) -> Path:
    """Where the tokens of a corpus under a tokenizer lie; changes when a file, the tokenizer or an option does."""
    wanted = {"trained": vocab_size} if tokenizer is None else {"given": tokenizer_hash(tokenizer)}
    key = {"format": _FORMAT, "source": corpus.fingerprint(), "tokenizer": wanted, "end_of_text": end_of_text}
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=12).hexdigest()
    name = "builtin" if corpus.path is None else corpus.path.resolve().name
    return cache_dir / f"{name}-{digest}"


def build_token_file(
    folder: Path, corpus: Corpus, tokenizer: str | Path | None, vocab_size: int, end_of_text: str | None
) -> TokenFile:
    """The token file at ``folder``, built if it is not there yet. Processes that ask for the same one wait for the first.

    Raises:
        ValueError: a file of the corpus, or the tokenizer, is at fault. Nothing is left behind then.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not (folder / "meta.json").exists():
            building = folder.with_name(f".{folder.name}.building")
            shutil.rmtree(building, ignore_errors=True)  # of a process that was killed: the lock says that nobody builds now
            try:
                building.mkdir()
                _build(building, corpus, tokenizer, vocab_size, end_of_text)
                os.replace(building, folder)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    return TokenFile(folder)


def _build(folder: Path, corpus: Corpus, tokenizer: str | Path | None, vocab_size: int, end_of_text: str | None) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        num_bytes = corpus.num_bytes

        def watched(text: str) -> Iterator[Piece]:
            task = progress.add_task(text, total=num_bytes)
            for piece in corpus.pieces():
                yield piece
                progress.advance(task, piece.num_bytes)

        if tokenizer is None:
            codec = train_tokenizer(watched(f"Training a tokenizer on {corpus}"), vocab_size)
        else:
            codec = load_tokenizer(tokenizer)
        end = end_of_text_id(codec, end_of_text)
        # Ids may have gaps: the embedding must reach the largest one.
        size = max(codec.get_vocab(with_added_tokens=True).values()) + 1
        dtype = np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)
        with (folder / "tokens.bin").open("wb") as stream:
            starts, tokens_hash = _write_tokens(stream, watched(f"Tokenizing {corpus}"), codec, end, dtype)
            stream.flush()
            os.fsync(stream.fileno())
    np.save(folder / "documents.npy", np.asarray(starts, dtype=np.int64))
    codec.save(str(folder / "tokenizer.json"))
    meta = TokenMeta(_FORMAT, starts[-1], len(starts) - 1, size, end, dtype.name, tokens_hash, corpus.fingerprint())
    (folder / "meta.json").write_text(json.dumps(asdict(meta), indent=1), encoding="utf-8")


def _write_tokens(
    stream: BinaryIO, pieces: Iterator[Piece], codec: Tokenizer, end: int, dtype: np.dtype
) -> tuple[list[int], str]:
    """(start of each document and the end of the last, hash of the ids)."""
    digest = hashlib.blake2b(digest_size=16)
    starts, position = [0], 0
    codec.encode_special_tokens = True  # a text that spells the end-of-text token out does not end its document
    for group in _groups(pieces):
        for piece, encoding in zip(group, codec.encode_batch([p.text for p in group], add_special_tokens=False), strict=True):
            ids = np.asarray(encoding.ids + [end] * piece.ends_document, dtype=dtype)
            stream.write(ids.tobytes())
            digest.update(ids.astype("<u4").tobytes())
            position += len(ids)
            if piece.ends_document:
                starts.append(position)
    return starts, digest.hexdigest()


def _groups(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    characters = 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece.text)
        if characters >= _ENCODE_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def unigram_entropy_nats(tokens: np.ndarray) -> float:
    """Entropy of the token frequencies: the lowest loss, in nats a token, of any model that does not look at the context.

    Raises:
        ValueError: there are no tokens.
    """
    if tokens.size == 0:
        raise ValueError("no tokens, no entropy.")
    counts = np.unique(tokens, return_counts=True)[1]
    share = counts / tokens.size
    return float(-(share * np.log(share)).sum())
