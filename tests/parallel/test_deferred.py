"""Values that constructors give to tensors on the meta device are given again, to one tensor at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_5d.parallel.deferred import Record
from lightning_5d.parallel.materialize import Materializer
from tests.ranks import RankFailed, run_ranks

CPU = torch.device("cpu")


class Scale(nn.Module):
    """A leaf with parameters and buffers and no ``reset_parameters``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 0.5))
        self.noise = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.register_buffer("frequencies", 1.0 / 10.0 ** (torch.arange(0, width, 2) / width))
        self.register_buffer("mask", torch.ones(width, width, dtype=torch.bool).tril())


class Net(nn.Module):
    """Sets values of its own in leaves that have others by default; copies one from another; ties two."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, width, padding_idx=2)
        self.first, self.second = Scale(width), Scale(width)
        self.narrow, self.zero = nn.Linear(width, width), nn.Linear(width, width)
        self.copied = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 9, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.narrow.weight, std=0.02)
        nn.init.zeros_(self.zero.weight)
        with torch.no_grad():
            self.copied.weight.copy_(self.narrow.weight)
            self.copied.bias[1:3] = 7.0


def built(make: Any = Net, seed: int = 0, order: int = 1) -> dict[str, Tensor]:
    """In a rank: built on the meta device, then filled leaf by leaf, in the order of the leaves or the other."""
    torch.manual_seed(seed)
    record = Record()
    with torch.device("meta"), record:
        module = make()
    materializer = Materializer(module, CPU, None, record)
    for leaf in list(module.modules())[::order]:
        materializer.fill(leaf)
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def test_what_constructors_do_is_what_the_tensors_start_from() -> None:
    (state,) = run_ranks(1, built, init=True)
    assert not any(value.is_meta or value.isnan().any() for value in state.values())
    assert torch.equal(state["first.weight"], torch.full((6,), 0.5))
    assert torch.equal(state["first.frequencies"], 1.0 / 10.0 ** (torch.arange(0, 6, 2) / 6))
    assert torch.equal(state["first.mask"], torch.ones(6, 6, dtype=torch.bool).tril())
    assert not torch.equal(state["first.noise"], state["second.noise"])
    assert 0.2 < float(state["first.noise"].detach().std()) < 0.7
    assert 0 < float(state["narrow.weight"].detach().std()) < 0.04
    assert not state["zero.weight"].any() and state["zero.bias"].any()
    assert not state["embedding.weight"][2].any() and state["embedding.weight"][1].all()
    assert torch.equal(state["copied.weight"], state["narrow.weight"])
    assert state["copied.bias"][1:3].tolist() == [7.0, 7.0] and abs(state["copied.bias"].detach()[0]) < 1
    assert torch.equal(state["head.weight"], state["embedding.weight"])
    assert state["norm.num_batches_tracked"] == 0 and torch.equal(state["norm.running_var"], torch.ones(6))


def test_the_seed_decides_and_the_order_of_filling_does_not() -> None:
    (one,), (turned,), (other,) = (run_ranks(1, built, Net, seed, order, init=True) for seed, order in ((0, 1), (0, -1), (1, 1)))
    assert all(torch.equal(one[name], turned[name]) for name in one)
    assert not torch.equal(one["first.noise"], other["first.noise"])
    assert not torch.equal(one["narrow.weight"], other["narrow.weight"])


class NeverSet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


class FromData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("make", [NeverSet, FromData])
def test_values_that_nobody_knows_are_refused(make: Any) -> None:
    with pytest.raises(RankFailed, match=rf"weight \({make.__name__}\) is on the meta device and has no initial value"):
        run_ranks(1, built, make, init=True)
