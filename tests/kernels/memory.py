"""Bytes of tensors alive, counted by storage while operations run: on fake tensors, so at any size and on any machine."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside it, ``live`` and ``peak`` are the bytes of what was made since, each storage once, until it is freed."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def know(self, tensor: torch.Tensor) -> None:
        """Does not count ``tensor``, which was there before."""
        self._known.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self.know(tensor)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, nbytes)

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def saved_bytes(function, *inputs, parameters=()) -> int:
    """Bytes that ``function(*inputs)`` keeps for backward, parameters aside, each storage once."""
    storages: dict[int, int] = {}
    ours = {p.untyped_storage()._cdata for p in parameters}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in ours:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = function(*inputs)
    del kept
    return sum(storages.values())
