"""The examples of docs/layouts.md are run, and its tables name every token."""

import doctest
import re
from pathlib import Path

from lightning_5d.layout_tokens import SIZES, WORDS

TEXT = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text(encoding="utf-8")


def test_the_examples_print_what_the_page_shows() -> None:
    source = "\n".join(re.findall(r"```pycon\n(.*?)```", TEXT, flags=re.DOTALL))
    test = doctest.DocTestParser().get_doctest(source, {}, "layouts.md", "docs/layouts.md", 0)
    assert len(test.examples) > 10
    report: list[str] = []
    results = doctest.DocTestRunner().run(test, out=report.append)
    assert results.failed == 0, "".join(report)


def test_the_tables_name_every_token() -> None:
    for section in ("## The grammar", "## What each token gives"):
        body = TEXT.split(section)[1].split("\n## ")[0]
        for token in (
            *(name for name in WORDS if name not in ("nosp",)),
            *(f"{name}N" for name in SIZES if name not in ("zero",)),
        ):
            assert re.search(rf"`{token}`", body), f"{token} in {section}"
