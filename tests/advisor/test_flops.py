"""Operations per token against published figures and counts by hand."""

from dataclasses import dataclass

import pytest

from lightning_5d.advisor.flops import flops_per_token, num_recomputed_layers, recomputed_flops_per_token, utilization


@dataclass(frozen=True)
class LlamaShape:
    vocab_size: int
    hidden_size: int
    num_layers: int
    ffn: int
    tied: bool = False

    @property
    def num_embedding_parameters(self):
        return self.vocab_size * self.hidden_size

    @property
    def layer_parameters(self):
        return 4 * self.hidden_size**2 + 3 * self.hidden_size * self.ffn + 2 * self.hidden_size

    @property
    def num_parameters(self):
        embeddings = self.num_embedding_parameters * (1 if self.tied else 2)
        return self.num_layers * self.layer_parameters + self.hidden_size + embeddings


PAPER_13B = LlamaShape(128_000, 5120, 40, 13_824)


def test_the_papers_13b():
    assert PAPER_13B.num_parameters == 13_998_904_320
    assert flops_per_token(PAPER_13B, 2048) == 89_026_590_720
    # Its best run: 70.57% of 312 TFLOP/s on 64 A100, 4,194,304 tokens a step.
    tokens_per_s = 0.7057 * 64 * 312e12 / flops_per_token(PAPER_13B, 2048)
    assert utilization(tokens_per_s, flops_per_token(PAPER_13B, 2048), 64, 312) == pytest.approx(0.7057)


def test_the_published_46_percent_of_7b_on_h100():
    llama2_7b = LlamaShape(32_000, 4096, 32, 11_008)
    assert llama2_7b.num_parameters == 6_738_415_616
    mfu = utilization(tokens_per_s=128 * 9600, flops_per_token=flops_per_token(llama2_7b, 4096), num_gpus=128, peak_tflops=989)
    assert mfu == pytest.approx(0.46, abs=0.006)  # published without decimals
    assert flops_per_token(llama2_7b, 4096) * 4096 == pytest.approx(192e12, rel=0.003)  # as its authors give a sequence


def matrix_products_by_hand(shape, seq_len, causal):
    """Forward operations a token: 2 a multiply-add, of every matrix product of a Llama."""
    h, ffn = shape.hidden_size, shape.ffn
    projections = 2 * (4 * h * h + 3 * h * ffn)
    attention = 2 * (2 * h * seq_len)  # scores, then the weighted sum of values
    return shape.num_layers * (projections + attention // (2 if causal else 1)) + 2 * h * shape.vocab_size


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("formula", ["palm", "nemo", "causal"])
def test_a_tiny_llama_against_a_count_by_hand(formula, tied):
    shape, seq_len = LlamaShape(vocab_size=96, hidden_size=8, num_layers=3, ffn=20, tied=tied), 16
    by_hand = 3 * matrix_products_by_hand(shape, seq_len, causal=formula == "causal")
    norms = 6 * (2 * 3 + 1) * 8  # not matrix products, but in N as published
    lookup = 6 * 96 * 8 if formula == "palm" and not tied else 0  # `palm` takes the untied input embedding for a product
    assert flops_per_token(shape, seq_len, formula) == by_hand + norms + lookup


def test_a_tied_matrix_counts_once():
    untied, tied = LlamaShape(1000, 8, 2, 16), LlamaShape(1000, 8, 2, 16, tied=True)
    assert flops_per_token(untied, 4, "palm") - flops_per_token(tied, 4, "palm") == 6 * 1000 * 8
    assert flops_per_token(untied, 4, "nemo") == flops_per_token(tied, 4, "nemo") == flops_per_token(tied, 4, "palm")


def test_an_unknown_formula_is_refused():
    with pytest.raises(ValueError, match=r"'megatron'.*palm, nemo, causal"):
        flops_per_token(PAPER_13B, 2048, "megatron")


@pytest.mark.parametrize(("ac", "layers"), [(0, 0), (1, 12), (2, 6), (5, 2), (13, 0), ("sel", 0)])
def test_recomputed_layers(ac, layers):
    assert num_recomputed_layers(ac, 12) == layers


@pytest.mark.parametrize("ac", [-1, "all", 1.5, None])
def test_wrong_recomputation_is_refused(ac):
    with pytest.raises(ValueError, match="every Nth layer"):
        num_recomputed_layers(ac, 12)


@pytest.mark.parametrize("formula", ["palm", "causal"])
@pytest.mark.parametrize("tied", [False, True])
def test_recomputing_every_layer_runs_their_forward_pass_again(formula, tied):
    shape, seq_len = LlamaShape(96, 8, 4, 20, tied=tied), 16
    attention = (4 if formula == "palm" else 2) * 8 * seq_len
    every_layer = 4 * (2 * shape.layer_parameters + attention) + 2 * 8  # the last norm is taken for a layer's
    assert recomputed_flops_per_token(shape, seq_len, 1, formula) == every_layer
    assert recomputed_flops_per_token(shape, seq_len, 2, formula) == every_layer // 2
    assert (
        recomputed_flops_per_token(shape, seq_len, "sel", formula) == recomputed_flops_per_token(shape, seq_len, 0, formula) == 0
    )


def test_full_recomputation_of_a_large_model_is_about_four_thirds():
    model, again = flops_per_token(PAPER_13B, 2048, "nemo"), recomputed_flops_per_token(PAPER_13B, 2048, 1, "nemo")
    assert 1.30 < (model + again) / model < 4 / 3
