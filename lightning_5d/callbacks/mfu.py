"""Model FLOPs utilisation and what goes with it, under any strategy. Definitions: docs/mfu.md."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_5d.advisor.flops import (
    Shape,
    check_formula,
    flops_per_token,
    num_recomputed_layers,
    recomputed_flops_per_token,
    utilization,
)
from lightning_5d.advisor.hardware import canonical_dtype
from lightning_5d.callbacks.bubble import bubble_share
from lightning_5d.callbacks.console import console_line
from lightning_5d.callbacks.peak import Peak, device_name, find_peak, matmul_dtype, peak_memory_gib
from lightning_5d.callbacks.ranks import data_parallel_size, gather, synchronize
from lightning_5d.callbacks.stopwatch import Stopwatch, pause_while_saving
from lightning_5d.callbacks.tokens import find_token_ids


@dataclass
class _Window:
    """What this rank ran since the last log step. NaN: cannot be told."""

    num_steps: int = 0
    num_tokens: float = 0
    flops: float = 0
    recomputed_flops: float = 0


class MFUMonitor(Callback):
    """Logs what a run achieves, on every rank with one value, at log steps:

    `perf/tokens_per_s` of the whole job, `perf/tokens_per_s_per_gpu`, `perf/step_time_s`, `perf/tflops_per_gpu` (the model's
    operations, none recomputed), `perf/mfu` and `perf/hfu` (shares of 1), `perf/peak_memory_gib` (of the fullest rank) and,
    under pipeline parallelism, `perf/bubble` (closed form, share of the ideal time).

    A figure that cannot be had is not logged, and one message says which and why. Time counts waiting for data, not
    validation or saving. Between log steps nothing waits for the accelerator and nothing is communicated.

    Args:
        formula: how operations are counted: "palm", "nemo" or "causal".
        peak_tflops: DENSE peak of one device in TFLOP/s; None: looked up by the device's name, measured on a CPU.
        dtype: of matrix products ("bf16", "fp32", "tf32", "fp16", "fp8", "fp4"), which chooses the peak; None: by the precision.
        log_every_n_steps: optimizer steps between log steps; None: the trainer's.
        warmup_steps: first optimizer steps of a fit that are left out (compilation, allocation).
        recompute: activation checkpointing for `perf/hfu`, as a layout writes `ac`: 0, 1, N or "sel"; None: the layout's, and
            without one 0, unless checkpointed modules are found (then no `perf/hfu`).
        print_line: whether rank 0 prints a line at log steps, above a progress bar if there is one.
        tokens_key: entry of the batch that holds token ids; without it the first 2-D integer tensor counts.
        clock: seconds.

    Raises ValueError for a wrong argument.
    """

    def __init__(
        self,
        formula: str = "palm",
        peak_tflops: float | None = None,
        dtype: str | None = None,
        log_every_n_steps: int | None = None,
        warmup_steps: int = 1,
        recompute: int | str | None = None,
        print_line: bool = True,
        tokens_key: str = "input_ids",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if peak_tflops is not None and not peak_tflops > 0:
            raise ValueError(f"peak_tflops is the dense peak of one device in TFLOP/s, above 0; not {peak_tflops}")
        if log_every_n_steps is not None and log_every_n_steps < 1:
            raise ValueError(f"log_every_n_steps is at least 1, or None for the trainer's; not {log_every_n_steps}")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps is at least 0, not {warmup_steps}")
        if recompute is not None:
            num_recomputed_layers(recompute, 1)
        self.formula = check_formula(formula)
        self.peak_tflops = peak_tflops
        self.dtype = None if dtype is None else canonical_dtype(dtype)
        self.log_every_n_steps = log_every_n_steps
        self.warmup_steps = warmup_steps
        self.recompute = recompute
        self.print_line = print_line
        self.tokens_key = tokens_key
        self.clock = clock
        self._shape: Shape | None = None
        self._why_no_shape = ""
        self._said: set[str] = set()
        self._stopwatch: Stopwatch | None = None

    # ---- what does not change during a fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not hasattr(trainer.strategy, "model_shape"):
            self._find_shape(pl_module)  # before a strategy wraps or shards it; once more below for `configure_model`

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        device = strategy.root_device
        if hasattr(strategy, "model_shape"):
            self._shape = strategy.model_shape
            self._why_no_shape = "the strategy knows no plan of this model"
        elif self._shape is None and not isinstance(strategy, FSDPStrategy):  # whose flat parameters have lost their shapes
            self._find_shape(pl_module)
        self._peak = self._find_peak(trainer, pl_module)
        self._recompute = self._find_recompute(strategy, pl_module)
        self._dp_size = data_parallel_size(trainer)
        self._every = self.log_every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._warmup_left = self.warmup_steps
        self._global_step = trainer.global_step
        self._has_reported = False
        self._window: _Window | None = None
        self._stopwatch = Stopwatch(self.clock, lambda: synchronize(device))
        self._undo_pausing = pause_while_saving(trainer, self._stopwatch)
        if self._shape is None:
            self._say(f"MFUMonitor: no perf/mfu, perf/hfu, perf/tflops_per_gpu, as nothing can be counted: {self._why_no_shape}.")
        if self._peak.tflops is None:
            self._say(f"MFUMonitor: no perf/mfu and perf/hfu. {self._peak.note}", warn=True)
        elif self._peak.measured:
            self._say(f"MFUMonitor: {self._peak.note}")
        if device.type == "cpu":
            self._say("MFUMonitor: perf/peak_memory_gib is resident memory of the largest process, since this is a CPU.")

    def _find_shape(self, module: LightningModule) -> None:
        from lightning_5d.plan import model_shape  # late: a plan may import what the model is written with

        self._why_no_shape = f"no plan is known for {type(module).__name__}; see register_plan"
        try:
            self._shape = model_shape(module)
        except ValueError as error:
            self._shape, self._why_no_shape = None, str(error)

    def _find_peak(self, trainer: Trainer, module: LightningModule) -> Peak:
        if self.peak_tflops is not None:
            return Peak(self.peak_tflops)
        name = device_name(trainer.strategy.root_device)
        if name == "cpu":
            trainer.strategy.barrier("MFUMonitor")  # processes that share a CPU must measure at the same time
        return find_peak(name, self.dtype or matmul_dtype(str(trainer.precision), module))

    def _find_recompute(self, strategy: Any, module: nn.Module) -> int | str | None:
        if self.recompute is not None:
            return self.recompute
        layout = getattr(strategy, "layout", None)
        if layout is not None and layout.ac != 0:
            return layout.ac
        if any(_is_checkpointed(part) for part in module.modules()):
            self._say(
                "MFUMonitor: no perf/hfu, since activation checkpointing was found but not how much of the model it "
                "recomputes. Pass MFUMonitor(recompute=...): 1 for every layer, N for every Nth."
            )
            return None
        return 0

    # ---- a step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._window is None and not self._warmup_left:
            self._begin_window()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        stepped = trainer.global_step != self._global_step
        self._global_step = trainer.global_step
        if self._window is None:
            if stepped:
                self._warmup_left -= 1
                if not self._warmup_left:
                    self._begin_window()
            return
        self._count(batch)
        if not stepped:
            return
        self._window.num_steps += 1
        if self._is_log_step(trainer):
            self._report(trainer, pl_module, outputs)

    def _begin_window(self) -> None:
        assert self._stopwatch is not None
        self._window, self._reported_step = _Window(), self._global_step
        self._stopwatch.start()

    def _count(self, batch: Any) -> None:
        assert self._window is not None
        ids = find_token_ids(batch, self.tokens_key)
        if ids is None:
            self._say(
                "MFUMonitor: only perf/step_time_s and perf/peak_memory_gib, as tokens cannot be counted: the batch has neither "
                f"an entry '{self.tokens_key}' nor a 2-D integer tensor. MFUMonitor(tokens_key=...) names the entry."
            )
        num_tokens = math.nan if ids is None else ids.numel()
        self._window.num_tokens += num_tokens
        if ids is None or self._shape is None:
            self._window.flops = self._window.recomputed_flops = math.nan
            return
        seq_len = ids.shape[-1]
        self._window.flops += num_tokens * flops_per_token(self._shape, seq_len, self.formula)
        again = math.nan
        if self._recompute is not None:
            again = recomputed_flops_per_token(self._shape, seq_len, self._recompute, self.formula)
        self._window.recomputed_flops += num_tokens * again

    def _is_log_step(self, trainer: Trainer) -> bool:
        if not self._every:  # Lightning's way to switch logging off
            return False
        # A count of several optimizers may jump over a multiple.
        if self._global_step // self._every != self._reported_step // self._every:
            return True
        last_epoch = trainer.max_epochs is not None and trainer.current_epoch + 1 == trainer.max_epochs
        last = self._global_step == trainer.max_steps or (trainer.is_last_batch and last_epoch)
        return last and not self._has_reported  # a run too short for a log step still gets its figures

    def _report(self, trainer: Trainer, pl_module: LightningModule, outputs: Any) -> None:
        assert self._stopwatch is not None and self._window is not None
        window, elapsed_s, device = self._window, self._stopwatch.lap(), trainer.strategy.root_device
        self._window, self._reported_step, self._has_reported = _Window(), self._global_step, True
        memory_gib = peak_memory_gib(device)
        ranks = gather(
            [
                elapsed_s,
                window.num_tokens,
                window.flops,
                window.recomputed_flops,
                math.nan if self._peak.tflops is None else self._peak.tflops,
                math.nan if memory_gib is None else memory_gib,
            ],
            device,
        )
        metrics = self._metrics(ranks, window.num_steps)
        layout, num_microbatches = getattr(trainer.strategy, "layout", None), getattr(trainer.strategy, "num_microbatches", None)
        if layout is not None and layout.pp > 1 and num_microbatches:
            metrics["perf/bubble"] = bubble_share(layout, num_microbatches)
        # Equal on all ranks: reducing again would cost, and on rank 0 alone ModelCheckpoint(monitor=...) would hang.
        pl_module.log_dict(metrics, on_step=True, on_epoch=False, sync_dist=False, rank_zero_only=False, batch_size=1)
        if self.print_line and trainer.is_global_zero:
            pl_module.print(console_line(self._global_step, _loss_of(outputs), metrics, self._peak.measured))

    def _metrics(self, ranks: list[list[float]], num_steps: int) -> dict[str, float]:
        """Figures of the whole job from one row a rank: the slowest rank's time, each dp rank's tokens once, all ranks' peaks."""
        num_gpus = len(ranks)
        elapsed_s, tokens, flops, recomputed_flops, peak_tflops, memory_gib = zip(*ranks, strict=True)
        seconds, copies = max(elapsed_s), num_gpus / self._dp_size  # ranks that see the same tokens
        num_tokens, total_flops, total_recomputed = (sum(column) / copies for column in (tokens, flops, recomputed_flops))
        metrics = {"perf/step_time_s": seconds / num_steps, "perf/peak_memory_gib": max(memory_gib)}
        if seconds > 0 and num_tokens > 0:
            rate, per_token, mean_peak = num_tokens / seconds, total_flops / num_tokens, sum(peak_tflops) / num_gpus
            metrics["perf/tokens_per_s"] = rate
            metrics["perf/tokens_per_s_per_gpu"] = rate / num_gpus
            metrics["perf/tflops_per_gpu"] = total_flops / seconds / num_gpus / 1e12
            metrics["perf/mfu"] = utilization(rate, per_token, num_gpus, mean_peak)
            metrics["perf/hfu"] = utilization(rate, per_token + total_recomputed / num_tokens, num_gpus, mean_peak)
        return {key: value for key, value in metrics.items() if not math.isnan(value)}

    # ---- what does not count as training

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._stopwatch is not None:
            self._stopwatch.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._stopwatch is not None:
            self._stopwatch.resume()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._stopwatch is not None:
            self._undo_pausing()
            self._stopwatch = None

    def _say(self, text: str, warn: bool = False) -> None:
        if text not in self._said:
            self._said.add(text)
            (rank_zero_warn if warn else rank_zero_info)(text)


def _is_checkpointed(module: nn.Module) -> bool:
    """Torch's checkpoint wrapper (FSDP, torchtitan), or the flag of transformers and diffusers."""
    is_wrapper = any(cls.__name__ == "CheckpointWrapper" for cls in type(module).__mro__)
    return is_wrapper or getattr(module, "gradient_checkpointing", False) is True


def _loss_of(outputs: Any) -> float | None:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.item() if isinstance(loss, Tensor) and loss.numel() == 1 else None
