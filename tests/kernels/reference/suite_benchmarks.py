"""The benchmark commands run their checks on the CPU, so that they cannot rot."""

import csv
import math

import pytest

from tests.benchmarks import kernels, single_gpu


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels(dtype, tmp_path):
    rows = kernels.main(["--device", "cpu", "--iterations", "2", "--dtype", dtype, "--out", str(tmp_path)])
    operations = {row["operation"] for row in rows}
    assert operations >= {"rms_norm", "swiglu", "rotary", "cross_entropy", "linear_cross_entropy", "embedding", "attention"}
    for row in rows:
        assert row["error"] < (1e-5 if dtype == "float32" else 1e-2), row
        assert row["forward_ms"] > 0 and all(math.isfinite(row[name]) for name in ("forward_share", "backward_share"))
    with (tmp_path / "kernels.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert (tmp_path / "kernels.png").stat().st_size > 10_000


@pytest.mark.slow
def test_host_cost(capsys):
    kernels.main(["--host"])
    assert capsys.readouterr().out.count("us a call on the host") == 3


@pytest.mark.slow
def test_single_gpu():
    rows = single_gpu.main(["--device", "cpu"])
    assert [row["kernels"] for row in rows] == list(single_gpu.SETS)
    for row in rows:
        assert abs(row["loss"] - rows[0]["loss"]) < 1e-3
        assert row["mfu"] is None, "an unknown device has no MFU"
