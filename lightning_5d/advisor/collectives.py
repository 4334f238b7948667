"""Every collective of a step on one rank: what for, bytes, group, link, how often, how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_5d.advisor.cases import Case, Cases, collect
from lightning_5d.advisor.parameters import Framework
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


@dataclass(frozen=True)
class Collective:
    """One kind of collective of the first pipeline rank; bytes are what that rank sends."""

    purpose: str
    operation: str
    axis: str
    group: int
    link: str
    """`node` or `network`."""
    calls: int
    """A step."""
    bytes_each: float
    seconds: float
    """A step, if nothing hid it."""

    @property
    def bytes_step(self) -> float:
        return self.calls * self.bytes_each


def list_collectives(case: Case, framework: Framework) -> list[Collective]:
    """The collectives of a step, largest first."""
    c = collect([case], framework)
    x, q = case.layout, framework
    layers, m = int(c.layers_first[0]), case.num_microbatches
    found: list[Collective] = []

    def add(purpose: str, operation: str, axis: str, group: int, stride: int, calls: float, each: float, seconds: float) -> None:
        link = "node" if group * stride <= case.gpu.scaleup_domain_gpus else "network"
        found.append(Collective(purpose, operation, axis, group, link, round(calls), each, seconds))

    if x.tp > 1:
        each = float(gather_bytes(c)[0])
        exchanges = q["tp_exchanges"] * layers * m
        seconds = float(exchange_s(c, q, gather_bytes(c))[0]) * exchanges
        if x.sp:
            gathers = round((2 * q["tp_exchanges"] - 4) * layers * m)
            add("hidden states of a layer", "all-gather", "tp", x.tp, 1, gathers, each, seconds * gathers / (2 * exchanges))
            scatters = 4 * layers * m
            add("hidden states of a layer", "reduce-scatter", "tp", x.tp, 1, scatters, each, seconds * scatters / (2 * exchanges))
        else:
            add("hidden states of a layer", "all-reduce", "tp", x.tp, 1, exchanges, 2 * each, seconds)
    if x.cp > 1:
        forward, backward = (float(b[0]) for b in cp_bytes(c))
        gb_s = float(link_gb_s(c, q, c.cp, c.tp)[0]) * 1e9
        operation = {"ring": "send and receive", "ulysses": "all-to-all", "allgather": "all-gather"}[x.cp_method]
        for purpose, each in (("keys and values, forward", forward), ("keys and values, backward", backward)):
            add(purpose, operation, "cp", x.cp, x.tp, layers * m, each, layers * m * each / gb_s)
    if x.ep > 1:
        each = float(ep_bytes(c)[0]) / 4
        gb_s = float(link_gb_s(c, q, c.ep, c.tp)[0]) * 1e9
        add("tokens to experts and back", "all-to-all", "ep", x.ep, x.tp, 4 * layers * m, each, 4 * layers * m * each / gb_s)
    if x.pp > 1:
        each = float(boundary_bytes(c)[0])
        sends = 2 * m * (x.v or 1)
        stride = x.tp * x.cp * (x.dp or 1) if q.rank_order == "pp_outer" else x.tp * x.cp
        add(
            "hidden states and their gradients between stages", "send", "pp", x.pp, stride, sends, each, m * float(p2p_s(c, q)[0])
        )
    found += _data_parallel(case, c, q)
    return sorted(found, key=lambda k: -k.bytes_step)


def _data_parallel(case: Case, c: Cases, q: Framework) -> list[Collective]:
    x, m = case.layout, case.num_microbatches
    group = int(c.dp[0] * c.cp[0])
    if group == 1:
        return []
    parameters = c.layers_first * (c.layer_parameters + c.layer_experts) + c.embedding_first * c.embedding_parameters
    gb_s = float(dp_gb_s(c, q)[0]) * 1e9
    link = "node" if group * x.tp <= case.gpu.scaleup_domain_gpus else "network"
    shard = int(c.shard[0])
    share = (shard - 1) / shard
    own = float(parameters[0])
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
    once, each = dp_bytes(c, q, parameters)
    expected = float(np.asarray(once + each * m)[0])
    assert abs(total - expected) <= 1e-6 * max(expected, 1.0), (total, expected)
    return found


def as_dict(collective: Collective) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {**collective.__dict__, "bytes_step": collective.bytes_step}
