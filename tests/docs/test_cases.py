"""docs/cases.md names tests that exist."""

from __future__ import annotations

import ast
import re

from tests.docs.pages import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "cases.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| T\d", line)
]


def test_every_case_names_tests_that_exist() -> None:
    assert [row[0] for row in ROWS] == [f"T{number}" for number in range(1, 16)]
    for case, *_, tests in ROWS:
        named = re.findall(r"`([^`]*)::(test_\w+)`", tests)
        assert named, case
        file = ""
        for path, function in named:
            file = path or file  # "::name" is in the file before it
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
                f"{case}: {file}::{function}"
            )
