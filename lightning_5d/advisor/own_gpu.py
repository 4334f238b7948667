"""A user's own accelerator, described in a YAML file."""

from __future__ import annotations

import difflib
import reprlib
from pathlib import Path

import yaml

from lightning_5d.advisor.hardware import Gpu, find_gpu, load_gpus

_NEEDED = {
    "name": "what to call it",
    "bf16_tflops": "dense peak of bf16 matrix products, TFLOP/s",
    "hbm_gib": "memory, GiB",
    "hbm_tb_s": "memory bandwidth, TB/s",
    "scaleup_uni_gb_s": "one-way bandwidth to the GPUs of the same node, GB/s",
    "scaleup_domain_gpus": "GPUs of a node",
    "internode_uni_gb_s": "one-way network bandwidth per GPU, GB/s",
}
_MORE = {
    "measured_bf16_tflops": "best measured matrix product, TFLOP/s; default 80% of the peak",
    "usable_gib": "memory software can take, GiB",
}
_LOWEST, _HIGHEST = 1e-6, 1e9
"""Of every figure: what lies beyond is no accelerator, and may not be a finite time."""


def load_own_gpu(path: str | Path) -> Gpu:
    """The accelerator described in a YAML file.

    Raises:
        ValueError: the file cannot be read, a figure is missing, unknown, not a positive number or contradicts another.
    """
    try:
        loaded = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} does not describe a GPU; it needs {_explain(_NEEDED)}")
    missing = [k for k in _NEEDED if k not in loaded]
    unknown = [k for k in loaded if k not in (*_NEEDED, *_MORE)]
    if missing or unknown:
        said = "; ".join(
            s
            for s in (
                f"missing: {_explain(_NEEDED, missing)}" if missing else "",
                f"unknown: {', '.join(map(str, unknown))}" if unknown else "",
            )
            if s
        )
        raise ValueError(f"{path}: {said}. Allowed: {_explain({**_NEEDED, **_MORE})}")
    figures: dict[str, float] = {}
    for key, value in loaded.items():
        if key == "name":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _LOWEST <= value <= _HIGHEST:
            raise ValueError(f"{path}: {key} must be a positive number ({_LOWEST:g} to {_HIGHEST:g}), not {reprlib.repr(value)}")
        figures[key] = float(value)
    if loaded["name"] in (None, ""):
        raise ValueError(f"{path}: name is empty; give {_NEEDED['name']}")
    if not figures["scaleup_domain_gpus"].is_integer():
        raise ValueError(f"{path}: scaleup_domain_gpus must be a whole number, not {loaded['scaleup_domain_gpus']!r}")
    for part, whole in (("measured_bf16_tflops", "bf16_tflops"), ("usable_gib", "hbm_gib")):
        if figures.get(part, 0) > figures[whole]:
            raise ValueError(f"{path}: {part} {figures[part]:g} is above {whole} {figures[whole]:g}, the most it can be")
    return Gpu(
        name=str(loaded["name"]),
        short_names=(),
        device_names=(),
        peak_tflops={"bf16": figures["bf16_tflops"]},
        measured_tflops={"bf16": figures["measured_bf16_tflops"]} if "measured_bf16_tflops" in figures else {},
        hbm_gib=figures["hbm_gib"],
        usable_gib=figures.get("usable_gib"),
        hbm_tb_s=figures["hbm_tb_s"],
        scaleup_kind="",
        scaleup_uni_gb_s=figures["scaleup_uni_gb_s"],
        scaleup_domain_gpus=int(figures["scaleup_domain_gpus"]),
        internode_uni_gb_s=figures["internode_uni_gb_s"],
        source=str(path),
        notes="",
    )


def _explain(names: dict[str, str], only: list[str] | None = None) -> str:
    return ", ".join(f"{k} ({v})" for k, v in names.items() if only is None or k in only)


def require_gpu(name: str | Path) -> Gpu:
    """The GPU of that name, or of that YAML file.

    Raises:
        ValueError: unknown name; the message lists the nearest and all short names.
    """
    if not isinstance(name, (str, Path)):
        raise ValueError(f"gpu must be a name such as h100, the path of a YAML file or a Gpu, not {reprlib.repr(name)}")
    name = str(name)
    if Path(name).suffix in (".yaml", ".yml"):
        return load_own_gpu(name)
    found = find_gpu(name)
    if found is None:
        known = [gpu.short_names[0] for gpu in load_gpus() if gpu.short_names]
        every = [short for gpu in load_gpus() for short in gpu.short_names]
        near = difflib.get_close_matches(name.lower(), every, n=3)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ValueError(f"unknown GPU {name!r}{hint}; known: {', '.join(known)}; your own: the path of a YAML file")
    if found.peak("bf16") is None:
        raise ValueError(f"{found.name}: no dense bf16 peak is known, so no time can be predicted")
    return found
