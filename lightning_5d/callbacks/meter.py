"""Counts and times what this rank runs, a window of steps at a time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_5d.advisor.flops import Shape, flops_per_token, recomputed_flops_per_token
from lightning_5d.callbacks.bubble import bubble_share
from lightning_5d.callbacks.data_wait import DataWait
from lightning_5d.callbacks.figures import RankFigures, Totals, Window, job_figures
from lightning_5d.callbacks.peak import peak_memory_gib
from lightning_5d.callbacks.ranks import data_parallel_size, gather, synchronize
from lightning_5d.callbacks.stopwatch import Stopwatch, pause_while_saving


class Meter:
    """One fit's counts. Between the edges of windows nothing waits for the accelerator and nothing is communicated.

    Args:
        shape: of the whole model; None: operations cannot be counted.
        recompute: activation checkpointing as a layout writes it; None: what runs again cannot be counted.
        peak_tflops: dense peak of this device; None: not known.
    """

    def __init__(
        self,
        trainer: Trainer,
        clock: Callable[[], float],
        *,
        shape: Shape | None,
        formula: str,
        recompute: int | str | None,
        peak_tflops: float | None,
    ) -> None:
        self.window: Window | None = None
        """None until the warm-up has ended."""
        self.totals = Totals()
        self.dp_size = data_parallel_size(trainer)
        self._shape, self._formula, self._recompute, self._peak_tflops = shape, formula, recompute, peak_tflops
        self._strategy = trainer.strategy
        self._device = device = trainer.strategy.root_device
        self.stopwatch = Stopwatch(clock, lambda: synchronize(device))
        self._undo_pausing = pause_while_saving(trainer, self.stopwatch)
        self._data_wait = DataWait(trainer, clock)

    def begin(self) -> None:
        """A window begins now."""
        self.window = Window()
        self._data_wait.lap()
        self.stopwatch.start()

    def count(self, ids: Tensor | None) -> None:
        """Counts a batch of tokens ``[..., sequence]``; with None the window's tokens cannot be told."""
        assert self.window is not None
        self.window.microbatches.append(getattr(self._strategy, "num_microbatches", None) or 1)
        if ids is None:
            self.window.num_tokens = self.window.flops = self.window.recomputed_flops = math.nan
            return
        num_tokens, seq_len = ids.numel(), ids.shape[-1]
        self.window.num_tokens += num_tokens
        if num_tokens:
            self.totals.batches[num_tokens // seq_len, seq_len] += 1
        if self._shape is None:
            self.window.flops = self.window.recomputed_flops = math.nan
            return
        self.window.flops += num_tokens * flops_per_token(self._shape, seq_len, self._formula)
        again = math.nan
        if self._recompute is not None:
            again = recomputed_flops_per_token(self._shape, seq_len, self._recompute, self._formula)
        self.window.recomputed_flops += num_tokens * again

    def close(self) -> dict[str, float]:
        """Ends the window with one collective and returns the job's figures; the next window begins."""
        assert self.window is not None
        window, elapsed_s, data_wait_s = self.window, self.stopwatch.lap(), self._data_wait.lap()
        self.window = Window()
        memory_gib = peak_memory_gib(self._device)
        mine = RankFigures(
            elapsed_s,
            data_wait_s,
            window.num_tokens,
            window.flops,
            window.recomputed_flops,
            math.nan if self._peak_tflops is None else self._peak_tflops,
            math.nan if memory_gib is None else memory_gib,
        )
        ranks = [RankFigures(*row) for row in gather(list(mine), self._device)]
        self.totals.add(ranks, window.num_steps)
        figures, layout = job_figures(ranks, window.num_steps, self.dp_size), getattr(self._strategy, "layout", None)
        if layout is not None and layout.pp > 1:
            figures["perf/bubble"] = bubble_share(layout, statistics.mean(window.microbatches))
        return figures

    def end(self) -> None:
        """Gives the trainer back what was wrapped."""
        self._undo_pausing()
        self._data_wait.end()
