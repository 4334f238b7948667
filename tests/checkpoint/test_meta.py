import argparse
import collections
import dataclasses
import datetime
import enum
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_5d.checkpoint.meta import from_bytes, is_plain, split_plain, to_bytes


@dataclasses.dataclass
class Config:
    width: int = 3


class Colour(enum.Enum):
    RED = 1


PLAIN: dict[str, Any] = {
    "none": None,
    "bool": True,
    "float": 1.5,
    "complex": 1j,
    "text": "x",
    "bytes": b"x",
    "nested": {"a": [1, (2, {3})], 4: {"b": "c"}},
    "ordered": collections.OrderedDict(a=1),
    "counter": collections.Counter("aab"),
    "tensor": torch.arange(3),
    "size": torch.Size([1, 2]),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "random": random.getstate(),
}
OTHER: dict[str, Any] = {
    "numpy scalar": np.float64(1.0),
    "numpy array": np.ones(2),
    "path": Path("x"),
    "namespace": argparse.Namespace(a=1),
    "dataclass": Config(),
    "enum": Colour.RED,
    "time": datetime.datetime(2024, 1, 1),
    "defaultdict": collections.defaultdict(int),
    "deque": collections.deque([1]),
    "class": Config,
    "deep": {"a": [{"b": Path("x")}]},
}


def test_plain_is_what_weights_only_reads(tmp_path: Path) -> None:
    """Checked against torch itself, so that a change there shows."""
    for name, value in {**PLAIN, **OTHER}.items():
        torch.save({"x": value}, tmp_path / "x.pt")
        try:
            torch.load(tmp_path / "x.pt", weights_only=True)
            reads = True
        except Exception:
            reads = False
        assert is_plain(value) == (name in PLAIN), name
        assert reads or not is_plain(value), name


def test_entries_survive() -> None:
    files = to_bytes({**PLAIN, "config": Config(7)})
    assert set(files) == {"meta.pt", "extra.pt"}
    found = from_bytes(files["meta.pt"], files["extra.pt"], weights_only=False, path="x")
    assert found["config"] == Config(7)
    assert found["nested"] == PLAIN["nested"] and torch.equal(found["tensor"], PLAIN["tensor"])
    assert set(found) == {*PLAIN, "config"}


def test_no_extra_file_when_all_is_plain() -> None:
    assert set(to_bytes(PLAIN)) == {"meta.pt"}


@pytest.mark.parametrize("weights_only", [None, True])
def test_an_entry_that_is_not_plain_is_left_out_with_a_warning(weights_only: bool | None) -> None:
    files = to_bytes({"hyper_parameters": {"config": Config()}, "epoch": 3})
    with pytest.warns(UserWarning, match=r"hyper_parameters.*weights_only=False"):
        found = from_bytes(files["meta.pt"], files["extra.pt"], weights_only, path="x")
    assert found == {"epoch": 3}


@pytest.mark.parametrize("entry", ["callbacks", "loops", "lr_schedulers"])
def test_a_needed_entry_that_is_not_plain_is_an_error(entry: str) -> None:
    files = to_bytes({entry: {"state": Path("x")}})
    with pytest.raises(ValueError, match=rf"{entry}.*weights_only=False"):
        from_bytes(files["meta.pt"], files["extra.pt"], None, path="x")


def test_split_is_by_entry() -> None:
    plain, extra = split_plain({"a": 1, "b": Path("x")})
    assert plain == {"a": 1} and extra == {"b": Path("x")}
