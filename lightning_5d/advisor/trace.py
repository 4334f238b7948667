"""Watches one rank's operations on fake tensors: memory alive, by kind and part of the step; collectives; operations."""

from __future__ import annotations

import contextlib
import heapq
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_5d.advisor.torch_private import READ_ON_HOST, flop_counter, group_of, in_backward, storage_key, watch_resizes

OPERATIONS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
KINDS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "temporary")
"""What memory is for: `buffers` hold messages of data parallelism and of stages, `temporary` what a backward pass works on."""
SET_UP = ("set-up of the step",)
"""The region before the first micro-batch."""
LARGEST = 8
ANSWERED = ("torchmetrics", "lightning", "lightning_5d", "transformers")
"""Packages whose looks at a value are answered with no, or one: they check what they were given."""


class ReadsValues(ValueError):
    """The user's step asks for a value on the host."""


@dataclass
class Storage:
    """Memory of one tensor and its views."""

    nbytes: int
    operation: str
    shape: tuple[int, ...]
    dtype: str
    backward: bool
    """Made while a backward pass ran."""
    kind: str

    def describe(self) -> tuple[float, str]:
        """GiB, and what it is."""
        when = "backward" if self.backward else "forward"
        text = f"{self.kind}: {self.operation} {list(self.shape)} {self.dtype} ({when})"
        return self.nbytes / 2**30, text


@dataclass
class Peak:
    """The most that was alive in one part of the step."""

    nbytes: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    largest: list[tuple[float, str]] = field(default_factory=list)
    """GiB and description of the largest tensors (not renewed for a peak less than 0.1% above the last)."""
    made_by: str = ""
    """The tensor whose allocation made the peak."""


@dataclass(frozen=True)
class Message:
    """One collective, as its rank sees it."""

    operation: str
    ranks: tuple[int, ...]
    numel: int
    """Of the whole: what an all-gather makes, what a reduce-scatter takes."""
    element_bytes: int

    @property
    def moved_bytes(self) -> float:
        """What the rank sends, by the ring algorithms."""
        n = len(self.ranks)
        share = {
            "all-reduce": 2 * (n - 1) / n,
            "all-gather": (n - 1) / n,
            "reduce-scatter": (n - 1) / n,
            "all-to-all": (n - 1) / n,
        }
        return share.get(self.operation, 1.0 if self.operation == "send" else 0.0) * self.numel * self.element_bytes


