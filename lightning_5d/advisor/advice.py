"""Which layouts are best for a model on some GPUs: the search, told in a table's rows and two sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_5d.advisor.cases import ATTENTION_KERNELS, Case
from lightning_5d.advisor.hardware import Gpu
from lightning_5d.advisor.model import ModelSpec, describe_model
from lightning_5d.advisor.own_gpu import require_gpu
from lightning_5d.advisor.parameters import Framework, find_framework
from lightning_5d.advisor.predict import SIMULATED, Estimate, check_sizes, estimate_cases
from lightning_5d.advisor.search import WHOLE_GRAMMAR, Constraints, Ranking, divisors, lacks, search, smallest_layout
from lightning_5d.advisor.step import mfu, model_flops_per_token
from lightning_5d.layout import Layout
from lightning_5d.support import layout_problem

LOOKED_AT = 400
"""Best layouts of the closed forms that are considered for the table."""
NAMES = {
    "tensor_parallel": "tensor-parallel communication",
    "context_parallel": "context-parallel communication",
    "expert_parallel": "expert-parallel communication",
    "data_parallel": "exposed data-parallel communication",
    "pipeline_transfer": "transfers between stages",
    "bubble": "pipeline bubbles",
    "recompute": "recomputation",
    "host": "waiting for Python",
    "matmul": "matrix products (larger shapes are faster)",
    "head": "the head on the slowest stage",
    "elementwise": "norms and element-wise operations",
    "attention": "attention",
    "optimizer": "the optimizer",
}
LOSSES = {
    **NAMES,
    "matmul": "matrix products slower than the GPU's peak",
    "attention": "attention slower than the peak",
    "head": "the head and its loss slower than the peak",
}
"""What keeps a step from running at peak speed."""


@dataclass(frozen=True)
class Advice:
    """The best layouts, and why."""

    model: ModelSpec
    gpu: Gpu
    framework: str
    num_gpus: int
    seq_len: int
    global_batch: int
    considered: int
    """Layouts whose memory and time were predicted."""
    fitting: int
    best: tuple[Estimate, ...]
    """Layouts that fit, fastest first; of those that differ only in ZeRO stage, schedule or recomputation, the best."""
    closest: tuple[Estimate, ...]
    """When nothing fits: the layouts that come nearest."""
    why: str
    """One sentence: why the first is first, or what to try."""
    grid: dict[tuple[int, int], float] = field(default_factory=dict)
    """Best MFU of each (tp, pp) that fits."""


def advise(
    model: Any,
    *,
    gpu: str | Gpu,
    num_gpus: int,
    seq_len: int,
    global_batch: int,
    framework: str | Framework = "lightning_5d",
    top: int = 10,
    require: Sequence[str] = (),
    forbid: Sequence[str] = (),
    attention: str | None = None,
    fused_norm: bool | None = None,
    all_layouts: bool = False,
) -> Advice:
    """The best layouts for a model on `num_gpus` GPUs; see :func:`lightning_5d.advisor.estimate` for the arguments they share.

    `require` and `forbid` are tokens of the layout string (`tp8`, `ac`, `zero3`). `all_layouts` also searches what the layout
    string can say but the framework cannot train yet.

    Raises:
        ValueError: the question has no meaning (no GPUs, unknown names, contradicting constraints); never because nothing fits.
    """
    rules = framework if isinstance(framework, Framework) else find_framework(framework)
    spec, device = describe_model(model), gpu if isinstance(gpu, Gpu) else require_gpu(gpu)
    check_sizes(num_gpus=num_gpus, seq_len=seq_len, global_batch=global_batch, top=top)
    if attention is not None and attention not in ATTENTION_KERNELS:
        raise ValueError(f"unknown attention {attention!r}; allowed: {', '.join(ATTENTION_KERNELS)}")
    constraints = Constraints(tuple(require), tuple(forbid))
    _refuse_untrainable(constraints, rules, all_layouts)
    kernel, fused = attention or rules.attention, rules.fused_norm if fused_norm is None else fused_norm

    def look(gpus: int, whole_grammar: bool = all_layouts) -> Ranking:
        space = WHOLE_GRAMMAR if whole_grammar else None
        return search(spec, device, gpus, seq_len, global_batch, rules, kernel, fused, constraints, space)

    ranking = look(num_gpus)
    if not ranking.cases:
        raise ValueError(_nothing_valid(spec, num_gpus, global_batch, constraints))
    common: dict[str, Any] = {
        "model": spec,
        "gpu": device,
        "framework": rules.name,
        "num_gpus": num_gpus,
        "seq_len": seq_len,
        "global_batch": global_batch,
        "considered": ranking.considered,
        "fitting": len(ranking.order),
    }
    if not len(ranking.order):
        closest = _estimates(ranking, np.argsort(ranking.gib - ranking.limits)[:LOOKED_AT], rules)
        closest = sorted(_one_of_each(closest), key=lambda e: -e.margin_gib)[: min(top, 3)]
        why = _what_to_try(look, closest[0], num_gpus)
        if rules.name == "lightning_5d" and not all_layouts:
            why += _would_fit(look(num_gpus, whole_grammar=True), rules)
        return Advice(**common, best=(), closest=tuple(closest), why=why)
    estimates = _estimates(ranking, ranking.order[:LOOKED_AT], rules)
    best = _one_of_each(sorted(estimates, key=lambda e: e.step_time_s))
    grid = _grid(ranking)
    return Advice(**common, best=tuple(best[:top]), closest=(), why=_why(best, ranking), grid=grid)


def _refuse_untrainable(constraints: Constraints, framework: Framework, all_layouts: bool) -> None:
    """Raises a ValueError for a required token that no layout of the search can have."""
    for token in constraints.require:
        layout = smallest_layout(token)
        lacking = lacks(framework, layout)
        if lacking is not None:
            raise ValueError(f"constraint {token!r}: {lacking}")
        problem = layout_problem(layout)
        if problem is not None and framework.name == "lightning_5d" and not all_layouts:
            raise ValueError(
                f"constraint {token!r}: this version cannot train it ({problem}). Leave it out, or search all that a layout "
                "string can say with --all-layouts (all_layouts=True)"
            )


def _would_fit(ranking: Ranking, framework: Framework) -> str:
    """A sentence about the fastest layout that fits, though it cannot be trained yet; empty when there is none."""
    if not len(ranking.order):
        return ""
    best = min(_estimates(ranking, ranking.order[:LOOKED_AT], framework), key=lambda e: e.step_time_s)
    return (
        f" Layouts that this version cannot train yet would fit, such as {best.layout} ({best.memory_gib:.1f} GiB): "
        "--all-layouts shows them."
    )


def _estimates(ranking: Ranking, indices: np.ndarray, framework: Framework) -> list[Estimate]:
    """Estimates of some layouts; of each family only the first few schedules are simulated."""
    chosen: list[int] = []
    seen: dict[tuple[Any, ...], int] = {}
    for i in indices:
        case = ranking.cases[i]
        family = _family(case)
        seen[family] = seen.get(family, 0) + 1
        if seen[family] <= 3 or case.layout.schedule not in SIMULATED:
            chosen.append(int(i))
    chosen = chosen[: LOOKED_AT // 4]
    return estimate_cases([ranking.cases[i] for i in chosen], framework, ranking.columns.select(np.array(chosen)))


def _family(case: Case) -> tuple[Any, ...]:
    x = case.layout
    return x.tp, x.sp, x.cp, x.pp, case.micro_batch, x.ep


def _one_of_each(estimates: Sequence[Estimate]) -> list[Estimate]:
    """The first of each family: those that differ only in ZeRO stage, schedule, recomputation or how keys travel are left out."""
    first: dict[tuple[Any, ...], Estimate] = {}
    for e in estimates:
        x = Layout.parse(e.layout)
        first.setdefault((x.tp, x.sp, x.cp, x.pp, e.micro_batch, x.ep), e)
    return list(first.values())


def _grid(ranking: Ranking) -> dict[tuple[int, int], float]:
    shares = mfu(ranking.columns, ranking.seconds)
    grid: dict[tuple[int, int], float] = {}
    for i in ranking.order:
        key = ranking.cases[i].layout.tp, ranking.cases[i].layout.pp
        grid[key] = max(grid.get(key, 0.0), float(shares[i]))
    return grid


def _why(best: Sequence[Estimate], ranking: Ranking) -> str:
    """Where the winner saves most against the best layout with another mesh, and what keeps it from being faster still."""
    winner = best[0]
    place, other = next(((i, e) for i, e in enumerate(best, 1) if _mesh(e) != _mesh(winner)), (0, None))
    text = f"{winner.layout} wins"
    if other is not None:
        saved = {k: other.time_parts_s[k] - winner.time_parts_s[k] for k in NAMES}
        most = sorted(saved, key=lambda k: -saved[k])[:2]
        told = [f"{saved[k]:.2g} s less on {NAMES[k]}" for k in most if saved[k] > 0.002 * winner.step_time_s]
        gain = other.step_time_s / winner.step_time_s - 1
        faster = f"{gain:.1%} faster than" if gain > 0.005 else "by a hair, within the model's error of"
        which = f"{other.layout} (number {place}{', the first with another mesh' if place > 2 else ''})"
        text += f": {faster} {which}" + (f", with {' and '.join(told)}" if told else "")
    if winner.verdict == "tight":
        text += f"; it leaves only {winner.margin_gib:.1f} GiB, so if it runs out of memory take {_roomier(best)}"
    lost = _lost_s(winner, ranking)
    first, second = (
        f"{LOSSES[k]} ({lost[k] / winner.step_time_s:.0%} of the step)" for k in sorted(lost, key=lambda k: -lost[k])[:2]
    )
    missed = f"Of the {1 - winner.mfu:.0%} that an MFU of {winner.mfu:.0%} misses"
    return f"{text}. {missed}, the largest part is {first}, then {second}."


def _lost_s(e: Estimate, ranking: Ranking) -> dict[str, float]:
    """Seconds of a step by what loses them: all but the model's own operations at peak speed."""
    c = ranking.columns  # of one model, so that any row tells the operations
    a_token = float(model_flops_per_token(c)[0])
    share = {"attention": float(12 * c.layers[0] * c.attention_width[0] * c.s[0]) / a_token}
    if e.time_parts_s["head"] > 0:  # else another stage is the slowest
        share["head"] = float(6 * c.vocab[0] * c.h[0]) / a_token
    share["matmul"] = 1 - sum(share.values())
    at_peak_s = e.mfu * e.step_time_s
    return {k: v - share.get(k, 0.0) * at_peak_s for k, v in e.time_parts_s.items() if k in LOSSES}


