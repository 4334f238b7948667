"""The suites need processes of their own: only one that is named on the command line is collected, with its conftest."""

from __future__ import annotations

from pathlib import Path

import pytest

SUITES = ("ahead_of_time", "interpreter", "interpreter_ranks", "reference")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    here = Path(__file__).parent
    if collection_path.parent != here or collection_path.name not in SUITES:
        return None
    named = (Path(str(argument).partition("::")[0]).resolve() for argument in config.args)
    return None if any(path.is_relative_to(collection_path) for path in named) else True
