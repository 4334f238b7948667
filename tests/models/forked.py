"""Runs a test in a forked rank, for those that run a backward pass: the parent must not, before it forks ranks for others."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tests.ranks import run_ranks


def forked(test: Callable) -> Callable:
    @functools.wraps(test)
    def run(*args, **kwargs):
        run_ranks(1, test, *args, **kwargs)

    return run
