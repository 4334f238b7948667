"""A checkpoint outside of training, in one process: as a module, as one file, to and from Hugging Face's folders."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_5d.checkpoint import huggingface_read, huggingface_write
from lightning_5d.checkpoint.commit import FORMAT
from lightning_5d.checkpoint.names import Names
from lightning_5d.checkpoint.session import ENTRY
from lightning_5d.checkpoint.store import CheckpointStore
from lightning_5d.checkpoint.weight_map import HuggingFaceNames, find_huggingface_names

M = TypeVar("M", bound=LightningModule)


def load_module(
    cls: type[M], path: str | Path, weights_only: bool | None = None, strict: bool | None = None, **hparams: Any
) -> M:
    """``cls.load_from_checkpoint`` for a checkpoint written under a layout: the whole module, on the CPU.

    Args:
        cls: The LightningModule to build, from the hyper-parameters in the checkpoint.
        weights_only: As in torch.load; False also reads hyper-parameters that are not of plain types, and may run code in them.
        strict: Whether every weight must be there and have a place.
        hparams: Replace saved hyper-parameters.

    Raises:
        CheckpointError: There is no complete checkpoint.
    """
    return _load_state(cls, whole_checkpoint(path, weights_only, optimizers=False), strict=strict, **hparams)  # type: ignore[return-value]


def whole_checkpoint(path: str | Path, weights_only: bool | None = None, optimizers: bool = True) -> dict[str, Any]:
    """Lightning's own checkpoint dict, with whole tensors, as a stock Trainer on one device would have written it.

    Raises:
        CheckpointError: There is no complete checkpoint.
        ValueError: The optimizers' parameters were in an order that the pipeline stages do not show.
    """
    store = CheckpointStore()
    checkpoint = store.read_entries(path, weights_only)
    entry = checkpoint.pop(ENTRY)
    saved = store.read_metadata(path)
    kinds = ("model.", "optim.", "entry.") if optimizers else ("model.",)
    tensors = _read(store, path, [key for key in saved if key.startswith(kinds)])
    weights = {key.removeprefix("model."): tensor for key, tensor in tensors.items() if key.startswith("model.")}
    for first, *others in entry["tied"]:
        weights.update({name: weights[first] for name in others if first in weights})
    checkpoint["state_dict"] = {**weights, **checkpoint.get("state_dict", {})}
    for name in entry["sharded_entries"] if optimizers else ():
        prefix = f"entry.{name}."
        checkpoint[name] = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        checkpoint[name].update({alias: checkpoint[name][first] for first, *others in entry["tied"] for alias in others})
    if optimizers and entry["optimizers"] is not None:
        checkpoint["optimizer_states"] = [_optimizer_state(i, saved, tensors) for i, saved in enumerate(entry["optimizers"])]
    return checkpoint


def export_lightning(path: str | Path, out: str | Path, weights_only: bool | None = None) -> Path:
    """Writes one file ``out`` for ``load_from_checkpoint`` and a stock Trainer's ``ckpt_path``; holds all of it in memory."""
    out = Path(out)
    checkpoint = whole_checkpoint(path, weights_only)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.parent / f".tmp-{os.getpid()}-{out.name}"
    try:
        torch.save(checkpoint, unfinished)
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)
    return out


