"""Pipeline schedules as lists of actions, one list a rank: the same lists torch's pipelining runs (a test compares them).

Sources: 1F1B and interleaving, Narayanan et al. 2021 (arXiv 2104.04473); zero bubble ZB-H1 and ZB-V, Qi et al. 2024
(2401.10241); DualPipeV, DeepSeek-V3 (2412.19437).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple


class Action(NamedTuple):
    """What a rank does: `F` forward, `B` whole backward, `I` its input part, `W` its weight part, `FB` a forward beside one."""

    kind: str
    stage: int
    microbatch: int
    beside: Action | None = None
    """The backward of an `FB`."""

    @property
    def parts(self) -> tuple[Action, ...]:
        return (Action("F", self.stage, self.microbatch), self.beside) if self.beside else (self,)


V_SHAPED = ("zbv", "dualpipev")


def rank_of_stage(schedule: str, num_ranks: int, stage: int) -> int:
    """Pipeline rank that holds a stage: round-robin, or down and up again for the V schedules."""
    if schedule in V_SHAPED:
        return stage if stage < num_ranks else 2 * num_ranks - 1 - stage
    return stage % num_ranks


def stages_of_rank(schedule: str, num_ranks: int, chunks: int, rank: int) -> tuple[int, ...]:
    """Stages a pipeline rank holds, in order."""
    if schedule in V_SHAPED:
        return (rank, 2 * num_ranks - 1 - rank)
    return tuple(rank + num_ranks * i for i in range(chunks))


def schedule_problem(schedule: str, num_ranks: int, chunks: int, num_microbatches: int) -> str | None:
    """Why torch's schedule refuses so many micro-batches, or None."""
    if schedule == "1f1b" and num_microbatches < num_ranks:
        return f"1f1b needs at least as many micro-batches as its {num_ranks} stages, not {num_microbatches}"
    if schedule in ("interleaved", "zb"):
        rounds = max(1, num_microbatches // num_ranks)
        if num_microbatches % rounds:
            return f"{schedule} runs {rounds} rounds, which must divide the {num_microbatches} micro-batches"
    if schedule == "dualpipev" and num_microbatches < 2 * num_ranks:
        return f"dualpipev needs at least {2 * num_ranks} micro-batches, not {num_microbatches}"
    return None


@lru_cache(maxsize=512)
def schedule_actions(schedule: str, num_ranks: int, chunks: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of every pipeline rank.

    Raises:
        ValueError: the schedule has no actions for that number of micro-batches. (1F1B has, where torch refuses.)
    """
    problem = schedule_problem(schedule, num_ranks, chunks, num_microbatches)
    if problem and schedule != "1f1b":
        raise ValueError(problem)
    make: dict[str, Callable[[int], list[Action]]] = {
        "gpipe": lambda r: _gpipe(r, num_microbatches),
        "1f1b": lambda r: _1f1b(r, num_ranks, num_microbatches),
        "interleaved": lambda r: _interleaved(r, num_ranks, chunks, num_microbatches, split=False),
        "zb": lambda r: _interleaved(r, num_ranks, chunks, num_microbatches, split=True),
        "zbv": lambda r: _zbv(r, num_ranks, num_microbatches),
        "dualpipev": lambda r: _dualpipev(r, num_ranks, num_microbatches),
    }
    return tuple(tuple(make[schedule](rank)) for rank in range(num_ranks))


def _gpipe(rank: int, m: int) -> list[Action]:
    return [Action("F", rank, i) for i in range(m)] + [Action("B", rank, i) for i in range(m)]


def _1f1b(rank: int, p: int, m: int) -> list[Action]:
    warmup = min(p - rank - 1, m)
    actions = [Action("F", rank, i) for i in range(warmup)]
    for i in range(m - warmup):
        actions += [Action("F", rank, warmup + i), Action("B", rank, i)]
    return actions + [Action("B", rank, i) for i in range(m - warmup, m)]


def _interleaved(rank: int, p: int, v: int, m: int, split: bool) -> list[Action]:
    """Interleaved 1F1B; with `split`, ZB-H1: weight passes are put off by as many backwards as the rank's number."""
    per_round = m // max(1, m // p)
    total = v * m
    warmup = min((v - 1) * per_round + (1 if split else 2) * (p - 1 - rank), total)

    forwards: defaultdict[int, int] = defaultdict(int)
    backwards: defaultdict[int, int] = defaultdict(int)
    weights: defaultdict[int, int] = defaultdict(int)
    waiting: deque[int] = deque()
    actions: list[Action] = []

    def forward(step: int) -> None:
        stage = (step // per_round) % v * p + rank
        actions.append(Action("F", stage, forwards[stage]))
        forwards[stage] += 1

    def weight() -> None:
        stage = waiting.popleft()
        actions.append(Action("W", stage, weights[stage]))
        weights[stage] += 1

    def backward(step: int) -> None:
        stage = (v - 1 - ((step - warmup) // per_round) % v) * p + rank
        actions.append(Action("I" if split else "B", stage, backwards[stage]))
        backwards[stage] += 1
        waiting.append(stage)
        if split and step - warmup >= rank:
            weight()

    for step in range(warmup):
        forward(step)
    for step in range(warmup, total):
        forward(step)
        backward(step)
    for step in range(total, total + warmup):
        backward(step)
    while split and waiting:
        weight()
    return actions


class _Counters:
    """Appends actions of one rank, numbering micro-batches by kind and stage."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.next: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.pending: deque[tuple[int, int]] = deque()

    def take(self, kind: str, stage: int) -> Action:
        key = ("F" if kind == "F" else "I" if kind in "BI" else "W", stage)
        action = Action(kind, stage, self.next[key])
        self.next[key] += 1
        if kind == "I":
            self.pending.append((stage, action.microbatch))
        return action

    def add(self, kind: str, stage: int) -> None:
        self.actions.append(self.take(kind, stage))

    def add_pending_weight(self) -> None:
        if self.pending:
            self.actions.append(Action("W", *self.pending.popleft()))

    def add_overlapped(self, forward_stage: int, backward_stage: int) -> None:
        forward, backward = self.take("F", forward_stage), self.take("B", backward_stage)
        self.actions.append(Action("FB", forward.stage, forward.microbatch, backward))


def _zbv(rank: int, p: int, m: int) -> list[Action]:
    full = max(2 * p - 1, m)  # the pattern needs that many micro-batches; surplus actions are dropped below
    down, up = rank, 2 * p - 1 - rank
    c = _Counters()
    w = {down: 0, up: 0}

    def weight(stage: int) -> None:
        c.actions.append(Action("W", stage, w[stage]))
        w[stage] += 1

    for _ in range(2 * (p - rank) - 1):
        c.add("F", down)
    for _ in range(rank):
        c.add("F", up)
        c.add("F", down)
    for _ in range(p - rank):
        c.add("F", up)
        c.add("I", up)
        weight(up)
    while c.next["F", up] < c.next["F", down] or c.next["F", down] < full:
        if c.next["F", down] < full:
            c.add("F", down)
        c.add("I", down)
        weight(down)
        c.add("F", up)
        c.add("I", up)
        weight(up)
    for _ in range(rank):
        c.add("I", down)
        c.add("I", up)
    for _ in range(p - rank):
        c.add("I", down)
        weight(down)
    for stage in (up, down):
        while w[stage] < c.next["I", stage]:
            weight(stage)
    return [a for a in c.actions if a.microbatch < m]


def _dualpipev(rank: int, p: int, m: int) -> list[Action]:
    down, up = rank, 2 * p - 1 - rank
    c = _Counters()
    for _ in range(2 * (p - rank - 1)):
        c.add("F", down)
    for _ in range(rank + 1):
        c.add("F", down)
        c.add("F", up)
    for _ in range(p - rank - 1):
        c.add("I", up)
        c.add_pending_weight()
        c.add("F", up)
    for i in range(m - 2 * p + rank + 1):
        if i == 0 and rank == p - 1:
            c.add("F", down)
            c.add("B", up)
        else:
            c.add_overlapped(down, up)
        c.add_overlapped(up, down)
    for _ in range(p - rank - 1):
        c.add("B", up)
        c.add_overlapped(up, down)
    split = False
    for i in range(rank + 1):
        split = split or (i == (rank + 1) // 2 and rank % 2 == 1)
        c.add("I" if split else "B", up)
        split = split or (i == (rank + 1) // 2 and rank % 2 == 0)
        c.add("I" if split else "B", down)
    for _ in range(p - rank - 1):
        c.add_pending_weight()
        c.add("I" if split else "B", down)
    for _ in range(rank + 1):
        c.add_pending_weight()
    return c.actions
