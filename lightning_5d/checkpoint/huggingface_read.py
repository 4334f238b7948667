"""Hugging Face's safetensors folders, read: into a sharded model, each rank its own bytes, or mapped whole."""

from __future__ import annotations

import json
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
        opened = {file: stack.enter_context(_open(file)) for file in set(files.values())}
        _check(folder, wanted, sources, files, lambda name: opened[files[name]].get_slice(name))
    for fqn, tensor in wanted:
        local, box = (tensor.to_local() if isinstance(tensor, DTensor) else tensor), Box.of(tensor)
        if local.numel() == 0:
            continue
        for source in sources[fqn]:
            rows = box.rows(source) if tensor.ndim else (slice(None), slice(None))
            if rows is None:
                continue
            theirs = (rows[0], *(slice(o, o + n) for o, n in zip(box.offset[1:], box.shape[1:], strict=True)))
            # Opened for each tensor: what was mapped for it is given back before the next.
            with _open(files[source.name]) as file, torch.no_grad():
                content = file.get_slice(source.name)[theirs if tensor.ndim else ...]
                if content.dtype != local.dtype:
                    converted.add(f"{_short(content.dtype)} to {_short(local.dtype)}")
                (local[rows[1]] if tensor.ndim else local).copy_(content)
                del content
    return converted


def map_weights(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], sources: Mapping[str, list[Source]]
) -> dict[str, torch.Tensor]:
    """Whole tensors by canonical name, in their own dtypes; those that are one of theirs are mapped from the file, not read.

    Raises:
        ValueError: As :func:`read_weights`.
    """
    files = find_files(folder)
    with ExitStack() as stack:
        opened = {file: stack.enter_context(_open(file)) for file in set(files.values())}
        wanted = [(fqn, torch.empty(shape, device="meta")) for fqn, shape in shapes.items()]
        _check(folder, wanted, sources, files, lambda name: opened[files[name]].get_slice(name))
        whole = {}
        for fqn, shape in shapes.items():
            parts = [(source, opened[files[source.name]].get_tensor(source.name)) for source in sources[fqn]]
            if parts[0][0].num_rows is None:
                whole[fqn] = parts[0][1]
                continue
            whole[fqn] = torch.empty(shape, dtype=parts[0][1].dtype)
            for source, content in parts:
                assert source.num_rows is not None
                rows = content[source.start : source.start + source.num_rows]
                whole[fqn][source.our_start : source.our_start + source.num_rows] = rows
    return whole


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


def safetensors() -> Any:
    """The package, which an extra brings. Raises ``ValueError`` when it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        raise ValueError("Hugging Face's weights are files of the package safetensors: pip install 'lightning-5d[hf]'.") from None
    return safetensors


def _open(file: Path) -> Any:
    package = safetensors()
    try:
        return package.safe_open(file, framework="pt")
    except (package.SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
