"""Bytes of every collective against the formulas of the papers that introduced it."""

import pytest

from lightning_5d.advisor import explain
from lightning_5d.advisor.collectives import Collective
from lightning_5d.advisor.model import PRESETS
from tests.advisor.cases import PAPER

TOKENS, H, LAYERS = 2048, 5120, 40


def of(layout: str, model: str = "llama-13b", **changes) -> list[Collective]:
    return explain(model, layout, **{**PAPER, **changes}).collectives


def step_bytes(found: list[Collective], axis: str, operation: str | None = None) -> float:
    return sum(c.bytes_step for c in found if c.axis == axis and operation in (None, c.operation))


@pytest.mark.parametrize("sp", ["sp", "nosp"])
def test_tensor_parallel_moves_the_same_with_and_without_sequence_parallelism(sp: str) -> None:
    """8·s·b·h·(t−1)/t elements a layer and micro-batch (Korthikanti et al. 2022)."""
    found = [c for c in of(f"tp4_{sp}_zero1_mbs1") if c.purpose == "hidden states of a layer"]
    m = 2048 // 16
    assert step_bytes(found, "tp") == pytest.approx(2 * 8 * TOKENS * H * 3 / 4 * LAYERS * m)
    assert {c.operation for c in found} == ({"all-gather", "reduce-scatter"} if sp == "sp" else {"all-reduce"})


@pytest.mark.parametrize(
    ("zero", "a_parameter"),
    [(0, 2 * 4 * 63 / 64), (1, (4 + 2) * 63 / 64), (2, (2 + 4 * 32) * 63 / 64), (3, (4 + 4) * 32 * 63 / 64)],
)
def test_data_parallel(zero: int, a_parameter: float) -> None:
    """Reduced in fp32, gathered in bf16; ZeRO-2 reduces and ZeRO-3 also gathers twice with each of 32 micro-batches."""
    parameters = PRESETS["llama-13b"].num_parameters
    assert step_bytes(of(f"zero{zero}_mbs1"), "dp") == pytest.approx(a_parameter * parameters, rel=1e-4)


def test_calls_of_data_parallelism() -> None:
    calls = {z: {c.operation: c.calls for c in of(f"zero{z}_mbs1") if c.axis == "dp"} for z in range(4)}
    assert calls == {
        0: {"all-reduce": 1},
        1: {"all-gather": 1, "reduce-scatter": 1},
        2: {"all-gather": 1, "reduce-scatter": 32},
        3: {"all-gather": 64, "reduce-scatter": 32},
    }


def test_replicas_reduce_between_them_what_they_shard() -> None:
    whole, hybrid = of("zero1_mbs1"), of("zero1_rep8_mbs1")
    between = next(c for c in hybrid if c.operation == "all-reduce")
    assert between.group == 8
    assert between.bytes_each == pytest.approx(2 * 4 * PRESETS["llama-13b"].num_parameters / 8 * 7 / 8, rel=1e-4)
    assert {c.group for c in whole} == {64} and {c.group for c in hybrid if c.operation != "all-reduce"} == {8}


def test_pipeline_sends_each_boundary_twice() -> None:
    """Once with the hidden states and once, back, with their gradients: the ends of a pipeline have one neighbour."""
    for layout, first, middle in (("pp4_zero1", 1, 2), ("pp4_v2_zero1", 3, 4), ("pp4_tp2_zero1", 1, 2), ("pp4_zbv_zero1", 2, 4)):
        tp = 2 if "tp2" in layout else 1
        m = 2048 // (64 // 4 // tp)
        by_rank = explain("llama-13b", layout, **PAPER).collectives_by_rank
        for rank, sends in (("first", first), ("middle", middle)):
            found = next(c for c in by_rank[rank] if c.axis == "pp")
            assert (found.calls, found.bytes_each) == (sends * m, pytest.approx(2 * TOKENS * H / tp)), (layout, rank)


def test_context_parallel() -> None:
    """The ring passes keys and values (c−1)/c of the sequence forward and twice that backward; Ulysses all four, both ways."""
    common = {"num_gpus": 8, "seq_len": 32768, "global_batch": 8}
    kv = 2 * 2 * 1024 * 32768 * 3 / 4 * 32
    m = 8 // 2
    assert step_bytes(of("cp4_zero1_mbs1", "llama3-8b", **common), "cp") == pytest.approx(3 * kv * m)
    ulysses = 2 * (2 * 4096 + 2 * 1024) * 32768 / 4 * 3 / 4 * 32
    assert step_bytes(of("cp4_ulysses_zero1_mbs1", "llama3-8b", **common), "cp") == pytest.approx(2 * ulysses * m)


def test_experts_exchange_tokens_four_times_a_layer() -> None:
    found = next(c for c in of("ep8_zero1_mbs1", "mixtral-8x7b", gpu="h100") if c.axis == "ep")
    assert found.operation == "all-to-all" and found.calls == 4 * 32 * 32
    assert found.bytes_each == pytest.approx(2 * 2 * TOKENS * 4096 * 7 / 8)


def test_links() -> None:
    links = {c.axis: c.link for c in of("tp8_pp2_zero1")}
    assert links == {"tp": "node", "pp": "network", "dp": "network"}
    assert {c.link for c in of("tp8_zero1_mbs1", gpu="gb200") if c.axis == "dp"} == {"node"}


def test_one_gpu_says_nothing() -> None:
    assert of("mbs1", num_gpus=1, global_batch=1) == []
