"""What the advisor predicts for the run that is going on, or in a sentence why it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_5d.advisor.flops import flops_per_token, utilization
from lightning_5d.advisor.hardware import Gpu, find_gpu
from lightning_5d.callbacks.figures import Totals, mean_peak_tflops
from lightning_5d.layout import Layout

if TYPE_CHECKING:
    from lightning_5d.advisor import Estimate
    from lightning_5d.plan import ModelShape


@dataclass(frozen=True)
class Setting:
    """What `MFUMonitor` knows of a run besides its batches."""

    shape: ModelShape | None
    device_name: str
    gpu: Gpu | None
    """The user's word; None: found by the device's name."""
    dtype: str | None
    recompute: int | str | None
    formula: str
    dp_size: int


@dataclass(frozen=True)
class Prediction:
    """An estimate, in the words of what it stands beside."""

    estimate: Estimate
    mfu: float | None
    """By the formula, parameters and peak of the measured one, so that the two can be compared."""
    allocated_gib: float
    """Of the worst rank's memory, what torch allocates: without context, communicators and fragmentation."""
    is_cuda: bool
    """Whether allocated memory is measured, or resident memory of the process."""
    remarks: tuple[str, ...]
    """In what the run differs from what was predicted."""

    def keys(self) -> dict[str, float]:
        """Values to be logged beside the measured ones."""
        e = self.estimate
        figures = {
            "prediction/step_time_s": e.step_time_s,
            "prediction/tokens_per_s_per_gpu": e.tokens_per_s_per_gpu,
            "prediction/peak_memory_gib": self.allocated_gib if self.is_cuda else e.memory_gib,
        }
        return figures if self.mfu is None else {**figures, "prediction/mfu": self.mfu}


def try_to_predict(trainer: Trainer, module: LightningModule, setting: Setting, totals: Totals) -> tuple[Prediction | None, str]:
    """The prediction for the batches seen so far, or None and in a sentence why there is none."""
    try:
        return predict(trainer, module, setting, totals), ""
    except ValueError as error:
        return None, str(error)
    except Exception as error:  # a mistake of the advisor's must not end a training run
        return None, f"the advisor failed, which it should not: {type(error).__name__}: {error}"


def predict(trainer: Trainer, module: LightningModule, setting: Setting, totals: Totals) -> Prediction:
    """The prediction for the batches seen so far.

    Raises ValueError with a sentence when the advisor cannot predict this device, model, strategy or batch.
    """
    gpu = _find_gpu(setting)
    if setting.dtype not in ("bf16", "fp16"):
        raise ValueError(
            f"the advisor knows the speed of bf16 matrix products; this run's are {setting.dtype or 'of unknown type'}"
        )
    layout = _find_layout(trainer, setting)
    if setting.shape is None:
        raise ValueError("no plan of this model is known")
    if not totals.batches:
        raise ValueError("tokens cannot be counted, so neither the sequence length nor the batch is known")

    from lightning_5d.advisor import estimate  # late: the advisor is not needed to train
    from lightning_5d.advisor.parameters import find_framework
    from lightning_5d.callbacks.model_spec import spec_of

    (rows, seq_len), _ = totals.batches.most_common(1)[0]
    batches_a_step = max(1, round(totals.batches.total() / totals.num_steps))
    if layout.mbs is None and layout.pp == 1:
        layout = layout.replace(mbs=rows)  # the loader's batch is not one with the step's
    spec = spec_of(setting.shape, module)
    e = estimate(
        spec,
        layout,
        gpu=gpu,
        num_gpus=trainer.world_size,
        seq_len=seq_len,
        global_batch=rows * setting.dp_size * batches_a_step,
    )
    peak, mfu = mean_peak_tflops(totals.ranks), None
    if peak > 0:  # not NaN
        mfu = utilization(e.tokens_per_s_per_gpu, flops_per_token(setting.shape, seq_len, setting.formula), 1, peak)
    allocated_gib = e.memory_gib - find_framework(e.framework)["overhead_gib"]
    is_cuda = trainer.strategy.root_device.type == "cuda"
    remarks = _remarks(trainer, module, layout, totals, batches_a_step)
    if abs(spec.num_parameters - setting.shape.num_parameters) > 0.01 * setting.shape.num_parameters:
        remarks.append(
            f"Predicted for a plain decoder of {spec.num_parameters:,} parameters; this one has {setting.shape.num_parameters:,}."
        )
    return Prediction(e, mfu, allocated_gib, is_cuda, tuple(remarks))


def _find_gpu(setting: Setting) -> Gpu:
    if setting.gpu is not None:
        return setting.gpu
    how = "MFUMonitor(hardware=...) takes the name of a GPU, or a YAML file with the figures of your own device"
    if setting.device_name == "cpu":
        raise ValueError(f"a CPU is not in the advisor's table. {how}")
    gpu = find_gpu(setting.device_name)
    if gpu is None or gpu.peak("bf16") is None:
        raise ValueError(f"'{setting.device_name}' is not in the advisor's table. {how}")
    return gpu


def _find_layout(trainer: Trainer, setting: Setting) -> Layout:
    strategy: Any = trainer.strategy
    layout = getattr(strategy, "layout", None)
    if not isinstance(layout, Layout):
        if not isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
            raise ValueError(f"the advisor predicts layouts, DDP and a single device, not {type(strategy).__name__}")
        layout = Layout(dp=trainer.world_size)
    if setting.recompute is None:
        raise ValueError("how much of the model is recomputed is not known; MFUMonitor(recompute=...) says it")
    return layout if layout.ac == setting.recompute else layout.replace(ac=setting.recompute)


def _remarks(trainer: Trainer, module: LightningModule, layout: Layout, totals: Totals, batches_a_step: int) -> list[str]:
    optimizers = sorted({type(optimizer).__name__ for optimizer in trainer.optimizers})
    remarks = [
        "Predicted for bf16-mixed, Adam, flash attention and fused norms; "
        f"this run: {trainer.precision}, {', '.join(optimizers) or 'no optimizer'}."
    ]
    most, seen = totals.batches.most_common(1)[0][1], totals.batches.total()
    if most < seen:
        remarks.append(f"Predicted for the most common batch, {most} of {seen} on rank 0; the mean of all is measured.")
    if layout.pp > 1 and batches_a_step > 1:
        remarks.append(
            f"Each of the {batches_a_step} accumulated batches fills and drains the pipeline; predicted is one pass a step, "
            "as micro-batches of one batch (mbsN) make it."
        )
    if getattr(trainer.strategy, "split", None) is not None:
        remarks.append("Predicted with layers shared out evenly, not by split=.")
    if not all(p.requires_grad for p in module.parameters()):
        remarks.append("Predicted as if no parameter were frozen.")
    return remarks
