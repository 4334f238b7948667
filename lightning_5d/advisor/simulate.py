"""Event simulation of a pipeline schedule: when each action runs, what is lost in bubbles, what is alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_5d.advisor.schedules import Action, rank_of_stage, schedule_actions


@dataclass(frozen=True)
class Event:
    """One executed action; times in the unit of the durations given."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step of the pipeline."""

    events: tuple[Event, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    """Working time of each rank."""
    peak_in_flight: tuple[int, ...]
    """Most (micro-batch, stage) pairs of each rank that are alive at once: from forward to the end of the weight pass."""

    @property
    def bubble(self) -> float:
        """Idle share of the busiest rank's time, as a share of its work."""
        return self.makespan_s / max(self.busy_s) - 1


def simulate(
    schedule: str,
    num_ranks: int,
    chunks: int,
    num_microbatches: int,
    forward_s: Sequence[float],
    input_s: Sequence[float],
    weight_s: Sequence[float],
    transfer_s: float = 0.0,
    keep_events: bool = False,
) -> Timeline:
    """Run the schedule's action lists with given durations of each stage (`num_ranks · chunks` of each).

    A whole backward takes `input_s + weight_s`. `transfer_s` delays what crosses a rank boundary; the sender does not wait.
    """
    ranks = schedule_actions(schedule, num_ranks, chunks, num_microbatches)
    last = num_ranks * chunks - 1
    home = [rank_of_stage(schedule, num_ranks, s) for s in range(last + 1)]
    durations = {
        "F": forward_s,
        "B": [i + w for i, w in zip(input_s, weight_s, strict=True)],
        "I": input_s,
        "W": weight_s,
    }
    done: dict[tuple[str, int, int], float] = {}
    position, free, busy = [0] * num_ranks, [0.0] * num_ranks, [0.0] * num_ranks
    live, peak = [0] * num_ranks, [0] * num_ranks
    events: list[Event] = []

    def ready(action: Action, rank: int) -> float | None:
        """Earliest start, or None while something it needs has not run."""
        stage, mb = action.stage, action.microbatch
        if action.kind == "F":
            needs = [("F", stage - 1, mb)] if stage else []
        elif action.kind == "W":
            needs = [("I", stage, mb)]
        else:
            needs = [("F", stage, mb)] + ([("I", stage + 1, mb)] if stage < last else [])
        start = 0.0
        for need in needs:
            end = done.get(need)
            if end is None:
                return None
            start = max(start, end + (transfer_s if home[need[1]] != rank else 0.0))
        return start

    remaining = sum(map(len, ranks))
    waiting = True
    while remaining:
        assert waiting, "the action lists wait for each other"
        waiting = False
        for rank, actions in enumerate(ranks):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                starts = [ready(part, rank) for part in action.parts]
                if any(s is None for s in starts):
                    break
                start = now = max([free[rank], *(s for s in starts if s is not None)])
                for part in action.parts:
                    now += durations[part.kind][part.stage]
                    # An I and a B both say that the gradient of the stage's input exists.
                    done["I" if part.kind == "B" else part.kind, part.stage, part.microbatch] = now
                    if part.kind == "F":
                        live[rank] += 1
                        peak[rank] = max(peak[rank], live[rank])
                    elif part.kind != "I":
                        live[rank] -= 1
                if keep_events:
                    events.append(Event(rank, action, start, now))
                busy[rank] += now - start
                free[rank] = now
                position[rank] += 1
                remaining -= 1
                waiting = True
    return Timeline(tuple(events), max(free), tuple(busy), tuple(peak))


@lru_cache(maxsize=4096)
def unit_bubble(schedule: str, num_ranks: int, chunks: int, num_microbatches: int) -> float:
    """Idle time of the busiest rank in units of one micro-batch's forward and backward on a rank, all stages alike, F = I = W.

    GPipe and 1F1B `p−1`, interleaved `(p−1)/v`, ZB-H1 `(p−1)/3v`, ZB-V `(p−1)/6`, DualPipeV `(p−1)/3`, which the simulation
    gives too; where a schedule has too few micro-batches or rounds that are not full, the simulation itself.
    """
    p, v = num_ranks, chunks
    if p == 1:
        return 0.0
    if _regular(schedule, p, num_microbatches):
        closed = {"gpipe": p - 1, "1f1b": p - 1, "interleaved": (p - 1) / v, "zb": (p - 1) / (3 * v), "zbv": (p - 1) / 6}
        return float(closed.get(schedule, (p - 1) / 3))
    third = [1 / (3 * v)] * (p * v)
    return simulate(schedule, p, v, num_microbatches, third, third, third).makespan_s - num_microbatches


@lru_cache(maxsize=4096)
def in_flight(schedule: str, num_ranks: int, chunks: int, num_microbatches: int) -> tuple[float, ...]:
    """Peak of live micro-batches on each pipeline rank, counted in whole ranks' worth of layers (a chunk counts `1/v`).

    GPipe all; 1F1B `p−i`; interleaved `((v−1)p + 2(p−1−i) + 1)/v`; zero bubble and ZB-V `p`; DualPipeV `p + 1/2`.
    """
    p, v, m = num_ranks, chunks, num_microbatches
    if schedule == "gpipe":
        return (float(m),) * p
    if schedule == "1f1b":
        return tuple(float(min(m, p - r)) for r in range(p))
    if schedule == "interleaved":
        per_round = m // max(1, m // p)
        return tuple(min((v - 1) * per_round + 2 * (p - 1 - r) + 1, m * v) / v for r in range(p))
    if _regular(schedule, p, m):
        return (p + 0.5 if schedule == "dualpipev" else float(p),) * p
    unit = [1.0] * (p * v)
    return tuple(k / v for k in simulate(schedule, p, v, m, unit, unit, unit).peak_in_flight)


def _regular(schedule: str, num_ranks: int, num_microbatches: int) -> bool:
    """Whether the closed forms hold."""
    if schedule in ("interleaved", "zb"):
        return num_microbatches % num_ranks == 0
    return schedule != "zbv" or num_microbatches >= 2 * num_ranks - 1
