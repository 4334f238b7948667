"""What is in a checkpoint, told without loading a tensor and without running anything that is in it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from lightning_5d.checkpoint.commit import read_complete
from lightning_5d.checkpoint.meta import from_bytes
from lightning_5d.checkpoint.session import ENTRY
from lightning_5d.checkpoint.torch_metadata import read_metadata, tensors_of

_KINDS = {
    "model": "weights and buffers",
    "optim": "optimizer state",
    "entry": "further entries shaped like the weights",
    "rng": "random number generators",
}


@dataclass(frozen=True)
class StoredTensor:
    key: str
    shape: tuple[int, ...]
    dtype: str
    num_chunks: int
    """Pieces it is stored in."""
    num_bytes: int

    @property
    def kind(self) -> str:
        return self.key.split(".", 1)[0]


@dataclass(frozen=True)
class Inspection:
    """A checkpoint's description; raises ``ValueError`` in :meth:`of` when it is not complete."""

    path: Path
    layout: str
    world_size: int
    global_step: int
    epoch: int | None
    format: int
    file_bytes: int
    tied: list[list[str]]
    optimizers: list[str]
    entries: list[str]
    tensors: list[StoredTensor]

    @classmethod
    def of(cls, path: str | Path) -> Inspection:
        path = Path(path)
        complete = read_complete(path)
        entries = from_bytes((path / "meta.pt").read_bytes(), None, weights_only=None, path=str(path), needed=False)
        entry = entries.pop(ENTRY)
        tensors = [
            StoredTensor(
                key,
                tuple(stored.size),
                str(stored.properties.dtype).removeprefix("torch."),
                len(stored.chunks),
                prod(stored.size) * stored.properties.dtype.itemsize,
            )
            for key, stored in sorted(tensors_of(read_metadata(path)).items())
        ]
        optimizers = [f"{saved['optimizer']} with {len(saved['groups'])} groups" for saved in entry["optimizers"] or []]
        return cls(
            path,
            complete["layout"],
            entry["world_size"],
            complete["global_step"],
            entries.get("epoch"),
            complete["format"],
            sum(complete["files"].values()),
            entry["tied"],
            optimizers,
            sorted(entries),
            tensors,
        )

    def report(self, all_tensors: bool = False) -> str:
        """The summary and a line for each weight; with ``all_tensors`` for optimizer state and random numbers too."""
        lines = [
            f"{self.path}: complete, format {self.format}, {_size(self.file_bytes)} on disk",
            f"layout {self.layout} on {self.world_size} ranks, step {self.global_step}, epoch {self.epoch}",
            f"optimizers: {', '.join(self.optimizers) or 'none (weights alone)'}",
            f"other entries: {', '.join(self.entries)}",
            *(f"tied: {' = '.join(names)}" for names in self.tied),
        ]
        for kind, meaning in _KINDS.items():
            of_kind = [tensor for tensor in self.tensors if tensor.kind == kind]
            lines.append(f"{meaning}: {len(of_kind)} tensors, {_size(sum(tensor.num_bytes for tensor in of_kind))}")
        rows = [("tensor", "shape", "dtype", "pieces", "size")]
        for tensor in self.tensors:
            if all_tensors or tensor.kind == "model":
                shape = " x ".join(map(str, tensor.shape)) or "number"
                rows.append((tensor.key, shape, tensor.dtype, str(tensor.num_chunks), _size(tensor.num_bytes)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["", *("  ".join(f"{cell:<{n}}" for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows)]
        return "\n".join(lines)


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