def _roomier(best: Sequence[Estimate]) -> str:
    return next((e.layout for e in best[1:] if e.verdict == "fits"), "a layout with recomputation (ac) or more sharding")


def _mesh(e: Estimate) -> tuple[str, ...]:
    return tuple(t for t in e.layout.split("_") if t.rstrip("0123456789") in ("tp", "cp", "pp", "ep"))


def _what_to_try(look: Any, nearest: Estimate, num_gpus: int) -> str:
    """For a model that fits nowhere: how much is missing, and how many GPUs would do."""
    largest = max(nearest.memory_parts_gib, key=lambda k: nearest.memory_parts_gib[k])
    text = (
        f"nothing fits: the nearest, {nearest.layout}, needs {nearest.memory_gib:.1f} GiB of {nearest.limit_gib:.1f}, "
        f"most of it {largest} ({nearest.memory_parts_gib[largest]:.1f} GiB)"
    )
    gpus = num_gpus
    while gpus < 64 * num_gpus and gpus < 32768:
        gpus *= 2
        if len(look(gpus).order):
            return f"{text}. Try {gpus} GPUs, where layouts fit, a shorter sequence, or GPUs with more memory."
    more = "try a shorter sequence, a larger batch (it limits dp), or GPUs with more memory"
    return f"{text}. Up to {gpus} GPUs do not help either: {more}."


