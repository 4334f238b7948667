"""What Lightning asks a strategy about checkpoints, answered by :class:`CheckpointSession`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_5d.checkpoint import CheckpointSession
from lightning_5d.checkpoint.lightning_links import restore_links
from lightning_5d.strategy_ranks import RankedStrategy


class CheckpointedStrategy(RankedStrategy):
    """Saves and loads in the layout-free format of docs/checkpoints.md. See :class:`LayoutStrategy`."""

    async_save: bool
    _checkpoints: CheckpointSession | None = None
    _restore_rng = False

    def setup_environment(self) -> None:
        super().setup_environment()
        if self._checkpoints is None:
            self._checkpoints = CheckpointSession(str(self.layout), background=self.async_save)

    def _reshard(self) -> None:
        """Leaves on this rank what the optimizer holds; :class:`LayoutStrategy` knows how."""
        raise NotImplementedError

    def on_train_start(self) -> None:
        if self._restore_rng:
            assert self._checkpoints is not None
            self._checkpoints.load_rng()
            self._restore_rng = False

    @property
    def _save_has_failed(self) -> bool:
        return self._checkpoints is not None and self._checkpoints.save_has_failed

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """No: Lightning then keeps the user's ``weights_only``. The weights are loaded at the end of :meth:`setup`."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self._checkpoints is not None and self.lightning_module is not None
        self._reshard()
        return self._checkpoints.state_dict(self.lightning_module)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Empty: the optimizers' tensors are written from where they are."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise TypeError("LayoutStrategy writes its own format: storage_options are for a CheckpointIO")
        assert self._checkpoints is not None and self.lightning_module is not None
        background = self.async_save and self.lightning_module.trainer.training
        self._checkpoints.save(checkpoint, filepath, self.lightning_module, self.optimizers, background=background)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        assert self._checkpoints is not None
        return self._checkpoints.open(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self._checkpoints is not None
        self._checkpoints.set_strict(strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._checkpoints is not None and self.lightning_module is not None
        self._checkpoints.load_optimizers(self.lightning_module, self.optimizers)
        self._restore_rng = True

    def remove_checkpoint(self, filepath: str | Path) -> None:
        assert self._checkpoints is not None
        self._checkpoints.remove(filepath)

    def _close_checkpoints(self) -> None:
        """Waits for a save in the background. Raises what went wrong with it."""
        try:
            if self._checkpoints is not None:
                self._checkpoints.close()
        finally:
            if self.async_save and self._lightning_module is not None and self._lightning_module._trainer is not None:
                restore_links(self._lightning_module.trainer.callbacks)  # type: ignore[attr-defined]
