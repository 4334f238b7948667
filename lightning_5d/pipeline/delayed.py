"""Reading a device value on the host without waiting for the device."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor


class DelayedFlag:
    """A device value read by the host without draining the device: on an accelerator, two steps after it was computed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pending: deque[tuple[Tensor, Any]] = deque()

    def push(self, value: Tensor) -> None:
        if self.device.type == "cpu":
            self._pending.append((value, None))
            return
        copy = torch.empty((), dtype=value.dtype, pin_memory=True)
        copy.copy_(value, non_blocking=True)
        event = torch.Event(self.device.type)
        event.record()
        self._pending.append((copy, event))

    def pop(self) -> bool:
        """The oldest value that is due; False when none is."""
        delay = 0 if self.device.type == "cpu" else 2
        flag = False
        while len(self._pending) > delay:
            value, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
            flag = flag or bool(value > 0)
        return flag
