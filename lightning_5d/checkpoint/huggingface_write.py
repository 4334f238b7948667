"""Hugging Face's safetensors folders, written: whole tensors, file by file, so that no more than one file is in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_5d.checkpoint.huggingface_read import INDEX, SINGLE, safetensors
from lightning_5d.checkpoint.weight_map import Source

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
)


Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Global shape and dtype of our tensors, by canonical name."""


def write_weights(
    out: Path,
    shapes: Shapes,
    sources: Mapping[str, list[Source]],
    load: Callable[[dict[str, torch.Tensor]], None],
    max_file_bytes: int,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Writes ``model.safetensors``, or several and an index; holds the tensors of one file at a time.

    Args:
        shapes: Global shape and dtype of our tensors, by canonical name.
        sources: Their names, and rows, of each.
        load: ``load({fqn: empty tensor})`` fills whole tensors.
        max_file_bytes: A file holds no more, but at least one tensor.
        dtype: Floating point tensors are converted to it; as they are when not given.

    Raises:
        ValueError: The sources of a fused tensor leave rows open, or safetensors is not installed.
    """
    save_file = safetensors().torch.save_file
    theirs = _their_tensors(shapes, sources)
    sizes = {name: parts.num_bytes(dtype) for name, parts in theirs.items()}
    buckets = _buckets(sizes, max_file_bytes)
    written = []
    for i, bucket in enumerate(buckets):
        file = out / (SINGLE if len(buckets) == 1 else f"model-{i + 1:05d}-of-{len(buckets):05d}.safetensors")
        needed = {fqn for name in bucket for fqn, _ in theirs[name].parts}
        ours = {fqn: torch.empty(shapes[fqn][0], dtype=shapes[fqn][1]) for fqn in needed}
        load(ours)
        content = {name: theirs[name].assemble(ours, dtype) for name in bucket}
        del ours
        save_file(content, file, metadata={"format": "pt"})
        written.append(file)
    if len(buckets) > 1:
        weight_map = {name: file.name for file, bucket in zip(written, buckets, strict=True) for name in bucket}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2))
    return written


def copy_tokenizer(source: Path, out: Path) -> list[str]:
    """Copies the tokenizer (a file ``tokenizer.json`` or a folder) beside the weights; returns the names of the files."""
    files = [source] if source.is_file() else [source / name for name in _TOKENIZER_FILES if (source / name).exists()]
    if not files:
        raise ValueError(f"{source} holds no tokenizer; looked for {', '.join(_TOKENIZER_FILES)}")
    for file in files:
        shutil.copyfile(file, out / ("tokenizer.json" if source.is_file() else file.name))
    return [file.name for file in files]


@dataclass
class _Theirs:
    """One of their tensors, put together from rows of ours."""

    parts: list[tuple[str, Source]]
    shape: tuple[int, ...]
    own_dtype: torch.dtype

    def assemble(self, ours: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> torch.Tensor:
        target = self._dtype(dtype)
        if len(self.parts) == 1 and self.parts[0][1].num_rows is None:
            return ours[self.parts[0][0]].to(target).contiguous()
        whole = torch.empty(self.shape, dtype=target)
        for fqn, source in self.parts:
            assert source.num_rows is not None
            rows = ours[fqn][source.our_start : source.our_start + source.num_rows]
            whole[source.start : source.start + source.num_rows] = rows.to(target)
        return whole

    def num_bytes(self, dtype: torch.dtype | None) -> int:
        return torch.Size(self.shape).numel() * self._dtype(dtype).itemsize

    def _dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        return dtype if dtype is not None and self.own_dtype.is_floating_point else self.own_dtype


def _their_tensors(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], sources: Mapping[str, list[Source]]
) -> dict[str, _Theirs]:
    parts: dict[str, list[tuple[str, Source]]] = {}
    for fqn, found in sources.items():
        for source in found:
            parts.setdefault(source.name, []).append((fqn, source))
    theirs = {}
    for name, found_parts in parts.items():
        shape, dtype = shapes[found_parts[0][0]]
        if found_parts[0][1].num_rows is not None:
            covered = sorted((source.start, source.num_rows or 0) for _, source in found_parts)
            end = 0
            for start, num_rows in covered:
                if start != end:
                    raise ValueError(f"the weight map leaves rows {end} to {start} of {name} open")
                end = start + num_rows
            shape = (end, *shape[1:])
        theirs[name] = _Theirs(found_parts, shape, dtype)
    return theirs


def _buckets(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    buckets: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if buckets[-1] and filled + size > max_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets
