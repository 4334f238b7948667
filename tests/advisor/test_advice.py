"""The search and what it says: every layout of the grammar that can matter, the fastest that fits first, constraints kept."""

import itertools

import numpy as np
import pytest

from lightning_5d.advisor import advise, explain
from lightning_5d.advisor.hardware import find_gpu
from lightning_5d.advisor.model import PRESETS
from lightning_5d.advisor.parameters import find_framework
from lightning_5d.advisor.search import SPACES, WHOLE_GRAMMAR, Constraints, divisors, enumerate_layouts, has_token, search
from lightning_5d.layout import Layout
from lightning_5d.layout_tokens import read_token
from lightning_5d.support import layout_problem
from tests.advisor.cases import PAPER, predict


def test_the_paper_best_layout_is_found() -> None:
    """Among ZeRO-1 layouts of the paper's code: 13B on 64 GPUs ran best without model parallelism, 30B on 64 with pp 4."""
    for model, gpus, best in (("llama-13b", 64, "dp64_zero1_mbs1"), ("llama-30b", 64, "dp16_pp4_zero1_mbs1")):
        advice = advise(model, **{**PAPER, "num_gpus": gpus}, framework="aleph-alpha", top=8)
        assert best in [e.layout for e in advice.best[:6]], [e.layout for e in advice.best]


def test_best_is_sorted_fits_and_estimates_agree() -> None:
    advice = advise("llama-13b", **PAPER)
    times = [e.step_time_s for e in advice.best]
    assert times == sorted(times) and len(times) == 10
    assert all(e.fits for e in advice.best) and advice.fitting <= advice.considered
    for e in advice.best[:3]:
        again = predict(e.layout)
        assert (again.step_time_s, again.memory_gib) == pytest.approx((e.step_time_s, e.memory_gib))


def test_nothing_faster_is_left_out() -> None:
    """Against all layouts of a small world, one by one through `estimate`."""
    question = {"gpu": "h100", "num_gpus": 8, "seq_len": 4096, "global_batch": 32}
    best = advise("llama3-8b", **question, top=1, all_layouts=True).best[0]
    space = WHOLE_GRAMMAR
    fastest, count = 1e9, 0
    gpu = find_gpu("h100")
    for layout in enumerate_layouts(PRESETS["llama3-8b"], gpu, 8, 4096, 32, space, Constraints()):
        try:
            e = predict(str(layout), "llama3-8b", **question)
        except ValueError:
            continue
        count += 1
        if e.fits:
            fastest = min(fastest, e.step_time_s)
    assert count > 200
    assert best.step_time_s == pytest.approx(fastest, rel=2e-3)


def test_the_space_has_every_part_of_the_grammar() -> None:
    gpu = find_gpu("h100")
    found = list(enumerate_layouts(PRESETS["mixtral-8x7b"], gpu, 16, 16384, 32, WHOLE_GRAMMAR, Constraints()))
    for name in (
        "tp",
        "cp",
        "pp",
        "v",
        "ep",
        "zero",
        "rep",
        "mbs",
        "ac",
        "acsel",
        "ring",
        "ulysses",
        "1f1b",
        "interleaved",
        "zb",
        "zbv",
    ):
        assert any(has_token(x, name) for x in found), name
    assert any(has_token(x, "dualpipev") for x in found)
    assert len(found) == len(set(map(str, found)))
    for x in found:
        assert x.world_size == 16 and Layout.parse(str(x)) == x


@pytest.mark.parametrize(
    ("require", "forbid"),
    [(("tp8",), ()), (("zero1", "pp"), ("ac",)), ((), ("zero3", "zero2")), (("1f1b",), ("v",)), (("acsel",), ())],
)
def test_constraints_are_kept(require: tuple[str, ...], forbid: tuple[str, ...]) -> None:
    advice = advise("llama-13b", **PAPER, require=require, forbid=forbid)
    assert advice.best
    for e in advice.best:
        layout = Layout.parse(e.layout)
        assert all(has_token(layout, t) for t in require) and not any(has_token(layout, t) for t in forbid), e.layout


@pytest.mark.parametrize(("token", "said"), [("tq8", "tq8"), ("zero9", "zero"), ("ac0x", "ac0x")])
def test_a_constraint_that_is_no_token_is_refused(token: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"constraint '{token}'"):
        advise("llama-13b", **PAPER, require=[token])


@pytest.mark.parametrize("token", ["nosp", "gpipe", "ac4", "mbs128", "mbs16", "tp2_nosp"])
def test_what_trains_is_searched_when_it_is_required(token: str) -> None:
    """Also what is left out of the search for being slow or rare."""
    advice = advise("llama-13b", **PAPER, require=[token])
    assert advice.best or advice.closest
    for e in (*advice.best, *advice.closest):
        assert all(has_token(Layout.parse(e.layout), part) for part in token.split("_")), e.layout


