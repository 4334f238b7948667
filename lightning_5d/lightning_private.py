"""The places where we reach into Lightning's private parts. tests/strategy/test_private_api.py notices when they change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device as default_process_group_backend
from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
from lightning.fabric.utilities.distributed import _sync_ddp_if_available as sync_ddp_if_available
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher

__all__ = [
    "SigtermAgreement",
    "SubprocessScriptLauncher",
    "default_process_group_backend",
    "init_dist_connection",
    "sync_ddp_if_available",
]


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
