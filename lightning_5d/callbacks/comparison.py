"""The table that sets prediction beside measurement, and says where the missing MFU went."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping

from lightning.pytorch import Trainer

from lightning_5d.callbacks.figures import Totals, job_figures
from lightning_5d.callbacks.prediction import Prediction

NOT_KNOWN = "-"
Row = tuple[str, str, str]
"""Name, predicted, measured."""


def comparison_table(
    trainer: Trainer, totals: Totals, dp_size: int, prediction: Prediction | None, why_not: str, *, is_peak_measured: bool
) -> str:
    """The table's text, over all steps in ``totals``; ``why_not`` stands below it when there is no ``prediction``."""
    measured = job_figures(totals.ranks, totals.num_steps, dp_size)
    title = f"Prediction beside measurement, mean of {totals.num_steps} steps"
    below = [f"No prediction: {why_not.rstrip('.')}."]
    if prediction is not None:
        e, below = prediction.estimate, list(prediction.remarks)
        title += f": {e.layout} on {e.num_gpus} x {e.gpu}, {e.global_batch} sequences of {e.seq_len} tokens a step"
    layout = getattr(trainer.strategy, "layout", None)
    rows = [
        *_memory(totals, prediction, trainer.strategy.root_device.type == "cuda"),
        *_speed(measured, prediction, " of measured peak" if is_peak_measured else ""),
    ]
    losses = _losses(measured, prediction, trainer.world_size > 1, layout is not None and layout.pp > 1)
    return "\n".join([title, _render(rows, losses, prediction is not None), *below])


def _memory(totals: Totals, prediction: Prediction | None, is_cuda: bool) -> list[Row]:
    """What torch allocates is known on CUDA, what the process holds on a CPU."""
    by_rank = [r.peak_memory_gib for r in totals.ranks]
    worst = by_rank.index(max(by_rank))
    measured = NOT_KNOWN if math.isnan(by_rank[worst]) else f"rank {worst}: {by_rank[worst]:.2f} GiB"
    allocated = whole = NOT_KNOWN
    if prediction is not None:
        stage = f"stage {prediction.estimate.worst_stage}: "
        allocated = f"{stage}{prediction.allocated_gib:.2f} GiB"
        whole = f"{stage}{prediction.estimate.memory_gib:.2f} GiB"
    return [
        ("peak memory of the worst rank, allocated by torch", allocated, measured if is_cuda else NOT_KNOWN),
        ("peak memory of the worst rank, whole process", whole, NOT_KNOWN if is_cuda else measured),
    ]


def _speed(measured: Mapping[str, float], prediction: Prediction | None, of_peak: str) -> list[Row]:
    seconds, rate = "{:.4g} s", "{:,.0f}"
    e, mfu = (prediction.estimate, prediction.mfu) if prediction is not None else (None, None)
    step_s, tokens_per_s = (e.step_time_s, e.tokens_per_s_per_gpu) if e is not None else (None, None)
    of_peak = of_peak if "perf/mfu" in measured else ""
    return [
        ("time of a step", _show(step_s, seconds), _show(measured["perf/step_time_s"], seconds)),
        ("tokens/s per device", _show(tokens_per_s, rate), _show(measured.get("perf/tokens_per_s_per_gpu"), rate)),
        ("MFU", _show(mfu), _show(measured.get("perf/mfu")) + of_peak),
    ]


def _losses(measured: Mapping[str, float], prediction: Prediction | None, has_neighbours: bool, has_pipeline: bool) -> list[Row]:
    """Shares of the step time. With MFU, the share in which the model's operations would run at peak speed, they add up to 1."""
    lost = _predicted_losses(prediction) if prediction else {}
    mfu, hfu, wait = (measured.get(f"perf/{name}") for name in ("mfu", "hfu", "data_wait"))
    again = None if mfu is None or hfu is None else hfu - mfu
    rows = []
    if has_pipeline:
        rows.append(("bubble", _show(lost.get("bubble")), NOT_KNOWN))
    if has_neighbours:
        rows.append(("exposed communication", _show(lost.get("communication")), NOT_KNOWN))
    # Counted operations at peak speed: they took at least that long.
    rows.append(("recomputation", _show(lost.get("recompute")), (">= " if again else "") + _show(again)))
    rows.append(("data wait (host's time in the loader)", NOT_KNOWN, _show(wait)))
    rest = None if mfu is None else 1 - mfu - (again or 0.0) - (wait or 0.0)
    unmeasured = " with all not measured" if rest is not None and (has_neighbours or again is None) else ""
    rows.append(("rest: slower than peak, launches, optimizer", _show(lost.get("rest")), _show(rest) + unmeasured))
    return rows


def _predicted_losses(prediction: Prediction) -> dict[str, float]:
    e = prediction.estimate
    lost = {
        "bubble": e.time_parts_s["bubble"] / e.step_time_s,
        "communication": e.exposed_communication,
        "recompute": e.time_parts_s["recompute"] / e.step_time_s,
    }
    return lost if prediction.mfu is None else {**lost, "rest": 1 - prediction.mfu - sum(lost.values())}


def _show(value: float | None, form: str = "{:.1%}") -> str:
    return NOT_KNOWN if value is None else form.format(value)


def _render(rows: list[Row], losses: list[Row], is_predicted: bool) -> str:
    """Rows of which nothing is known are left out, and so is the column of predictions without one."""
    from rich import box  # late: only rank 0 prints, once
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.ASCII2, show_edge=False, pad_edge=False)
    table.add_column("")
    for name in ("predicted", "measured") if is_predicted else ("measured",):
        table.add_column(name, justify="right")
    shown = len(table.columns) - 1
    for name, *values in rows:
        if set(values[-shown:]) != {NOT_KNOWN}:
            table.add_row(name, *values[-shown:])
    table.add_section()
    table.add_row("where the missing MFU went, of the step time:")
    for name, *values in losses:
        if set(values[-shown:]) != {NOT_KNOWN}:
            table.add_row(f"  {name}", *values[-shown:])
    text = io.StringIO()
    Console(file=text, width=130, color_system=None, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))
