"""Splitting a batch into micro-batches, and the weight of each in the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_5d.layout import Layout

IGNORED_LABEL = -100


def num_rows(batch: Any) -> int:
    """Sequences in a batch: the first dimension of its ``input_ids`` or ``labels``; without these of the first tensor that has
    two, else of the first that has one. ``ValueError`` when there is none.
    """
    shapes = _shapes(batch)
    if not shapes:
        raise ValueError(f"the batch ({type(batch).__name__}) holds no tensor with a batch dimension")
    return next((s for s in shapes if len(s) > 1), shapes[0])[0]


def refuse_unclear_rows(batch: Any) -> None:
    """Raises ``ValueError`` when tensors disagree on the sequences of a batch that is to be split, and none has a known name."""
    sizes = {s[0] for s in _shapes(batch) if len(s) > 1}
    if len(sizes) > 1:
        raise ValueError(
            f"which of {sorted(sizes)} is the number of sequences of the batch? They are the first dimensions of its tensors, of "
            "which those of the batch's size are split. Give a dict that names the token ids 'input_ids' or the targets 'labels'"
        )


def _shapes(batch: Any) -> list[torch.Size]:
    """Of the tensors that tell the batch's size: those with a known name, or all."""
    if isinstance(batch, Mapping):
        for name in ("input_ids", "labels"):
            if isinstance(batch.get(name), Tensor) and batch[name].ndim:
                return [batch[name].shape]
    shapes: list[torch.Size] = []
    apply_to_collection(batch, Tensor, lambda t: shapes.append(t.shape) if t.ndim else None)
    return shapes


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Equal parts of every tensor whose first dimension is the batch's; all else goes to each part as it is."""
    if num_microbatches == 1:
        return [batch]
    rows = num_rows(batch)
    size = rows // num_microbatches
    assert size * num_microbatches == rows, (rows, num_microbatches)

    def part(index: int) -> Callable[[Tensor], Tensor]:
        return lambda t: t[index * size : (index + 1) * size] if t.ndim and t.shape[0] == rows else t

    return [apply_to_collection(batch, Tensor, part(i)) for i in range(num_microbatches)]


def microbatch_rows(rows: int, mbs: int | None) -> int:
    """Sequences per micro-batch: ``mbs``, or for a ragged batch the largest divisor of ``rows`` below it; None: all."""
    if mbs is None or mbs >= rows:
        return rows
    return next(size for size in range(mbs, 0, -1) if rows % size == 0)


def communicates_each(layout: Layout) -> bool:
    """Whether replicas talk with every micro-batch, and a batch may be several."""
    return (layout.zero or 0) >= 2 and (layout.mbs is not None or layout.pp > 1)


