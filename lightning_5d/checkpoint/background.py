"""One save at a time behind the training's back, and what must wait until it is committed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """A thread that finishes one save; actions queued meanwhile run after it if it went well, and never if it did not."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._future: Future[None] | None = None
        self._actions: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def start(self, save: Callable[[], None]) -> None:
        """Runs ``save`` in the background. The last one must have been waited for."""
        assert self._future is None, "two saves on one process group would mix their messages"
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

        def run() -> None:
            save()  # if it raises, what is queued is never done: an old checkpoint is not removed for one that is not there
            while (action := self._next()) is not None:
                action()

        self._future = self._executor.submit(run)

    def after(self, action: Callable[[], None]) -> None:
        """Runs ``action`` once the save in flight is committed; at once when there is none, never when it failed."""
        with self._lock:
            if self.is_busy:
                self._actions.append(action)
                return
        if not self.has_failed:
            action()

    @property
    def is_busy(self) -> bool:
        """Whether a save is being written now."""
        return self._future is not None and not self._future.done()

    @property
    def has_failed(self) -> bool:
        """Whether the last save failed and :meth:`wait` has not told yet. Does not block."""
        return self._future is not None and self._future.done() and self._future.exception() is not None

    def wait(self) -> None:
        """Until the save in flight, and all that waits for it, is done. Raises what it raised."""
        future, self._future = self._future, None
        if future is not None:
            try:
                future.result()  # if it raises, what is queued is forgotten
            finally:
                with self._lock:
                    actions, self._actions = self._actions, []
            for action in actions:  # queued in the moment between the thread's last look and its end
                action()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            return self._actions.pop(0) if self._actions else None
