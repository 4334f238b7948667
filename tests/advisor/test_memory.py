"""Memory: closed forms that can be checked by hand, one rank of the real operations simulated, and what parallelism does."""

import pytest

from lightning_5d.advisor import explain
from lightning_5d.advisor.memory import GIB
from lightning_5d.advisor.model import PRESETS
from lightning_5d.advisor.parameters import find_framework
from tests.advisor.cases import PAPER, predict

STATE = ("parameters", "gradients", "optimizer")


def state_bytes_a_parameter(layout: str, **changes) -> float:
    e = predict(layout, **changes)
    return sum(e.memory_parts_gib[k] for k in STATE) * GIB / PRESETS["llama-13b"].num_parameters


@pytest.mark.parametrize(
    ("zero", "expected"), [(0, 2 + 4 + 12), (1, 2 + 4 + 12 / 64), (2, 2 + (4 + 12) / 64), (3, (2 + 4 + 12) / 64)]
)
def test_state_by_zero_stage(zero: int, expected: float) -> None:
    """Rajbhandari et al. 2020, with gradients accumulated in fp32."""
    assert state_bytes_a_parameter(f"zero{zero}_mbs1") == pytest.approx(expected, rel=1e-3)


def test_gradient_bytes_belong_to_the_framework() -> None:
    assert state_bytes_a_parameter("zero1_mbs1", framework="aleph-alpha") == pytest.approx(2 + 2 + 12 / 64, rel=1e-3)


def test_one_micro_batch_leaves_no_whole_gradients_under_zero1() -> None:
    one, two = (predict("zero1_mbs1", global_batch=64 * n).memory_parts_gib["gradients"] for n in (1, 2))
    assert one < 0.02 * two


def test_optimizer_state_of_a_square_weight_is_12h2_bytes() -> None:
    """fp32 master, momentum and variance are 4 bytes each; 6h² is the same in units of two bytes."""
    model = {**dict(num_hidden_layers=1, num_attention_heads=8, intermediate_size=1, vocab_size=1), "hidden_size": 512}
    e = predict("zero0_mbs1", model, num_gpus=1, global_batch=1)
    attention = 4 * 512 * 512
    assert e.memory_parts_gib["optimizer"] * GIB == pytest.approx(12 * attention, rel=0.01)


@pytest.mark.parametrize(
    ("layout", "simulated_gib"), [("tp2_zero1_mbs1", 46.67), ("tp2_zero2_mbs1", 22.05), ("tp2_zero3_mbs1", 11.04)]
)
def test_agrees_with_one_rank_of_the_real_operations(layout: str, simulated_gib: float) -> None:
    """A Llama 13B, V = 32,000, two micro-batches, on fake tensors: torch 2.13's tensor parallelism and FSDP2, fused kernels."""
    e = predict(layout, "llama2-13b", global_batch=64)
    kept = e.memory_gib - e.memory_parts_gib["buffers"] - e.memory_parts_gib["logits"]
    # What lives for a moment is counted as if all of it lived at once.
    assert simulated_gib < e.memory_gib
    assert kept == pytest.approx(simulated_gib, rel=0.02, abs=1.3)


def test_activations_of_a_layer() -> None:
    """`4h + (8h + 4kv + 8·ffn)/t` bytes a token and layer: inputs of both norms are sharded, their outputs are whole."""
    h, ffn, tokens = 5120, 13824, 2048
    for tp in (1, 2, 4):
        kept = predict(f"tp{tp}_zero1_mbs1").memory_parts_gib["activations"] * GIB / 40 / tokens
        assert kept == pytest.approx(4 * h + (4 * h + 8 * h + 8 * ffn) / tp, rel=1e-6)
    kept = predict("zero1_mbs1", framework="aleph-alpha").memory_parts_gib["activations"] * GIB / 40 / tokens
    assert kept == pytest.approx(16 * h + 8 * ffn, rel=1e-6)


def test_grouped_queries_keep_less() -> None:
    model = dict(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, intermediate_size=14336, vocab_size=128256)
    few, many = (predict("zero1_mbs1", {**model, "num_key_value_heads": kv}).memory_parts_gib["activations"] for kv in (8, 32))
    assert (many - few) * GIB == pytest.approx(32 * 2048 * 4 * 4096 * 0.75, rel=1e-6)


def test_the_schedule_decides_what_the_first_rank_holds() -> None:
    """1F1B holds min(p, m) micro-batches on rank 0, as much as no pipeline; GPipe (AFAB) holds all.

    When its gradients are there too, the first micro-batch has gone backward.
    """

    def activations(layout: str, **changes) -> float:
        return predict(layout, framework=FRAMEWORK, **changes).memory_parts_gib["activations"]

    FRAMEWORK = find_framework("lightning_5d").with_values(extra_in_flight=0.0)
    one = activations("zero1_mbs1")
    assert activations("pp4_zero1") == pytest.approx(one)
    assert activations("pp4_gpipe_zero1", global_batch=128) == pytest.approx(one / 4 * 7)
    assert activations("pp4_gpipe_zero1", global_batch=256) == pytest.approx(one / 4 * 15)
    assert activations("pp4_v2_zero1") == pytest.approx(one / 4 * (4 * 1 + 6 + 1) / 2)


