"""Scores the layout advisor on published measurements, and fits its parameters.

    python -m tests.benchmarks.advisor [--paper CSV] [--playbook CSV] [--runs CSV] [--refit]
        [--docs docs/advisor.md] [--pictures docs/advisor] [--json FILE]

Any files with the columns of `lightning_5d/advisor/data/` will do, whatever other columns and however few rows they have; rows
that cannot be read are listed with the reason. A file that cannot be read is told in one line, with exit code 2.

Without `--refit` the in-sample scores are those of the carried parameters; scores with a group left out always refit without it.
`--refit` fits the carried parameters anew and writes `lightning_5d/advisor/data/frameworks.yaml`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_5d.advisor.parameters import DATA, PARAMETERS, Framework, find_framework, load_frameworks
from tests.benchmarks import advisor_scores as scores
from tests.benchmarks.advisor_findings import all_findings, finding_cells
from tests.benchmarks.advisor_fit import PAPER_MEMORY, PAPER_TIME, PLAYBOOK_MEMORY, PLAYBOOK_TIME, RUNS_TIME
from tests.benchmarks.advisor_rows import PAPER, PLAYBOOK, RUNS, Skipped, TableError, paper_rows, playbook_rows
from tests.benchmarks.advisor_runs import run_rows
from tests.benchmarks.advisor_scores import LeftOut

FITTED = {
    "aleph-alpha": (("paper_memory", PAPER_MEMORY), ("paper_time", PAPER_TIME)),
    "nanotron": (("playbook_memory", PLAYBOOK_MEMORY), ("playbook_time", PLAYBOOK_TIME)),
    "lightning_5d": (("runs_time", RUNS_TIME),),
}


def fit_all(paper: Any, playbook: Any, runs: Any) -> dict[str, LeftOut]:
    """Every fit, on all rows and with groups left out."""
    return {
        "paper_memory": scores.paper_memory_fits(paper),
        "paper_time": scores.paper_time_fits(paper),
        "playbook_memory": scores.playbook_memory_fits(playbook),
        "playbook_time": scores.playbook_time_fits(playbook),
        "runs_time": scores.runs_time_fits(runs),
    }


def require_groups(fits: dict[str, LeftOut]) -> None:
    """Raises a TableError when a fit has no two groups to leave out in turn."""
    few = [name.replace("_", " ") for name, fit in fits.items() if len(fit.without) < 2]
    if few:
        raise TableError(
            f"--refit, --docs and --pictures need runs of two groups at least (models, GPUs), and there are not for the "
            f"{' and '.join(few)}; give files with more rows"
        )


def write_parameters(fits: dict[str, LeftOut]) -> None:
    """Writes the fitted values, and the range each takes when a group is left out, into `frameworks.yaml`."""
    path = DATA / "frameworks.yaml"
    loaded = yaml.safe_load(path.read_text())
    for framework, parts in FITTED.items():
        for fit, names in parts:
            ranges = fits[fit].ranges(names)
            for name in names:
                entry = loaded[framework]["parameters"][name]
                entry["value"] = round_to(fits[fit].all[name])
                entry["left_out"] = [round_to(x) for x in ranges[name]]
    path.write_text(yaml.safe_dump(loaded, sort_keys=False, width=160))
    load_frameworks.cache_clear()


def round_to(x: float, digits: int = 4) -> float:
    return float(f"{x:.{digits}g}")


def use_carried(fits: dict[str, LeftOut]) -> None:
    """In-sample scores are those of the parameters that the package carries."""
    for framework, parts in FITTED.items():
        for fit, _ in parts:
            fits[fit].all = find_framework(framework)


def all_scores(paper: Any, playbook: Any, runs: Any, fits: dict[str, LeftOut]) -> dict[str, Any]:
    return {
        "paper_memory": scores.score_paper_memory(paper, fits["paper_memory"]),
        "paper_time": scores.score_paper_time(paper, fits["paper_time"]),
        "paper_choice": scores.score_paper_choice(paper, fits["paper_memory"], fits["paper_time"]),
        "paper_choice_with_anomaly": scores.score_paper_choice(paper, fits["paper_memory"], fits["paper_time"], exclude=()),
        "findings": [{**asdict(f), "share": f.share} for f in all_findings(paper, fits["paper_time"].all)],
        "playbook_memory": scores.score_playbook_memory(playbook, fits["playbook_memory"]),
        "playbook_time": scores.score_playbook_time(playbook, fits["playbook_time"]),
        "runs": scores.score_runs(runs, fits["runs_time"], fits["playbook_time"].all),
    }


def shown(x: float, form: str) -> str:
    """A score as tables show it; one of no rows is nan."""
    return "no rows" if math.isnan(x) else format(x, form)


def print_table(console: Console, table: Table) -> None:
    if not table.rows:
        table.add_row("no rows")
    console.print(table)


def print_scores(console: Console, result: dict[str, Any], skipped: Sequence[Skipped]) -> None:
    """Tables of every score."""
    memory = result["paper_memory"]
    table = Table("layouts paper: out of memory or not", "right", title=f"{memory['rows']} runs")
    in_sample = shown(memory["in_sample"], ".1%")
    table.add_row("in-sample", f"{in_sample} ({memory['false_oom']} false alarms, {memory['missed_oom']} missed)")
    table.add_row("group left out", shown(memory["left_out"], ".1%"))
    for group, share in memory["groups"].items():
        table.add_row(f"  {group}", shown(share, ".1%"))
    gib = shown(memory["headline_gib"], ".1f")
    fits = f"{gib} GiB, {'fits' if memory['headline_fits'] else 'DOES NOT FIT'}"
    table.add_row("headline run", gib if math.isnan(memory["headline_gib"]) else fits)
    print_table(console, table)

    table = Table("layouts paper: MFU, points", "runs", "median", "p90", "max", "rank corr. mean / min")
    for name, label in (("narrow", "without the anomaly"), ("wide", "without it and its relatives")):
        for kind in ("in_sample", "left_out"):
            e = result["paper_time"][name][kind]
            few = math.isnan(e["spearman_mean"])
            ranks = "no rows" if few else f"{e['spearman_mean']:.2f} / {e['spearman_min']:.2f}"
            table.add_row(
                f"{label}, {kind.replace('_', ' ')}",
                str(e["rows"]),
                shown(e["median"], ".2f"),
                shown(e["p90"], ".2f"),
                shown(e["max"], ".1f"),
                ranks,
            )
    for group, e in result["paper_time"]["narrow"]["groups"].items():
        table.add_row(
            f"  {group}, left out",
            str(e["rows"]),
            shown(e["median"], ".2f"),
            shown(e["p90"], ".2f"),
            shown(e["max"], ".1f"),
            shown(e["spearman_mean"], ".2f"),
        )
    print_table(console, table)

    for key, label in (("paper_choice", "without the anomaly"), ("paper_choice_with_anomaly", "anomaly included")):
        table = Table(f"whole advisor, group left out, {label}", "first choice", "lost points", "best of three", "out of memory")
        for group, choice in result[key].items():
            table.add_row(
                group,
                choice["first"],
                f"{choice['lost_first']:.2f}",
                f"{choice['lost_three']:.2f}",
                "YES" if choice["oom"] else "no",
            )
        print_table(console, table)

    table = Table("layouts paper: what its runs show", "unit", "pairs", "measured", "5% – 95%", "predicted", "rank corr.")
    for f in result["findings"]:
        table.add_row(f["name"], f["unit"], *finding_cells(f))
    print_table(console, table)

    table = Table("playbook: memory of the first rank, GiB", "runs", "mean error", "median", "p90")
    for name, e in result["playbook_memory"].items():
        if isinstance(e, dict):
            errors = (shown(e["mean"], ".2f"), shown(e["median"], ".2f"), shown(e["p90"], ".1f"))
            table.add_row(name.replace("_", " "), str(e["rows"]), *errors)
    table.add_row("ran but called out of memory", "", shown(result["playbook_memory"]["ran_called_oom"], ".1%"), "", "")
    table.add_row("failed and called out of memory", "", shown(result["playbook_memory"]["failed_called_oom"], ".1%"), "", "")
    print_table(console, table)

    table = Table("playbook: tokens/s above 10% MFU", "runs", "median error", "p90", "median, all runs")
    for name, e in result["playbook_time"].items():
        errors = (shown(e["median"], ".1%"), shown(e["p90"], ".0%"), shown(e["median_all"], ".1%"))
        table.add_row(name.replace("_", " "), str(e["rows"]), *errors)
    print_table(console, table)

    runs = result["runs"]
    table = Table("other published runs: tokens/s", "runs", "median error", "p90")
    table.add_row("in-sample", str(runs["rows"]), shown(runs["median"], ".1%"), shown(runs["p90"], ".0%"))
    table.add_row("GPU family left out (FSDP frameworks)", "", shown(runs["left_out_median"], ".1%"), "")
    for source, e in runs["sources"].items():
        table.add_row(f"  {escape(source)}", str(e["rows"]), f"{e['median']:.1%}", "")
    print_table(console, table)
    counts: dict[tuple[str, str], int] = {}
    for s in skipped:
        counts[s.source, s.reason] = counts.get((s.source, s.reason), 0) + 1
    table = Table("not scored", "runs", "reason")
    for (source, reason), n in sorted(counts.items()):
        table.add_row(escape(source), str(n), escape(reason))
    print_table(console, table)


def print_parameters(console: Console, frameworks: Sequence[Framework]) -> None:
    """Value, unit, range and rows of each fitted parameter."""
    for framework in frameworks:
        table = Table(
            "parameter",
            "value",
            "range left out",
            "bounds",
            "unit",
            "meaning",
            "fitted on",
            title=f"{framework.name}: fitted parameters",
        )
        for name, fit in framework.fits.items():
            p = PARAMETERS[name]
            low, high = fit.get("left_out", (float("nan"), float("nan")))
            table.add_row(
                name,
                f"{framework[name]:.4g}",
                f"{low:.4g} to {high:.4g}",
                f"{p.low:g} to {p.high:g}",
                p.unit,
                p.meaning,
                fit["rows"],
            )
        console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.advisor", description=__doc__.splitlines()[0])
    parser.add_argument("--paper", type=Path, default=PAPER, help="runs with the columns of layouts_paper.csv")
    parser.add_argument("--playbook", type=Path, default=PLAYBOOK, help="runs with the columns of playbook_benchmarks.csv")
    parser.add_argument("--runs", type=Path, default=RUNS, help="runs with the columns of published_runs.csv")
    parser.add_argument("--refit", action="store_true", help="fit the parameters on these files and write them into the package")
    parser.add_argument("--pictures", type=Path, help="directory for the pictures of predicted against measured")
    parser.add_argument("--docs", type=Path, help="rewrite the tables of this page (docs/advisor.md)")
    parser.add_argument("--json", type=Path, help="write the scores here too")
    args = parser.parse_args(argv)
    try:
        score_files(args)
    except (TableError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def score_files(args: argparse.Namespace) -> None:
    """Scores the files, and writes what is asked for."""
    skipped: list[Skipped] = []
    paper, playbook = paper_rows(args.paper, skipped), playbook_rows(args.playbook, skipped)
    runs, others = run_rows(args.runs)
    skipped += others
    fits = fit_all(paper, playbook, runs)
    if args.refit or args.docs or args.pictures:
        require_groups(fits)
    if args.refit:
        write_parameters(fits)
    use_carried(fits)
    result = all_scores(paper, playbook, runs, fits)
    console = Console(width=None if Console().is_terminal else 170)
    print_scores(console, result, skipped)
    print_parameters(console, list(load_frameworks().values()))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    if args.docs:
        from tests.benchmarks.advisor_docs import dispute_tables, parameter_tables, score_tables, write_docs

        write_docs(
            args.docs,
            {"scores": score_tables(result), "parameters": parameter_tables(), "disputes": dispute_tables(playbook, runs)},
        )
        console.print(f"wrote {args.docs}")
    if args.pictures:
        from tests.benchmarks.advisor_pictures import draw

        for path in draw(args.pictures, paper, playbook, runs, fits):
            console.print(f"wrote {path}")


if __name__ == "__main__":
    raise SystemExit(main())
