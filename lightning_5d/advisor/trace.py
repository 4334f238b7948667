"""Watches one rank's operations on fake tensors: memory alive, collectives, floating-point operations."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}


@dataclass
class Storage:
    """Memory of one tensor and its views."""

    nbytes: int
    operation: str
    shape: tuple[int, ...]
    dtype: str
    backward: bool
    """Made while a backward pass ran."""
    kind: str = ""
    """`parameters`, `optimizer` or `gathered`, where known."""


@dataclass(frozen=True)
class Message:
    """One collective, as its rank sees it."""

    operation: str
    ranks: tuple[int, ...]
    nbytes: int
    """Of the whole: what an all-gather makes, what a reduce-scatter takes."""

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
        return share.get(self.operation, 1.0 if self.operation == "send" else 0.0) * self.nbytes


class Trace(TorchDispatchMode, AbstractContextManager):  # type: ignore[misc]
    """Memory, messages and operations of what runs inside it. DTensors are left to desugar: only what is local counts."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Storage] = {}
        self.current_bytes = self.peak_bytes = 0
        self.peak: list[Storage] = []
        """What is alive at the peak (a peak less than 0.1% above the last is not copied)."""
        self.messages: list[Message] = []
        self.flops = 0.0
        self._resize = torch.UntypedStorage.resize_

    def register(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Counts tensors that exist already."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._see(local, kind, kind)

    def restart(self) -> None:
        """Forgets what was counted; what is alive stays known."""
        self.messages, self.flops = [], 0.0
        self.peak_bytes, self.peak = self.current_bytes, [Storage(**vars(s)) for s in self.live.values()]

    def __enter__(self) -> Trace:
        trace, resize = self, self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            # FSDP2 gives and takes the memory of gathered parameters this way.
            out = resize(storage, size)
            known = trace.live.get(storage._cdata)
            if known is None:
                known = trace._add(storage, Storage(0, "resize_", (), "", False))
            trace._grow(int(size) - known.nbytes)
            known.nbytes, known.kind = int(size), known.kind or "gathered"
            trace._look()
            return out

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default:
            # The host asks for a value, and there are none: no to a question, one to a count.
            return False if args[0].dtype is torch.bool else 1
        if func.namespace == "c10d":
            self._note_message(func, args)
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf, str(func._overloadpacket).removeprefix("aten."))
        return out

    def _note_message(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._schema.name.removeprefix("c10d::")
        group = next((ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject)), None)
        if group is None:
            return
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        nbytes = max((t.numel() * t.element_size() for t in tensors), default=0)
        self.messages.append(Message(KINDS.get(name, name), tuple(dist.get_process_group_ranks(group)), nbytes))

    def _see(self, tensor: Tensor, operation: str, kind: str = "") -> None:
        storage = tensor.untyped_storage()
        known = self.live.get(storage._cdata)
        if known is not None:
            known.kind = known.kind or kind
            return
        backward = torch._C._current_graph_task_id() != -1
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._add(storage, Storage(storage.nbytes(), operation, tuple(tensor.shape), dtype, backward, kind))
        self._grow(storage.nbytes())
        self._look()

    def _add(self, storage: torch.UntypedStorage, entry: Storage) -> Storage:
        key = storage._cdata
        self.live[key] = entry
        weakref.finalize(storage, self._free, key)
        return entry

    def _free(self, key: int) -> None:
        entry = self.live.pop(key, None)
        if entry is not None:
            self._grow(-entry.nbytes)

    def _grow(self, nbytes: int) -> None:
        self.current_bytes += nbytes

    def _look(self) -> None:
        if self.current_bytes > self.peak_bytes:
            if self.current_bytes > 1.001 * self.peak_bytes:
                self.peak = [Storage(**vars(s)) for s in self.live.values()]
            self.peak_bytes = self.current_bytes
