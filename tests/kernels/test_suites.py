"""Runs the suites of kernels in the processes they need: Triton interprets or compiles, for a whole process, and other tests
fork ranks from this one, which forbids backward passes here.

One suite by hand: ``TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreter/suite_norm.py``.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INTERPRETED = {"TRITON_INTERPRET": "1"}
SUITES = {"reference": {}, "interpreter": INTERPRETED, "ahead_of_time": {}}
SLOW_SUITES = SUITES | {"interpreter_ranks": INTERPRETED}


@functools.cache
def run_suite(name: str, mark: str) -> None:
    """Once for each mark: with "" the whole suite, which then counts for its fast and its slow half."""
    files = sorted(str(path) for path in (HERE / name).glob("suite_*.py"))
    environment = (
        {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")} | {"OMP_NUM_THREADS": "1"} | SLOW_SUITES[name]
    )
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "-m", mark, *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 0


def mark_of(config: pytest.Config, mark: str) -> str:
    """Where all tests run, a suite needs one process and not two: starting one costs as much as many of its tests."""
    return mark if config.option.markexpr else ""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SUITES)
def test_suite(name, pytestconfig):
    run_suite(name, mark_of(pytestconfig, "not slow"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SLOW_SUITES)
def test_slow_suite(name, pytestconfig):
    run_suite(name, mark_of(pytestconfig, "slow"))
