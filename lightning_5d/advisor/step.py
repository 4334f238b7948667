"""Time of a training step: the layer's roofline, communication, the pipeline's makespan, data parallelism, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_5d.advisor.cases import Array, Cases
from lightning_5d.advisor.compute import head_s, host_s, layer_time
from lightning_5d.advisor.parameters import Framework
from lightning_5d.advisor.traffic import cp_s, dp_bytes, dp_gb_s, ep_s, exchange_s, gather_bytes, head_exchange_s, p2p_s


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step and what they are made of. Parts are those of the slowest pipeline rank; they add up to `total_s`."""

    total_s: Array
    parts: dict[str, Array]
    layer_forward_s: Array
    """One layer and micro-batch, with its communication."""
    layer_backward_s: Array
    layer_weight_s: Array
    """The part of the backward that only computes the weights' gradients."""
    head_s: Array
    p2p_s: Array
    slowest_s: Array
    """One micro-batch on the slowest pipeline rank."""


PARTS = (
    "matmul", "attention", "elementwise", "head", "recompute", "tensor_parallel", "context_parallel", "expert_parallel", "host",
    "pipeline_transfer", "bubble", "data_parallel", "optimizer", "constant",
)  # fmt: skip


def step_time(c: Cases, q: Framework) -> StepTime:
    """Step time of each case. Closed-form makespan: `m` micro-batches on the slowest rank plus the schedule's idle time."""
    lt = layer_time(c, q)
    exchange = q["tp_exchanges"] * exchange_s(c, q, gather_bytes(c))
    cp = cp_s(c, q, lt.attention_forward_s, lt.attention_backward_s) if np.any(c.cp > 1) else np.zeros(len(c))
    ep = ep_s(c, q) if np.any(c.ep > 1) else np.zeros(len(c))
    forward = lt.forward_s + 2 * exchange / q["tp_exchanges"] + (cp / 3 + ep / 2)
    cheap = np.where(c.selective > 0, lt.elementwise_s / 3 + np.where(c.flash > 0, 0.0, lt.attention_forward_s), 0.0)
    recompute = c.recomputed * forward + cheap
    gpu = lt.forward_s + lt.backward_s + exchange + cp + ep + recompute
    # Python launches recomputed operations too.
    floor = host_s(c, q) * (1 + c.recomputed / 3)
    layer = (gpu**4 + floor**4) ** 0.25
    head_exchange = head_exchange_s(c, q)
    head = head_s(c, q) + head_exchange
    p2p = p2p_s(c, q)

    # The slowest rank: one with most layers, or the one that also holds the head.
    with_head = np.where(c.head_last > 0, c.layers_last, c.layers_first) * layer + head
    without = c.layers_slow * layer
    head_is_slow = with_head >= without
    slow = np.maximum(with_head, without) + p2p
    layers = np.where(head_is_slow, np.where(c.head_last > 0, c.layers_last, c.layers_first), c.layers_slow)
    # Idle: while the pipeline fills and drains, the slowest rank waits for all others.
    mean_rank = (c.layers * layer + head) / c.pp + p2p
    fill = np.where(c.pp > 1, c.bubble_units / np.maximum(c.pp - 1, 1) * (c.pp * mean_rank - slow), 0.0)
    fill = np.maximum(fill, 0.0)
    pipeline = c.m * slow + fill

    # A stage's parameters, embedding or head included; experts travel in their own, smaller group.
    most_layers = np.maximum(np.maximum(c.layers_first, c.layers_middle), c.layers_slow)
    parameters = most_layers * c.layer_parameters + c.embedding_parameters
    experts = most_layers * c.layer_experts
    once, each = dp_bytes(c, q, parameters + experts)
    gb_s = dp_gb_s(c, q) * 1e9
    backward_share = 2 / 3
    hidden_once = q["dp_overlap"] * backward_share * slow
    alone = c.shard * c.rep > 1
    exposed = np.maximum(once / gb_s - hidden_once, 0.0)
    exposed_each = np.maximum(each / gb_s - q["dp_overlap"] * slow, 0.0) * c.m
    dp = np.where(alone, exposed + exposed_each, 0.0)
    held = parameters / np.where(c.zero >= 1, c.shard, 1.0) + experts / np.where(c.zero >= 1, c.expert_shard, 1.0)
    optimizer = held * q["optimizer_traffic"] / c.hbm_bytes_s
    total = pipeline + dp + optimizer + q["step_s"]

    each_layer = c.m * layers
    parts = {
        "matmul": each_layer * 3 * lt.matmul_s,
        "attention": each_layer * (lt.attention_forward_s + lt.attention_backward_s),
        "elementwise": each_layer * lt.elementwise_s,
        "head": c.m * np.where(head_is_slow, head, 0.0),
        "recompute": each_layer * recompute,
        "tensor_parallel": each_layer * exchange,
        "context_parallel": each_layer * cp,
        "expert_parallel": each_layer * ep,
        "host": each_layer * (layer - gpu),
        "pipeline_transfer": c.m * p2p,
        "bubble": fill,
        "data_parallel": dp,
        "optimizer": optimizer,
        "constant": np.full(len(c), q["step_s"]),
    }
    forward_share = forward / gpu
    return StepTime(total, parts, layer * forward_share, layer * (1 - forward_share), layer * lt.matmul_s / gpu, head, p2p, slow)


def model_flops_per_token(c: Cases) -> Array:
    """`palm`: 6N + 12·L·h·s, N as the model holds it (a tied matrix once), of a mixture what one token uses."""
    moe = c.moe_share * c.layers
    routed = 3 * c.h * c.expert_ffn * c.experts_per_token
    parameters = (c.layers - moe) * c.dense_parameters + moe * (c.moe_parameters + routed)
    parameters = parameters + c.vocab * c.h * (2 - c.tied) + c.h
    return 6 * parameters + 12 * c.layers * c.attention_width * c.s


def mfu(c: Cases, seconds: Array) -> Array:
    """Model FLOPs utilisation (0 to 1) of steps that take `seconds`, by the dense bf16 peak."""
    tokens = c.s * c.b * c.m * c.dp
    return tokens * model_flops_per_token(c) / (seconds * c.gpus * c.peak_flops)
