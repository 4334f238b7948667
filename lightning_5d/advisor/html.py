"""One self-contained page about an advice: no network, drawings as inline SVG, a table that sorts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lightning_5d.advisor.advice import Advice
from lightning_5d.advisor.explanation import Explanation
from lightning_5d.advisor.memory import PARTS as MEMORY_PARTS
from lightning_5d.advisor.predict import Estimate
from lightning_5d.advisor.report import headline

_MEMORY_COLOURS = dict(zip(MEMORY_PARTS, ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c9c9c"), strict=True))
_ACTION_COLOURS = {"F": "#4e79a7", "B": "#e15759", "I": "#ff9d9a", "W": "#f1ce63", "FB": "#b07aa1"}
_ACTIONS = {
    "F": "forward",
    "B": "backward",
    "I": "backward, input part",
    "W": "backward, weight part",
    "FB": "forward beside backward",
}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; background: #fff }
h1 { font-size: 1.3rem }
h2 { font-size: 1.05rem; margin-top: 2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100% }
th, td { padding: .25rem .5rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace }
.heat td, .heat th { text-align: center }
#layouts th { cursor: pointer; user-select: none }
#layouts th[aria-sort=ascending]::after { content: " ▲" }
#layouts th[aria-sort=descending]::after { content: " ▼" }
.tight { color: #a86400 }
.oom { color: #b00020 }
.scroll { overflow-x: auto }
.legend span { display: inline-block; margin-right: 1rem }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .3em }
svg { width: 100%; height: auto }
svg text { font: 12px system-ui, sans-serif; fill: #222; paint-order: stroke; stroke: #fff; stroke-width: 3px }
svg text.on { fill: #fff; stroke: none }
"""
_SCRIPT = """
const table = document.getElementById("layouts"), body = table.tBodies[0];
function value(row, column) {
  const cell = row.cells[column];
  return cell.dataset.v === undefined ? cell.textContent : parseFloat(cell.dataset.v);
}
table.querySelectorAll("th").forEach((th, column) => th.addEventListener("click", () => {
  const up = th.getAttribute("aria-sort") !== "ascending";
  table.querySelectorAll("th").forEach(x => x.removeAttribute("aria-sort"));
  th.setAttribute("aria-sort", up ? "ascending" : "descending");
  const order = (a, b) => {
    const x = value(a, column), y = value(b, column);
    return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1);
  };
  [...body.rows].sort(order).forEach(row => body.append(row));
}));
"""


def page(advice: Advice, winner: Explanation | None) -> str:
    """The page. `winner` is the explanation of the first layout, or of the first with a pipeline, for the timeline."""
    shown = advice.best or advice.closest
    timeline = ""
    if winner is not None and winner.timeline is not None:
        timeline = (
            f"<h2>Pipeline of {escape(winner.estimate.layout)}: {winner.pictured} of {winner.estimate.num_microbatches} "
            f"micro-batches, bubble {winner.estimate.bubble:.1%} of the whole step's work</h2>{_timeline(winner)}"
        )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Layouts for {escape(advice.model.name)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(headline(advice))}</h1>
