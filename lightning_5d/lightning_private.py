"""The places where we reach into Lightning's private parts. tests/strategy/test_private_api.py notices when they change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def replace_sigterm_broadcast(trainer: Any, check: Callable[[], None]) -> None:
    """Lightning broadcasts a flag and reads it on the host before every batch; ``check`` is called in its place."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = check


def restore_sigterm_broadcast(trainer: Any) -> None:
    trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