class Trace(TorchDispatchMode, AbstractContextManager):  # type: ignore[misc]
    """Memory, messages and operations of what runs inside it. DTensors are left to desugar: only what is local counts.

    ``regions`` names the parts of the step that run now (regions.py); the peak of each is kept. ``weight_shapes`` tell gradients
    from other tensors of a backward pass, ``vocabulary`` (sizes of the last dimension) tells logits, ``buffer_groups`` are those
    whose messages lie in buffers.
    """

    def __init__(self, weight_shapes: set[tuple[int, ...]], vocabulary: set[int], buffer_groups: Iterable[Any]) -> None:
        super().__init__()
        self.live: dict[int, Storage] = {}
        self.current_bytes = 0
        self.by_kind: defaultdict[str, int] = defaultdict(int)
        self.regions: tuple[str, ...] = SET_UP
        self.is_last = False
        """Whether the last backward of the step has begun."""
        self.in_user_step = False
        self.peaks: defaultdict[str, Peak] = defaultdict(Peak)
        self.messages: Counter[Message] = Counter()
        self.flops = 0.0
        self._weight_shapes, self._vocabulary = weight_shapes, vocabulary
        self._buffer_groups = {g.group_name for g in buffer_groups}
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._resizes: Any = None

    def register(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Says what tensors are for, and counts those not seen yet."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._see(local, kind)
            self._set_kind(local, kind)

    def restart(self) -> None:
        """Forgets what was counted; what is alive stays known."""
        self.messages, self.flops, self.peaks = Counter(), 0.0, defaultdict(Peak)

    def __enter__(self) -> Trace:
        self._resizes = watch_resizes(self._on_resize)
        self._resizes.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._resizes.__exit__(*args)
        super().__exit__(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if func is READ_ON_HOST:
            if self.in_user_step:
                refuse_users_read()
            # There are no values: no to a question, one to a count.
            return False if args[0].dtype is torch.bool else 1
        is_message = func.namespace == "c10d"
        if is_message:
            self._note_message(func, args)
        out = func(*args, **(kwargs or {}))
        count = flop_counter(func)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        if isinstance(out, Tensor):
            self._see(out, "", func)
        elif not is_message:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self._see(leaf, "", func)
        return out

    # ---- messages

    def _note_message(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._schema.name.removeprefix("c10d::")
        group = group_of(args)
        if group is None or name == "barrier":
            return
        if group.group_name not in self._ranks:
            self._ranks[group.group_name] = tuple(dist.get_process_group_ranks(group))
        operation = OPERATIONS.get(name, name)
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        if not tensors:
            return
        largest = max(tensors, key=lambda t: t.numel())
        self.messages[Message(operation, self._ranks[group.group_name], largest.numel(), largest.element_size())] += 1
        if operation == "receive" or group.group_name in self._buffer_groups:
            for tensor in tensors:
                # The sharded gradient is a view of what a reduce-scatter gives.
                is_result = operation == "reduce-scatter" and tensor is not largest
                self._set_kind(tensor, "gradients" if is_result else "buffers", only=("activations", "temporary", "gradients"))

    # ---- memory

    def _see(self, tensor: Tensor, kind: str, func: Any = None) -> None:
        storage = tensor.untyped_storage()
        if storage_key(storage) in self.live:
            return
        shape, backward = tuple(tensor.shape), in_backward()
        name = kind if func is None else str(func._overloadpacket).removeprefix("aten.")
        entry = Storage(
            storage.nbytes(),
            name,
            shape,
            str(tensor.dtype).removeprefix("torch."),
            backward,
            kind or self._guess(shape, backward),
        )
        self._add(storage, entry)

    def _guess(self, shape: tuple[int, ...], backward: bool) -> str:
        if len(shape) > 1 and shape[-1] in self._vocabulary and shape not in self._weight_shapes:
            return "logits"
        if self.regions == SET_UP:
            return "buffers"  # what is received, for every micro-batch
        if not backward:
            return "activations"
        return "gradients" if shape in self._weight_shapes else "temporary"

    def _set_kind(self, tensor: Tensor, kind: str, only: tuple[str, ...] = KINDS) -> None:
        entry = self.live.get(storage_key(tensor.untyped_storage()))
        if entry is not None and entry.kind != kind and entry.kind in only:
            self.by_kind[entry.kind] -= entry.nbytes
            self.by_kind[kind] += entry.nbytes
            entry.kind = kind

    def _add(self, storage: torch.UntypedStorage, entry: Storage) -> None:
        key = storage_key(storage)
        self.live[key] = entry
        weakref.finalize(storage, self._free, key)
        self._grow(entry, entry.nbytes)

    def _free(self, key: int) -> None:
        entry = self.live.pop(key, None)
        if entry is not None:
            self.current_bytes -= entry.nbytes
            self.by_kind[entry.kind] -= entry.nbytes

    def _on_resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        entry = self.live.get(storage_key(storage))
        if entry is None:
            entry = Storage(0, "gathered", (nbytes,), "bytes", False, "parameters")
            self._add(storage, entry)
        elif entry.kind != "parameters":
            self.by_kind[entry.kind] -= entry.nbytes
            self.by_kind["parameters"] += entry.nbytes
            entry.kind, entry.operation = "parameters", "gathered"
        grown, entry.nbytes = nbytes - entry.nbytes, nbytes
        self._grow(entry, grown)

    def _grow(self, entry: Storage, nbytes: int) -> None:
        self.current_bytes += nbytes
        self.by_kind[entry.kind] += nbytes
        for region in self.regions:
            peak = self.peaks[region]
            if self.current_bytes > peak.nbytes:
                if self.current_bytes > 1.001 * peak.nbytes:
                    largest = heapq.nlargest(LARGEST, self.live.values(), key=lambda s: s.nbytes)
                    peak.largest = [s.describe() for s in largest]
                peak.nbytes, peak.by_kind, peak.made_by = self.current_bytes, dict(self.by_kind), entry.describe()[1]


def refuse_users_read() -> None:
    """Raises :class:`ReadsValues` when it is the user's own code, not a library's check, that asks for a value."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in ANSWERED:
            return
        if package not in ("torch", "contextlib", "functools"):
            raise ReadsValues(
                f"{frame.f_code.co_filename}:{frame.f_lineno} reads a value on the host (.item(), float(), int(), if): a dry run "
                "has no values, and on a GPU the read would wait for it; log tensors as they are, and decide on the device"
            )
        frame = frame.f_back


@contextlib.contextmanager
def users_step(trace: Trace) -> Iterator[None]:
    """Around each micro-batch's step of the user's."""
    trace.regions, trace.in_user_step = ("forward, before the layers",), True
    try:
        yield
    finally:
        trace.regions, trace.in_user_step = ("between",), False
