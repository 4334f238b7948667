"""How a framework cuts a model's layers into pipeline stages."""

from __future__ import annotations

from functools import lru_cache

CUTS = ("uniform", "parameters", "cumulative")


@lru_cache(maxsize=4096)
def cut_layers(num_layers: int, num_stages: int, how: str, embedding_layers: float) -> tuple[int, ...]:
    """Layers of each stage; the first also holds the embedding, the last the head.

    `uniform`: as even as possible, earlier stages one more. `parameters`: equal shares of parameters, embedding and head counted
    as `embedding_layers` layers each. `cumulative`: in order, a stage closes with the layer that passes its share, only the head
    counted (nanotron).
    """
    if num_stages == 1:
        return (num_layers,)
    if how == "uniform":
        base, rest = divmod(num_layers, num_stages)
        return tuple(base + (i < rest) for i in range(num_stages))
    if how == "parameters":
        costs = [embedding_layers] + [1.0] * num_layers + [embedding_layers]
        sums = [sum(costs[: i + 1]) for i in range(len(costs))]
        bounds = [0]
        for k in range(1, num_stages):
            share = sums[-1] * k / num_stages
            bounds.append(min(range(len(sums)), key=lambda i: abs(sums[i] - share)) + 1)
        bounds.append(num_layers + 2)
        counts = [bounds[i + 1] - bounds[i] for i in range(num_stages)]
        counts[0] -= 1
        counts[-1] -= 1
        return tuple(max(c, 0) for c in counts)
    assert how == "cumulative", how
    counts = [0] * num_stages
    total, stage = num_layers + embedding_layers, 0
    for passed in range(1, num_layers + 1):
        counts[stage] += 1
        if stage < num_stages - 1 and passed > total * (stage + 1) / num_stages:
            stage += 1
    return tuple(counts)
