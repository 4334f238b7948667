"""Time spent training: a stopwatch that can be paused, and pauses itself while the trainer saves a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer


class Stopwatch:
    """Seconds between laps, pauses left out.

    ``synchronize`` waits for the accelerator; it runs where a span begins or ends and nowhere else, so that work
    which is still queued is charged to the span that queued it.
    """

    def __init__(self, clock: Callable[[], float], synchronize: Callable[[], None]) -> None:
        self._clock, self._synchronize = clock, synchronize
        self._elapsed_s = 0.0
        self._started_at = 0.0
        self._num_pauses = 0

    def start(self) -> None:
        """Begin a lap now."""
        self._elapsed_s = 0.0
        self._started_at = self._now()

    def lap(self) -> float:
        """Seconds since the lap began; the next one begins."""
        now = self._now()
        elapsed_s = self._elapsed_s + (0.0 if self._num_pauses else now - self._started_at)
        self._elapsed_s, self._started_at = 0.0, now
        return elapsed_s

    def pause(self) -> None:
        """Stop counting; pauses nest."""
        if not self._num_pauses:
            self._elapsed_s += self._now() - self._started_at
        self._num_pauses += 1

    def resume(self) -> None:
        """Undo one :meth:`pause`."""
        assert self._num_pauses > 0, "resumed a stopwatch that was not paused"
        self._num_pauses -= 1
        if not self._num_pauses:
            self._started_at = self._now()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def _now(self) -> float:
        self._synchronize()
        return self._clock()


def pause_while_saving(trainer: Trainer, stopwatch: Stopwatch) -> Callable[[], None]:
    """Pause ``stopwatch`` during ``trainer.save_checkpoint``; returns a function that undoes this.

    The method is wrapped since no hook marks the end of saving, and none at all a save of the weights alone.
    """
    save, had_own = trainer.save_checkpoint, "save_checkpoint" in vars(trainer)

    @functools.wraps(save)
    def timed(*args: Any, **kwargs: Any) -> None:
        with stopwatch.paused():
            save(*args, **kwargs)

    def undo() -> None:
        if vars(trainer).get("save_checkpoint") is timed:
            if had_own:
                vars(trainer)["save_checkpoint"] = save
            else:
                del vars(trainer)["save_checkpoint"]

    vars(trainer)["save_checkpoint"] = timed
    return undo
