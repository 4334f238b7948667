"""The peak that a device's operations are compared with, and the most memory it held."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import torch
from torch import nn

from lightning_5d.advisor.hardware import Gpu, find_gpu

_DTYPE_OF_PRECISION = {
    "16-true": "fp16",
    "16-mixed": "fp16",
    "bf16-true": "bf16",
    "bf16-mixed": "bf16",
    "transformer-engine": "fp8",
    "transformer-engine-float16": "fp8",
}
_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_TORCH_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Peak:
    """Dense peak of one device in TFLOP/s, or why there is none."""

    tflops: float | None
    note: str = ""
    """A sentence for the user when ``tflops`` is None or ``measured``."""
    measured: bool = False
    """Measured by a matrix product instead of taken from a vendor's specification."""


def device_name(device: torch.device) -> str:
    """Name of ``device``: torch's for a GPU, "cpu", or the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def matmul_dtype(precision: str, module: nn.Module) -> str | None:
    """Number format in which matrix products run, in the words of `advisor.hardware`; None when it cannot be told.

    `32-true` leaves parameters as the user made them, so theirs counts; float32 on CUDA is "tf32" where torch is told to use it.
    """
    if precision != "32-true":
        return _DTYPE_OF_PRECISION.get(precision)
    matrix = next((p for p in module.parameters() if p.ndim >= 2 and p.is_floating_point()), None)
    dtype = "fp32" if matrix is None else _DTYPE_NAMES.get(matrix.dtype)
    if dtype == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return dtype


def find_peak(name: str, dtype: str | None, gpu: Gpu | None = None) -> Peak:
    """Dense peak of the device called ``name`` for matrix products in ``dtype``: of ``gpu`` when it is given, else from the
    table, or measured on a CPU.
    """
    override = "Pass MFUMonitor(peak_tflops=...), the DENSE peak of one device in TFLOP/s."
    if dtype is None:
        return Peak(
            None, f"The dtype of matrix products cannot be told from the precision. Pass MFUMonitor(dtype=...). {override}"
        )
    if gpu is None and name == "cpu":
        if dtype not in _TORCH_DTYPES:
            return Peak(None, f"{dtype} cannot be measured on a CPU. {override}")
        tflops = measure_matmul_tflops(_TORCH_DTYPES[dtype])
        note = (
            f"Peak of this CPU: {tflops:.3f} TFLOP/s a process ({_TORCH_DTYPES[dtype]}, {torch.get_num_threads()} thread(s)), "
            "MEASURED by a matrix product in all processes at once. MFU on a CPU is a share of that, not of a specification."
        )
        return Peak(tflops, note, measured=True)
    name, gpu = (name, find_gpu(name)) if gpu is None else (gpu.name, gpu)
    tflops_known = gpu.peak(dtype) if gpu is not None else None
    if tflops_known is None:
        missing = f"accelerator '{name}'" if gpu is None else f"'{name}' in {dtype}"
        return Peak(None, f"No dense peak is known for {missing}. {override}")
    return Peak(tflops_known)


def measure_matmul_tflops(dtype: torch.dtype, size: int = 1024, budget_s: float = 0.3) -> float:
    """Best rate in TFLOP/s of a ``size``³ matrix product on this process's CPU threads, repeated for about ``budget_s``."""
    a = torch.ones(size, size, dtype=dtype)
    out = torch.empty_like(a)
    best_s, spent_s = float("inf"), 0.0
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        torch.mm(a, a, out=out)  # warm-up
        while spent_s < budget_s:
            started_at = time.perf_counter()
            torch.mm(a, a, out=out)
            taken_s = time.perf_counter() - started_at
            best_s, spent_s = min(best_s, taken_s), spent_s + taken_s
    return 2 * size**3 / best_s / 1e12


def peak_memory_gib(device: torch.device) -> float | None:
    """Most memory of this process so far, GiB: allocated by torch on CUDA, resident on a CPU; None where it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if device.type != "cpu" or sys.platform == "win32":
        return None
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