class SameCount:
    """Whether all replicas split their batches into as many micro-batches. Where each is communicated, others would wait forever.

    ``host_group``: the replicas, where :func:`communicates_each`; else None. Hosts wait for each other, not for their devices.
    """

    def __init__(self, host_group: dist.ProcessGroup | None) -> None:
        self.host_group = host_group
        self._work: Any = None
        self._most_and_fewest = torch.empty(0)

    def announce(self, count: int) -> None:
        if self.host_group is not None:
            self._most_and_fewest = torch.tensor([count, -count])
            self._work = dist.all_reduce(self._most_and_fewest, dist.ReduceOp.MAX, self.host_group, async_op=True)

    def check(self) -> None:
        """Raises ``ValueError`` on every replica when they differ, before the first micro-batch."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        most, fewest = self._read()
        if most != fewest:
            raise ValueError(
                f"replicas split their batches into {fewest} to {most} micro-batches; zero2 and zero3 communicate with each, so "
                "all need as many. Give every replica batches of one size (Lightning's own sampler does, or drop_last=True in "
                "yours), or use zero1"
            )

    def _read(self) -> tuple[int, int]:
        most, fewest = self._most_and_fewest.tolist()
        return most, -fewest


class LossWeights:
    """The weight of each micro-batch's mean loss in the mean loss of the whole batch over all data-parallel ranks.

    ``counts`` are the valid targets of each micro-batch ``[num_microbatches]``; the total over the replicas is summed while
    the first forward runs. ``of_replica`` instead gives each replica the same weight, as DDP does.
    """

    def __init__(self, counts: Tensor, dp_group: dist.ProcessGroup | None, of_replica: bool) -> None:
        self.counts = counts
        self.empty = counts == 0
        """``[num_microbatches]``: which have no target, and so perhaps no finite mean loss."""
        self._total = counts.sum()
        self._scale = 1.0
        self._work = None
        self._weights: Tensor | None = None
        if dp_group is not None and dp_group.size() > 1:
            if of_replica:
                self._scale = 1.0 / dp_group.size()
            else:
                self._work = dist.all_reduce(self._total, group=dp_group, async_op=True)

    def __getitem__(self, index: int) -> Tensor:
        return self.all[index]

    @property
    def all(self) -> Tensor:
        """``[num_microbatches]``; all zero when no replica has a target."""
        if self._weights is None:
            if self._work is not None:
                self._work.wait()
            self._weights = self.counts * (self._scale / self._total.clamp(min=1))
        return self._weights


def count_targets(batch: Any, num_microbatches: int, labels_shifted_by_model: bool, device: torch.device) -> Tensor:
    """Valid targets of each micro-batch, float ``[num_microbatches]``: ``labels`` that are not -100, or else sequences."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(labels, Tensor) and labels.ndim >= 1:
        if labels_shifted_by_model and labels.ndim >= 2:
            labels = labels[:, 1:]
        return (labels != IGNORED_LABEL).reshape(num_microbatches, -1).sum(1, dtype=torch.float32)
    return torch.full((num_microbatches,), num_rows(batch) / num_microbatches, dtype=torch.float32, device=device)


def has_labels(batch: Any) -> bool:
    """Whether targets are counted in ``labels``; else sequences are."""
    return isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor) and batch["labels"].ndim >= 1


def may_hold_no_target(batch: Any, labels_shifted_by_model: bool) -> bool | None:
    """Whether some sequence has no valid target, so that a micro-batch may have none; None when the host cannot tell.

    To be asked before the batch is moved to an accelerator, where looking would be a synchronisation.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.device.type != "cpu" or labels.ndim < 1:
        return None
    if labels_shifted_by_model and labels.ndim >= 2:
        labels = labels[:, 1:]
    if labels.numel() and labels.amin() > IGNORED_LABEL:
        return False
    return bool((labels == IGNORED_LABEL).reshape(labels.shape[0], -1).all(1).any())


def refuse_unseen_ignored_targets(batch: Any) -> None:
    """Raises ``ValueError`` for ignored targets that :func:`count_targets` would count: another loss of a split batch, silently.

    -100 outside of a mapping's ``labels``, and other negative integers anywhere (``ignore_index=-1``): no token is negative.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None

    def look(tensor: Tensor) -> None:
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool or tensor.device.type == "meta":
            return
        if tensor.numel() == 0 or tensor.amin() >= 0:
            return
        suspicious = tensor < 0
        if tensor is labels:
            suspicious &= tensor != IGNORED_LABEL
        if suspicious.any():
            value = int(tensor[suspicious][0])
            where = (
                "outside of a dict's 'labels'" if value == IGNORED_LABEL else "where only -100 in 'labels' is known to be ignored"
            )
            raise ValueError(
                f"the batch has ignored targets ({value}) {where}. To weight the parts of a split batch, "
                "define `num_targets(self, batch) -> int | Tensor` in the LightningModule"
            )

    apply_to_collection(batch, Tensor, look)


class _StopGradientWhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, empty: Tensor) -> Tensor:
        ctx.save_for_backward(empty)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.masked_fill(ctx.saved_tensors[0], 0.0), None


def stop_gradient_where(x: Tensor, empty: Tensor) -> Tensor:
    """``x``; its gradient is zero where ``empty`` (a boolean scalar), also if it would be NaN.

    A mean loss over no targets is 0 / 0. Its weight is zero, but zero times NaN is NaN.
    """
    return _StopGradientWhere.apply(x, empty)
