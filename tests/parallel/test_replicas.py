"""zero0: one asynchronous all-reduce a group, in one order, whatever a replica's data uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_5d.parallel.replicas import Replicas
from tests.ranks import RankFailed, run_ranks


class Branches(nn.Module):
    """Two layers behind each other; the second has a branch that a batch may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.ModuleDict({"always": nn.Linear(3, 3), "rarely": nn.Linear(3, 3)})])
        self.head, self.never = nn.Linear(3, 1), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, rarely: bool) -> torch.Tensor:
        x = self.layers[0](x)
        y = self.layers[1]["always"](x)
        return self.head(y + self.layers[1]["rarely"](x) if rarely else y).sum()


def steps(uses: list[list[bool]], min_group_bytes: int = 0) -> list[dict[str, Any]]:
    """``uses[step][rank]``: whether the branch is used. Gradients after each step, and the collectives of the last."""
    torch.manual_seed(0)
    model, calls = Branches(), []
    replicas = Replicas(dist.group.WORLD, min_group_bytes)
    for layer in model.layers:
        replicas.wrap_layer(layer)
    replicas.wrap_root(model)
    original, found = dist.all_reduce, []
    for step in uses:
        calls.clear()
        for p in model.parameters():
            p.grad = None
        for half in range(2):  # two micro-batches
            replicas.before_first_backward()
            loss = model(torch.full((2, 3), 1.0 + dist.get_rank() + half), step[dist.get_rank()])
            if half == 1:
                replicas.before_last_backward()
                dist.all_reduce = lambda t, *a, **k: (calls.append(t.numel()), original(t, *a, **k))[1]
            loss.backward()
        replicas.launch_rest()
        replicas.finish()
        dist.all_reduce = original
        found.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()} | {"calls": list(calls)}
        )
    return found


def alone(rank: int, uses: list[bool]) -> dict[str, torch.Tensor | None]:
    torch.manual_seed(0)
    model = Branches()
    for half in range(2):
        model(torch.full((2, 3), 1.0 + rank + half), uses[rank]).backward()
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("min_group_bytes", "messages"),
    [(0, [24, 12, 4]), (4 * 30, [36, 4]), (1 << 20, [40])],  # the last layer first, the rest last
)
def test_gradients_are_summed_group_by_group_and_what_no_replica_uses_has_none(min_group_bytes: int, messages: list[int]) -> None:
    uses = [[True, False], [False, True], [True, True]]
    ranks = run_ranks(2, steps, uses, min_group_bytes, init=True)
    for number, step in enumerate(uses):
        parts = [run_ranks(1, alone, rank, step)[0] for rank in range(2)]
        for rank in ranks:
            for name, gradient in rank[number].items():
                if name == "calls":
                    continue
                given = [p[name] for p in parts if p[name] is not None]
                assert (gradient is None) == name.startswith("never"), name
                if given:
                    torch.testing.assert_close(gradient, torch.stack(given).sum(0))
    assert ranks[0][2]["calls"] == messages


def test_a_parameter_that_comes_late_is_an_error() -> None:
    with pytest.raises(RankFailed, match="get their first gradient after the first step"):
        run_ranks(2, steps, [[False, False], [True, True]], init=True)
