"""The advisor's action lists are those that torch runs, and its closed forms are what the simulation of them gives."""

import contextlib
import io

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from lightning_5d.advisor.schedules import Action, schedule_actions, schedule_problem
from lightning_5d.advisor.simulate import in_flight, simulate, unit_bubble

TORCH = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
CHUNKS = {"gpipe": (1,), "1f1b": (1,), "interleaved": (2, 3), "zb": (2, 3), "zbv": (2,), "dualpipev": (2,)}


def torch_actions(schedule: str, p: int, v: int, m: int) -> list[tuple[Action, ...]]:
    def convert(action) -> Action | None:
        if action.sub_actions:
            forward, backward = action.sub_actions
            return Action("FB", forward.stage_index, forward.microbatch_index, convert(backward))
        kind = KINDS.get(action.computation_type.name)
        return Action(kind, action.stage_index, action.microbatch_index) if kind else None

    with contextlib.redirect_stdout(io.StringIO()):
        ranks = get_schedule_ops(TORCH[schedule], p, m, num_stages_per_rank=v)
    found = [tuple(c for a in rank if a is not None and (c := convert(a))) for rank in ranks]
    if schedule == "1f1b":  # torch 2.13 lists the last rank's forwards from 1, while it runs them from 0
        found[-1] = tuple(a._replace(microbatch=a.microbatch - 1) if a.kind == "F" else a for a in found[-1])
    return found


@pytest.mark.parametrize("schedule", TORCH)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_actions_are_those_of_torch(schedule: str, p: int) -> None:
    compared = 0
    for v in CHUNKS[schedule]:
        for m in (p, p + 1, 2 * p, 2 * p + 1, 5 * p):
            if schedule_problem(schedule, p, v, m) is None:
                assert list(schedule_actions(schedule, p, v, m)) == torch_actions(schedule, p, v, m), (v, m)
                compared += 1
    assert compared >= 2


@pytest.mark.parametrize("schedule", TORCH)
def test_what_torch_refuses_is_a_problem(schedule: str) -> None:
    for v in CHUNKS[schedule]:
        for m in range(1, 8):
            if schedule == "gpipe":
                continue
            try:
                torch_actions(schedule, 3, v, m)
                refused = False
            except ValueError:
                refused = True
            assert refused == (schedule_problem(schedule, 3, v, m) is not None), (v, m)


@pytest.mark.parametrize(("schedule", "v"), [(s, v) for s in TORCH for v in CHUNKS[s]] + [("zb", 1), ("interleaved", 4)])
@pytest.mark.parametrize("p", [2, 4, 5])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_closed_forms_are_what_the_simulation_gives(schedule: str, v: int, p: int, rounds: int) -> None:
    m = rounds * p
    if schedule_problem(schedule, p, v, m):
        pytest.skip("not enough micro-batches")
    third = [1 / (3 * v)] * (p * v)
    timeline = simulate(schedule, p, v, m, third, third, third)
    assert unit_bubble(schedule, p, v, m) == pytest.approx(timeline.makespan_s - m)
    assert in_flight(schedule, p, v, m) == pytest.approx([k / v for k in timeline.peak_in_flight])


def test_known_bubbles() -> None:
    """Of 4 ranks and 8 micro-batches, as a share of the makespan: Narayanan et al. 2021, Qi et al. 2024."""
    shares = {
        s: unit_bubble(s, 4, v, 8) / (8 + unit_bubble(s, 4, v, 8)) for s, v in (("1f1b", 1), ("interleaved", 2), ("zbv", 2))
    }
    assert shares == pytest.approx({"1f1b": 3 / 11, "interleaved": 1.5 / 9.5, "zbv": 0.5 / 8.5})


def test_dependencies_are_kept() -> None:
    timeline = simulate("zbv", 3, 2, 6, [1.0] * 6, [1.2] * 6, [0.8] * 6, transfer_s=0.1, keep_events=True)
    end = {(e.action.kind, e.action.stage, e.action.microbatch): e.end_s for e in timeline.events}
    start = {(e.action.kind, e.action.stage, e.action.microbatch): e.start_s for e in timeline.events}
    home = {(e.action.stage): e.rank for e in timeline.events}
    for (kind, stage, mb), begun in start.items():
        if kind == "F" and stage:
            assert begun >= end["F", stage - 1, mb] + (0.1 if home[stage] != home[stage - 1] else 0) - 1e-9
        if kind == "I" and stage < 5:
            assert begun >= end["I", stage + 1, mb] + (0.1 if home[stage] != home[stage + 1] else 0) - 1e-9
        if kind == "W":
            assert begun >= end["I", stage, mb]
    assert len(end) == 3 * 6 * 6  # F, I and W of six micro-batches on six stages


def test_transfers_cost_more_under_1f1b_than_under_gpipe() -> None:
    """Latency shows between every forward and backward of 1F1B; a closed bubble formula misses it."""
    times = ([1.0] * 4, [1.0] * 4, [1.0] * 4)
    one, other = (simulate(s, 4, 1, 8, *times, transfer_s=0.1).makespan_s for s in ("1f1b", "gpipe"))
    assert one == pytest.approx(34.6) and other == pytest.approx(33.6)


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="dualpipev needs at least 8 micro-batches"):
        schedule_actions("dualpipev", 4, 2, 7)
    with pytest.raises(ValueError, match="rounds, which must divide"):
        schedule_actions("interleaved", 4, 2, 9)
