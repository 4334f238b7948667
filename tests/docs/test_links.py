"""Every link within the pages leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, name, prose


def links(page: Path) -> list[str]:
    return [target for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", prose(page)) if not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.is_relative_to(ROOT) or not file.exists():
            broken.append(f"{target}: no such file")
        elif anchor and (file.suffix != ".md" or anchor not in anchors(file)):
            broken.append(f"{target}: no such heading; there are {', '.join(sorted(anchors(file)))}")
    assert not broken, "\n".join(broken)


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached:
            reached.add(page)
            ahead += [t for t in ((page.parent / link.partition("#")[0]).resolve() for link in links(page)) if t in PAGES]
    assert not {name(page) for page in set(PAGES) - reached}
