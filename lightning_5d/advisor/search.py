"""Enumerates the layouts that can matter for a model on a number of GPUs, and ranks those that fit by predicted step time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lightning_5d.advisor.cases import Case, Cases, collect
from lightning_5d.advisor.hardware import Gpu
from lightning_5d.advisor.memory import limit_gib, worst_gib
from lightning_5d.advisor.model import ModelSpec
from lightning_5d.advisor.parameters import Framework
from lightning_5d.advisor.schedules import schedule_problem
from lightning_5d.advisor.step import step_time
from lightning_5d.layout import Layout, LayoutError
from lightning_5d.layout import model_problems as layout_problems
from lightning_5d.layout_tokens import CP_METHODS, SCHEDULES, read_token

MAX_PIPELINE = 64


@dataclass(frozen=True)
class Constraints:
    """What a layout must have (`require`) and must not have (`forbid`): tokens such as `tp8`, `zero3`, `ac`, `cp`, `zbv`.

    A token without a number (`ac`, `cp`, `pp`) stands for any size above its default; `no ac` also forbids `acsel`.
    Tokens joined by `_` are taken one by one.
    """

    require: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("require", "forbid"):
            object.__setattr__(self, name, tuple(part for token in getattr(self, name) for part in token.lower().split("_")))
        for token in (*self.require, *self.forbid):
            try:
                smallest_layout(token)
            except LayoutError as error:
                raise ValueError(f"constraint {token!r}: {error}") from None

    def allow(self, layout: Layout) -> bool:
        """Whether a resolved layout meets them."""
        return all(has_token(layout, t) for t in self.require) and not any(has_token(layout, t) for t in self.forbid)


_NEEDS = (
    {"sp": "tp2", "nosp": "tp2", "rep": "zero1", "v": "pp2"} | dict.fromkeys(CP_METHODS, "cp2") | dict.fromkeys(SCHEDULES, "pp2")
)
_SIZES = ("dp", "zero", "rep", "tp", "cp", "pp", "v", "mbs", "ep")


def smallest_layout(token: str) -> Layout:
    """A layout with this token of a constraint and little else. Raises LayoutError when there is none."""
    whole = f"{token}{1 if token == 'zero' else 2}" if token in _SIZES else token
    needed = _NEEDS.get(token if token in _NEEDS else token.rstrip("0123456789"))
    return Layout.parse(f"{whole}_{needed}" if needed else whole)


def has_token(layout: Layout, token: str) -> bool:
    """Whether a layout has what a token says; a name without number means more than its default."""
    if token in ("sp", "nosp"):
        return layout.tp > 1 and bool(layout.sp) == (token == "sp")
    if token in CP_METHODS:
        return layout.cp > 1 and layout.cp_method == token
    if token in SCHEDULES:
        return layout.pp > 1 and layout.schedule == token
    if token == "ac":
        return layout.ac != 0
    if token == "acsel":
        return layout.ac == "sel"
    name = token.rstrip("0123456789")
    value = getattr(layout, name) or 0
    if token == name:
        return bool(value > (0 if name == "zero" else 1))
    return bool(value == int(token[len(name) :]))


_LISTED = {
    "sp": "sequence_parallel",
    "schedule": "schedules",
    "ac": "recompute",
    "cp_method": "cp_methods",
    "mbs": "micro_batches",
    "rep": "replica_groups",
    "tp": "wide_tp",
}
"""Field of a layout: field of a :class:`Space` that lists what is searched."""


@dataclass(frozen=True)
class Space:
    """What to search: sizes follow from the model and the number of GPUs, the rest from what the framework can do."""

    zeros: tuple[int, ...] = (0, 1, 2, 3)
    schedules: tuple[tuple[str, int], ...] = (
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 4),
        ("zb", 1),
        ("zbv", 2),
        ("dualpipev", 2),
    )
    """With their virtual stages. GPipe is searched when it is required: it is as slow as 1F1B, and holds more."""
    recompute: tuple[int | str, ...] = (0, "sel", 2, 1)
    cp_methods: tuple[str, ...] = ("ring", "ulysses")
    sequence_parallel: tuple[bool, ...] = (True,)
    replicas: bool = True
    expert: bool = True
    micro_batches: tuple[int, ...] = tuple(2**k for k in range(7))
    fewest_cp_tokens: int = 4096
    """Tokens of a sequence that a rank keeps under context parallelism; with fewer it does not pay."""
    wide_tp: tuple[int, ...] = ()
    """Tensor-parallel sizes that span more than two fast domains."""
    replica_groups: tuple[int, ...] = ()
    """Besides groups of the size of a node under zero3."""

    def with_required(self, tokens: Sequence[str]) -> Space:
        """With what is required and left out of the space for being slow or rare."""
        space = self
        for token in tokens:
            value: object
            name, value = read_token(token) or (token, None)
            if name in ("cp", "cp_method"):
                space = replace(space, fewest_cp_tokens=1)
            if name == "schedule":
                value = value, smallest_layout(token).v
            elif name == "v" and value not in (None, 1):
                name, value = "schedule", ("interleaved", value)
            if name in _LISTED and value is not None:
                listed = getattr(space, _LISTED[name])
                more: dict[str, Any] = {_LISTED[name]: tuple(dict.fromkeys((*listed, value)))}
                space = replace(space, **more)
        return space


WHOLE_GRAMMAR = Space()
"""All of the layout string that can matter, also what this version cannot train yet."""

SPACES = {
    # What LayoutStrategy runs today; a test compares it with what the strategy refuses.
    "lightning_5d": Space(schedules=(("1f1b", 1),), cp_methods=(), replicas=False, expert=False),
    "aleph-alpha": Space((1,), (("1f1b", 1),), (0, 1), (), (True, False), replicas=False, expert=False),
    "nanotron": Space((0, 1), (("1f1b", 1),), (0, 1), (), (True, False), replicas=False, expert=False),
}


def lacks(framework: Framework, layout: Layout) -> str | None:
    """What `layout` has and the code of a published framework never had, in a sentence; None when there is nothing.

    ZeRO stages above its own and context parallelism: schedules it never ran can still be predicted for it. A framework
    without a space of its own lacks nothing, and `lightning_5d` is asked about layouts that it is still to learn.
    """
    space = SPACES.get(framework.name)
    if space is None or framework.name == "lightning_5d":
        return None
    if layout.zero > max(space.zeros):
        return f"{framework.name} has no zero{layout.zero}; allowed: up to zero{max(space.zeros)}"
    if layout.cp > 1 and not space.cp_methods:
        return f"{framework.name} has no context parallelism; leave cp{layout.cp} out"
    return None


def divisors(n: int) -> list[int]:
    return sorted({d for i in range(1, math.isqrt(n) + 1) if n % i == 0 for d in (i, n // i)})


def enumerate_layouts(
    model: ModelSpec, gpu: Gpu, num_gpus: int, seq_len: int, global_batch: int, space: Space, constraints: Constraints
) -> Iterator[Layout]:
    """Resolved layouts with a micro-batch size, each valid for the model and the batch."""
    heads = np.gcd(model.num_heads, model.num_kv_heads)
    widest = 2 * gpu.scaleup_domain_gpus
    for tp in (t for t in divisors(num_gpus) if heads % t == 0 and (t <= widest or t in space.wide_tp)):
        for cp in (
            c
            for c in divisors(num_gpus // tp)
            if c == 1 or (space.cp_methods and seq_len % (2 * c) == 0 and seq_len // c >= space.fewest_cp_tokens)
        ):
            for pp in (p for p in divisors(num_gpus // (tp * cp)) if p <= min(model.num_layers, MAX_PIPELINE)):
                dp = num_gpus // (tp * cp * pp)
                if global_batch % dp == 0:
                    for layout in _choices(model, gpu, tp, cp, pp, dp, seq_len, global_batch // dp, space):
                        if constraints.allow(layout):
                            yield layout


def _choices(
    model: ModelSpec, gpu: Gpu, tp: int, cp: int, pp: int, dp: int, seq_len: int, sequences: int, space: Space
) -> Iterator[Layout]:
    """All settings that leave the mesh alone."""
    for mbs in (b for b in space.micro_batches if sequences % b == 0):
        m = sequences // mbs
        for schedule, v in space.schedules if pp > 1 else (("1f1b", 1),):
            if pp * v > model.num_layers or (pp > 1 and schedule_problem(schedule, pp, v, m)):
                continue
            # Rounds that are not full, and V schedules that never fill, are never better.
            if (schedule in ("interleaved", "zb") and m % pp) or (schedule == "zbv" and m < 2 * pp):
                continue
            split_backward = schedule in ("zb", "zbv", "dualpipev")
            for zero in space.zeros if dp * cp > 1 else (0,):
                for ac in (a for a in space.recompute if a == "sel" or int(a) <= model.num_layers):
                    if split_backward and (ac != 0 or zero >= 2):
                        continue
                    for ep in _expert_sizes(model, dp * cp, space):
                        for rep in _replicas(gpu, tp, dp, zero, ep, space):
                            for sp in space.sequence_parallel if tp > 1 else (False,):
                                for method in space.cp_methods if cp > 1 else ("ring",):
                                    try:
                                        layout = Layout(dp, rep, zero, tp, sp, cp, method, pp, v, schedule, mbs, ep, ac)
                                    except LayoutError:
                                        continue
                                    yield layout


def _expert_sizes(model: ModelSpec, group: int, space: Space) -> Sequence[int]:
    if not (model.num_experts and space.expert):
        return (1,)
    return [e for e in divisors(model.num_experts) if group % e == 0]


def _replicas(gpu: Gpu, tp: int, dp: int, zero: int, ep: int, space: Space) -> Sequence[int]:
    """One group, and groups of the size of a node."""
    inside = gpu.scaleup_domain_gpus // tp
    required = [n for n in space.replica_groups if dp % n == 0]
    if not (space.replicas and zero == 3 and ep == 1 and 1 < inside < dp and dp % inside == 0):
        return (1, *required)
    return tuple(dict.fromkeys((1, dp // inside, *required)))


@dataclass
class Ranking:
    """Layouts found, best first."""

    cases: list[Case]
    columns: Cases
    seconds: np.ndarray
    gib: np.ndarray
    limits: np.ndarray
    order: np.ndarray
    """Indices of those that fit, by step time."""
    considered: int = 0
    rejected: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


def search(
    model: ModelSpec,
    gpu: Gpu,
    num_gpus: int,
    seq_len: int,
    global_batch: int,
    framework: Framework,
    attention: str,
    fused_norm: bool,
    constraints: Constraints | None = None,
    space: Space | None = None,
    accept: Callable[[Layout], bool] | None = None,
) -> Ranking:
    """All layouts of the space with their predicted memory and step time."""
    constraints = constraints or Constraints()
    chosen = (space or SPACES.get(framework.name, Space())).with_required(constraints.require)
    cases = [
        Case(model, layout, gpu, seq_len, global_batch, attention, fused_norm)
        for layout in enumerate_layouts(model, gpu, num_gpus, seq_len, global_batch, chosen, constraints)
        if _runs(model, layout, seq_len) and lacks(framework, layout) is None and (accept is None or accept(layout))
    ]
    if not cases:
        empty = np.zeros(0)
        return Ranking([], Cases({"tp": empty}), empty, empty, empty, np.zeros(0, dtype=int))
    columns = collect(cases, framework)
    gib = worst_gib(columns, framework)[0]
    limits = limit_gib(columns, framework)
    seconds = step_time(columns, framework).total_s
    fitting = np.flatnonzero(gib <= limits)
    # Of layouts equally fast to 0.1%, the plainer one: less sharding, then less memory.
    plain = columns.zero + columns.rep * 1e-3 + columns.chunks * 1e-2
    key = np.lexsort((gib[fitting], plain[fitting], np.round(np.log(seconds[fitting]) / 1e-3)))
    return Ranking(cases, columns, seconds, gib, limits, fitting[key], len(cases), len(cases) - len(fitting))


def _runs(model: ModelSpec, layout: Layout, seq_len: int) -> bool:
    return not layout_problems(layout, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads, seq_len=seq_len)
