"""An estimate as a whole: its parts add up, its trends are right, its simulation and closed forms agree, nonsense is refused."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_5d import LayoutError
from lightning_5d.advisor import Estimate, estimate
from lightning_5d.advisor.cases import collect
from lightning_5d.advisor.flops import flops_per_token
from lightning_5d.advisor.hardware import load_gpus
from lightning_5d.advisor.model import PRESETS
from lightning_5d.advisor.own_gpu import require_gpu
from lightning_5d.advisor.parameters import PARAMETERS, find_framework, load_frameworks
from lightning_5d.advisor.predict import make_case, pipeline_timeline
from lightning_5d.advisor.step import step_time
from tests.advisor.cases import PAPER, predict


def test_the_headline_run_fits_and_is_fast() -> None:
    e = predict("dp64_zero1_mbs1", framework="aleph-alpha", attention="flash2", fused_norm=True)
    assert e.fits and e.verdict in ("fits", "tight")
    assert 0.60 < e.mfu < 0.72
    assert not predict("dp64_zero1_mbs1", framework="aleph-alpha", fused_norm=False).fits


@pytest.mark.parametrize("framework", ["lightning_5d", "aleph-alpha", "nanotron"])
@pytest.mark.parametrize("layout", ["zero1_mbs1", "tp2_pp4_zero1_mbs2", "tp8_nosp_pp2_zero1_ac_mbs1", "pp4_v2_zero1_mbs1"])
def test_parts_add_up(framework: str, layout: str) -> None:
    e = predict(layout, framework=framework)
    assert sum(e.memory_parts_gib.values()) == pytest.approx(e.memory_gib)
    assert sum(e.time_parts_s.values()) == pytest.approx(e.step_time_s)
    assert min(e.time_parts_s.values()) >= -1e-9
    assert e.tokens_per_s_per_gpu * 64 * e.step_time_s == pytest.approx(2048 * 2048)
    flops = flops_per_token(Shape(), 2048)
    assert e.mfu == pytest.approx(e.tokens_per_s_per_gpu * flops / 312e12)
    assert e.margin_gib == pytest.approx(e.limit_gib - e.memory_gib)
    assert (e.micro_batch * e.num_microbatches * 64) % 2048 == 0


class Shape:
    """The paper's 13B, as the formulas of MFU take it."""

    num_parameters = PRESETS["llama-13b"].num_parameters
    num_embedding_parameters = 128000 * 5120
    num_layers, hidden_size, tied = 40, 5120, False


def test_every_framework_and_gpu_answers() -> None:
    for gpu in load_gpus():
        if gpu.peak("bf16") is None:
            continue
        for framework in load_frameworks():
            e = predict("zero1_mbs1", "llama3-8b", gpu=gpu, framework=framework)
            assert 0 < e.mfu < 1 and e.memory_gib > 0, (gpu.name, framework)


def test_parameters_lie_within_their_bounds_and_know_their_rows() -> None:
    for framework in load_frameworks().values():
        assert set(framework.values) == set(PARAMETERS)
        for name, fit in framework.fits.items():
            low, high = fit["left_out"]
            p = PARAMETERS[name]
            assert p.low < low <= high < p.high, (framework.name, name, "sits on its bound")
            assert fit["rows"] and p.meaning and p.unit


@pytest.mark.parametrize("layout", ["pp2_zero1", "pp4_zero1_mbs2", "tp2_pp8_zero1_mbs1", "pp4_gpipe_zero1"])
def test_closed_form_is_what_the_simulation_of_the_actions_gives(layout: str) -> None:
    """With the layers cut evenly; stages that are not even fill the pipeline a little differently."""
    framework = find_framework("aleph-alpha")
    case = make_case("llama-13b", layout, **PAPER, framework=framework)
    time = step_time(collect([case], framework), framework)
    closed = time.total_s[0] - sum(time.parts[k][0] for k in ("data_parallel", "optimizer", "constant"))
    simulated = pipeline_timeline(case, framework, time, 0, case.num_microbatches).makespan_s
    assert simulated == pytest.approx(closed, rel=0.004)


def test_schedules_order_as_their_papers_say() -> None:
    bubbles = [predict(f"pp8{s}_zero1_mbs1", global_batch=256).bubble for s in ("", "_v2", "_zb", "_zbv")]
    assert bubbles == sorted(bubbles, reverse=True)
    assert bubbles[0] > 2 * bubbles[2]


