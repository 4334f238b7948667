"""Memory of a rank in closed form: state by ZeRO stage, activations by what autograd saves, logits, buffers.

Sources: ZeRO, Rajbhandari et al. 2020 (arXiv 1910.02054); activations, Korthikanti et al. 2022 (2205.05198), counted anew for
Llama's gated MLP; micro-batches in flight from the schedule's own action lists. All results in bytes unless named otherwise.
"""

from __future__ import annotations

import numpy as np

from lightning_5d.advisor.cases import Array, Cases
from lightning_5d.advisor.parameters import Framework

GIB = float(2**30)
OPTIMIZER_BYTES = 12.0
"""fp32 master weight and Adam's two moments, a parameter."""
KEPT_LOGIT_BYTES = 4.0
"""Of `logit_bytes`, what cross entropy keeps until its backward pass: the logarithm of the softmax, in fp32."""
RANKS = ("first", "middle", "last")
"""Pipeline ranks that can be the worst: the first, the one after it, the last."""
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")


def layer_activation_bytes(c: Cases, q: Framework) -> Array:
    """What one layer keeps for one micro-batch on a rank when nothing is recomputed."""
    h, t = c.h, c.tp
    norms = q["norm_bytes"] * h + q["unfused_norm_bytes"] * c.unfused * h
    attention = q["attention_bytes"] / 8 * (4 * c.attention_width + 4 * c.kv_width) / t
    used = np.maximum(c.experts_per_token, 1.0)
    width = (1 - c.moe_share) * c.ffn + c.moe_share * (c.shared_ffn + used * c.expert_ffn)
    mlp = q["mlp_bytes"] * np.where(c.mlp_matrices == 3, 1.0, 0.5) * width / t
    dispatch = c.moe_share * used * 4 * h / t  # tokens sent out and their results
    scores = (1 - c.flash) * q["score_bytes"] * c.a * c.s / t
    return c.tokens * (norms / c.sp_tp + q["gathered_bytes"] * h + attention + mlp + dispatch + scores)


def selective_activation_bytes(c: Cases, q: Framework) -> Array:
    """The same when norms, activations and attention scores are computed again: input and outputs of the matrix products.

    The two products that end in a sum over tp are kept before that sum, and so whole under sequence parallelism too.
    """
    h, t = c.h, c.tp
    used = np.maximum(c.experts_per_token, 1.0)
    width = (1 - c.moe_share) * c.ffn + c.moe_share * (c.shared_ffn + used * c.expert_ffn)
    return c.tokens * (2 * h / c.sp_tp + 4 * h + (4 * c.attention_width + 4 * c.kv_width + 4 * width) / t)


def memory_parts(c: Cases, q: Framework) -> dict[str, dict[str, Array]]:
    """Bytes by part, for the first, middle and last pipeline rank: `{"first": {"parameters": ..., ...}, ...}`."""
    full = layer_activation_bytes(c, q)
    kept_input = 2 * c.tokens * c.h / c.sp_tp
    kept = c.recomputed * kept_input + (1 - c.recomputed) * np.where(c.selective > 0, selective_activation_bytes(c, q), full)
    transient = (1 - c.flash) * q["score_transient_bytes"] * c.tokens * c.a * c.s / c.tp
    working = np.where((c.recomputed > 0) | (c.selective > 0), full, 0.0) + transient
    tokens_vocab = c.tokens * c.vocab / (1.0 if q.logits == "gathered" else c.tp)
    out: dict[str, dict[str, Array]] = {}
    extra = np.where(c.pp > 1, q["extra_in_flight"], 0.0)
    received = np.where(c.pp > 1, c.m * c.chunks * kept_input, 0.0) if q.receives_ahead else 0.0
    for rank, layers, live, embeddings, head, neighbours in (
        ("first", c.layers_first, c.live_first, c.embedding_first, c.head_first, 1),
        ("middle", c.layers_middle, c.live_middle, 0.0, 0.0, 2),
        ("last", c.layers_last, c.live_last, c.embedding_last, c.head_last, 1),
    ):
        dense = layers * c.layer_parameters + embeddings * c.embedding_parameters
        experts = layers * c.layer_experts
        part = _state(c, q, dense, experts, embeddings * c.embedding_parameters)
        logits = head * q["logit_bytes"] * tokens_vocab
        one = layers * kept + head * KEPT_LOGIT_BYTES * tokens_vocab
        live, part["gradients"] = _worst_of_gpipe(c, live, one, part["gradients"])
        part["activations"] = layers * (live + extra * (layers > 0)) * kept
        # One layer's working set and the logits at work are never alive together. GPipe keeps those of the others as well.
        waiting = np.where(c.gpipe > 0, np.maximum(live - 1, 0.0), 0.0)
        part["logits"] = np.maximum(logits, working) - working + waiting * head * KEPT_LOGIT_BYTES * tokens_vocab
        part["buffers"] = part["buffers"] + working + neighbours * received + q["overhead_gib"] * GIB
        out[rank] = {k: np.broadcast_to(np.asarray(v, dtype=float), c.tp.shape) for k, v in part.items()}
    return out