@pytest.mark.parametrize("token", ["rep2", "v2", "cp2", "zbv", "cp", "allgather", "tp2_cp2"])
def test_what_does_not_train_yet_is_told_and_searched_on_demand(token: str) -> None:
    with pytest.raises(ValueError, match=r"this version cannot train it .* --all-layouts"):
        advise("llama-13b", **PAPER, require=[token])
    advice = advise("llama-13b", **PAPER, require=[token], all_layouts=True, top=3)
    assert advice.best
    assert all(has_token(Layout.parse(e.layout), part) for e in advice.best for part in token.split("_"))


@pytest.mark.parametrize(
    ("token", "framework", "said"),
    [
        ("ep2", "lightning_5d", "constraint 'ep2': this version cannot train it"),
        ("mbs3", "lightning_5d", "micro-batches of 3 do not divide the sequences of a replica, 2048, 1024, 512, 256, 128, 64"),
        ("ac50", "lightning_5d", "recomputes none of the 40 layers"),
        ("zero3", "aleph-alpha", "aleph-alpha has no zero3"),
    ],
)
def test_a_token_that_no_layout_can_have_is_told(token: str, framework: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        advise("llama-13b", **PAPER, require=[token], framework=framework)


def test_no_nosp_leaves_layouts_without_tensor_parallelism() -> None:
    assert "tp" not in advise("llama-13b", **PAPER, forbid=["nosp"]).best[0].layout


def test_what_would_fit_if_it_could_be_trained_is_told() -> None:
    question = {"gpu": "h100", "num_gpus": 16, "seq_len": 65536, "global_batch": 16}
    why = advise("llama3-8b", **question).why
    assert "nothing fits" in why and "cannot train yet would fit, such as dp2_cp8" in why and "--all-layouts" in why
    assert advise("llama3-8b", **question, all_layouts=True).best


def test_contradicting_constraints_are_told() -> None:
    with pytest.raises(ValueError, match=r"no layout of llama-13b uses all 64 GPUs .* require tp8, no tp"):
        advise("llama-13b", **PAPER, require=["tp8"], forbid=["tp"])


def test_a_prime_batch_is_told() -> None:
    with pytest.raises(ValueError, match="dp must divide the batch"):
        advise("llama-13b", **{**PAPER, "num_gpus": 11, "global_batch": 7})


def test_a_model_that_fits_nowhere_is_an_answer() -> None:
    advice = advise("llama3-405b", gpu="h100", num_gpus=8, seq_len=8192, global_batch=16)
    assert advice.best == () and advice.fitting == 0
    assert 1 <= len(advice.closest) <= 3 and not any(e.fits for e in advice.closest)
    assert advice.closest[0].margin_gib == max(e.margin_gib for e in advice.closest)
    assert "nothing fits" in advice.why and "GPUs" in advice.why


def test_a_recommended_number_of_gpus_does_fit() -> None:
    why = advise("llama3-70b", gpu="h100", num_gpus=8, seq_len=8192, global_batch=256).why
    assert "Try 16 GPUs" in why or "Try 32 GPUs" in why, why
    gpus = 16 if "Try 16" in why else 32
    assert advise("llama3-70b", gpu="h100", num_gpus=gpus, seq_len=8192, global_batch=256).best


def test_ten_thousand_layouts_are_one_batch_of_array_operations() -> None:
    """The search costs a few passes over arrays, not a prediction a layout: the number of layouts, not the time, is asserted."""
    question = (PRESETS["llama3-70b"], find_gpu("h100"), 512, 8192, 1024, find_framework("lightning_5d"), "flash2", True)
    ranking = search(*question, space=WHOLE_GRAMMAR)
    assert len(ranking.cases) >= 10_000
    assert ranking.seconds.shape == ranking.gib.shape == (len(ranking.cases),)
    assert np.all(np.diff(np.round(np.log(ranking.seconds[ranking.order]) / 1e-3)) >= 0)


@pytest.mark.parametrize("framework", ["aleph-alpha", "nanotron"])
def test_only_what_a_framework_can_do_is_searched(framework: str) -> None:
    for e in advise("llama-13b", **PAPER, framework=framework).best:
        layout = Layout.parse(e.layout)
        assert layout.cp == 1 and layout.v == 1 and layout.zero in SPACES[framework].zeros


def test_why_names_the_winner_and_another_mesh() -> None:
    advice = advise("llama-13b", **PAPER)
    assert advice.why.startswith(advice.best[0].layout)
    place, other = next((i, e) for i, e in enumerate(advice.best, 1) if f"{e.layout} (number {i}" in advice.why)
    faster = other.step_time_s / advice.best[0].step_time_s - 1
    assert place > 1 and f"{faster:.1%} faster than {other.layout}" in advice.why


def test_why_names_the_largest_loss() -> None:
    """At 67% MFU most is lost in matrix products slower than peak, in long sequences in attention."""
    advice = advise("llama-13b", **PAPER)
    e = advice.best[0]
    # Attention is 5.7% of the operations (docs/advisor.md), the head V h of N parameters.
    model = PRESETS["llama-13b"]
    head = model.vocab_size * model.hidden_size / model.num_parameters * (1 - 0.057)
    lost = e.time_parts_s["matmul"] / e.step_time_s - e.mfu * (1 - 0.057 - head)
    said = f"the largest part is matrix products slower than the GPU's peak ({lost:.0%} of the step)"
    assert f"Of the {1 - e.mfu:.0%} that an MFU of {e.mfu:.0%} misses, {said}, then " in advice.why
    long = advise("llama3-8b", gpu="h100", num_gpus=64, seq_len=32768, global_batch=64, all_layouts=True)
    assert "the largest part is attention slower than the peak" in long.why


def test_explain_tells_what_is_too_much_and_what_would_fit() -> None:
    x = explain("llama-13b", "zero1_mbs4", **PAPER)
    assert not x.estimate.fits and "GiB too much" in x.why_not
    assert x.nearest and all(e.fits for e in x.nearest)
    assert x.timeline is None
    fine = explain("llama-13b", "tp2_pp4_zero1", **PAPER)
    assert fine.why_not == "" and fine.nearest == [] and fine.timeline is not None
    assert set(fine.memory_by_rank) == {"first", "middle", "last"}
    worst = max(sum(parts.values()) for parts in fine.memory_by_rank.values())
    assert worst == pytest.approx(fine.estimate.memory_gib)


@pytest.mark.parametrize("layout", ["tp2", "zero0", "zero1_mbs4", "tp2_nosp_mbs16", "pp8_zbv", "tp8_pp2_gpipe", "ac3_mbs8"])
def test_the_nearest_change_fewest_tokens_and_are_the_fastest_of_those(layout: str) -> None:
    x = explain("llama-13b", layout, **PAPER)
    resolved = Layout.parse(layout).resolve(64)

    def fields(text: str, mbs: int) -> dict[str, object]:
        return dict(filter(None, map(read_token, str(Layout.parse(text).replace(mbs=mbs, dp=None)).split("_"))))

    here = fields(str(resolved), x.case.micro_batch)
    others = [fields(e.layout, e.micro_batch) for e in x.nearest]
    changed = [sum(here.get(k) != other.get(k) for k in here | other) for other in others]
    assert len(x.nearest) == 3 and all(e.fits for e in x.nearest) and changed == sorted(changed)
    for a, b in itertools.pairwise(x.nearest):
        assert a.step_time_s <= 1.002 * b.step_time_s or changed[0] < changed[-1]
    assert all(layout_problem(Layout.parse(e.layout)) is None for e in x.nearest)


@pytest.mark.parametrize("layout", ["pp2_zero1", "pp4_v2_zero1", "pp8_zbv_zero1", "pp4_dualpipev_zero1", "pp4_gpipe_zero1"])
def test_the_picture_shows_every_micro_batch(layout: str) -> None:
    x = explain("llama-13b", layout, **PAPER)
    assert x.timeline is not None
    forwards = {(p.stage, p.microbatch) for e in x.timeline.events for p in e.action.parts if p.kind == "F"}
    stages = x.case.layout.num_stages
    assert forwards == set(itertools.product(range(stages), range(x.pictured)))


def test_nothing_is_near_when_nothing_fits() -> None:
    x = explain("llama-13b", "mbs1", **{**PAPER, "num_gpus": 1, "global_batch": 1})
    assert not x.estimate.fits and x.nearest == []


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(16384) == [2**i for i in range(15)]


def test_what_is_recommended_is_what_the_strategy_trains() -> None:
    """And all of it: when the strategy learns something, the search must look at it too."""
    question = (PRESETS["mixtral-8x7b"], find_gpu("h100"), 16, 16384, 32)
    searched = set(map(str, enumerate_layouts(*question, SPACES["lightning_5d"], Constraints())))
    whole = list(enumerate_layouts(*question, WHOLE_GRAMMAR, Constraints()))
    trained = {str(x) for x in whole if layout_problem(x) is None}
    assert searched == trained and len(whole) > 2 * len(trained)


def test_all_layouts_are_searched_on_demand() -> None:
    few, many = (
        advise("llama3-8b", gpu="h100", num_gpus=16, seq_len=8192, global_batch=64, all_layouts=a) for a in (False, True)
    )
    assert many.considered > 2 * few.considered
    assert many.best[0].step_time_s <= few.best[0].step_time_s