def _nothing_valid(spec: ModelSpec, num_gpus: int, global_batch: int, constraints: Constraints) -> str:
    asked = [*(f"require {t}" for t in constraints.require), *(f"no {t}" for t in constraints.forbid)]
    text = f"no layout of {spec.name} uses all {num_gpus} GPUs with a global batch of {global_batch} sequences"
    if asked:
        text += f" and the constraints {', '.join(asked)}"
    possible = [d for d in divisors(num_gpus) if global_batch % d == 0]
    for token in constraints.require:
        mbs, ac = smallest_layout(token).mbs, smallest_layout(token).ac
        if isinstance(ac, int) and ac > spec.num_layers:
            layers = spec.num_layers
            return f"constraint {token!r} recomputes none of the {layers} layers of {spec.name}: take ac1 to ac{layers}"
        if mbs is not None and not any(global_batch // d % mbs == 0 for d in possible):
            per_replica = ", ".join(str(global_batch // d) for d in possible)
            return (
                f"constraint {token!r}: micro-batches of {mbs} do not divide the sequences of a replica, {per_replica} for dp "
                f"{', '.join(map(str, possible))}: take a divisor of one of these, or a global batch that is a multiple of {mbs}"
            )
    return (
        f"{text}. dp must divide the batch (of the divisors of {num_gpus}: {', '.join(map(str, possible))}), tp the "
        f"{spec.num_heads} heads and {spec.num_kv_heads} key/value heads, pp at most {spec.num_layers} layers: "
        "change the batch, the number of GPUs or the constraints."
    )
