"""Every collective of a step on one rank: what for, bytes, group, link, how often, how long.

Bytes are those that a dry run of the strategy counts, to the byte (tests/advisor/test_bytes.py). Left out are messages of a few
numbers: over dp the counts of valid targets and of micro-batches, over the world the norm of all gradients and the logged values,
over pp their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_5d.advisor.cases import Case, Cases, collect
from lightning_5d.advisor.parameters import Framework
from lightning_5d.advisor.rank_part import RankPart, ceil_div, rank_part, weight_elements
from lightning_5d.advisor.traffic import (
    boundary_bytes,
    cp_bytes,
    dp_bytes,
    dp_gb_s,
    ep_bytes,
    exchange_s,
    gather_bytes,
    link_gb_s,
    p2p_s,
)

GRADIENT_BYTES = 4.0
"""Of an element of a gradient that is summed over tp or sent between tied matrices: gradients are kept in float32."""


@dataclass(frozen=True)
class Collective:
    """One kind of collective of a pipeline rank; bytes are what its first rank sends, by the ring algorithms."""

    purpose: str
    operation: str
    axis: str
    group: int
    link: str
    """`node` or `network`."""
    calls: int
    """A step. Weights and gradients, which travel layer by layer, count as one."""
    bytes_each: float
    seconds: float
    """A step, if nothing hid it."""

    @property
    def bytes_step(self) -> float:
        return self.calls * self.bytes_each


def list_collectives(case: Case, framework: Framework, pp_rank: int = 0) -> list[Collective]:
    """The collectives of a step on one pipeline rank, largest first."""
    c = collect([case], framework)
    part = rank_part(case.model, case.layout, framework, pp_rank)
    found: list[Collective] = []
    for make in (_tensor_parallel, _context_and_experts, _pipeline, _data_parallel):
        found += make(case, c, framework, part)
    return sorted(found, key=lambda k: -k.bytes_step)


def _link(case: Case, group: int, stride: int) -> str:
    return "node" if group * stride <= case.gpu.scaleup_domain_gpus else "network"


def _tensor_parallel(case: Case, c: Cases, q: Framework, part: RankPart) -> list[Collective]:
    x, m = case.layout, case.num_microbatches
    if x.tp == 1:
        return []
    found = []

    def add(purpose: str, operation: str, calls: float, gathered: float) -> None:
        """`gathered`: bytes of an all-gather of the same tensor."""
        seconds = float(exchange_s(c, q, np.array([gathered]))[0])
        whole = operation == "all-reduce"
        each, seconds = (2 * gathered, seconds) if whole else (gathered, seconds / 2)
        if calls:
            calls = round(calls)
            found.append(Collective(purpose, operation, "tp", x.tp, _link(case, x.tp, 1), calls, each, calls * seconds))

    hidden, others = float(gather_bytes(c)[0]), (x.tp - 1) / x.tp
    layers, again = len(part.layers) * m, part.recomputed(x.ac) * m
    # Of a recomputed layer's forward only the last exchange is not run again: nothing of its result is kept.
    if x.sp:
        add("hidden states of a layer", "all-gather", (2 * q["tp_exchanges"] - 4) * layers, hidden)
        add("hidden states of a layer", "reduce-scatter", 4 * layers, hidden)
        add("hidden states of a layer, recomputed", "all-gather", 2 * again, hidden)
        add("hidden states of a layer, recomputed", "reduce-scatter", again, hidden)
    else:
        add("hidden states of a layer", "all-reduce", q["tp_exchanges"] * layers, hidden)
        add("hidden states of a layer, recomputed", "all-reduce", again, hidden)
    if part.has_embedding:
        add("embedding, forward", "all-reduce", m, hidden)
        add("embedding, backward", "all-gather", m if x.sp else 0, hidden)
    if part.has_head:
        add("hidden states of the head, forward", "all-gather", m if x.sp else 0, hidden)
        add("hidden states of the head, backward", "reduce-scatter" if x.sp else "all-reduce", m, hidden)
        columns = ceil_div(case.model.vocab_size, x.tp) * x.tp
        add("logits", "all-gather", m if q.logits == "gathered" else 0, others * 2 * float(c.tokens[0]) * columns)
    if x.sp:
        # Each rank sees the norms' gradients of its part of the sequence.
        norms = 2 * len(part.layers) + part.has_head
        elements = norms * ceil_div(case.model.hidden_size, int(c.shard[0]) if x.zero else 1)
        add("gradients of norms", "all-reduce", min(norms, 1), others * GRADIENT_BYTES * elements)
    return found


def _context_and_experts(case: Case, c: Cases, q: Framework, part: RankPart) -> list[Collective]:
    x, each_layer = case.layout, len(part.layers) * case.num_microbatches
    found = []

    def add(purpose: str, operation: str, axis: str, group: int, calls: int, each: float, gb_s: float) -> None:
        link = _link(case, group, x.tp)
        found.append(Collective(purpose, operation, axis, group, link, calls, each, calls * each / (gb_s * 1e9)))

    if x.cp > 1:
        gb_s = float(link_gb_s(c, q, c.cp, c.tp)[0])
        operation = {"ring": "send and receive", "ulysses": "all-to-all", "allgather": "all-gather"}[x.cp_method]
        forward, backward = (float(b[0]) for b in cp_bytes(c))
        add("keys and values, forward", operation, "cp", x.cp, each_layer, forward, gb_s)
        add("keys and values, backward", operation, "cp", x.cp, each_layer, backward, gb_s)
    if x.ep > 1:
        gb_s = float(link_gb_s(c, q, c.ep, c.tp)[0])
        add("tokens to experts and back", "all-to-all", "ep", x.ep, 4 * each_layer, float(ep_bytes(c)[0]) / 4, gb_s)
    return found


def _pipeline(case: Case, c: Cases, q: Framework, part: RankPart) -> list[Collective]:
    x, model = case.layout, case.model
    if x.pp == 1:
        return []
    stride = x.tp * x.cp * (x.dp or 1) if q.rank_order == "pp_outer" else x.tp * x.cp
    each, sends = float(boundary_bytes(c)[0]), part.sends * case.num_microbatches
    # p2p_s is of two sends for each of a rank's stages.
    one_s = float(p2p_s(c, q)[0]) / (2 * (x.v or 1))

    def send(purpose: str, calls: int, nbytes: float) -> Collective:
        seconds = calls * one_s * nbytes / each
        return Collective(purpose, "send", "pp", x.pp, _link(case, x.pp, stride), calls, nbytes, seconds)

    found = [send("hidden states and their gradients between stages", sends, each)]
    if model.tied and part.has_embedding != part.has_head:
        rows = ceil_div(ceil_div(model.vocab_size, x.tp), int(c.shard[0]) if x.zero else 1)
        found.append(send("gradient of the tied embedding, to its copy", 1, GRADIENT_BYTES * rows * model.hidden_size))
    return found


def _data_parallel(case: Case, c: Cases, q: Framework, part: RankPart) -> list[Collective]:
    x, m = case.layout, case.num_microbatches
    group, shard = int(c.dp[0] * c.cp[0]), int(c.shard[0])
    if group == 1:
        return []
    # Shards are equal: rows that do not divide are filled up.
    own = weight_elements(case.model, x, part, shard if x.zero else 1)
    gb_s = float(dp_gb_s(c, q)[0]) * 1e9
    link = _link(case, group, x.tp)
    share = (shard - 1) / shard
    reduce = q["reduce_bytes"]
    found = []

    def add(purpose: str, operation: str, size: int, calls: int, each: float) -> None:
        found.append(Collective(purpose, operation, "dp", size, link, calls, each, calls * each / gb_s))

    if x.zero == 0:
        add("gradients", "all-reduce", group, 1, own * 2 * reduce * (group - 1) / group)
    else:
        add("parameters", "all-gather", shard, {1: 1, 2: 1, 3: 2 * m}[x.zero], own * 2.0 * share)
        add("gradients", "reduce-scatter", shard, 1 if x.zero == 1 else m, own * reduce * share)
        if x.rep > 1:
            add("gradients between replicas", "all-reduce", x.rep, 1, own * 2 * reduce / shard * (x.rep - 1) / x.rep)
    total = sum(k.bytes_step for k in found)
    once, each = dp_bytes(c, q, np.array([own]))
    expected = float(np.asarray(once + each * m)[0])
    assert abs(total - expected) <= 1e-6 * max(expected, 1.0), (total, expected)
    return found


def as_dict(collective: Collective) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {**collective.__dict__, "bytes_step": collective.bytes_step}