def test_a_long_batch_is_not_simulated_twice() -> None:
    """What repeats is left out: the idle time of a few rounds is that of many."""
    framework = find_framework("lightning_5d")
    case = make_case("llama-13b", "pp4_v2_zero1", **PAPER, framework=framework)
    time = step_time(collect([case], framework), framework)
    whole = pipeline_timeline(case, framework, time, 0, case.num_microbatches).makespan_s
    e = predict("pp4_v2_zero1")
    assert e.step_time_s - sum(e.time_parts_s[k] for k in ("data_parallel", "optimizer", "constant")) == pytest.approx(
        whole, rel=2e-3
    )


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    mbs=st.sampled_from([1, 2, 4]),
    zero=st.integers(0, 3),
    ac=st.sampled_from(["", "_ac", "_acsel"]),
)
def test_more_of_something_never_helps_where_it_cannot(tp: int, pp: int, mbs: int, zero: int, ac: str) -> None:
    layout = f"tp{tp}_pp{pp}_zero{zero}_mbs{mbs}{ac}"
    e = predict(layout)
    assert all(math.isfinite(x) for x in (e.memory_gib, e.step_time_s, e.mfu, e.bubble))
    assert 0 < e.mfu < 1 and e.memory_gib >= e.memory_rank0_gib > 0
    assert predict(layout, seq_len=4096).memory_gib > e.memory_gib
    if zero < 3:
        more = predict(layout.replace(f"zero{zero}", f"zero{zero + 1}"))
        other_rank = more.worst_stage != e.worst_stage  # one that may hold the embedding
        assert other_rank or more.memory_parts_gib["optimizer"] <= e.memory_parts_gib["optimizer"]
    if ac == "":
        slower = predict(layout + "_ac")
        if zero < 2:  # beyond, it also gives traffic more time to hide
            assert slower.step_time_s > 1.15 * e.step_time_s
        assert slower.memory_parts_gib["activations"] < e.memory_parts_gib["activations"]


def test_a_faster_gpu_and_a_faster_link_help() -> None:
    assert predict("tp2_zero1_mbs1", gpu="h100").step_time_s < predict("tp2_zero1_mbs1").step_time_s
    a800, a100 = (predict("tp8_zero1_mbs1", gpu=g).time_parts_s["tensor_parallel"] for g in ("A800-80GB-SXM", "a100-80gb"))
    assert a800 > 1.2 * a100


def test_data_parallel_traffic_grows_with_nodes() -> None:
    def exposed(gpus: int) -> float:
        e = predict("tp1_pp4_zero1_mbs1", "llama-30b", num_gpus=gpus, framework="aleph-alpha")
        return e.time_parts_s["data_parallel"]

    assert 0 < exposed(64) < exposed(256)


def test_a_layout_near_the_limit_is_tight() -> None:
    verdicts = {
        m: predict("zero1_mbs1", "llama-13b", framework="aleph-alpha", seq_len=m).verdict for m in (512, 2048, 2304, 4096)
    }
    assert verdicts[512] == "fits" and verdicts[4096] == "oom"
    e = predict("zero1_mbs1", framework="aleph-alpha", seq_len=2304)
    assert e.verdict == "tight" and e.fits and 0 <= e.margin_gib < 3


def test_own_gpu(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nbf16_tflops: 312\nmeasured_bf16_tflops: 271.2\nhbm_gib: 80\nusable_gib: 79.2\nhbm_tb_s: 2.0\n"
        "scaleup_uni_gb_s: 300\nscaleup_domain_gpus: 8\ninternode_uni_gb_s: 25\n"
    )
    mine, a100 = predict("tp2_pp2_zero1_mbs1", gpu=str(path)), predict("tp2_pp2_zero1_mbs1")
    assert mine.gpu == "mine"
    assert (mine.step_time_s, mine.memory_gib) == pytest.approx((a100.step_time_s, a100.memory_gib))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("name: x", "missing: bf16_tflops"),
        ("[1]", "does not describe a GPU"),
        ("a: [", "cannot be read"),
        (
            "{name: x, bf16_tflops: fast, hbm_gib: 1, hbm_tb_s: 1, scaleup_uni_gb_s: 1, scaleup_domain_gpus: 8, "
            "internode_uni_gb_s: 1}",
            "bf16_tflops must be a positive number",
        ),
    ],
)
def test_a_broken_gpu_file_is_named(tmp_path, content: str, said: str) -> None:
    path = tmp_path / "gpu.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=said):
        require_gpu(str(path))


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [
        ("tp3_zero1", {}, "does not divide the world size 64"),
        ("zero1_mbs3", {}, "mbs3 does not divide"),
        ("zero1", {"global_batch": 100}, "does not divide over dp64"),
        ("zero1", {"num_gpus": 0}, "num_gpus must be a whole number of at least 1"),
        ("zero1", {"seq_len": -1}, "seq_len must be"),
        ("zero1", {"gpu": "a200"}, "unknown GPU 'a200'"),
        ("zero1", {"framework": "deepspeed"}, "unknown framework 'deepspeed'; known: lightning_5d"),
        ("zero1", {"attention": "flash9"}, "unknown attention"),
        ("zro1", {}, "zero1"),
        ("ep2_zero1", {}, "has no experts"),
        ("pp64", {"num_gpus": 64}, "needs at least 64 layers"),
        ("ac50", {}, "ac50"),
    ],
)
def test_what_cannot_be_is_refused(layout: str, changes: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        predict(layout, **changes)
    if "layout" in str(caught.value):
        assert isinstance(caught.value, LayoutError)


def test_the_signature_takes_what_people_have() -> None:
    config = {
        "num_hidden_layers": 40,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "intermediate_size": 13824,
        "vocab_size": 128000,
        "tie_word_embeddings": False,
    }
    named, described = predict("zero1_mbs1"), predict("zero1_mbs1", config)
    assert isinstance(named, Estimate)
    assert described.memory_gib == named.memory_gib and described.step_time_s == named.step_time_s
    for n in (np.int64(64), 64):
        assert estimate("llama-13b", "zero1_mbs1", gpu="a100", num_gpus=n, seq_len=2048, global_batch=2048).num_gpus == 64
