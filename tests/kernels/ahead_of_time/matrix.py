"""Compiles, without a GPU, exactly what the operations would launch: each kernel, tile and dtype, for four targets.

The launchers run on meta tensors with ``Kernel.run`` replaced by a recorder, so what is compiled is what would be launched:
argument types, the alignment Triton would see, constants and warps. ``python -m tests.kernels.ahead_of_time.matrix`` rewrites
resources.csv after a wanted change; the suite compares with it.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning_5d.kernels import _triton

TABLE = Path(__file__).with_name("resources.csv")
SHARED_LIMIT_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}  # A100, H100, B200, MI300
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32"}
COLUMNS = ("case", "kernel", "target", "warps", "registers", "spill_bytes", "shared_bytes")


@dataclass
class Launch:
    kernel: _triton.Kernel
    args: tuple
    num_warps: int
    num_stages: int
    constants: dict

    @property
    def name(self) -> str:
        module = self.kernel.fn.__module__.rsplit(".", 1)[-1]
        return f"{module}.{self.kernel.name.strip('_').removesuffix('_kernel')}"

    def key(self) -> tuple:
        """What Triton specialises on: types, integers that are 1 or multiples of 16, constants."""

        def kind(arg):
            if isinstance(arg, torch.Tensor):
                return arg.dtype
            return (type(arg), arg == 1, arg % 16 == 0) if isinstance(arg, int) else type(arg)

        return (self.name, *map(kind, self.args), self.num_warps, self.num_stages, *sorted(self.constants.items()))


def recorded(launcher: Callable[[], object], monkeypatch) -> list[Launch]:
    launches: list[Launch] = []
    monkeypatch.setattr(
        _triton.Kernel,
        "run",
        lambda self, grid, args, warps, stages, constants: launches.append(Launch(self, args, warps, stages, constants)),
    )
    launcher()
    monkeypatch.undo()
    return launches


def source(launch: Launch):
    """Triton's description of a specialised kernel: what its launcher derives from the same arguments."""
    from triton.compiler import ASTSource

    jitted = launch.kernel.jitted
    signature, constants, attributes = {}, dict(launch.constants), {}
    values = dict(zip(jitted.arg_names, launch.args, strict=False))
    for i, name in enumerate(jitted.arg_names):
        value = values.get(name)
        if name in constants or (isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constants.setdefault(name, 1)
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(jitted, signature, constants, attributes)


def compile_for(launch: Launch, target: str) -> dict:
    """Resources of the compiled kernel: registers a thread, bytes spilled, bytes of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget

    amd = target.startswith("gfx")
    where = GPUTarget("hip", target, 64) if amd else GPUTarget("cuda", int(target[3:]), 32)
    warps = _triton.warps_on_amd(launch.num_warps) if amd else launch.num_warps
    compiled = triton.compile(source(launch), target=where, options={"num_warps": warps, "num_stages": launch.num_stages})
    registers, spill = _amd_resources(compiled.asm["amdgcn"]) if amd else _nvidia_resources(compiled.asm["cubin"])
    return {"warps": warps, "registers": registers, "spill_bytes": spill, "shared_bytes": compiled.metadata.shared}


def _amd_resources(assembly: str) -> tuple[int, int]:
    def number(field: str) -> int:
        match = re.search(rf"\.{field}:\s+(\d+)", assembly)
        assert match, f"no {field} in the assembly"
        return int(match[1])

    return number("vgpr_count"), 4 * number("vgpr_spill_count") + number("private_segment_fixed_size")


def _nvidia_resources(cubin: bytes) -> tuple[int, int]:
    import tempfile

    import triton.backends.nvidia

    cuobjdump = Path(triton.backends.nvidia.__file__).with_name("bin") / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert match, f"cuobjdump says nothing of registers: {text}"
    return int(match[1]), int(match[2])  # what is spilled lies on the stack, and these kernels put nothing else there


def read_table() -> dict[tuple[str, str, str], dict]:
    with TABLE.open() as file:
        return {(row["case"], row["kernel"], row["target"]): row for row in csv.DictReader(file)}


def rows(cases: dict, monkeypatch) -> Iterator[dict]:
    """Every launch of every case on every target; launches that compile to the same kernel are compiled once."""
    done: dict[tuple, dict] = {}
    for case, launcher in cases.items():
        launches = recorded(launcher, monkeypatch)
        for i, launch in enumerate(launches):
            earlier = sum(other.name == launch.name for other in launches[:i])
            name = launch.name if not earlier else f"{launch.name} {earlier + 1}"
            for target in SHARED_LIMIT_BYTES:
                key = (*launch.key(), target)
                if key not in done:
                    done[key] = compile_for(launch, target)
                yield {"case": case, "kernel": name, "target": target} | done[key]


def main(prefix: str = "") -> None:
    """Prints the rows of the cases that start with ``prefix``; without one, rewrites the table too."""
    import pytest

    from tests.kernels.ahead_of_time.cases import CASES

    with pytest.MonkeyPatch.context() as monkeypatch:
        found = []
        for row in rows({case: launcher for case, launcher in CASES.items() if case.startswith(prefix)}, monkeypatch):
            print(*row.values(), "SPILLS" if row["spill_bytes"] else "", flush=True)
            found.append(row)
    if not prefix:
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
