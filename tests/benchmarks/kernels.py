"""Checks and times every fused operation at the shapes of Llama models, beside what else is installed.

    python -m tests.benchmarks.kernels [--model 8b 70b] [--only rms_norm ...] [--dtype bfloat16] [--out FOLDER]
        [--iterations 50] [--compile] [--host]

On a GPU times are medians by CUDA events, with inputs rotated past the cache, next to the copy bandwidth and matrix rate measured
there and then. Without one (or with --device cpu) it runs the tiny shape, as a check of itself: the times mean nothing then.
--out writes kernels.csv and, with matplotlib, kernels.png. --host measures what a call costs the host beside its
kernel: an operation that does nothing, registered as ours are and by torch.library.custom_op.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from lightning_5d.kernels._library import define_op
from rich.console import Console
from rich.table import Table

from tests.benchmarks.kernel_cases import SHAPES, Case, cases, leaves_of, outputs_of

COLUMNS = (
    "model", "operation", "contender", "error", "forward_ms", "backward_ms", "forward_gb_s", "backward_gb_s", "forward_tflops",
    "backward_tflops", "forward_share", "backward_share",
)  # fmt: skip
ROTATED_BYTES = 256 * 2**20
"""Inputs that together exceed every cache, so that none is found in one."""


def median_ms(run: Callable[[int], object], iterations: int, device: torch.device) -> float:
    """Median time of ``run(i)``."""
    for i in range(3):
        run(i)
    times = []
    if device.type != "cuda":
        for i in range(iterations):
            start = time.perf_counter()
            run(i)
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)
    for i in range(iterations):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(100_000)  # the host is ahead: its cost is not measured here, but by --host
        start.record()
        run(i)
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in times)


def copy_gb_s(device: torch.device) -> float:
    """Bytes read and written a second by torch's copy."""
    source = torch.empty((2**29 if device.type == "cuda" else 2**20) // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda i: target.copy_(source), 20, device) / 1e6


def matrix_tflops(device: torch.device, dtype: torch.dtype) -> float:
    side = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / median_ms(lambda i: a @ b, 20, device) / 1e9


def error_of(case: Case, contender: Callable, inputs: list) -> float:
    """Relative error (in norm, the worst of outputs and gradients) against float64, or against torch's in float64."""
    exact = case.exact or case.contenders["torch"]
    double = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs]
    worst = 0.0
    got, want = outputs_of(contender(*inputs)), outputs_of(exact(*double))
    weights = [torch.randn_like(t) for t in got]
    got += torch.autograd.grad(got, leaves_of(inputs), weights)
    want += torch.autograd.grad(want, leaves_of(double), [w.double() for w in weights])
    for a, b in zip(got, want, strict=True):
        worst = max(worst, ((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item())
    return worst


def measure(case: Case, contender: Callable, iterations: int, device: torch.device) -> dict:
    inputs = case.inputs()
    nbytes = sum(t.nbytes for t in inputs)
    copies = [inputs] + [case.inputs() for _ in range(min(15, ROTATED_BYTES // max(1, nbytes)) if device.type == "cuda" else 0)]

    def forward(i: int) -> list[torch.Tensor]:
        return outputs_of(contender(*copies[i % len(copies)]))

    gradients = [torch.randn_like(t) for t in forward(0)]

    def both(i: int) -> None:
        torch.autograd.grad(forward(i), leaves_of(copies[i % len(copies)]), gradients)

    forward_ms = median_ms(forward, iterations, device)
    return {"forward_ms": forward_ms, "backward_ms": max(1e-6, median_ms(both, iterations, device) - forward_ms)}


def rates(case: Case, row: dict, copy: float, matrix: float) -> dict:
    """GB/s and TFLOP/s, and the share of the measured limit: matrix rate where the case has products, else copy bandwidth."""
    out = {}
    for way, nbytes, flops in (
        ("forward", case.forward_bytes, case.flops),
        ("backward", case.backward_bytes, case.backward_flops),
    ):
        ms = row[f"{way}_ms"]
        out[f"{way}_gb_s"], out[f"{way}_tflops"] = nbytes / ms / 1e6, flops / ms / 1e9
        out[f"{way}_share"] = out[f"{way}_tflops"] / matrix if flops else out[f"{way}_gb_s"] / copy
    return out


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.ops.lightning_5d.nothing(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


def host_us(calls: int = 5000) -> dict[str, float]:
    """Host microseconds a call, forward with autograd, of an operation that returns its input's shape and computes nothing."""
    if not hasattr(torch.ops.lightning_5d, "nothing"):
        define_op("nothing(Tensor x) -> Tensor", torch.empty_like, torch.empty_like)
    custom = torch.library.custom_op(
        "lightning_5d::nothing_custom", torch.empty_like, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    custom.register_autograd(lambda ctx, dy: dy, setup_context=lambda ctx, inputs, output: None)
    x = torch.randn(8, requires_grad=True)
    functions: dict[str, Callable] = {"as ours": _Nothing.apply, "by custom_op": custom, "torch's own": torch.empty_like}
    found = {}
    for name, function in functions.items():
        found[name] = 1e3 * median_ms(lambda i, f=function: [f(x) for _ in range(100)], calls // 100, torch.device("cpu")) / 100
    return found


def picture(rows: list[dict], path: Path) -> bool:
    """Shares of the measured limit as bars; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.3 * len(rows) + 1))
    labels = [f"{row['model']} {row['operation']}: {row['contender']}" for row in rows]
    for offset, way in ((-0.2, "forward"), (0.2, "backward")):
        axes.barh([i + offset for i in range(len(rows))], [row[f"{way}_share"] for row in rows], height=0.4, label=way)
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(0.9, color="grey", linewidth=0.8)
    axes.set_xlabel("share of the measured copy bandwidth or matrix rate")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def show(rows: list[dict], title: str) -> None:
    table = Table(title=title)
    for name in ("model", "operation", "contender", "error", "forward", "backward", "forward rate", "backward rate", "share"):
        table.add_column(name)
    for row in rows:
        unit = "tflops" if row["forward_tflops"] else "gb_s"
        speeds = [f"{row[f'{way}_{unit}']:,.0f} {'TFLOP/s' if unit == 'tflops' else 'GB/s'}" for way in ("forward", "backward")]
        share = f"{row['forward_share']:.0%} {row['backward_share']:.0%}"
        times = [f"{row[f'{way}_ms']:.3f} ms" for way in ("forward", "backward")]
        table.add_row(row["model"], row["operation"], row["contender"], f"{row['error']:.1e}", *times, *speeds, share)
    Console(width=160).print(table)


def main(arguments: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", nargs="+", choices=SHAPES, help="shapes (default: 8b and 70b on a GPU, tiny without)")
    parser.add_argument("--only", nargs="+", help="operations")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--compile", action="store_true", help="also torch.compile of torch's own code")
    parser.add_argument("--host", action="store_true", help="the host's cost of a call, and nothing else")
    parser.add_argument("--out", type=Path, help="folder of kernels.csv and kernels.png")
    options = parser.parse_args(arguments)
    if options.host:
        for name, us in host_us().items():
            print(f"{name}: {us:.1f} us a call on the host")
        return []
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    models = options.model or (["8b", "70b"] if device.type == "cuda" else ["tiny"])
    torch.manual_seed(0)
    copy, matrix = copy_gb_s(device), matrix_tflops(device, dtype)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU: a check, the times mean nothing"
    title = f"{where}; copy {copy:,.0f} GB/s, {options.dtype} matrices {matrix:,.1f} TFLOP/s"
    rows = []
    for model in models:
        small = cases(SHAPES["tiny"], device, dtype)
        for case, checked in zip(cases(SHAPES[model], device, dtype), small, strict=True):
            if options.only and case.operation not in options.only:
                continue
            contenders = dict(case.contenders)
            if options.compile and "torch" in contenders:
                contenders["torch.compile"] = torch.compile(contenders["torch"])
            for name, contender in contenders.items():
                source = checked.contenders.get(name, checked.contenders.get("torch"))
                assert source is not None
                row = {"error": error_of(checked, source, checked.inputs())}
                row |= measure(case, contender, options.iterations, device)
                rows.append(
                    {"model": model, "operation": case.operation, "contender": name} | row | rates(case, row, copy, matrix)
                )
    show(rows, title)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        with (options.out / "kernels.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        if not picture(rows, options.out / "kernels.png"):
            print("no picture: matplotlib is not installed")
    return rows


if __name__ == "__main__":
    main()
