"""Every kernel with every tile compiles for four targets, spills nothing, fits shared memory, and uses the recorded registers."""

import pytest

from tests.kernels.ahead_of_time.cases import CASES
from tests.kernels.ahead_of_time.matrix import SHARED_LIMIT_BYTES, read_table, rows

FAST = ("rms_norm 4096 bf16", "silu 14336 bf16")


def check(cases, monkeypatch):
    table, seen, faults = read_table(), 0, []
    for row in rows(cases, monkeypatch):
        where = (row["case"], row["kernel"], row["target"])
        seen += 1
        recorded = table.get(where)
        if row["spill_bytes"]:
            faults.append(f"{where} spills {row['spill_bytes']} bytes")
        if row["shared_bytes"] > SHARED_LIMIT_BYTES[row["target"]]:
            faults.append(
                f"{where} needs {row['shared_bytes']} bytes of shared memory, the device has {SHARED_LIMIT_BYTES[row['target']]}"
            )
        if recorded is None:
            faults.append(f"{where} is not in resources.csv: run python -m tests.kernels.ahead_of_time.matrix")
        elif int(recorded["registers"]) != row["registers"]:
            faults.append(f"{where}: {row['registers']} registers, recorded {recorded['registers']}")
    assert not faults, "\n".join(faults)
    return seen


def test_common_shapes(monkeypatch):
    assert check({case: CASES[case] for case in FAST}, monkeypatch) == 4 * 2 * len(FAST)


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_all_shapes(monkeypatch):
    seen = check(CASES, monkeypatch)
    assert seen == len(read_table()), (
        "resources.csv has rows of cases that are gone: run python -m tests.kernels.ahead_of_time.matrix"
    )