def export_huggingface(
    path: str | Path,
    out: str | Path,
    max_file_gib: float = 4.66,
    dtype: torch.dtype | None = None,
    tokenizer: str | Path | None = None,
    config: str | Path | None = None,
) -> list[Path]:
    """Writes a folder that ``transformers`` loads: safetensors, index, config.json, tokenizer; one file's tensors in memory.

    Args:
        path: A checkpoint of a model that a weight map is known for: our Llama, a transformers model, a registered one.
        max_file_gib: Size of a file; the default is Hugging Face's 5 GB.
        dtype: To convert floating point weights to; as saved when not given.
        tokenizer: tokenizer.json, or a folder that holds a tokenizer's files.
        config: A config.json to use instead of the model's own.

    Raises:
        CheckpointError: There is no complete checkpoint.
        ValueError: No weight map was known for the model, there is no configuration, or ``out`` is not empty.
    """
    store, out = CheckpointStore(), Path(out)
    entry = store.read_entries(path)[ENTRY]
    if entry["huggingface"] is None or not entry["huggingface"]["sources"]:
        raise ValueError(
            f"{path}: it is not known under which names Hugging Face keeps this model's weights. Before training, tell with "
            "lightning_5d.checkpoint.register_weight_map(model_class, make_map), or export with --format lightning."
        )
    names = HuggingFaceNames.from_plain(entry["huggingface"])
    config_json = json.loads(Path(config).read_text()) if config is not None else names.config
    if config_json is None:
        raise ValueError(f"{path}: the weight map of this model has no config.json; give one (--config)")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: nothing there is overwritten, give another folder")
    out.mkdir(parents=True, exist_ok=True)
    saved = store.read_metadata(path)
    shapes = {fqn: (tuple(saved[f"model.{fqn}"].size), saved[f"model.{fqn}"].properties.dtype) for fqn in names.sources}

    def load(tensors: dict[str, torch.Tensor]) -> None:
        store.load({f"model.{fqn}": tensor for fqn, tensor in tensors.items()}, path)

    files = huggingface_write.write_weights(out, shapes, names.sources, load, int(max_file_gib * 2**30), dtype)
    written_dtype = dtype or next(dtype for _, dtype in shapes.values())
    config_json = {**config_json, "dtype": str(written_dtype).removeprefix("torch.")}
    (out / "config.json").write_text(json.dumps(config_json, indent=2))
    if tokenizer is not None:
        huggingface_write.copy_tokenizer(Path(tokenizer), out)
    return files


def import_huggingface(folder: str | Path, out: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Makes a checkpoint of :class:`lightning_5d.models.LlamaModule`, weights alone, from a Hugging Face Llama's folder.

    The weights are mapped, not read into memory, as long as no dtype is given.

    Raises:
        ValueError: The folder holds no safetensors or not a Llama's, or ``out`` is a directory that is no checkpoint.
    """
    from lightning_5d.models import LlamaModule

    folder, out = Path(folder), Path(out)
    with torch.device("meta"):
        module = LlamaModule(str(folder))
        module.configure_model()
    names = Names.of(module)
    found = find_huggingface_names(module, names)
    assert found is not None, "there is a weight map for our own Llama"
    weights = huggingface_read.map_weights(folder, {fqn: spec.shape for fqn, spec in names.specs.items()}, found.sources)
    tensors = {f"model.{fqn}": tensor if dtype is None else tensor.to(dtype) for fqn, tensor in weights.items()}
    entry = {
        "format": FORMAT,
        "layout": "dp1",
        "world_size": 1,
        "tied": names.tied,
        "huggingface": found.to_plain(),
        "optimizers": None,
        "sharded_entries": [],
    }
    import lightning

    entries = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": {},
        "loops": {},
        "hyper_parameters": dict(module.hparams),
        ENTRY: entry,
    }
    CheckpointStore().save(tensors, entries, out, "dp1", 0)
    rank_zero_info(f"Wrote {out} from {folder}")
    return out


def _read(store: CheckpointStore, path: str | Path, keys: list[str]) -> dict[str, torch.Tensor]:
    saved = store.read_metadata(path)
    tensors = {key: torch.empty(tuple(saved[key].size), dtype=saved[key].properties.dtype) for key in keys}
    store.load(tensors, path)
    return tensors


def _optimizer_state(index: int, saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What ``Optimizer.state_dict()`` gives: parameters numbered through the groups."""
    numbers: dict[str, int] = {}
    groups = []
    for j, group in enumerate(saved["groups"]):
        if not group["ordered"]:
            raise ValueError(
                f"parameter group {j} of optimizer {index} is not in the order of the model's parameters, and its parts on the "
                "pipeline stages do not show in which it is; a file for a stock Trainer would mix the moments up. Save under a "
                "layout without pp."
            )
        start = len(numbers)
        numbers.update({name: start + i for i, name in enumerate(group["params"])})
        hyper = {key: value for key, value in group.items() if key not in ("params", "ordered")}
        groups.append({**hyper, "params": [numbers[name] for name in group["params"]]})
    states: dict[int, dict[str, Any]] = {numbers[name]: dict(slots) for name, slots in saved["scalars"].items()}
    for key, tensor in tensors.items():
        kind, i, *rest = key.split(".", 3)
        if kind == "optim" and int(i) == index:
            slot, name = rest
            states.setdefault(numbers[name], {})[slot] = tensor
    return {"state": dict(sorted(states.items())), "param_groups": groups}
