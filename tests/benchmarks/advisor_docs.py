"""Tables of docs/advisor.md: scores, parameters, and figures that settle what others dispute. All are computed, none is typed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_5d.advisor import estimate
from lightning_5d.advisor.cases import Cases, collect
from lightning_5d.advisor.memory import GIB, total_bytes
from lightning_5d.advisor.model import PRESETS
from lightning_5d.advisor.parameters import PARAMETERS, find_framework, load_frameworks
from tests.benchmarks.advisor_findings import finding_cells
from tests.benchmarks.advisor_fit import PLAYBOOK_MEMORY, Bounds
from tests.benchmarks.advisor_rows import Row, values


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; all but the first column to the right."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, r))} |" for r in rows)])


def score_tables(result: dict[str, Any]) -> str:
    """What the benchmark prints, beside the goals."""
    memory, time = result["paper_memory"], result["paper_time"]
    narrow, wide = time["narrow"], time["wide"]
    play, speed, runs = result["playbook_memory"], result["playbook_time"], result["runs"]
    rows = [
        ("layouts paper, out of memory or not, 711 runs, in-sample", "≥ 97.0%", f"{memory['in_sample']:.1%}"),
        ("the same, each group left out of the fit", "≥ 96.5%", f"{memory['left_out']:.1%}"),
        ("the same, worst group", "≥ 92%", f"{memory['worst_group']:.1%}"),
        ("headline run (13B, no model parallelism) fits", "yes", "yes" if memory["headline_fits"] else "NO"),
        ("layouts paper, MFU, 310 runs: median / 90th percentile, points", "0.9 / 3.3", _pair(narrow["in_sample"])),
        ("the same, each group left out", "1.2 / 3.8", _pair(narrow["left_out"])),
        ("without the anomaly's relatives, 299 runs, in-sample", "", _pair(wide["in_sample"])),
        ("the same, each group left out", "", _pair(wide["left_out"])),
        ("playbook, memory, mean error in GiB, in-sample", "≤ 2.6", f"{play['in_sample']['mean']:.2f}"),
        ("the same, 3B / 1B and 80B left out", "≤ 2.9", f"{play['to 3B']['mean']:.2f} / {play['to 1B and 80B']['mean']:.2f}"),
        ("playbook, ran but called out of memory", "≤ 2%", f"{play['ran_called_oom']:.1%}"),
        ("playbook, tokens/s above 10% MFU, median error, in-sample", "≤ 5%", f"{speed['in_sample']['median']:.1%}"),
        (
            "the same, 3B / 1B and 80B left out",
            "≤ 7%",
            f"{speed['to 3B']['median']:.1%} / {speed['to 1B and 80B']['median']:.1%}",
        ),
        (f"other published runs, {runs['rows']}, tokens/s, median error", "≤ 20%", f"{runs['median']:.1%}"),
        ("the same, a GPU generation left out", "", f"{runs['left_out_median']:.1%}"),
    ]
    choices = [
        (g, f"`{c['first']}`", f"{c['lost_first']:.1f}", f"{c['lost_three']:.1f}", "yes" if c["oom"] else "no")
        for g, c in result["paper_choice"].items()
    ]
    findings = [(f["name"], f["unit"], *finding_cells(f)) for f in result["findings"]]
    return "\n\n".join(
        [
            table(("score", "goal", "reached"), rows),
            "First choice of the whole advisor among the layouts the paper measured, the group left out of both fits:",
            table(("group", "first choice", "points lost", "by the best of three", "out of memory"), choices),
            "What the paper's runs show, medians over pairs of runs that differ in one thing; with the 5th and 95th\n"
            "percentile of the measured median when the pairs are drawn anew, and the rank correlation of measured\n"
            "and predicted over the pairs:",
            table(("finding", "unit", "pairs", "measured", "5% – 95%", "predicted", "rank corr."), findings),
        ]
    )


def _pair(e: dict[str, float]) -> str:
    return f"{e['median']:.2f} / {e['p90']:.2f}"


def parameter_tables() -> str:
    """Fitted parameters with the range they take when a group is left out; the fixed ones in a line."""
    parts = []
    for framework in load_frameworks().values():
        rows = []
        for name, fit in framework.fits.items():
            low, high = fit["left_out"]
            p = PARAMETERS[name]
            rows.append(
                (f"`{name}`", f"{framework[name]:.3g}", f"{low:.3g} – {high:.3g}", f"{p.low:g} – {p.high:g}", p.unit, fit["rows"])
            )
        fixed = ", ".join(f"`{n}` {v:g}" for n, v in framework.values.items() if n not in framework.fits)
        parts.append(
            f"**{framework.name}**: {framework.about}\n\n"
            + table(("fitted", "value", "left out", "bounds", "unit", "rows"), rows)
            + f"\n\nFixed: {fixed}."
        )
    meanings = table(("parameter", "unit", "meaning"), ((f"`{n}`", p.unit, p.meaning) for n, p in PARAMETERS.items()))
    return "\n\n".join([*parts, meanings])


# ---------------------------------------------------------------- what others dispute


def dispute_tables(playbook: Sequence[Row], runs: Sequence[tuple[Row, str]]) -> str:
    """Figures of our own on what the playbook's memory widget and its errata leave open."""
    return "\n\n".join(
        [_stage_memory(playbook), _optimizer(), _attention_share(), _sequence_parallel_batches(runs), _layer_operations()]
    )


