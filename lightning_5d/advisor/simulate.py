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
    """Most (micro-batch, stage) pairs of each rank whose activations are alive at once: from forward to the end of the weight pass."""

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

    Closed forms where they are exact: GPipe and 1F1B `p−1`, interleaved `(p−1)/v` when rounds are full.
    """
    if num_ranks == 1:
        return 0.0
    if schedule in ("gpipe", "1f1b"):
        return float(num_ranks - 1)
    per_round = num_microbatches // max(1, num_microbatches // num_ranks)
    if schedule == "interleaved" and per_round == num_ranks:
        return (num_ranks - 1) / chunks
    m = _few(schedule, num_ranks, num_microbatches)
    third = [1 / (3 * chunks)] * (num_ranks * chunks)
    timeline = simulate(schedule, num_ranks, chunks, m, third, third, third)
    return timeline.makespan_s - m


@lru_cache(maxsize=4096)
def in_flight(schedule: str, num_ranks: int, chunks: int, num_microbatches: int) -> tuple[float, ...]:
    """Peak of live micro-batches on each pipeline rank, counted in whole ranks' worth of layers (a chunk counts `1/v`)."""
    if schedule == "gpipe":
        return (float(num_microbatches),) * num_ranks
    if schedule == "1f1b":
        return tuple(float(min(num_microbatches, num_ranks - r)) for r in range(num_ranks))
    if schedule == "interleaved":
        per_round = num_microbatches // max(1, num_microbatches // num_ranks)
        total = num_microbatches * chunks
        return tuple(min((chunks - 1) * per_round + 2 * (num_ranks - 1 - r) + 1, total) / chunks for r in range(num_ranks))
    m = _few(schedule, num_ranks, num_microbatches)
    third = [1.0] * (num_ranks * chunks)
    return tuple(k / chunks for k in simulate(schedule, num_ranks, chunks, m, third, third, third).peak_in_flight)


def _few(schedule: str, num_ranks: int, num_microbatches: int) -> int:
    """A smaller number of micro-batches with the same warm-up, drain and peak: what lies between repeats."""
    few = 4 * num_ranks
    if num_microbatches <= few:
        return num_microbatches
    per_round = num_microbatches // max(1, num_microbatches // num_ranks)
    return few if per_round == num_ranks or schedule not in ("interleaved", "zb") else num_microbatches
