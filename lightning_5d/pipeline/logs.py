"""``self.log`` under micro-batches, stages and replicas: on every rank, once a step, with one value.

During a step the module's ``log`` only records. After it, one all-reduce over the world gives every rank the loss, the logged
values of the whole batch, and whether anyone was asked to stop; then the real ``log`` is called once, everywhere. So monitors,
loggers and ``sync_dist`` work, the latter for free.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_5d.pipeline.delayed import DelayedFlag
from lightning_5d.pipeline.microbatch import LossWeights

_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min", "amax": "max", "amin": "min"}


SYNCHRONISED: Any = object()
"""In place of a group: the value is the same on every rank already. Lightning then neither reduces it nor advises to."""


@dataclass(frozen=True)
class LogItem:
    """One logged name: what every rank must know to log it alike."""

    name: str
    reduction: str
    """Over micro-batches and replicas: "mean" (weighted like the loss), "sum", "max" or "min"."""
    metric_path: str | None
    """The module's attribute, when a torchmetrics object was logged."""
    has_value: bool
    """False for a torchmetrics object that has no value of this step."""
    has_batch_size: bool
    arguments: tuple[tuple[str, Any], ...]

    def digest(self) -> str:
        arguments = [(k, getattr(v, "__name__", v)) for k, v in self.arguments]
        return repr((self.name, self.reduction, self.metric_path, self.has_value, self.has_batch_size, arguments))


@dataclass
class _Record:
    item: LogItem
    values: dict[int, Any] = field(default_factory=dict)
    """By micro-batch; the last, when one logs a name twice."""
    batch_size: float = 0.0


