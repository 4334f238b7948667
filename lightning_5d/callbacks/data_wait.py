"""Time that the training loop spends in its data loader."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

_EDGES = ("_on_before_fetch", "_on_after_fetch")
"""What Lightning's training loop calls around each fetch of a batch: private, a test notices when they go."""


class DataWait:
    """Seconds inside the training loader's ``next``, by the host's clock: nothing waits for the accelerator.

    With loader workers that keep up it is the time to take a finished batch from their queue. On an accelerator that still
    has work queued, a part of it may be hidden.
    """

    def __init__(self, trainer: Trainer, clock: Callable[[], float]) -> None:
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._clock = clock
        self._total_s = self._started_at = 0.0
        before, after = (getattr(self._loop, name) for name in _EDGES)

        @functools.wraps(before)
        def begin() -> None:
            before()
            self._started_at = clock()

        @functools.wraps(after)
        def finish() -> None:
            self._total_s += clock() - self._started_at
            after()

        self._loop.__dict__.update(zip(_EDGES, (begin, finish), strict=True))

    def lap(self) -> float:
        """Seconds since the last lap."""
        total_s, self._total_s = self._total_s, 0.0
        return total_s

    def end(self) -> None:
        """Gives Lightning its own back."""
        for name in _EDGES:
            self._loop.__dict__.pop(name, None)