<p>{escape(advice.why)}</p>
<h2>Layouts</h2><div class="scroll">{_table(shown)}</div>
<h2>Memory of the worst GPU against its limit</h2>{_memory_bars(shown)}
{timeline}
{_heat_map(advice)}
<script>{_SCRIPT}</script></body></html>
"""


def _table(estimates: Sequence[Estimate]) -> str:
    names = ("layout", "GiB", "margin GiB", "micro-batches", "bubble %", "communication %", "step s", "tokens/s/GPU", "MFU %")
    rows = []
    for e in estimates:
        figures = (
            (e.memory_gib, ".1f"), (e.margin_gib, ".1f"), (e.num_microbatches, "d"), (100 * e.bubble, ".1f"),
            (100 * e.exposed_communication, ".1f"), (e.step_time_s, ".2f"),
            (e.tokens_per_s_per_gpu, ",.0f"), (100 * e.mfu, ".1f"),
        )  # fmt: skip
        cells = "".join(f'<td data-v="{value!r}">{value:{form}}</td>' for value, form in figures)
        rows.append(f'<tr class="{e.verdict}"><td>{escape(e.layout)}</td>{cells}</tr>')
    head = "".join(f"<th>{n}</th>" for n in names)
    return f'<table id="layouts"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _legend(colours: dict[str, str], names: dict[str, str] | None = None) -> str:
    items = "".join(f'<span><i style="background:{c}"></i>{escape((names or {}).get(k, k))}</span>' for k, c in colours.items())
    return f'<p class="legend">{items}</p>'


def _memory_bars(estimates: Sequence[Estimate]) -> str:
    left, width, row = 290, 700, 24
    most = max(max(e.memory_gib, e.limit_gib) for e in estimates) * 1.04
    scale = width / most
    drawn = []
    for i, e in enumerate(estimates):
        y, x = i * row, float(left)
        drawn.append(f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{escape(e.layout)}</text>')
        for part in MEMORY_PARTS:
            gib = e.memory_parts_gib[part]
            drawn.append(
                f'<rect class="memory" x="{x:.1f}" y="{y + 4}" width="{gib * scale:.1f}" height="{row - 8}" '
                f'fill="{_MEMORY_COLOURS[part]}">'
                f"<title>{part}: {gib:.2f} GiB</title></rect>"
            )
            x += gib * scale
        drawn.append(f'<text x="{x + 5:.1f}" y="{y + 16}">{e.memory_gib:.1f}</text>')
    limit = left + estimates[0].limit_gib * scale
    height = row * len(estimates)
    drawn.append(f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="0" y2="{height}" stroke="#b00020" stroke-dasharray="4 3"/>')
    drawn.append(f'<text x="{limit:.1f}" y="{height + 16}" text-anchor="middle">limit {estimates[0].limit_gib:.1f} GiB</text>')
    box = f'viewBox="0 0 {left + width + 60} {height + 22}" role="img" aria-label="memory by part"'
    svg = f'<svg id="memory" {box}>{"".join(drawn)}</svg>'
    return _legend(_MEMORY_COLOURS) + svg


def _timeline(x: Explanation) -> str:
    assert x.timeline is not None
    left, width, row, pp = 60, 980, 26, x.case.layout.pp
    scale = width / x.timeline.makespan_s
    drawn = [f'<text x="0" y="{r * row + 17}">rank {r}</text>' for r in range(pp)]
    used = {}
    for event in x.timeline.events:
        kind = event.action.kind
        used[kind] = _ACTION_COLOURS[kind]
        start, length = left + event.start_s * scale, (event.end_s - event.start_s) * scale
        y = event.rank * row
        title = f"{_ACTIONS[kind]}, micro-batch {event.action.microbatch}, stage {event.action.stage}"
        drawn.append(
            f'<rect class="action" x="{start:.1f}" y="{y + 3}" width="{max(length - 0.6, 0.4):.1f}" height="{row - 6}" '
            f'fill="{_ACTION_COLOURS[kind]}">'
            f"<title>{title}</title></rect>"
        )
        if length > 16:
            middle = start + length / 2
            drawn.append(f'<text x="{middle:.1f}" y="{y + 17}" text-anchor="middle" class="on">{event.action.microbatch}</text>')
    names = {k: _ACTIONS[k] for k in used}
    box = f'viewBox="0 0 {left + width + 10} {row * pp}" role="img" aria-label="pipeline schedule"'
    svg = f'<svg id="timeline" {box}>{"".join(drawn)}</svg>'
    return _legend(used, names) + svg


def _heat_map(a: Advice) -> str:
    if not a.grid:
        return ""
    tps, pps = sorted({t for t, _ in a.grid}), sorted({p for _, p in a.grid})
    low, high = min(a.grid.values()), max(a.grid.values())
    rows = []
    for tp in tps:
        cells = []
        for pp in pps:
            value = a.grid.get((tp, pp))
            if value is None:
                cells.append('<td style="background:#eee">–</td>')
                continue
            share = (value - low) / (high - low) if high > low else 1.0
            colour = f"hsl({20 + 110 * share:.0f} 65% {82 - 12 * share:.0f}%)"
            cells.append(f'<td style="background:{colour}">{100 * value:.1f}</td>')
        rows.append(f"<tr><td>tp{tp}</td>{''.join(cells)}</tr>")
    head = "".join(f"<th>pp{p}</th>" for p in pps)
    return (
        "<h2>Best MFU (%) of each tensor and pipeline size that fits</h2>"
        f'<div class="scroll"><table id="heat" class="heat"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