class LogRecorder:
    """Stands in for ``module.log`` during a step."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.records: dict[str, _Record] = {}
        self.microbatch = 0
        self._own_log: Any = None
        self._metric_paths: dict[int, str] | None = None

    def __enter__(self) -> LogRecorder:
        self.records = {}
        self._own_log = self.module.__dict__.get("log")
        self.module.__dict__["log"] = self.log
        return self

    def __exit__(self, *exc: object) -> None:
        if self._own_log is None:
            self.module.__dict__.pop("log", None)
        else:
            self.module.__dict__["log"] = self._own_log

    @property
    def items(self) -> list[LogItem]:
        return [record.item for record in self.records.values()]

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group")
            kwargs.update(zip(names, args, strict=False))
        batch_size = kwargs.pop("batch_size", None)
        for synchronised_here in ("sync_dist", "sync_dist_group", "enable_graph"):
            kwargs.pop(synchronised_here, None)
        reduce_fx = kwargs.get("reduce_fx", "mean")
        reduction = _REDUCTIONS.get(reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", ""), "mean")
        metric_path = None
        if isinstance(value, Metric):
            metric_path = self._path_of(value, name)
            value = (
                value._forward_cache if isinstance(value._forward_cache, Tensor) and value._forward_cache.numel() == 1 else None
            )
        item = LogItem(name, reduction, metric_path, value is not None, batch_size is not None, tuple(sorted(kwargs.items())))
        record = self.records.setdefault(name, _Record(item))
        if value is not None:
            record.values[self.microbatch] = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
        if batch_size is not None:
            record.batch_size += float(batch_size)

    def _path_of(self, metric: Metric, name: str) -> str:
        if self._metric_paths is None:
            self._metric_paths = {id(m): n for n, m in self.module.named_modules() if isinstance(m, Metric)}
        if id(metric) not in self._metric_paths:
            raise ValueError(f"self.log({name!r}, metric): the metric is not an attribute of {type(self.module).__name__}")
        return self._metric_paths[id(metric)]


class LogExchange:
    """Makes loss and log records of the whole batch out of each rank's, and logs them."""

    MESSAGE = 32
    """Values in the message of every step. A fixed number, so that ranks that logged different names still meet in one message,
    and learn of it; what does not fit follows in a second one."""

    def __init__(self, module: Any, device: torch.device, contributes: bool, num_replicas: int) -> None:
        self.module, self.device = module, device
        self.contributes = contributes
        """Whether this rank's values count: it is on the last stage, and the first of its tensor-parallel group."""
        self.num_replicas = num_replicas
        self.host_pp_group: dist.ProcessGroup | None = None
        self.last_stage_rank = 0
        self._known: dict[int, list[LogItem]] = {}
        self._names_differ = DelayedFlag(device)
        self._trouble: str | None = None
        self._vector: Tensor | None = None
        self._work: Any = None
        self._slots: list[tuple[int, int | None]] = []
        self._peaks: list[tuple[int, float, Any]] = []
        self._signature = 0.0

    def share_signature(self, items: list[LogItem], is_last_stage: bool) -> list[LogItem]:
        """The last stage's log items, on every stage. Names travel only when they are new; after that, eight bytes."""
        if self.host_pp_group is None:
            return items
        key = _signature(items) if is_last_stage else 0
        message = torch.tensor([key, key not in self._known])
        dist.broadcast(message, group=self.host_pp_group, group_src=self.last_stage_rank)
        key, is_new = int(message[0]), bool(message[1])
        if is_new:
            box = [items]
            dist.broadcast_object_list(box, group=self.host_pp_group, group_src=self.last_stage_rank)
            self._known[key] = box[0]
        return self._known[key]

    def launch(
        self,
        items: list[LogItem],
        records: dict[str, _Record],
        losses: list[Tensor],
        weights: LossWeights | None,
        rows: int,
        stop: bool,
    ) -> None:
        """Starts the sum over the world of this rank's parts. On every rank at one place in the order of its collectives."""
        loss: Any = 0.0
        if self.contributes and losses:
            loss = self._part("the loss", "mean", dict(enumerate(losses)), weights)
        self._signature = float(_signature(items))
        parts = [loss, float(stop)] + ([self._signature, float(rows)] if self.contributes else [0.0, 0.0])
        self._peaks, self._slots = [], []
        for item in items:
            record = records.get(item.name) if self.contributes else None
            slot = len(parts)
            values = record.values if record is not None else {}
            part = self._part(item.name, item.reduction, values, weights) if values else None
            if item.reduction in ("max", "min") and item.has_value:
                sign = 1.0 if item.reduction == "max" else -1.0
                self._peaks.append((slot, sign, -torch.inf if part is None else part * sign))
                part = None
            parts.append(0.0 if part is None else part)
            if item.has_batch_size:
                parts.append(record.batch_size if record is not None else 0.0)
            self._slots.append((slot, slot + 1 if item.has_batch_size else None))
        if self._trouble is not None:
            parts[2] = -1.0  # no rank must stop alone: the others would wait for it
        self._vector = self._to_vector([*parts, *[0.0] * (-len(parts) % self.MESSAGE)])
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._work = dist.all_reduce(self._vector[: self.MESSAGE], async_op=True)

    def finish(self, items: list[LogItem]) -> tuple[Tensor, list[Tensor], list[Tensor | None], Tensor, Tensor]:
        """``(loss, values, batch sizes, rows, stop requests)`` of the whole batch, the same on every rank."""
        vector, self._vector = self._vector, None
        assert vector is not None
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        self._check_alike(vector[2] - self._signature * self.num_replicas, items)  # before messages that depend on the names
        if work is not None and vector.numel() > self.MESSAGE:
            dist.all_reduce(vector[self.MESSAGE :])
        if work is not None and self._peaks:
            peaks = self._to_vector([value for _, _, value in self._peaks])
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
            self._peaks = [(slot, sign, peaks[index]) for index, (slot, sign, _) in enumerate(self._peaks)]
        for slot, sign, value in self._peaks:
            vector[slot] = sign * value
        used = 4 if not self._slots else 1 + max(self._slots[-1][0], self._slots[-1][1] or 0)
        values = vector[:used].float().unbind()
        sizes = [None if size_slot is None else vector[size_slot] for _, size_slot in self._slots]
        return values[0], [values[slot] for slot, _ in self._slots], sizes, vector[3], vector[1]

    def _part(self, name: str, reduction: str, by_microbatch: dict[int, Any], weights: LossWeights | None) -> Any:
        """This rank's part of a value of the whole batch. Values of micro-batches without a target may be NaN: left out."""
        if weights is None:
            (value,) = by_microbatch.values()
            return value
        tensors = [torch.as_tensor(v, dtype=torch.float64, device=self.device).reshape(1) for v in by_microbatch.values()]
        values, chosen = tensors[0] if len(tensors) == 1 else torch.cat(tensors), list(by_microbatch)
        all_chosen = len(chosen) == len(weights.counts)
        if reduction == "mean":
            if not all_chosen:
                self._trouble = (
                    f"self.log({name!r}) was called in {len(chosen)} of a batch's {len(weights.counts)} micro-batches: "
                    "a mean over some of them has no weights. Log it in each, or with reduce_fx='sum'"
                )
                return 0.0
            return values.masked_fill(weights.empty, 0.0).mul(weights.all).sum()
        empty = weights.empty if all_chosen else weights.empty[chosen]
        ignored = values.isnan() & empty
        if reduction == "sum":
            return values.masked_fill(ignored, 0.0).sum()
        return (
            values.masked_fill(ignored, -torch.inf).max() if reduction == "max" else values.masked_fill(ignored, torch.inf).min()
        )

    def _to_vector(self, parts: list[Any]) -> Tensor:
        vector = torch.tensor([0.0 if isinstance(p, Tensor) else p for p in parts], dtype=torch.float64, device=self.device)
        for index, part in enumerate(parts):
            if isinstance(part, Tensor):
                vector[index] = part
        return vector

    def _check_alike(self, difference: Tensor, items: list[LogItem]) -> None:
        self._names_differ.push(difference.abs())
        if self._names_differ.pop():
            raise ValueError(
                self._trouble
                or f"self.log was called with different names on different ranks (here: {[i.name for i in items]}). "
                "Log the same names on every data-parallel rank and in every micro-batch, whatever its part of the batch; "
                "and give every replica as many batches, else one is in validation while another trains"
            )

    def log(self, items: list[LogItem], values: list[Tensor], sizes: list[Tensor | None], rows: Tensor) -> None:
        """The real ``module.log``, once a name."""
        for item, value, size in zip(items, values, sizes, strict=True):
            arguments = dict(item.arguments)
            if item.metric_path is not None:
                metric = self.module.get_submodule(item.metric_path)
                if item.has_value:
                    metric._forward_cache = value
                self.module.log(item.name, metric, **arguments)
            else:
                # A tensor: an int would be a host sync on an accelerator. Lightning weights epoch means by it.
                size = rows if size is None else size
                self.module.log(item.name, value, batch_size=size, sync_dist=True, sync_dist_group=SYNCHRONISED, **arguments)


def _signature(items: list[LogItem]) -> int:
    """40 bits, so that sums over up to 8192 replicas are exact in float64."""
    digest = hashlib.blake2b("\n".join(item.digest() for item in items).encode(), digest_size=5).digest()
    return int.from_bytes(digest, "little")
