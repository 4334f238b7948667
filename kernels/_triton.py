"""The one door to Triton: kernels are written next to their operation, and Triton is imported when one is first launched.

So ``import lightning_5d.kernels`` costs no Triton, works where Triton is not installed, and a CPU run never loads it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What the kernels compute on, always in float32 inside; float64 takes the reference path."""


class Kernel:
    """A Triton kernel (or a device function that kernels call) whose module names ``tl`` only for type checkers."""

    def __init__(self, fn: Callable):
        self.fn = fn
        self.name = fn.__name__
        self.__doc__ = fn.__doc__
        self._jitted: Any = None

    @property
    def jitted(self) -> Any:
        """``triton.jit(fn)``, with ``tl`` and the device functions that ``fn`` calls bound in its module."""
        if self._jitted is None:
            import triton
            import triton.language as tl

            names = self.fn.__globals__
            names["tl"] = tl
            for name in self.fn.__code__.co_names:
                if isinstance(names.get(name), Kernel):
                    names[name] = names[name].jitted
            self._jitted = triton.jit(self.fn)
        return self._jitted

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.name} is a Triton kernel or device function: launch() runs it, and kernels call it")

    def run(self, grid: tuple[int, ...], args: tuple, num_warps: int, num_stages: int, constants: dict) -> None:
        """The launch itself, with nothing left to decide: the ahead-of-time tests compile what arrives here."""
        if torch.version.hip:
            num_warps = warps_on_amd(num_warps)
        self.jitted[grid](*args, num_warps=num_warps, num_stages=num_stages, **constants)


def kernel(fn: Callable) -> Kernel:
    return Kernel(fn)


@functools.cache
def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_interpreting() -> bool:
    """Whether Triton itself was told to interpret kernels on the CPU (``TRITON_INTERPRET=1``): a test process."""
    triton = sys.modules.get("triton")
    return triton is not None and triton.knobs.runtime.interpret


def runs_on_triton(x: torch.Tensor) -> bool:
    """Whether an operation on ``x`` launches its kernel (else it takes the plain torch reference)."""
    if x.dtype not in KERNEL_DTYPES:
        return False
    if x.is_cuda:
        if triton_is_installed():
            return True
        warnings.warn("Triton is not installed: lightning_5d.kernels run their plain torch reference on this GPU", stacklevel=2)
        return False
    return x.device.type == "cpu" and is_interpreting()


def warps_on_amd(num_warps: int) -> int:
    """AMD's wavefronts are twice as wide as a warp: half as many hold the same number of threads."""
    return max(1, num_warps // 2)


def launch(kernel: Kernel, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 2, **constants: Any) -> None:
    """Runs ``kernel`` over ``grid`` on the device of its first argument; an empty grid does nothing."""
    if 0 in grid:
        return
    device = args[0].device
    on_other_gpu = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if on_other_gpu else contextlib.nullcontext():
        kernel.run(grid, args, num_warps, num_stages, constants)


def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; elsewhere (interpreter, ahead-of-time compile) a small number for tests."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 2


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """``[..., width] -> [rows, width]`` with unit stride in a row: a view where possible, so that slices are not copied."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.shape[-1] <= 1 or rows.stride(-1) == 1 else rows.contiguous()


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """What references compute in: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
