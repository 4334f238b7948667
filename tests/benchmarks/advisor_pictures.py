"""Pictures of predicted against measured, for the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from lightning_5d.advisor.cases import collect
from lightning_5d.advisor.memory import GIB, limit_gib, total_bytes, worst_gib
from lightning_5d.advisor.step import step_time
from tests.benchmarks.advisor_rows import Row, groups, values
from tests.benchmarks.advisor_scores import LeftOut, left_out, mask, paper_time_rows, predicted_mfu

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def draw(
    directory: Path, paper: Sequence[Row], playbook: Sequence[Row], runs: Sequence[tuple[Row, str]], fits: dict[str, LeftOut]
) -> list[Path]:
    """Writes the pictures and returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "advisor"})
    drawn = []
    for name, figure in (
        ("mfu", _mfu(paper, fits["paper_time"])),
        ("out_of_memory", _out_of_memory(paper, fits["paper_memory"])),
        ("memory", _memory(playbook, fits["playbook_memory"])),
        ("speed", _speed(playbook, runs, fits)),
    ):
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
        plt.close(figure)
        drawn.append(path)
    return drawn


def _mfu(paper: Sequence[Row], fits: LeftOut) -> plt.Figure:
    rows = paper_time_rows(paper)
    predicted, measured = left_out(rows, fits, predicted_mfu), values(rows, "mfu_points")
    figure, axes = plt.subplots(figsize=(5, 4.6))
    for g in groups(rows):
        inside = mask(rows, lambda r, g=g: r.group == g)  # type: ignore[misc]
        axes.plot(measured[inside], predicted[inside], "o", ms=3.5, alpha=0.7, label=g)
    axes.plot([0, 75], [0, 75], color="#888", lw=0.8)
    axes.set(xlabel="measured MFU, %", ylabel="predicted MFU, %, its group left out of the fit", xlim=(10, 75), ylim=(10, 75))
    axes.legend(frameon=False)
    return figure


def _out_of_memory(paper: Sequence[Row], fits: LeftOut) -> plt.Figure:
    cases = collect([r.case for r in paper], fits.all)
    gib = worst_gib(cases, fits.all)[0]
    failed = mask(paper, lambda r: r.status != "ok")
    figure, axes = plt.subplots(figsize=(6.4, 2.8))
    bins = np.arange(0, 164, 4)
    axes.hist(
        [np.clip(gib[~failed], 0, 160), np.clip(gib[failed], 0, 160)],
        bins=bins,
        stacked=True,
        label=["ran", "out of memory"],
        color=["#59a14f", "#e15759"],
    )
    axes.axvline(float(limit_gib(cases, fits.all)[0]), color="k", lw=1, ls="--")
    axes.set(xlabel="predicted GiB of the worst GPU (160: and more)", ylabel="runs")
    axes.legend(frameon=False)
    return figure


def _memory(playbook: Sequence[Row], fits: LeftOut) -> plt.Figure:
    rows = [r for r in playbook if r.status == "ok"]
    predicted = total_bytes(collect([r.case for r in rows], fits.all), fits.all)["first"] / GIB
    measured = values(rows, "memory_gib")
    figure, axes = plt.subplots(figsize=(5, 4.6))
    for model in groups(rows, lambda r: r.model):
        inside = mask(rows, lambda r, m=model: r.model == m)  # type: ignore[misc]
        axes.plot(measured[inside], predicted[inside], "o", ms=2.5, alpha=0.5, label=model)
    axes.plot([0, 80], [0, 80], color="#888", lw=0.8)
    axes.set(xlabel="measured GiB of rank 0", ylabel="predicted GiB")
    axes.legend(frameon=False)
    return figure


def _speed(playbook: Sequence[Row], runs: Sequence[tuple[Row, str]], fits: dict[str, LeftOut]) -> plt.Figure:
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2))

    def plot(ax: plt.Axes, rows: Sequence[Row], fit: LeftOut, label: str, alpha: float) -> None:
        if not rows:
            return
        predicted = step_time(collect([r.case for r in rows], fit.all), fit.all).total_s
        measured = np.array([r.measured_step_s for r in rows])
        tokens = np.array([r.case.seq_len * r.case.global_batch / r.case.layout.world_size for r in rows])
        ax.loglog(tokens / measured, tokens / predicted, "o", ms=2.5, alpha=alpha, label=label)

    ran = [r for r in playbook if r.status == "ok"]
    plot(axes[0], [r for r in ran if (r.mfu_points or 0) > 10], fits["playbook_time"], "above 10% MFU", 0.5)
    plot(axes[0], [r for r in ran if (r.mfu_points or 0) <= 10], fits["playbook_time"], "below: stalled, or slow networks", 0.3)
    axes[0].set_title("playbook")
    for gpu in ("A100", "H100"):
        plot(
            axes[1], [r for r, f in runs if f == "lightning_5d" and r.case.gpu.name.startswith(gpu)], fits["runs_time"], gpu, 0.6
        )
    axes[1].set_title("PyTorch FSDP frameworks")
    for ax in axes:
        low, high = ax.get_xlim()
        ax.plot([low, high], [low, high], color="#888", lw=0.8)
        ax.set(xlabel="measured tokens/s per GPU", ylabel="predicted")
        ax.legend(frameon=False)
    return figure
