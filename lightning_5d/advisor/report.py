"""Tables of the terminal, and the same as JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lightning_5d.advisor.advice import Advice
from lightning_5d.advisor.collectives import Collective, as_dict
from lightning_5d.advisor.explanation import Explanation
from lightning_5d.advisor.memory import PARTS as MEMORY_PARTS
from lightning_5d.advisor.predict import Estimate
from lightning_5d.advisor.simulate import Timeline
from lightning_5d.advisor.step import PARTS as TIME_PARTS

_COLOURS = {"fits": "green", "tight": "yellow", "oom": "red"}
_GLYPHS = {"F": ("F", "cyan"), "B": ("B", "magenta"), "I": ("b", "magenta"), "W": ("w", "yellow"), "FB": ("X", "blue")}


def headline(a: Advice) -> str:
    """The question, and how many layouts were looked at."""
    return (
        f"{a.model.name} ({a.model.num_parameters / 1e9:.1f}B) on {a.num_gpus} × {a.gpu.name}, {a.seq_len} tokens × "
        f"{a.global_batch} sequences a step, {a.framework}: {a.considered} layouts, {a.fitting} fit"
    )


def advice_table(a: Advice) -> Table:
    """The best layouts, or those that come nearest."""
    table = Table(title=Text(headline(a)), title_justify="left", collapse_padding=True)
    table.add_column("#", justify="right")
    table.add_column("layout", no_wrap=True)
    for name in ("GiB", "margin", "params", "grads", "optim", "activ", "logits", "buffers", "stage", "m"):
        table.add_column(name, justify="right")
    for name in ("bubble", "comm", "step s", "tok/s/GPU", "MFU"):
        table.add_column(name, justify="right", no_wrap=True)
    for i, e in enumerate(a.best or a.closest, 1):
        colour = _COLOURS[e.verdict]
        mark = {"fits": "", "tight": " tight", "oom": " OOM"}[e.verdict]
        table.add_row(
            str(i),
            e.layout,
            Text(f"{e.memory_gib:.1f}", style=colour),
            Text(f"{e.margin_gib:.1f}{mark}", style=colour),
            *(f"{e.memory_parts_gib[k]:.1f}" for k in MEMORY_PARTS),
            str(e.worst_stage),
            str(e.num_microbatches),
            f"{e.bubble:.1%}",
            f"{e.exposed_communication:.1%}",
            f"{e.step_time_s:.2f}",
            f"{e.tokens_per_s_per_gpu:,.0f}",
            f"{e.mfu:.1%}",
        )
    return table


def advice_json(a: Advice) -> str:
    return json.dumps(
        {
            "model": a.model.name,
            "parameters": a.model.num_parameters,
            "gpu": a.gpu.name,
            "framework": a.framework,
            "num_gpus": a.num_gpus,
            "seq_len": a.seq_len,
            "global_batch": a.global_batch,
            "considered": a.considered,
            "fitting": a.fitting,
            "best": [e.as_dict() for e in a.best],
            "closest": [e.as_dict() for e in a.closest],
            "why": a.why,
        },
        indent=1,
    )


def estimates_csv(estimates: tuple[Estimate, ...] | list[Estimate]) -> str:
    """One row a layout; parts in columns of their own, units in the names."""
    rows = []
    for e in estimates:
        row: dict[str, Any] = e.as_dict()
        memory, time = row.pop("memory_parts_gib"), row.pop("time_parts_s")
        row |= {f"{k}_gib": v for k, v in memory.items()} | {f"{k}_s": v for k, v in time.items()}
        rows.append(row)
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue()


def explanation_tables(x: Explanation) -> Group:
    """All of an explanation."""
    e = x.estimate
    verdict = {"fits": "fits", "tight": "fits, but tight", "oom": "does not fit"}[e.verdict]
    lines: list[Any] = [
        Text.assemble(
            (e.layout, "bold"),
            f" · {e.model} on {e.num_gpus} × {e.gpu} · {e.framework}: ",
            (verdict, _COLOURS[e.verdict]),
            f", {e.memory_gib:.1f} of {e.limit_gib:.1f} GiB; {e.step_time_s:.2f} s a step, ",
            f"{e.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, MFU {e.mfu:.1%}; ",
            f"{e.num_microbatches} micro-batches of {e.micro_batch}",
        )
    ]
    if x.why_not:
        lines.append(Text(x.why_not, style="red"))
        lines.append(Text("nearest that fit: " + (", ".join(f"{n.layout} (MFU {n.mfu:.1%})" for n in x.nearest) or "none found")))
    lines += [_memory_table(x), _time_table(e), _collectives_table(x)]
    if x.timeline is not None:
        lines.append(Text(f"pipeline of {x.pictured} micro-batches ({_legend()}):"))
        lines.append(picture(x.timeline, x.case.layout.pp))
    return Group(*lines)


def _memory_table(x: Explanation) -> Table:
    table = Table("memory, GiB")
    for k in (*MEMORY_PARTS, "total", "layers", "live micro-batches"):
        table.add_column(k, justify="right")
    index = {"first": 0, "middle": 1, "last": x.case.layout.pp - 1}
    for rank, parts in x.memory_by_rank.items():
        r = index[rank]
        name = "each rank" if x.case.layout.pp == 1 else f"pipeline rank {r}"
        table.add_row(
            name, *(f"{parts[k]:.2f}" for k in MEMORY_PARTS), f"{sum(parts.values()):.2f}", str(x.layers[r]), f"{x.live[r]:g}"
        )
    return table


def _time_table(e: Estimate) -> Table:
    table = Table("time of a step")
    table.add_column("s", justify="right")
    table.add_column("share", justify="right")
    for k in TIME_PARTS:
        if e.time_parts_s[k] > 0:
            table.add_row(k.replace("_", " "), f"{e.time_parts_s[k]:.3f}", f"{e.time_parts_s[k] / e.step_time_s:.1%}")
    table.add_row("all", f"{e.step_time_s:.3f}", "")
    return table


def _collectives_table(x: Explanation) -> Table:
    pipeline = x.case.layout.pp > 1
    table = Table("collective", "for", "group", "link")
    if pipeline:
        table.add_column("pipeline ranks")
    for k in ("calls a step", "MiB each", "GiB a step", "s unhidden"):
        table.add_column(k, justify="right")
    ranks_of: dict[Collective, list[str]] = {}
    for rank, collectives in x.collectives_by_rank.items():
        for c in collectives:
            ranks_of.setdefault(c, []).append(rank)
    for c, ranks in sorted(ranks_of.items(), key=lambda item: -item[0].bytes_step):
        where = ["all" if len(ranks) == len(x.collectives_by_rank) else ", ".join(ranks)]
        table.add_row(
            c.operation,
            c.purpose,
            f"{c.axis}{c.group}",
            c.link,
            *(where if pipeline else []),
            f"{c.calls:,}",
            f"{c.bytes_each / 2**20:.1f}",
            f"{c.bytes_step / 2**30:.2f}",
            f"{c.seconds:.3f}",
        )
    if not ranks_of:
        table.add_row("none")
    return table


def _legend() -> str:
    return "F forward, B backward, b its input part, w its weight part, X both, · idle"


def picture(timeline: Timeline, num_ranks: int, width: int = 100) -> Text:
    """The pipeline as text, one line a rank."""
    text = Text()
    for rank in range(num_ranks):
        glyphs = ["·"] * width
        for event in timeline.events:
            if event.rank == rank:
                first = round(event.start_s / timeline.makespan_s * width)
                last = max(round(event.end_s / timeline.makespan_s * width), first + 1)
                glyphs[first:last] = [event.action.kind] * (min(last, width) - first)
        text.append(f"{rank:>3} ")
        for kind in glyphs:
            glyph, colour = _GLYPHS.get(kind, ("·", "bright_black"))
            text.append(glyph, style=colour)
        text.append("\n" if rank < num_ranks - 1 else "")
    return text


def explanation_json(x: Explanation) -> str:
    return json.dumps(
        {
            **x.estimate.as_dict(),
            "memory_by_rank_gib": x.memory_by_rank,
            "layers_by_rank": x.layers,
            "live_microbatches_by_rank": x.live,
            "collectives": [as_dict(c) for c in x.collectives],
            "collectives_by_rank": {rank: [as_dict(c) for c in own] for rank, own in x.collectives_by_rank.items()},
            "why_not": x.why_not,
            "nearest": [e.as_dict() for e in x.nearest],
        },
        indent=1,
    )
