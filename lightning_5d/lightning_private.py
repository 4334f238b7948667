"""The places where we reach into Lightning's private parts. tests/strategy/test_private_api.py notices when they change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _AgreedSigterm:
    """Lightning's signal connector, with a flag that all ranks raise together: one that stops alone leaves the others hanging."""

    was_asked = False
    is_agreed = False

    @property
    def received_sigterm(self) -> bool:
        return self.is_agreed

    @received_sigterm.setter
    def received_sigterm(self, value: bool) -> None:
        self.was_asked = value

    def _sigterm_notifier_fn(self, signum: Any, frame: Any) -> None:
        # Lightning's own broadcasts from inside the signal handler, in the middle of whatever collective is running.
        launcher = self.trainer.strategy.launcher  # type: ignore[attr-defined]
        if launcher is not None and not self.was_asked:
            launcher.kill(signum)
        self.was_asked = True


class SigtermAgreement:
    """Takes the place of the broadcast and host synchronisation that Lightning makes before every batch.

    ``check`` is called before every batch instead; it raises when the ranks have agreed to stop.
    """

    def __init__(self, trainer: Any, check: Callable[[], None]) -> None:
        self._loop, self._connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
        self._class = type(self._connector)
        self._connector.__class__ = type(self._class.__name__, (_AgreedSigterm, self._class), {})
        self._loop._broadcast_sigterm_tensor = check

    @property
    def was_asked(self) -> bool:
        """Whether this rank was sent SIGTERM."""
        return self._connector.was_asked

    def agree(self) -> None:
        """From here on ``trainer.received_sigterm`` is true."""
        self._connector.is_agreed = True

    def end(self) -> None:
        """Gives Lightning its own back."""
        self._loop.__dict__.pop("_broadcast_sigterm_tensor", None)
        self._connector.__class__ = self._class


class _SettledResults:
    """Lightning's collection of logged values, with a short way for a name that was logged the same way before.

    The long way moves the value's whole state to its device, attribute by attribute, builds its metadata again to compare it, and
    passes torch.compile's guards: together more than a small layer's forward.
    """

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        dataloader = getattr(self, "dataloader_idx", None)
        batch_size = kwargs.pop("batch_size", None)
        way = (fx, name, dataloader, *args, *kwargs.items())
        metric = self.__dict__.setdefault("_ways", {}).get(way)
        if metric is None or metric is not self.get(metric.__dict__["_key"]) or not isinstance(value, torch.Tensor):  # type: ignore[attr-defined]
            before = set(self)  # type: ignore[call-overload]
            super().log(fx, name, value, *args, batch_size=batch_size, **kwargs)  # type: ignore[misc]
            for key in set(self) - before:  # type: ignore[call-overload]
                added = self[key]  # type: ignore[index]
                if added.is_tensor and not added.meta.enable_graph:
                    added.__dict__["_key"] = key
                    self._ways[way] = added  # type: ignore[attr-defined]
            return
        metric.to(value.device)
        metric.forward(value.detach(), self._extract_batch_size(metric, batch_size, metric.meta))  # type: ignore[attr-defined]
        metric.has_reset = False

    def __setitem__(self, key: str, metric: Any) -> None:
        move = metric.to

        def move_if_elsewhere(device: Any) -> Any:
            value = metric.value if metric.is_tensor else None
            if not isinstance(value, torch.Tensor) or value.device != device:
                return move(device)
            return metric

        if metric.is_tensor:
            metric.to = move_if_elsewhere
        super().__setitem__(key, metric)  # type: ignore[misc]


def settle_results(trainer: Any) -> None:
    """Makes ``self.log`` cheap in every loop of ``trainer``. Idempotent."""
    fit = trainer.fit_loop.epoch_loop
    for loop in (fit, fit.val_loop, trainer.validate_loop, trainer.test_loop):
        results = loop._results
        if not isinstance(results, _SettledResults):
            results.__class__ = type(type(results).__name__, (_SettledResults, type(results)), {})
