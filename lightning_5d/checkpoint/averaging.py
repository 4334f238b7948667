"""Lightning's averages of the weights, kept sharded as the weights are: for any layout, saved and resumed under any other.

Lightning's own callbacks copy the whole module before it is cut. These behave the same, but copy this rank's part after.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import weight_averaging as stock
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_5d.checkpoint.names import persistent_tensors, plain
from lightning_5d.checkpoint.session import CheckpointSession

_CURRENT, _STATE = "current_model_state", "averaging_state"  # Lightning's entries

if TYPE_CHECKING:
    _Base = stock.WeightAveraging
else:
    _Base = object


class _Part(nn.Module):
    """Copies of a module's parameters and buffers, flat and in its order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.copies = nn.ParameterList(_copy(p) for p in module.parameters())
        for i, buffer in enumerate(module.buffers()):
            self.register_buffer(f"buffer{i}", _copy(buffer))


class _LocalAverage(AveragedModel):
    """torch's running average over this rank's part of a module."""

    def __init__(self, module: nn.Module, use_buffers: bool, **kwargs: Any) -> None:
        super().__init__(nn.Module(), use_buffers=use_buffers, **kwargs)
        self.module = _Part(module)  # not by torch's constructor, which would copy it once more

    def by_name(self, module: nn.Module) -> dict[str, Tensor]:
        """The averages under the names that ``module``'s own tensors have."""
        tensors = zip([*module.parameters(), *module.buffers()], [*self.module.parameters(), *self.module.buffers()], strict=True)
        copies = {id(own): average.detach() for own, average in tensors}
        return {plain(fqn): copies[id(own)] for fqn, own in persistent_tensors(module)}


class _Sharded(_Base):
    """What differs from Lightning's: when the average is made, and how it travels."""

    _resume: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._average_model = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the average, now that the strategy has cut and sharded the module and loaded what ``ckpt_path`` holds."""
        average = _LocalAverage(pl_module, self._use_buffers, **self._kwargs)
        if self._device is not None:
            average.to(self._device)
        if self._resume is not None:
            # The checkpoint's weights, loaded just now and copied, are the average; training goes on with the others.
            average.n_averaged.copy_(self._resume["n_averaged"])
            CheckpointSession.of(pl_module).load_entry(_CURRENT, pl_module)
            self._resume = None
        self._average_model = average

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        _shard_again(trainer)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _shard_again(trainer)
        super().on_train_epoch_end(trainer, pl_module)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _shard_again(trainer)
        super().on_validation_epoch_start(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _shard_again(trainer)
        super().on_validation_epoch_end(trainer, pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._average_model is None:
            return
        assert isinstance(self._average_model, _LocalAverage)
        checkpoint[_CURRENT] = checkpoint["state_dict"]
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **self._average_model.by_name(pl_module)}
        checkpoint[_STATE] = {"n_averaged": self._average_model.n_averaged.cpu().clone()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if _STATE in checkpoint:
            self._resume = checkpoint[_STATE]
        else:
            rank_zero_info(f"The checkpoint has no average of the weights: {type(self).__name__} starts from its weights")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _shard_again(trainer)
        super().on_train_end(trainer, pl_module)
        self._average_model = None  # the module holds it now: a later save writes that


class WeightAveraging(_Sharded, stock.WeightAveraging):
    """``lightning.pytorch.callbacks.WeightAveraging`` for modules that a layout cuts and shards; the same arguments."""


class EMAWeightAveraging(_Sharded, stock.EMAWeightAveraging):
    """``lightning.pytorch.callbacks.EMAWeightAveraging`` for modules that a layout cuts and shards; the same arguments."""


def refuse_stock_averaging(callbacks: Iterable[Callback]) -> None:
    """Raises ``ValueError`` for Lightning's own averaging callbacks, which copy the module before it is laid out."""
    for callback in callbacks:
        if isinstance(callback, stock.WeightAveraging) and not isinstance(callback, _Sharded):
            ours = "EMAWeightAveraging" if isinstance(callback, stock.EMAWeightAveraging) else "WeightAveraging"
            raise ValueError(
                f"the callback {type(callback).__name__} copies the whole module before it is cut and sharded, and cannot "
                f"average it afterwards: use lightning_5d.checkpoint.averaging.{ours}, which takes the same arguments"
            )


def _shard_again(trainer: Trainer) -> None:
    """FSDP leaves parameters gathered after a forward pass; asking the strategy for the state dict has it put the shards back."""
    trainer.strategy.lightning_module_state_dict()


def _copy(tensor: Tensor) -> Any:
    copied = tensor.detach().clone(memory_format=torch.preserve_format)
    return nn.Parameter(copied, requires_grad=False) if isinstance(tensor, nn.Parameter) else copied
