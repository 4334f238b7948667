"""Bytes of every collective as `explain` tells them, against those that a dry run of the strategy counts: equal, to the byte."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from lightning_5d.advisor import explain
from lightning_5d.advisor.model import ModelSpec
from tests.advisor.dry_and_real import assert_same_bytes, dry
from tests.advisor.test_dryrun import llama, long_batch

LAYERS, SEQ = 4, 128


def compare(layout: str, world_size: int, rows: int, tied: bool, **changes: Any) -> None:
    spec = ModelSpec("llama", LAYERS, 256, 8, 4, 512, changes.get("vocab_size", 4000), tied=tied)
    make = functools.partial(llama, num_hidden_layers=LAYERS, tie_word_embeddings=tied, **changes)
    batch = functools.partial(long_batch, SEQ)
    runs = dry(layout, world_size, make, make_batch=batch, global_batch=rows, precision="bf16-mixed", clip=True)
    assert_same_bytes(runs, explain(spec, layout, gpu="h100", num_gpus=world_size, seq_len=SEQ, global_batch=rows))


def test_bytes_of_three_dimensions() -> None:
    compare("dp2_tp2_pp2_zero1_mbs1", 8, 8, tied=False)


# One of each kind besides; test_dryrun.py compares larger ones.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "world_size", "rows", "tied"),
    [
        ("tp2_mbs1_ac", 2, 2, True),
        ("pp3_gpipe_mbs1", 3, 4, True),
        ("dp4_zero0_mbs1", 4, 8, False),
        ("dp2_tp2_pp2_zero3_nosp_mbs1", 8, 8, True),
    ],
)
def test_bytes_of_each_kind(layout: str, world_size: int, rows: int, tied: bool) -> None:
    compare(layout, world_size, rows, tied)


@pytest.mark.slow
def test_bytes_of_a_vocabulary_that_does_not_divide() -> None:
    compare("dp2_tp2_zero1", 4, 4, tied=False, vocab_size=4001)