def _stage_memory(playbook: Sequence[Row]) -> str:
    ran = [r for r in playbook if r.status == "ok"]
    framework = find_framework("nanotron")
    cases = collect([r.case for r in ran], framework)
    measured = values(ran, "memory_gib")
    rows = []
    for label, live in (
        ("min(p, m), 1F1B's first stage", cases.live_first),
        ("1", np.ones(len(cases))),
        ("m, as AFAB holds", cases.m),
    ):
        r2, mean = _fit_live(Cases({**cases.columns, "live_first": live}), measured, framework)
        rows.append((label, f"{r2:.2f}", f"{mean:.1f}"))
    question = {"gpu": "h100", "num_gpus": 4, "seq_len": 4096, "global_batch": 16}
    held = estimate("llama3-8b", "pp4_1f1b_mbs1", **question).memory_parts_gib["activations"]  # of pp = 4 micro-batches
    return (
        "**Memory of a pipeline stage.** The first stage of 1F1B holds min(p, m) micro-batches of its L/p layers, as much as no "
        "pipeline at all; only AFAB (GPipe) holds all m. Fitted to the playbook's own measured memory, micro-batches held:\n\n"
        + table(("micro-batches held by rank 0", "R²", "mean error, GiB"), rows)
        + f"\n\nLlama 3 8B, pp 4, 16 micro-batches of 4,096 tokens: activations of rank 0 are {held:.1f} GiB under 1F1B "
        f"and {held * 16 / 4:.1f} GiB under AFAB."
    )


def _fit_live(cases: Cases, measured: np.ndarray, framework: Any) -> tuple[float, float]:
    """R² and mean error of the best fit with these micro-batches in flight."""
    from scipy.optimize import least_squares

    bounds = Bounds(PLAYBOOK_MEMORY)

    def predicted(x: np.ndarray) -> np.ndarray:
        return total_bytes(cases, bounds.apply(framework, x))["first"] / GIB

    found = least_squares(
        lambda x: (predicted(x) - measured) / 2,
        bounds.start(framework),
        bounds=(bounds.low, bounds.high),
        x_scale=bounds.width,
    )
    error = predicted(found.x) - measured
    r2 = 1 - float((error**2).sum() / ((measured - measured.mean()) ** 2).sum())
    return r2, float(np.abs(error).mean())


def _optimizer() -> str:
    h = 4096
    return (
        "**Optimizer state.** fp32 master weight, momentum and variance are three times 4 bytes: 12h² BYTES for an h×h weight "
        f"({12 * h * h / 2**20:.0f} MiB at h = {h}). The widget's 6h² is the same number in units of two bytes."
    )


def _attention_share() -> str:
    rows = []
    for name in ("llama3-8b", "llama3-70b", "llama-13b"):
        m = PRESETS[name]
        shares = [
            12 * m.num_layers * m.attention_width * s / m.palm_flops_per_token(s) for s in (2048, 4096, 8192, 32768, 131072)
        ]
        rows.append((name, *(f"{x:.1%}" for x in shares)))
    return (
        "**Attention's share of the operations** (12·L·h·s of 6N + 12·L·h·s, full attention; half of that term is computed "
        "with a causal kernel):\n\n" + table(("model", "2k", "4k", "8k", "32k", "128k"), rows)
    )


def _sequence_parallel_batches(runs: Sequence[tuple[Row, str]]) -> str:
    """Largest micro-batch that fits, with and without sequence parallelism; the chart's own numbers beside."""
    chart: dict[str, dict[int, int]] = {"sp": {}, "nosp": {}}
    for row, framework in runs:
        if framework == "nanotron":
            chart["sp" if row.case.layout.sp else "nosp"][row.case.layout.tp] = row.case.micro_batch
    question: dict[str, Any] = {"gpu": "h100", "seq_len": 4096, "framework": "nanotron"}
    rows = []
    for tp in (2, 4, 8, 16, 32):
        cells = []
        for sp in ("nosp", "sp"):
            largest = 0
            for b in range(1, 257):
                e = estimate("playbook-3b", f"tp{tp}_{sp}_mbs{b}", num_gpus=tp, global_batch=b, **question)
                if not e.fits:
                    break
                largest = b
            cells += [largest, chart[sp].get(tp, "no run")]
        rows.append((f"tp {tp}", *cells))
    return (
        "**Largest micro-batch of tensor parallelism with and without sequence parallelism** (3B, 4,096 tokens, nanotron, H100). "
        "Without it norms and their inputs stay whole on every rank, so the batch grows less with tp; in fact not as little as "
        "predicted:\n\n" + table(("", "TP predicted", "TP, chart", "TP and SP predicted", "TP and SP, chart"), rows)
    )


def _layer_operations() -> str:
    rows = []
    for name in ("llama-13b", "llama3-8b", "llama3-70b"):
        m = PRESETS[name]
        own = 2 * (m.dense_layer_parameters - 2 * m.hidden_size)
        gpt = 24 * m.hidden_size**2
        rows.append((name, f"{own / 1e6:.0f}", f"{gpt / 1e6:.0f}", f"{own / gpt:.2f}"))
    return (
        "**Operations of a Llama layer** are 4h² + 4h²·kv/a + 6·h·ffn a token forward (matrix products alone), not the 24h² of a "
        "GPT with an MLP of 4h:\n\n" + table(("model", "Llama, MFLOP", "24h², MFLOP", "ratio"), rows)
    )


def write_docs(path: Path, blocks: dict[str, str]) -> None:
    """Replaces what stands between `<!-- name -->` and `<!-- end -->` of each block."""
    text = path.read_text(encoding="utf-8")
    for name, content in blocks.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
        if not pattern.search(text):
            raise ValueError(f"{path} has no block <!-- {name} --> ... <!-- end -->")
        text = pattern.sub(lambda m, c=content: f"{m[1]}{c}\n{m[2]}", text)
    path.write_text(text, encoding="utf-8")
