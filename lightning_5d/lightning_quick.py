"""Short ways through what Lightning does at every step and every ``self.log``. tests/strategy/test_quick.py compares them with
Lightning's own, and notices when that changes.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor


class QuickLog:
    """``module.log``, with a short way for a name that was logged the same way before, from the same hook.

    Lightning's own way inspects the step's signature, builds the metadata again to compare it, moves the metric's whole state to
    its device attribute by attribute and passes torch.compile's guards: together more than a small layer's forward.
    """

    def __init__(self, module: LightningModule, trainer: Trainer) -> None:
        self._module, self._trainer = module, trainer
        self._metrics: dict[Any, tuple[str, Any]] = {}

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        module, trainer = self._module, self._trainer
        results: Any = trainer._results
        fx = module._current_fx_name
        batch_size = kwargs.get("batch_size")
        named = len(args) < 10  # batch_size, the tenth, is not part of the way
        if not (named and isinstance(value, Tensor) and value.numel() == 1 and results is not None and fx is not None):
            LightningModule.log(module, name, value, *args, **kwargs)
            return
        way = (fx, name, results.dataloader_idx, args, *(item for item in kwargs.items() if item[0] != "batch_size"))
        known = self._metrics.get(way)
        if known is None or results.get(known[0]) is not known[1]:
            LightningModule.log(module, name, value, *args, **kwargs)
            self._remember(way, fx, name, results)
            return
        connector, metric = trainer._logger_connector, known[1]
        if connector.should_reset_tensors(fx):
            results.reset(metrics=False, fx=fx)
        if metric.value.device != value.device:
            metric.to(value.device)
        metric.forward(value.detach().reshape(()), results._extract_batch_size(metric, batch_size, metric.meta))
        metric.has_reset = False
        connector._current_fx = fx

    def _remember(self, way: Any, fx: str, name: str, results: Any) -> None:
        index = results.dataloader_idx
        for key in (f"{fx}.{name}", f"{fx}.{name}.{index}"):
            metric = results.get(key)
            if metric is not None and metric.is_tensor and not metric.meta.enable_graph and metric.meta.dataloader_idx == index:
                self._metrics[way] = (key, metric)


class QuickSteps:
    """Puts the short ways into a trainer and its module, and takes them out again."""

    def __init__(self, module: LightningModule, trainer: Trainer) -> None:
        self._module, self._loop = module, trainer.fit_loop.epoch_loop
        # A log of the user's own stays.
        if type(module).log is LightningModule.log and "log" not in module.__dict__ and not trainer.barebones:
            module.__dict__["log"] = QuickLog(module, trainer)
        # The strategy drops the last step's gradients itself, before the schedule fills them again. See Gradients.
        if not is_overridden("optimizer_zero_grad", module):
            module.__dict__["optimizer_zero_grad"] = _keep_gradients
        self._takes_batch_idx: bool | None = None
        self._loop.__dict__["_build_kwargs"] = self._build_kwargs

    def _build_kwargs(self, kwargs: dict[str, Any], batch: Any, batch_idx: int) -> dict[str, Any]:
        """Lightning's own inspects the signature of ``training_step`` before every batch."""
        if self._takes_batch_idx is None:
            kwargs = type(self._loop)._build_kwargs(self._loop, kwargs, batch, batch_idx)  # type: ignore[arg-type]
            self._takes_batch_idx = "batch_idx" in kwargs
            return kwargs
        kwargs["batch"] = batch
        if self._takes_batch_idx:
            kwargs["batch_idx"] = batch_idx
        return kwargs

    def end(self) -> None:
        """Gives Lightning its own back."""
        self._loop.__dict__.pop("_build_kwargs", None)
        if isinstance(self._module.__dict__.get("log"), QuickLog):
            del self._module.__dict__["log"]
        if self._module.__dict__.get("optimizer_zero_grad") is _keep_gradients:
            del self._module.__dict__["optimizer_zero_grad"]


def _keep_gradients(epoch: int, batch_idx: int, optimizer: Any) -> None:
    """In place of ``optimizer_zero_grad``, which Lightning calls between the forward and the backward."""
