"""Hugging Face's safetensors folders: read into a sharded model, each rank its own bytes; written from a checkpoint, file by file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_5d.checkpoint.weight_map import Source

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
)


@dataclass(frozen=True)
class Box:
    """A rectangle of a tensor: for each dimension first index and length."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Box:
        """What of the global tensor this rank holds."""
        if not isinstance(tensor, DTensor):
            return cls((0,) * tensor.ndim, tuple(tensor.shape))
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return cls(tuple(offset), tuple(shape))

    def rows(self, source: Source) -> tuple[slice, slice] | None:
        """Of a source's rows those inside this box, as slices of their tensor and of this box; None when there are none."""
        num_rows = self.offset[0] + self.shape[0] if source.num_rows is None else source.num_rows
        first = max(self.offset[0], source.our_start)
        last = min(self.offset[0] + self.shape[0], source.our_start + num_rows)
        if first >= last:
            return None
        theirs, ours = source.start - source.our_start, -self.offset[0]
        return slice(first + theirs, last + theirs), slice(first + ours, last + ours)


def find_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor of a Hugging Face folder.

    Raises:
        ValueError: No safetensors there, or files that the index names are missing.
    """
    if (folder / INDEX).exists():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        missing = sorted({file for file in weight_map.values() if not (folder / file).exists()})
        if missing:
            raise ValueError(f"{folder} lacks {', '.join(missing)}, which its {INDEX} names: the download is incomplete")
        return {name: folder / file for name, file in weight_map.items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        hint = "; it has pytorch_model.bin: convert it to safetensors" if list(folder.glob("*.bin")) else ""
        raise ValueError(f"{folder} holds no *.safetensors{hint}")
    found: dict[str, Path] = {}
    for file in files:
        with _open(file) as opened:
            found.update(dict.fromkeys(opened.keys(), file))
    return found


def read_weights(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], sources: Mapping[str, list[Source]]) -> set[str]:
    """Fills this rank's tensors, by canonical name, in place; reads only the rows and columns that this rank holds.

    A tensor is converted to the dtype it has in the model.

    Returns:
        The dtypes that were converted, as ``"bfloat16 to float32"``.

    Raises:
        ValueError: A tensor has no source, a source is not in the folder, or a shape differs; before anything is changed.
    """
    files, wanted = find_files(folder), list(tensors)
    converted: set[str] = set()
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def slice_of(name: str) -> Any:
            file = files[name]
            if file not in opened:
                opened[file] = stack.enter_context(_open(file))
            return opened[file].get_slice(name)

        _check(folder, wanted, sources, files, slice_of)
        for fqn, tensor in wanted:
            local, box = (tensor.to_local() if isinstance(tensor, DTensor) else tensor), Box.of(tensor)
            if local.numel() == 0:
                continue
            for source in sources[fqn]:
                rows = box.rows(source) if tensor.ndim else (slice(None), slice(None))
                if rows is None:
                    continue
                theirs = (rows[0], *(slice(o, o + n) for o, n in zip(box.offset[1:], box.shape[1:], strict=True)))
                content = slice_of(source.name)[theirs] if tensor.ndim else slice_of(source.name)[...]
                if content.dtype != local.dtype:
                    converted.add(f"{_short(content.dtype)} to {_short(local.dtype)}")
                with torch.no_grad():
                    (local[rows[1]] if tensor.ndim else local).copy_(content)
    return converted


def write_weights(
    out: Path,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    sources: Mapping[str, list[Source]],
    load: Any,
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
        ValueError: The sources of a fused tensor leave rows open.
    """
    from safetensors.torch import save_file

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


def _check(
    folder: Path,
    wanted: Iterable[tuple[str, torch.Tensor]],
    sources: Mapping[str, list[Source]],
    files: Mapping[str, Path],
    slice_of: Any,
) -> None:
    problems = []
    for fqn, tensor in wanted:
        for source in sources.get(fqn, []):
            if source.name not in files:
                problems.append(f"{source.name} is missing")
                continue
            shape = tuple(slice_of(source.name).get_shape())
            if source.num_rows is None:
                fits = shape == tuple(tensor.shape)
            else:
                fits = shape[1:] == tuple(tensor.shape[1:]) and source.start + source.num_rows <= shape[0]
            if not fits:
                problems.append(f"{source.name} has shape {shape} and {fqn} has {tuple(tensor.shape)}")
        if not sources.get(fqn):
            problems.append(f"{fqn} has no counterpart there")
    if problems:
        raise ValueError(f"the weights in {folder} do not fit the model: " + "; ".join(problems[:12]))


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