def test_logits_are_gathered_or_sharded() -> None:
    sharded = [predict(f"tp{t}_zero1_mbs1", framework="nanotron").memory_parts_gib["logits"] for t in (1, 4)]
    assert sharded[0] == pytest.approx(4 * sharded[1])
    for framework in ("aleph-alpha", "lightning_5d"):
        gathered = [predict(f"tp{t}_zero1_mbs1", framework=framework).memory_parts_gib["logits"] for t in (1, 4)]
        assert gathered[0] == gathered[1] > sharded[1]


def test_gpipe_keeps_the_log_softmax_of_every_micro_batch() -> None:
    """In fp32, until the first backward pass; 1F1B's last stage goes backward at once."""

    def last(layout: str, m: int) -> dict[str, float]:
        return explain("llama-13b", layout, **{**PAPER, "global_batch": 16 * m}).memory_by_rank["last"]

    logits = 2048 * PRESETS["llama-13b"].vocab_size / GIB
    assert last("pp4_zero1", 8)["logits"] == last("pp4_zero1", 16)["logits"] == pytest.approx(12 * logits)
    # Before the second backward pass: the micro-batch at work, and all that wait.
    assert last("pp4_gpipe_zero1", 16)["logits"] == pytest.approx((12 + 14 * 4) * logits)
    # With few gradients the peak is before the first backward pass, which makes them.
    few = last("pp4_tp4_gpipe_zero2", 16)  # dp 4, so 64 micro-batches
    assert few["logits"] == pytest.approx((12 + 63 * 4) * logits) and few["gradients"] == 0


def test_a_pipeline_stage_holds_a_receive_buffer_for_every_micro_batch() -> None:
    """torch.distributed.pipelining allocates them all; those of the first and last stage come from one side, others from both."""
    few, many = (predict("pp4_zero1", global_batch=16 * m).memory_parts_gib["buffers"] for m in (8, 32))
    assert (many - few) * GIB == pytest.approx(24 * 2 * 2048 * 5120)


def test_the_last_stage_can_be_the_worst() -> None:
    e = predict("tp8_pp2_zero1_mbs2", framework="aleph-alpha")
    assert e.worst_stage == 1 and e.memory_gib > e.memory_rank0_gib


def test_recomputation_keeps_inputs_and_one_layer() -> None:
    all_layers, none = predict("zero1_mbs4_ac").memory_parts_gib, predict("zero1_mbs4").memory_parts_gib
    assert all_layers["activations"] == pytest.approx(40 * 2 * 5120 * 4 * 2048 / GIB)
    assert all_layers["activations"] < 0.2 * none["activations"]
    every_other = predict("zero1_mbs4_ac2").memory_parts_gib["activations"]
    assert every_other == pytest.approx((all_layers["activations"] + none["activations"]) / 2)
    assert all_layers["activations"] < predict("zero1_mbs4_acsel").memory_parts_gib["activations"] < none["activations"]


def test_plain_norms_and_plain_attention_keep_more() -> None:
    def total(**options) -> float:
        return predict("tp2_zero1_mbs1", framework="aleph-alpha", **options).memory_gib

    assert total(fused_norm=False) > total() + 2
    assert total(attention="torch") > total(attention="flash1") + 5
    assert total(attention="flash1") == total(attention="flash2")


def test_sequence_and_context_parallelism_shard_activations() -> None:
    with_sp, without = (predict(f"tp4_{sp}_zero1_mbs1").memory_parts_gib["activations"] for sp in ("sp", "nosp"))
    assert with_sp < without
    assert predict("cp2_zero1_mbs1").memory_parts_gib["activations"] == pytest.approx(
        predict("zero1_mbs1").memory_parts_gib["activations"] / 2
    )


def test_experts_are_sharded_over_their_own_group() -> None:
    whole, sharded = (
        predict(layout, "mixtral-8x7b", gpu="h100").memory_parts_gib["parameters"] for layout in ("zero1_mbs1", "ep8_zero1_mbs1")
    )
    experts = 32 * PRESETS["mixtral-8x7b"].expert_parameters * 2 / GIB
    assert whole - sharded == pytest.approx(experts * 7 / 8, rel=1e-6)


def test_a_tied_embedding_is_there_once_or_on_both_ends() -> None:
    whole, cut = predict("zero1_mbs1", "playbook-1b"), predict("pp2_zero1_mbs1", "playbook-1b")
    embedding = 131072 * 2048 * 2 / GIB
    assert whole.memory_parts_gib["parameters"] * GIB == pytest.approx(2 * PRESETS["playbook-1b"].num_parameters, rel=1e-4)
    assert cut.memory_parts_gib["parameters"] == pytest.approx((whole.memory_parts_gib["parameters"] + embedding) / 2, rel=1e-3)
