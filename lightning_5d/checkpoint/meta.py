"""What a checkpoint holds beside tensors, split by whether ``torch.load(weights_only=True)`` can read it.

The plain part goes to ``meta.pt`` and loads with no code run; the rest goes to ``extra.pt``, which is only read when
the user says ``weights_only=False``.
"""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

_LEAVES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.Size,
    torch.dtype,
    torch.device,
    torch.Tensor,
    torch.nn.Parameter,
)
_SEQUENCES = (list, tuple, set)
_MAPPINGS = (dict, OrderedDict, Counter)

# Without these a run cannot go on as it was; everything else is only missed by whoever asks for it.
_NEEDED = {
    "loops": "the position in the epoch",
    "callbacks": "the state of callbacks",
    "lr_schedulers": "the state of the learning rate schedulers",
}


def is_plain(value: Any) -> bool:
    """Whether ``torch.load(weights_only=True)`` reads ``value`` back: exact built-in types, tensors, nothing else."""
    if type(value) in _LEAVES:
        return True
    if type(value) in _SEQUENCES:
        return all(is_plain(item) for item in value)
    if type(value) in _MAPPINGS:
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return False


def split_plain(meta: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of plain types and the others, by top-level entry."""
    plain = {key: value for key, value in meta.items() if is_plain(value)}
    return plain, {key: value for key, value in meta.items() if key not in plain}


def to_bytes(meta: Mapping[str, Any]) -> dict[str, bytes]:
    """The files ``meta.pt`` and, if any entry is not plain, ``extra.pt``; the entries are copied by this, not kept."""
    plain, extra = split_plain(meta)
    files = {"meta.pt": _dump({**plain, "extra_entries": sorted(map(str, extra))} if extra else plain)}
    if extra:
        files["extra.pt"] = _dump(extra)
    return files


def from_bytes(meta: bytes, extra: bytes | None, weights_only: bool | None, path: str, needed: bool = True) -> dict[str, Any]:
    """The entries again, those of ``extra.pt`` only with ``weights_only=False``; not ``needed``: nobody will train with them.

    Raises:
        ValueError: Without ``weights_only=False``, when an entry without which training cannot go on is not plain.
    """
    entries: dict[str, Any] = torch.load(io.BytesIO(meta), map_location="cpu", weights_only=True)
    left_out = entries.pop("extra_entries", [])
    if not left_out:
        return entries
    if weights_only is False:
        assert extra is not None, "meta.pt names entries of extra.pt, and completeness was checked"
        return {**entries, **torch.load(io.BytesIO(extra), map_location="cpu", weights_only=False)}
    if not needed:
        return entries
    lost = [key for key in left_out if key in _NEEDED]
    if lost:
        what = "; ".join(f"{key!r} ({_NEEDED[key]})" for key in lost)
        raise ValueError(
            f"{path}: {what} cannot be read with weights_only=True, because something in it is not a plain type. "
            "If you trust this checkpoint, pass weights_only=False: trainer.fit(..., ckpt_path=..., weights_only=False)."
        )
    rank_zero_warn(
        f"{path}: the entries {left_out} hold types that weights_only=True does not read, and are left out. "
        "If you trust this checkpoint and need them, pass weights_only=False."
    )
    return entries


def _dump(value: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
