"""A tokenizer: read from a tokenizer.json, or a byte-level BPE trained on the corpus itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lightning_5d.data.corpus import Piece

END_OF_TEXT = "<|endoftext|>"
# What the end of a document is called in published tokenizers.
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[SEP]")
MIN_VOCAB_SIZE = 257  # each byte, and the end of text
_TRAINING_CHARACTERS = 64_000_000  # more text changes the merges little and takes memory


def train_tokenizer(pieces: Iterable[Piece], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocab_size`` entries (fewer when the text is short), from the first 64 M characters."""
    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_characters(pieces), trainer)
    return tokenizer


def check_vocab_size(vocab_size: int) -> None:
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB_SIZE} (each byte and the end of text), got {vocab_size}.")


def _first_characters(pieces: Iterable[Piece]) -> Iterator[str]:
    total = 0
    for piece in pieces:
        yield piece.text
        total += len(piece.text)
        if total >= _TRAINING_CHARACTERS:
            return


def load_tokenizer(path: str | Path) -> Tokenizer:
    """From a ``tokenizer.json``, or the folder that holds one.

    Raises:
        ValueError: there is no such file, or it is not a tokenizer.
    """
    file = tokenizer_file(path)
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{file}: not a tokenizer.json of the tokenizers library: {error}") from error


def tokenizer_file(path: str | Path) -> Path:
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(
            f"{file}: no such file. Give a tokenizer.json, the folder that holds one, or no path to train a tokenizer."
        )
    return file


def end_of_text_id(tokenizer: Tokenizer, name: str | None = None) -> int:
    """The id of the token that ends a document: ``name``, or the first of the usual names that the tokenizer knows.

    Raises:
        ValueError: the tokenizer has no such token.
    """
    names = _END_OF_TEXT_NAMES if name is None else (name,)
    for candidate in names:
        token_id = tokenizer.token_to_id(candidate)
        if token_id is not None:
            return token_id
    raise ValueError(
        f"the tokenizer has no token {' or '.join(map(repr, names))} to end a document with: name one of its tokens by "
        "end_of_text=."
    )


def tokenizer_hash(path: str | Path) -> str:
    return hashlib.blake2b(tokenizer_file(path).read_bytes(), digest_size=16).hexdigest()
