"""``lightning-5d parity``: whether a recipe trains under a layout as it does in one process.

Runs the recipe's own model and data for a few steps, once in one process and once under each layout, each in processes of its
own, and compares the loss of every step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from rich.console import Console
from rich.table import Table

from lightning_5d.layout import Layout, LayoutError

TOLERANCE = 1e-5


class RecordLosses(Callback):
    """Writes the loss of every training batch to a JSON file, from rank 0."""

    def __init__(self, path: str) -> None:
        self.path, self.losses = Path(path), []  # type: ignore[var-annotated]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(self.losses))


def main(argv: list[str]) -> int:
    """Exit status 0 when every layout's losses equal one process's, 1 when not, 2 when a run failed or an option is wrong."""
    parser = argparse.ArgumentParser(
        prog="lightning-5d parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("layouts", nargs="+", help="layout strings")
    parser.add_argument("--config", required=True, help="a recipe of `lightning-5d fit`")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="relative, for the loss of each step")
    parser.add_argument(
        "--devices", type=int, help="ranks of each layout; default: as many as it names, with dp1 where it names none"
    )
    args = parser.parse_args(argv)
    try:
        layouts = [Layout.parse(text) for text in args.layouts]
        sizes = [args.devices or layout.model_parallel_size * (layout.dp or 1) for layout in layouts]
        layouts = [layout.resolve(size) for layout, size in zip(layouts, sizes, strict=True)]
    except LayoutError as error:
        print(f"lightning-5d parity: {error}", file=sys.stderr)
        return 2
    reference = run_recipe(args.config, "zero0", 1, args.steps)
    if reference is None:
        return 2
    table = Table("layout", "processes", "largest relative difference of a loss", "")
    status = 0
    for layout, size in zip(layouts, sizes, strict=True):
        losses = run_recipe(args.config, str(layout), size, args.steps)
        if losses is None:
            return 2
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))
        status = status if worst <= args.tolerance else 1
        table.add_row(str(layout), str(size), f"{worst:.1e}", "equal" if worst <= args.tolerance else "DIFFERS")
    Console().print(table)
    return status


def run_recipe(config: str, layout: str, num_processes: int, steps: int) -> list[float] | None:
    """The loss of each of ``steps`` batches; None when the run failed, whose output is then shown."""
    with tempfile.TemporaryDirectory() as folder:
        losses = Path(folder) / "losses.json"
        command = [
            *(sys.executable, "-m", "lightning_5d", "fit", "--config", config),
            *("--trainer.strategy", layout, "--trainer.devices", str(num_processes), "--trainer.max_steps", str(steps)),
            *("--trainer.logger", "false", "--trainer.enable_checkpointing", "false", "--trainer.limit_val_batches", "0"),
            *("--trainer.enable_progress_bar", "false", "--trainer.default_root_dir", folder),
            *("--trainer.callbacks+", "lightning_5d.parity.RecordLosses", "--trainer.callbacks.path", str(losses)),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0 or not losses.exists():
            print(f"{layout} on {num_processes} processes failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}", file=sys.stderr)
            return None
        return json.loads(losses.read_text())
