"""Model FLOPs utilisation and what goes with it, under any strategy. Definitions: docs/mfu.md."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_5d.advisor.flops import check_formula, num_recomputed_layers
from lightning_5d.advisor.hardware import Gpu, canonical_dtype
from lightning_5d.callbacks.comparison import comparison_table
from lightning_5d.callbacks.console import console_line, loss_of
from lightning_5d.callbacks.meter import Meter
from lightning_5d.callbacks.peak import Peak, device_name, find_peak, matmul_dtype
from lightning_5d.callbacks.prediction import Prediction, Setting, try_to_predict
from lightning_5d.callbacks.recomputed import is_checkpointed
from lightning_5d.callbacks.tokens import find_token_ids

if TYPE_CHECKING:
    from lightning_5d.plan import ModelShape

COMPARED_AFTER_STEPS = 10
"""Measured steps before prediction and measurement are compared."""


class MFUMonitor(Callback):
    """Logs what a run achieves, on every rank with one value, at log steps:

    `perf/tokens_per_s` of the whole job, `perf/tokens_per_s_per_gpu`, `perf/step_time_s`, `perf/tflops_per_gpu` (the model's
    operations, none recomputed), `perf/mfu` and `perf/hfu` (shares of 1), `perf/peak_memory_gib` (of the fullest rank) and,
    under pipeline parallelism, `perf/bubble` (closed form, share of the ideal time). `perf/data_wait` is the loader's share of
    the step time.

    Once a fit, after ten measured steps, rank 0 prints what `lightning_5d.advisor.estimate` predicts for this run beside what
    was measured, and where the missing MFU went. From then on `prediction/step_time_s`, `prediction/tokens_per_s_per_gpu`,
    `prediction/mfu` and `prediction/peak_memory_gib` are logged too.

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
        predict: whether prediction and measurement are compared.
        hardware: the device, where its own name does not tell: the advisor's name of a GPU ("h100"), or a YAML file with the
            figures of your own (docs/advisor.md). Gives the prediction and the peak.
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
        predict: bool = True,
        hardware: str | None = None,
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
        self.predict = predict
        self.hardware = hardware
        self.tokens_key = tokens_key
        self.clock = clock
        self._gpu = None if hardware is None else _require_gpu(hardware)
        self._shape: ModelShape | None = None
        self._why_no_shape = ""
        self._said: set[str] = set()
        self._meter: Meter | None = None
        self._prediction: Prediction | None = None

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
        self._device_name = device_name(device)
        self._dtype = self.dtype or matmul_dtype(str(trainer.precision), pl_module)
        self._peak = self._find_peak(trainer)
        self._recompute = self._find_recompute(strategy, pl_module)
        self._meter = Meter(
            trainer,
            self.clock,
            shape=self._shape,
            formula=self.formula,
            recompute=self._recompute,
            peak_tflops=self._peak.tflops,
        )
        self._every = self.log_every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._warmup_left = self.warmup_steps
        self._global_step = trainer.global_step
        self._has_reported = False
        self._prediction, self._has_compared = None, False
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

    def _find_peak(self, trainer: Trainer) -> Peak:
        if self.peak_tflops is not None:
            return Peak(self.peak_tflops)
        if self._gpu is None and self._device_name == "cpu":
            trainer.strategy.barrier("MFUMonitor")  # processes that share a CPU must measure at the same time
        return find_peak(self._device_name, self._dtype, self._gpu)

    def _find_recompute(self, strategy: Any, module: nn.Module) -> int | str | None:
        if self.recompute is not None:
            return self.recompute
        layout = getattr(strategy, "layout", None)
        if layout is not None and layout.ac != 0:
            return layout.ac
        if any(is_checkpointed(part) for part in module.modules()):
            self._say(
                "MFUMonitor: no perf/hfu, since activation checkpointing was found but not how much of the model it "
                "recomputes. Pass MFUMonitor(recompute=...): 1 for every layer, N for every Nth."
            )
            return None
        return 0

    # ---- a step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._metered.window is None and not self._warmup_left:
            self._begin()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        meter = self._metered
        stepped = trainer.global_step != self._global_step
        self._global_step = trainer.global_step
        if meter.window is None:
            if stepped:
                self._warmup_left -= 1
                if not self._warmup_left:
                    self._begin()
            return
        ids = find_token_ids(batch, self.tokens_key)
        if ids is None:
            self._say(
                "MFUMonitor: only perf/step_time_s, perf/data_wait and perf/peak_memory_gib, as tokens cannot be counted: the "
                f"batch has neither an entry '{self.tokens_key}' nor a 2-D integer tensor. MFUMonitor(tokens_key=...) names the "
                "entry."
            )
        meter.count(ids)
        if not stepped:
            return
        meter.window.num_steps += 1
        if self._is_log_step(trainer):
            self._report(trainer, pl_module, outputs)

    @property
    def _metered(self) -> Meter:
        assert self._meter is not None, "a fit has begun"
        return self._meter

    def _begin(self) -> None:
        self._reported_step = self._global_step
        self._metered.begin()

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
        meter = self._metered
        metrics = meter.close()
        self._reported_step, self._has_reported = self._global_step, True
        if self.predict and not self._has_compared and meter.totals.num_steps >= COMPARED_AFTER_STEPS:
            self._compare(trainer, pl_module)
        predicted = self._prediction.keys() if self._prediction is not None else {}
        # Equal on all ranks: reducing again would cost, and on rank 0 alone ModelCheckpoint(monitor=...) would hang.
        pl_module.log_dict(
            {**metrics, **predicted}, on_step=True, on_epoch=False, sync_dist=False, rank_zero_only=False, batch_size=1
        )
        if self.print_line and trainer.is_global_zero:
            # Lightning divides the loss of an accumulated batch.
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            loss = loss_of(outputs)
            line = console_line(self._global_step, None if loss is None else loss * parts, metrics, self._peak.measured)
            pl_module.print(line)

    # ---- prediction beside measurement

    def _compare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Predicts, on every rank alike, and prints on rank 0. Once a fit; its time is not counted."""
        self._has_compared = True
        totals, dp_size = self._metered.totals, self._metered.dp_size
        setting = Setting(self._shape, self._device_name, self._gpu, self._dtype, self._recompute, self.formula, dp_size)
        self._prediction, why_not = try_to_predict(trainer, pl_module, setting, totals)
        if trainer.is_global_zero:
            is_measured = self._peak.measured
            table = comparison_table(trainer, totals, dp_size, self._prediction, why_not, is_peak_measured=is_measured)
            pl_module.print(table)
        self._metered.stopwatch.start()

    def _compare_at_the_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """For a run that was too short, or whose log steps were too far apart."""
        meter = self._metered
        if meter.window is not None and meter.window.num_steps:
            meter.close()
        if meter.totals.num_steps:
            self._compare(trainer, pl_module)
        else:
            self._say("MFUMonitor: no prediction beside measurement, as the run ended within its warm-up.")

    # ---- what does not count as training

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._meter is not None:
            self._meter.stopwatch.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._meter is not None:
            self._meter.stopwatch.resume()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._meter is not None and self.predict and self._every and not self._has_compared:
            self._compare_at_the_end(trainer, pl_module)
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._meter is not None:
            self._meter.end()
            self._meter = None

    def _say(self, text: str, warn: bool = False) -> None:
        if text not in self._said:
            self._said.add(text)
            (rank_zero_warn if warn else rank_zero_info)(text)


def _require_gpu(hardware: str) -> Gpu:
    from lightning_5d.advisor.own_gpu import require_gpu  # late: seldom needed

    return require_gpu(hardware)
