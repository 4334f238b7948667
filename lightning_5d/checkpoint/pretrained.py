"""Training that starts from weights kept elsewhere: a Hugging Face folder, or a checkpoint of another run."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_5d.checkpoint import state
from lightning_5d.checkpoint.agree import CheckpointError, gather_objects, on_every_rank, on_first_rank
from lightning_5d.checkpoint.commit import COMPLETE
from lightning_5d.checkpoint.huggingface_read import read_weights
from lightning_5d.checkpoint.names import Names
from lightning_5d.checkpoint.session import CheckpointSession
from lightning_5d.checkpoint.weight_map import HuggingFaceNames


class PretrainedWeights(Callback):
    """Loads weights before training starts: each rank reads its own part, whatever the layout. Nothing else is taken over.

    Does nothing when training resumes from a checkpoint (``ckpt_path``), whose weights are newer.

    Args:
        path: A Hugging Face folder with safetensors, or a checkpoint of this model written under any layout.
        strict: Whether every weight must be there.

    Raises:
        CheckpointError: On every rank, before anything is changed: the weights do not fit the model.
    """

    def __init__(self, path: str | Path, strict: bool = True) -> None:
        self.path, self.strict = Path(path), strict

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is not None:
            rank_zero_info(f"Not loading the weights of {self.path}: training resumes from {trainer.ckpt_path}")
            return
        load_pretrained(pl_module, self.path, self.strict)


def load_pretrained(module: nn.Module, path: str | Path, strict: bool = True) -> None:
    """Fills this rank's part of ``module`` in place; called by all ranks. Dtypes are converted to the module's, and it is said.

    Args:
        module: A LightningModule, whole or laid out by a strategy: in ``on_fit_start`` or later, say.
        path: A Hugging Face folder with safetensors, or a checkpoint of this model written under any layout.
        strict: Whether every weight must be there.

    Raises:
        CheckpointError: On every rank: the weights do not fit the module; nothing was changed.
    """
    session = CheckpointSession.of(module)
    names = session.names
    assert names is not None
    path = Path(path)
    tensors = state.model_tensors(module, names)
    if on_first_rank(lambda: (path / COMPLETE).exists(), None):
        converted = _load_checkpoint(session, path, tensors, names, strict)
    else:
        converted = _load_folder(path, tensors, names, session.huggingface, strict)
    said = sorted(set().union(*gather_objects(converted, None)))
    rank_zero_info(f"Loaded the weights of {path}" + (f", converted from {', '.join(said)}" if said else ""))


def _load_checkpoint(
    session: CheckpointSession, path: Path, tensors: list[tuple[str, torch.Tensor]], names: Names, strict: bool
) -> set[str]:
    saved = session.store.read_metadata(path)
    missing, unexpected = state.compare_names(names, saved)
    if strict and (missing or unexpected):
        raise CheckpointError(state.mismatch(str(path), names, missing, unexpected, []))
    session.store.load(tensors, path, strict=strict, convert=True)
    both = [(saved[key].properties.dtype, tensor.dtype) for key, tensor in tensors if key in saved]
    return {f"{str(a).removeprefix('torch.')} to {str(b).removeprefix('torch.')}" for a, b in both if a != b}


def _load_folder(
    path: Path, tensors: list[tuple[str, torch.Tensor]], names: Names, huggingface: HuggingFaceNames | None, strict: bool
) -> set[str]:
    if huggingface is None or not huggingface.sources:
        raise CheckpointError(
            f"{path}: it is not known which of Hugging Face's tensors this model's are. Tell with "
            "lightning_5d.checkpoint.register_weight_map(model_class, make_map)."
        )
    wanted = [(key.removeprefix("model."), tensor) for key, tensor in tensors]
    # A buffer that is not kept there (a counter, a mask) stays; a parameter must have a counterpart.
    wanted = [(fqn, tensor) for fqn, tensor in wanted if fqn in huggingface.sources or (strict and names.specs[fqn].is_parameter)]
    return on_every_rank(lambda: read_weights(path, wanted, huggingface.sources), None)