def _worst_of_gpipe(c: Cases, live: Array, one: Array, gradients: Array) -> tuple[Array, Array]:
    """Live micro-batches and gradients when a rank's memory peaks.

    GPipe's first backward pass makes the gradients and frees its micro-batch, `one` in bytes. So the peak is before it, without
    gradients, or before the second, with one micro-batch less.
    """
    several = (c.gpipe > 0) & (c.m > 1)
    before_first = several & (gradients < one)
    return np.where(several & ~before_first, live - 1, live), np.where(before_first, 0.0, gradients)


def _state(c: Cases, q: Framework, dense: Array, experts: Array, root: Array) -> dict[str, Array]:
    """Parameters, gradients, optimizer state; under `buffers` what ZeRO-2 and 3 hold for a while. `root`: embedding, head."""
    state: dict[str, Array] = {}
    for name, bytes_each, from_stage in (
        ("parameters", 2.0, 3),
        ("gradients", q["gradient_bytes"], 2),
        ("optimizer", OPTIMIZER_BYTES, 1),
    ):
        sharded = c.zero >= from_stage
        if name == "gradients" and q.reduces_early:  # with one micro-batch, a layer's gradient is scattered as soon as it exists
            sharded = sharded | ((c.zero == 1) & (c.m == 1) & (c.pp == 1))
        state[name] = bytes_each * (dense / np.where(sharded, c.shard, 1.0) + experts / np.where(sharded, c.expert_shard, 1.0))
    one_layer = c.layer_parameters + c.layer_experts
    # FSDP2's last group, embedding and head, stays gathered through a step; its reduction of the last micro-batch is still held.
    reduction = np.where(c.m > 1, 4.0 * root, 0.0)
    gathered = 2.0 * root + 2.0 * one_layer
    state["buffers"] = np.where(c.zero >= 3, gathered, 0.0) + np.where(c.zero >= 2, reduction, 0.0)
    return state


def total_bytes(c: Cases, q: Framework) -> dict[str, Array]:
    """Bytes of each kind of pipeline rank."""
    return {rank: sum(parts.values(), np.zeros(len(c))) for rank, parts in memory_parts(c, q).items()}


def worst_gib(c: Cases, q: Framework) -> tuple[Array, Array]:
    """GiB of the worst rank, and which of :data:`RANKS` it is (as an index)."""
    stacked = np.stack([total_bytes(c, q)[rank] for rank in RANKS]) / GIB
    return stacked.max(axis=0), stacked.argmax(axis=0)


def limit_gib(c: Cases, q: Framework) -> Array:
    """GiB that a run of this framework may take."""
    return c.usable_gib * q["usable_share"]
