"""Seconds a rank computes, by roofline: operations over a calibrated share of the measured peak, plus memory traffic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_5d.advisor.cases import Array, Cases
from lightning_5d.advisor.parameters import Framework


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and one micro-batch on a rank; no communication, no host."""

    matmul_s: Array
    """Forward matrix products; the backward takes twice that."""
    attention_forward_s: Array
    attention_backward_s: Array
    elementwise_s: Array
    """Forward and backward; a third of it forward."""

    @property
    def forward_s(self) -> Array:
        return self.matmul_s + self.attention_forward_s + self.elementwise_s / 3

    @property
    def backward_s(self) -> Array:
        return 2 * self.matmul_s + self.attention_backward_s + 2 * self.elementwise_s / 3


def matmul_s(c: Cases, q: Framework, rows: Array, inner: Array, columns: Array) -> Array:
    """One product `[rows, inner] @ [inner, columns]` in bf16: operations at the calibrated rate plus its operands' traffic."""
    operands = 2 * (rows * inner + rows * columns + inner * columns)
    return (
        2 * rows * inner * columns / (q["matmul_efficiency"] * c.ceiling_flops) + q["operand_traffic"] * operands / c.hbm_bytes_s
    )


def layer_time(c: Cases, q: Framework) -> LayerTime:
    """Time of an average layer: in a mixture of experts the dense and the routed layers are averaged."""
    h, t, tokens = c.h, c.tp, c.tokens
    up = c.mlp_matrices - 1

    def product(rows: Array, inner: Array, columns: Array) -> Array:
        return matmul_s(c, q, rows, inner, columns)

    matmul = product(tokens, h, (c.attention_width + 2 * c.kv_width) / t) + product(tokens, c.attention_width / t, h)
    dense = product(tokens, h, up * c.ffn / t) + product(tokens, c.ffn / t, h)
    if np.any(c.moe_share > 0):
        shared = product(tokens, h, up * c.shared_ffn / t) + product(tokens, c.shared_ffn / t, h)
        # Grouped products: each local expert multiplies its share of the routed tokens of all ranks of its ep group.
        local = np.maximum(c.num_experts / c.ep, 1.0)
        split = np.where(c.ep > 1, 1.0, t)
        rows = tokens / np.where(c.ep > 1, t, 1.0) * c.experts_per_token / local
        routed = local * (product(rows, h, up * c.expert_ffn / split) + product(rows, c.expert_ffn / split, h))
        dense = (1 - c.moe_share) * dense + c.moe_share * (shared + routed)
    matmul = matmul + dense

    operations = 2 * tokens * c.s * c.attention_width / t  # forward, causal half
    flash = operations / c.peak_flops / np.where(c.flash1 > 0, q["flash1_efficiency"], q["flash2_efficiency"])
    scores = tokens * c.s * c.a / t / c.hbm_bytes_s
    traffic = np.where(c.plain_scores > 0, q["torch_score_traffic"], q["fused_score_traffic"])
    plain = 2 * operations / (q["matmul_efficiency"] * c.ceiling_flops) + scores * traffic
    elementwise = tokens * h / c.hbm_bytes_s
    elementwise = elementwise * (
        (q["norm_traffic"] + q["unfused_norm_traffic"] * c.unfused) / c.sp_tp + q["elementwise_traffic"] / t
    )
    return LayerTime(
        matmul_s=matmul,
        attention_forward_s=np.where(c.flash > 0, flash, plain),
        attention_backward_s=np.where(c.flash > 0, 2.5 * flash, 2 * plain),
        elementwise_s=elementwise,
    )


def host_s(c: Cases, q: Framework) -> Array:
    """Time Python needs to launch one layer, forward and backward: the layer can't be faster."""
    per_layer = np.where(c.tp > 1, q["host_layer_tp_s"], q["host_layer_s"])
    return per_layer + np.where((c.pp > 1) & (c.tp > 1) & (c.gpus > c.node), q["host_tp_pp_s"] * c.tp, 0.0)


def head_s(c: Cases, q: Framework) -> Array:
    """Head and loss of one micro-batch, forward and backward, without communication."""
    vocab = c.vocab / c.tp
    loss_vocab = c.vocab if q.logits == "gathered" else vocab
    return 3 * matmul_s(c, q, c.tokens, c.h, vocab) + q["head_traffic"] * c.tokens * loss_vocab / c.hbm_bytes_s
