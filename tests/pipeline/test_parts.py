"""The parts of the pipeline, each on its own: layer splits, micro-batches, weights, records of logs."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from torch import nn

from lightning_5d.layout import LayoutError
from lightning_5d.pipeline.logs import LogItem, LogRecorder, _signature
from lightning_5d.pipeline.microbatch import (
    LossWeights,
    count_targets,
    may_hold_no_target,
    microbatch_rows,
    num_rows,
    refuse_unclear_rows,
    refuse_unseen_ignored_targets,
    split_batch,
    stop_gradient_where,
)
from lightning_5d.pipeline.stage import StageCut, split_layers

CPU = torch.device("cpu")


def test_layers_are_shared_out_each_once() -> None:
    for num_layers in range(1, 40):
        for num_stages in range(1, num_layers + 1):
            parts = split_layers(num_layers, num_stages)
            assert [i for part in parts for i in part] == list(range(num_layers))
            sizes = [len(part) for part in parts]
            assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert split_layers(4, 2, [3, 1]) == [range(3), range(3, 4)]


@pytest.mark.parametrize("split", [[2, 2, 0], [4], [2, 1], [5, -1], [1, 1, 2]])
def test_a_split_that_does_not_add_up_is_refused(split: list[int]) -> None:
    with pytest.raises(LayoutError, match=r"split=.*4 layers"):
        split_layers(4, 2, split)


def test_a_batch_is_split_by_its_rows_whatever_it_is_made_of() -> None:
    batch = {"x": torch.arange(12).view(6, 2), "mask": [torch.ones(6), torch.ones(3)], "scalar": torch.tensor(1.0), "name": "a"}
    parts = split_batch(batch, 3)
    assert torch.equal(torch.cat([p["x"] for p in parts]), batch["x"]) and all(p["mask"][0].shape == (2,) for p in parts)
    assert all(p["mask"][1].shape == (3,) and p["scalar"].ndim == 0 and p["name"] == "a" for p in parts)
    assert split_batch(batch, 1)[0] is batch and num_rows((torch.tensor(2), torch.ones(5, 1))) == 5
    with pytest.raises(ValueError, match="no tensor with a batch dimension"):
        num_rows({"x": torch.tensor(1.0)})


def test_the_size_of_a_batch_is_that_of_its_tokens() -> None:
    positions, ids, mask = torch.arange(32), torch.zeros(4, 32), torch.ones(32, 32)
    assert num_rows({"positions": positions, "ids": ids}) == num_rows((positions, ids)) == 4
    assert num_rows({"mask": mask, "input_ids": ids}) == num_rows({"mask": mask, "labels": ids[:, 0]}) == 4
    assert split_batch({"mask": mask, "input_ids": ids}, 4)[0]["mask"].shape == (32, 32)
    for clear in ({"mask": mask, "input_ids": ids}, {"positions": positions, "ids": ids}, [ids, ids.view(4, 8, 4)]):
        refuse_unclear_rows(clear)
    with pytest.raises(ValueError, match=r"which of \[4, 32\].*'input_ids'"):
        refuse_unclear_rows({"mask": mask, "ids": ids})


def test_rows_of_a_micro_batch() -> None:
    assert [microbatch_rows(8, m) for m in (None, 1, 2, 3, 8, 9)] == [8, 1, 2, 2, 8, 8]
    assert [microbatch_rows(r, 4) for r in (6, 7, 1, 12)] == [3, 1, 1, 4]


def test_targets_are_counted_per_micro_batch() -> None:
    labels = torch.tensor([[-100, 1, 2], [3, -100, -100], [4, 5, 6], [-100, -100, -100]])
    assert count_targets({"labels": labels}, 2, False, CPU).tolist() == [3, 3]
    assert count_targets({"labels": labels}, 4, True, CPU).tolist() == [2, 0, 2, 0]
    assert count_targets({"labels": labels.t().contiguous().t()}, 4, False, CPU).tolist() == [2, 1, 3, 0]
    assert count_targets((labels,), 2, False, CPU).tolist() == [2, 2]
    weights = LossWeights(torch.tensor([3.0, 0.0, 1.0]), None, False)
    assert weights.all.tolist() == [0.75, 0.0, 0.25] and weights.empty.tolist() == [False, True, False]
    assert LossWeights(torch.zeros(2), None, False).all.tolist() == [0.0, 0.0]


def test_ignored_targets_that_would_be_counted_are_refused() -> None:
    ids, ignoring = torch.tensor([[1, 2]]), torch.tensor([[-100, 2]])
    refuse_unseen_ignored_targets({"input_ids": ids, "labels": ignoring})
    refuse_unseen_ignored_targets(UserDict(input_ids=ids, labels=ignoring))
    refuse_unseen_ignored_targets((ids, ids, torch.tensor([-1.0]), ids < 2))
    for batch in ((ids, ignoring), {"input_ids": ids, "targets": ignoring}):
        with pytest.raises(ValueError, match=r"\(-100\) outside of a dict's 'labels'.*num_targets"):
            refuse_unseen_ignored_targets(batch)
    for batch in ((ids, ids - 2), {"input_ids": ids, "labels": ids - 2}):
        with pytest.raises(ValueError, match=r"\(-1\).*num_targets"):
            refuse_unseen_ignored_targets(batch)


def test_sequences_without_targets_are_seen_on_the_host() -> None:
    labels = torch.tensor([[1, -100], [2, 3]])
    assert may_hold_no_target({"labels": labels}, True) is True and may_hold_no_target({"labels": labels}, False) is False
    assert may_hold_no_target({"labels": torch.full((1, 2), -100)}, False) is True
    assert may_hold_no_target((labels,), False) is None and may_hold_no_target({"labels": labels.to("meta")}, False) is None


def test_a_gradient_is_stopped_even_if_it_is_not_a_number() -> None:
    x = torch.ones(3, requires_grad=True)
    for empty, expected in ((True, 0.0), (False, float("nan"))):
        x.grad = None
        (stop_gradient_where(x, torch.tensor(empty)) * float("nan")).sum().backward()
        assert torch.allclose(x.grad, torch.full((3,), expected), equal_nan=True)


def test_a_cut_passes_through_what_users_catch() -> None:
    with pytest.raises(StageCut):
        try:
            raise StageCut(torch.ones(1))
        except Exception:
            pytest.fail("caught by 'except Exception'")


def test_a_recorder_stands_in_for_log_and_leaves_no_trace() -> None:
    module = nn.Module()
    with LogRecorder(module) as recorder:
        module.log("a", torch.tensor([2.0], requires_grad=True), True, on_epoch=True, sync_dist=True)
        recorder.microbatch = 1
        module.log("a", 3, batch_size=5)
    assert "log" not in module.__dict__
    record = recorder.records["a"]
    assert {i: float(v) for i, v in record.values.items()} == {0: 2.0, 1: 3.0} and record.batch_size == 5
    assert record.item.arguments == (("on_epoch", True), ("prog_bar", True)) and record.item.reduction == "mean"


def test_signatures_differ_with_what_is_logged() -> None:
    items = [LogItem(n, r, None, True, b, ()) for n in ("a", "b") for r in ("mean", "sum") for b in (True, False)]
    assert len({_signature([i]) for i in items}) == len(items)
    assert _signature(items) != _signature(items[::-1]) and 0 <= _signature(items) < 2**40
