"""The command `lightning-5d dryrun --config RECIPE --world-size N`."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

BAD_QUESTION = 2


def dryrun_main(argv: Sequence[str] | None = None) -> int:
    """Runs one rank of a recipe on fake tensors and prints what it needs. 0; 2 when the recipe cannot be run."""
    parser = argparse.ArgumentParser(
        prog="lightning-5d dryrun",
        description="One rank of each kind of pipeline stage, run by the strategy's own code on fake tensors.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, required=True, help="a recipe of `lightning-5d fit`")
    parser.add_argument("--world-size", type=int, required=True, help="ranks of the whole job")
    parser.add_argument("--layout", help="another layout than the recipe's")
    parser.add_argument("--seq-len", type=int, help="batches of input_ids and labels of so many tokens, not the data's own")
    parser.add_argument("--global-batch", type=int, help="sequences of a step over all replicas")
    parser.add_argument("--exact", action="store_true", help="run all layers and micro-batches, not few of each")
    parser.add_argument("--json", action="store_true", help="print JSON")
    try:
        args = parser.parse_args(argv)
        runs = _run(args)
    except SystemExit as stop:
        return int(stop.code or 0) if isinstance(stop.code, int) or stop.code is None else BAD_QUESTION
    except Exception as error:  # of the user's own module, too
        print(f"{parser.prog}: {_one_sentence(error)}", file=sys.stderr)
        return BAD_QUESTION
    if args.json:
        print(json.dumps([asdict(r) for r in runs], indent=1))
    else:
        _print(runs)
    return 0


def _run(args: argparse.Namespace) -> list[Any]:
    from lightning_5d.advisor.dryrun import dry_run
    from lightning_5d.advisor.dryrun_recipe import batches, read_recipe

    recipe = read_recipe(args.config, args.layout)
    layout = recipe.layout.resolve(args.world_size)
    made = batches(recipe, args.seq_len, args.global_batch)
    global_batch = (made.rows or 1) * (layout.dp or 1) if made.global_batch is None else made.global_batch
    return dry_run(
        recipe.make_module, made.make, layout, args.world_size, global_batch=global_batch, exact=args.exact, **recipe.options
    )


def _one_sentence(error: BaseException) -> str:
    """What went wrong, and where in the user's own code; for what was not foreseen, of which kind it is."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:  # a pipeline's stage wraps what its step raises
        error = error.__cause__
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, (ValueError, OSError, yaml.YAMLError)):
        return text
    if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
        text = f"needs values, of which a dry run has none ({text})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    return f"{where}{type(error).__name__}: {text[:500]}"


def _is_library(filename: str) -> bool:
    return "site-packages" in filename or filename.startswith("<") or Path(filename).is_relative_to(Path(__file__).parents[1])


def _print(runs: Sequence[Any]) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    kinds = list(runs[0].memory_gib)
    table = Table("peak memory, GiB", title="without context and fragmentation", title_justify="left")
    for name in (*kinds, "all", "layers", "TFLOP a step"):
        table.add_column(name, justify="right")
    for r in runs:
        parts = (f"{r.memory_gib[k]:.2f}" for k in kinds)
        table.add_row(f"pipeline rank {r.pp_rank}", *parts, f"{r.peak_gib:.2f}", str(r.layers), f"{r.tflops:.1f}")
    console.print(table)
    table = Table("collectives of a step", "axis", "ranks")
    for name in ("calls", "GiB"):
        table.add_column(name, justify="right")
    for r in runs:
        for t in r.traffic:
            table.add_row(f"rank {r.pp_rank}: {t.operation}", t.axis, str(t.group), f"{t.calls:,.0f}", f"{t.nbytes / 2**30:.3f}")
    console.print(table)
    worst = max(runs, key=lambda r: r.peak_gib)
    console.print(f"peak of pipeline rank {worst.pp_rank}: {worst.peak_at}", highlight=False, markup=False)
    console.print(f"largest tensors at the peak of pipeline rank {worst.pp_rank} (of the largest run):", highlight=False)
    for gib, text in worst.largest:
        console.print(f"  {gib:8.3f} GiB  {text}", highlight=False, markup=False)
