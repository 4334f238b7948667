"""Accelerators: dense peaks, memory and links, from ``data/gpus.csv`` (every row names its source).

``python -m lightning_5d.advisor.hardware`` prints the table of the documentation.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
"""Number formats of matrix products, as the columns of ``data/gpus.csv`` name them."""

_DTYPE_NAMES = {
    "float32": "fp32",
    "tfloat32": "tf32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8": "fp8",
    "float4": "fp4",
}

_TABLE = Path(__file__).parent / "data" / "gpus.csv"


@dataclass(frozen=True)
class Gpu:
    """One accelerator, as software sees it: one device of torch. A figure that is not known is None (or missing in a mapping)."""

    name: str
    short_names: tuple[str, ...]
    """Names a person types: "h100", "a100-80gb"."""
    device_names: tuple[str, ...]
    """What ``torch.cuda.get_device_name`` returns for it."""
    peak_tflops: Mapping[str, float]
    """Vendor's DENSE peak of matrix products in TFLOP/s, by one of :data:`DTYPES`; never the figure with sparsity."""
    measured_tflops: Mapping[str, float]
    """Best matrix product measured in public benchmarks in TFLOP/s, by one of :data:`DTYPES`."""
    hbm_gib: float
    """Memory as labelled."""
    usable_gib: float | None
    """Memory that software can allocate, where reported."""
    hbm_tb_s: float
    """Memory bandwidth, TB/s."""
    scaleup_kind: str
    """Link to the other GPUs of the scale-up domain."""
    scaleup_uni_gb_s: float
    """Bandwidth of that link per GPU in ONE direction, GB/s."""
    scaleup_domain_gpus: int
    """GPUs reached over it."""
    internode_uni_gb_s: float | None
    """Typical network bandwidth per GPU in one direction, GB/s."""
    source: str
    notes: str

    def peak(self, dtype: str) -> float | None:
        """Dense peak in TFLOP/s of ``dtype`` ("bf16" or "bfloat16"...); None when not known. ValueError for what is no dtype."""
        return self.peak_tflops.get(canonical_dtype(dtype))


def canonical_dtype(dtype: str) -> str:
    """``dtype`` as one of :data:`DTYPES`; takes torch's names too. Raises ValueError for anything else."""
    name = str(dtype).lower().removeprefix("torch.")
    name = _DTYPE_NAMES.get(name, name)
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; allowed: {', '.join((*DTYPES, *_DTYPE_NAMES))}")
    return name


@lru_cache(maxsize=1)
def load_gpus() -> tuple[Gpu, ...]:
    """All accelerators of the carried table."""
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(_gpu(row) for row in csv.DictReader(file))


def _gpu(row: dict[str, str]) -> Gpu:
    def number(column: str) -> float | None:
        return float(row[column]) if row[column] else None

    def by_dtype(pattern: str) -> dict[str, float]:
        columns = {dtype: row.get(pattern.format(dtype)) for dtype in DTYPES}
        return {dtype: float(text) for dtype, text in columns.items() if text}

    return Gpu(
        name=row["name"],
        short_names=tuple(filter(None, row["short_names"].split("|"))),
        device_names=tuple(filter(None, row["device_names"].split("|"))),
        peak_tflops=by_dtype("{}_tflops"),
        measured_tflops=by_dtype("measured_{}_tflops"),
        hbm_gib=float(row["hbm_gib"]),
        usable_gib=number("usable_gib"),
        hbm_tb_s=float(row["hbm_tb_s"]),
        scaleup_kind=row["scaleup_kind"],
        scaleup_uni_gb_s=float(row["scaleup_uni_gb_s"]),
        scaleup_domain_gpus=int(row["scaleup_domain_gpus"]),
        internode_uni_gb_s=number("internode_uni_gb_s"),
        source=row["source"],
        notes=row["notes"],
    )


@lru_cache(maxsize=1)
def _by_name() -> dict[str, Gpu]:
    names: dict[str, Gpu] = {}
    for gpu in load_gpus():
        for name in (gpu.name, *gpu.short_names, *gpu.device_names):
            assert names.setdefault(_key(name), gpu) is gpu, f"{name} stands in two rows"
    for gpu in load_gpus():
        for name in gpu.device_names:  # older drivers leave the vendor out
            names.setdefault(_key(name).removeprefix("nvidia "), gpu)
    return names


def _key(name: str) -> str:
    return " ".join(name.lower().split())


def find_gpu(device_name: str) -> Gpu | None:
    """The accelerator that torch calls ``device_name`` or a person calls by a short name; None when unknown.

    Whole names are compared, case and spacing ignored, and never parts of them: "NVIDIA H100 NVL" is not an H100 SXM,
    a MIG slice is not its GPU, "NVIDIA GeForce RTX 4090 Laptop GPU" is not an RTX 4090.
    """
    return _by_name().get(_key(device_name))


def peaks_table() -> str:
    """Markdown table of the dense peaks in TFLOP/s, with the device names they are found by."""
    lines = [
        "| GPU | " + " | ".join(DTYPES) + " | `torch.cuda.get_device_name` | short names | source |",
        "|---|" + "---|" * (len(DTYPES) + 3),
    ]
    for gpu in load_gpus():
        peaks = (f"{gpu.peak_tflops[dtype]:g}" if dtype in gpu.peak_tflops else "" for dtype in DTYPES)
        names = ", ".join(f"`{name}`" for name in gpu.device_names)
        short = ", ".join(f"`{name}`" for name in gpu.short_names)
        lines.append(f"| {gpu.name} | {' | '.join(peaks)} | {names} | {short} | {gpu.source} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(peaks_table())
