"""Text in, documents out: files, folders, or the built-in corpus. Every fault names its file and line."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".parquet")
_PIECE_BYTES = 1 << 20  # a long text file is read in pieces of whole lines, so that memory does not grow with it


@dataclass(frozen=True)
class Piece:
    """A stretch of a document's text."""

    text: str
    ends_document: bool
    """Whether the document ends with this piece."""
    num_bytes: int
    """How far this piece advances in its file, for the progress bar."""


class Corpus:
    """The documents below a path, or the built-in ones.

    Args:
        path: a file of one of ``SUFFIXES`` (a text file is one document, a line of .jsonl and a row of .parquet one each), or
            a folder that is searched for such files; None: the texts of Python's own documentation that come with it.
        field: the key or column of .jsonl and .parquet that holds the text.

    Raises:
        ValueError: the path does not exist, is of an unknown kind, or a folder holds no such file.
    """

    def __init__(self, path: str | Path | None = None, field: str = "text") -> None:
        self.path, self.field = None if path is None else Path(path), field
        self.files = [] if self.path is None else find_files(self.path)

    def __str__(self) -> str:
        return "the built-in corpus" if self.path is None else str(self.path)

    @property
    def num_bytes(self) -> int:
        if self.path is None:
            return sum(len(text.encode()) for text in _builtin_documents())
        return sum(file.stat().st_size for file in self.files)

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the source without reading it: names, sizes and times of change (the built-in corpus is hashed)."""
        if self.path is None:
            digest = hashlib.blake2b("\0".join(_builtin_documents()).encode(), digest_size=16).hexdigest()
            return {"builtin": digest, "python": sys.version.split()[0]}
        stats = [(str(file.resolve()), file.stat()) for file in self.files]
        return {"field": self.field, "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]}

    def pieces(self) -> Iterator[Piece]:
        """All documents, in a fixed order.

        Raises:
            ValueError: a file is empty, corrupt or not UTF-8, or a line is not JSON or lacks the field; file and line are named.
        """
        if self.path is None:
            for text in _builtin_documents():
                yield Piece(text, True, len(text.encode()))
        for file in self.files:
            has_text = False
            for piece in _read(file, self.field):
                has_text = has_text or bool(piece.text.strip())
                yield piece
            if not has_text:
                raise ValueError(f"{file}: holds no text. Remove the file, or leave it out of the folder.")


def find_files(path: Path) -> list[Path]:
    """The readable files at or below ``path``, sorted; hidden ones are left out."""
    kinds = ", ".join(SUFFIXES)
    if not path.exists():
        raise ValueError(
            f"{path}: no such file or folder. Give text ({kinds}), a folder of it, or no path for the built-in corpus."
        )
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"{path}: files of kind {path.suffix or '(no suffix)'!r} cannot be read. Supported: {kinds}.")
        return [path]
    below = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
    files = sorted(p for p in below if p.suffix.lower() in SUFFIXES and p.is_file())
    if not files:
        raise ValueError(f"{path}: the folder holds no file of a supported kind ({kinds}).")
    return files


def _builtin_documents() -> list[str]:
    topics = importlib.import_module("pydoc_data.topics").topics
    return [topics[name] for name in sorted(topics)]


def _read(file: Path, field: str) -> Iterator[Piece]:
    suffix = file.suffix.lower()
    if suffix == ".jsonl":
        return _read_jsonl(file, field)
    if suffix == ".parquet":
        return _read_parquet(file, field)
    return _read_text(file)


def _lines(file: Path) -> Iterator[tuple[int, int, str]]:
    """(line number from 1, its bytes, its text)."""
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{file}, line {number}: not UTF-8 (byte 0x{raw[error.start]:02x} at column {error.start + 1}). "
                    "Convert the file to UTF-8."
                ) from error
            yield number, len(raw), text


def _read_text(file: Path) -> Iterator[Piece]:
    lines: list[str] = []
    num_bytes = 0
    for _, length, line in _lines(file):
        lines.append(line)
        num_bytes += length
        if num_bytes >= _PIECE_BYTES:
            yield Piece("".join(lines), False, num_bytes)
            lines, num_bytes = [], 0
    yield Piece("".join(lines), True, num_bytes)


def _read_jsonl(file: Path, field: str) -> Iterator[Piece]:
    for number, length, line in _lines(file):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}, line {number}: not JSON ({error.msg} at column {error.colno}).") from error
        if not isinstance(record, dict):
            raise ValueError(f"{file}, line {number}: expected an object with the key {field!r}, got {type(record).__name__}.")
        if field not in record:
            keys = ", ".join(map(repr, record)) or "none"
            raise ValueError(f"{file}, line {number}: no key {field!r}; there are: {keys}. Name the right one by field=.")
        if not isinstance(record[field], str):
            raise ValueError(f"{file}, line {number}: {field!r} must be text, got {type(record[field]).__name__}.")
        yield Piece(record[field], True, length)


def _read_parquet(file: Path, field: str) -> Iterator[Piece]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ValueError(f"{file}: reading .parquet needs pyarrow: pip install 'lightning-5d[parquet]'.") from None
    try:
        table = pyarrow.parquet.ParquetFile(file)
        names = table.schema_arrow.names
        if field not in names:
            raise ValueError(
                f"{file}: no column {field!r}; there are: {', '.join(map(repr, names))}. Name the right one by field=."
            )
        num_bytes = file.stat().st_size // max(1, table.metadata.num_rows)
        row = 0
        for batch in table.iter_batches(columns=[field]):
            for text in batch.column(0).to_pylist():
                row += 1
                if not isinstance(text, str):
                    raise ValueError(f"{file}, row {row}: {field!r} must be text, got {type(text).__name__}.")
                yield Piece(text, True, num_bytes)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not a readable .parquet file: {error}") from error
