"""Bytes every collective moves, over which link, and how long it takes.

Sources of the byte counts: Megatron-LM's and ZeRO's papers, ring attention (arXiv 2310.01889), Ulysses (2309.14509). Bandwidth by
number of nodes: a measured table of 8-GPU H100 nodes (`data/collective_bw_h100_nanotron.csv`), or a law fitted to published runs.
"""

from __future__ import annotations

import csv
from functools import lru_cache

import numpy as np

from lightning_5d.advisor.cases import Array, Cases
from lightning_5d.advisor.parameters import DATA, Framework

REFERENCE_NODES = 8.0
"""Nodes at which `dp_bandwidth_gb_s` is stated."""


@lru_cache(maxsize=1)
def measured_bandwidth() -> dict[str, tuple[float, ...]]:
    """Columns of the measured table: `nodes` of 8 GPUs, and GB/s of `allreduce` and `allgather` over them."""
    with (DATA / "collective_bw_h100_nanotron.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = {"nodes": "nodes_of_8_h100", "allreduce": "allreduce_gb_s", "allgather": "allgather_gb_s"}
    return {name: tuple(float(r[column]) for r in rows) for name, column in names.items()}


def table_gb_s(nodes: Array, kind: str = "allgather") -> Array:
    """Measured bandwidth, interpolated over the logarithm of the number of nodes."""
    table = measured_bandwidth()
    return np.interp(np.log2(np.maximum(nodes, 1.0)), np.log2(table["nodes"]), table[kind])


_SLOWEST = (0.0, 0.5642, 1.0294, 1.4236, 1.7660, 2.0697, 2.3437)
"""Expected maximum of 1, 2, 4, 8, 16, 32 and 64 standard normal variables."""


def waits(ranks: Array) -> Array:
    """How long a group waits for its slowest rank, relative to a group of two, when each rank is late by normal chance."""
    return np.interp(np.log2(ranks), np.arange(len(_SLOWEST)), _SLOWEST) / _SLOWEST[1]


def gather_bytes(c: Cases) -> Array:
    """What one tensor-parallel all-gather (or reduce-scatter) of a layer's hidden states moves on a rank."""
    return (c.tp - 1) / c.tp * 2 * c.tokens * c.h


def exchange_s(c: Cases, q: Framework, gathered_bytes: Array) -> Array:
    """One tensor-parallel exchange (all-reduce, or gather and scatter): twice the bytes over the group's link, plus the wait."""
    inside = q["tp_bandwidth_share"] * c.scaleup_gb_s
    across = np.minimum(table_gb_s(c.tp / c.node) * c.nic_scale * q["tp_across_nodes"], inside)
    gb_s = np.where(c.tp > c.node, across, inside / (1 - q["tp_hidden_share"]))
    return np.where(c.tp > 1, q["tp_latency_s"] * waits(c.tp) + 2 * gathered_bytes / (gb_s * 1e9), 0.0)


def head_exchange_s(c: Cases, q: Framework) -> Array:
    """Communication of the head: whole logits gathered, or one exchange of hidden states when the loss is sharded."""
    if q.logits == "gathered":
        return exchange_s(c, q, (c.tp - 1) / c.tp * c.tokens * c.vocab)
    return exchange_s(c, q, gather_bytes(c))


def link_gb_s(c: Cases, q: Framework, group: Array, stride: Array) -> Array:
    """Bandwidth per rank of a group of `group` ranks, `stride` apart: the scale-up link inside a node, else the network card."""
    return np.where(group * stride <= c.node, q["tp_bandwidth_share"] * c.scaleup_gb_s, c.nic_gb_s * 0.8)


def cp_bytes(c: Cases) -> tuple[Array, Array]:
    """Bytes a rank receives in one layer for context parallelism, forward and backward."""
    others = (c.cp - 1) / c.cp
    whole = c.tokens * c.cp
    kv = others * whole * 2 * 2 * c.kv_width / c.tp
    ulysses = others * c.tokens * 2 * (2 * c.attention_width + 2 * c.kv_width) / c.tp
    forward = np.where(c.cp_ulysses > 0, ulysses, kv)
    return np.where(c.cp > 1, forward, 0.0), np.where(c.cp > 1, np.where(c.cp_ulysses > 0, ulysses, 2 * kv), 0.0)


def cp_s(c: Cases, q: Framework, attention_forward_s: Array, attention_backward_s: Array) -> Array:
    """Exposed time of context parallelism in one layer: the ring hides behind the attention it feeds, the others do not."""
    gb_s = link_gb_s(c, q, c.cp, c.tp) * 1e9
    forward, backward = (x / gb_s for x in cp_bytes(c))
    ring = np.maximum(forward - attention_forward_s, 0.1 * forward) + np.maximum(backward - attention_backward_s, 0.1 * backward)
    return np.where(c.cp_ring > 0, ring, forward + backward)


def ep_bytes(c: Cases) -> Array:
    """Bytes of the four all-to-alls of an average layer, forward and backward."""
    return np.where(c.ep > 1, 4 * c.moe_share * c.experts_per_token * c.tokens / c.tp * c.h * 2 * (c.ep - 1) / c.ep, 0.0)


def ep_s(c: Cases, q: Framework) -> Array:
    """Time of expert parallelism in one layer."""
    return ep_bytes(c) / (link_gb_s(c, q, c.ep, c.tp) * 1e9)


def boundary_bytes(c: Cases) -> Array:
    """Hidden states of one micro-batch that cross a stage boundary on one rank."""
    return np.where(c.pp > 1, 2 * c.tokens * c.h / c.sp_tp, 0.0)


def p2p_s(c: Cases, q: Framework) -> Array:
    """Sends of one micro-batch at a rank: forward and backward, once for each of its stages."""
    network = q["pp_bandwidth_gb_s"] * c.nic_scale
    if q.rank_order == "pp_inner":
        inside = c.tp * c.cp * c.pp <= c.node
        network = np.where(inside, q["tp_bandwidth_share"] * c.scaleup_gb_s, network)
    return 2 * boundary_bytes(c) * c.chunks / (network * 1e9)


def dp_gb_s(c: Cases, q: Framework) -> Array:
    """Bandwidth of the data-parallel group, GB/s of whole (unsharded) gradients per rank."""
    span = np.maximum(c.dp * c.cp * c.tp / c.node, 1.0)
    nodes = np.sqrt(span * np.maximum(c.gpus / c.node, 1.0))
    if q.dp_law == "table":
        measured = np.where(c.zero == 0, table_gb_s(nodes, "allreduce"), table_gb_s(nodes))
        return measured / q["dp_table_scale"] * c.nic_scale
    if q.dp_law == "power":
        return q["dp_bandwidth_gb_s"] * (nodes / REFERENCE_NODES) ** -q["dp_exponent"] * c.nic_scale
    neighbours = np.clip(c.node / (c.tp * (c.pp if q.rank_order == "pp_inner" else 1.0)), 1.0, c.dp * c.cp)
    inside = q["tp_bandwidth_share"] * c.scaleup_gb_s
    network = (
        np.minimum(0.8 * c.nic_gb_s * neighbours / q["dp_table_scale"], inside) * (span / REFERENCE_NODES) ** -q["dp_exponent"]
    )
    return np.where(span > 1, np.minimum(network, inside), inside)


def dp_bytes(c: Cases, q: Framework, parameters: Array) -> tuple[Array, Array]:
    """Bytes a rank moves for `parameters` of its own, once a step and with every micro-batch."""
    share = (c.shard - 1) / c.shard
    reduce, gather = q["reduce_bytes"], 2.0
    between_replicas = np.where(c.rep > 1, 2 * reduce / c.shard * (c.rep - 1) / c.rep, 0.0)
    once = np.select(
        [c.zero == 0, c.zero == 1, c.zero == 2],
        [2 * reduce * (c.dp * c.cp - 1) / (c.dp * c.cp), (reduce + gather) * share, gather * share],
        0.0,
    )
    each = np.select([c.zero == 2, c.zero == 3], [reduce * share, (reduce + 2 * gather) * share], 0.0)
    return parameters * (once + between_replicas), parameters * each
