"""The command `lightning-5d dryrun --config RECIPE --world-size N`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
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
    parser.add_argument("--exact", action="store_true", help="run all layers and micro-batches, not few of each")
    parser.add_argument("--json", action="store_true", help="print JSON")
    try:
        args = parser.parse_args(argv)
        runs = _run(args)
    except SystemExit as stop:
        return int(stop.code or 0) if isinstance(stop.code, int) or stop.code is None else BAD_QUESTION
    except (ValueError, OSError, yaml.YAMLError) as error:
        print(f"{parser.prog}: {str(error).splitlines()[0]}", file=sys.stderr)
        return BAD_QUESTION
    if args.json:
        print(json.dumps([asdict(r) for r in runs], indent=1))
    else:
        _print(runs)
    return 0


def _run(args: argparse.Namespace) -> list[Any]:
    import torch

    from lightning_5d.advisor.dryrun import dry_run

    recipe = yaml.safe_load(args.config.read_text())
    if not isinstance(recipe, dict) or not isinstance(recipe.get("model"), dict):
        raise ValueError(f"{args.config} is no recipe: it has no `model` with class_path and init_args")
    trainer, model = recipe.get("trainer") or {}, recipe["model"]
    data = (recipe.get("data") or {}).get("init_args") or {}
    if not isinstance(data.get("seq_len"), int) or not isinstance(data.get("global_batch_size"), int):
        raise ValueError(f"{args.config}: data.init_args needs seq_len and global_batch_size, whole numbers")
    seq_len, strategy = data["seq_len"], trainer.get("strategy", "zero0")
    if isinstance(strategy, dict):
        strategy = (strategy.get("init_args") or {}).get("layout", "zero0")
    module_class = _import(model.get("class_path", ""))

    def make_batch(rows: int) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(rows, seq_len, dtype=torch.long) for name in ("input_ids", "labels")}

    return dry_run(
        lambda: module_class(**(model.get("init_args") or {})),
        make_batch,
        args.layout or strategy,
        args.world_size,
        global_batch=data["global_batch_size"],
        precision=str(trainer.get("precision", "32-true")),
        exact=args.exact,
    )


def _import(class_path: str) -> Any:
    module, _, name = class_path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        raise ValueError(f"model.class_path {class_path!r} cannot be imported") from None


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
    console.print(f"largest tensors at the peak of pipeline rank {worst.pp_rank} (of the largest run):", highlight=False)
    for gib, text in worst.largest:
        console.print(f"  {gib:8.3f} GiB  {text}", highlight=False, markup=False)
