"""The pages that users read, and what a test needs to take from them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def code(page: Path) -> list[str]:
    """Lines of blocks of code, and code within a line (which may go on in the next)."""
    text = page.read_text(encoding="utf-8")
    blocks = [line for block in _FENCE.findall(text) for line in block.splitlines()]
    return blocks + [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", _FENCE.sub("", text))]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings: lower case, without punctuation, words joined by hyphens; and anchors set by hand."""
    text = prose(page)
    found: set[str] = set(re.findall(r"""<a (?:id|name)=["']([^"']+)["']""", text))
    for heading in re.findall(r"^#+ +(.*?)\s*#*$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        repeats = sum(1 for other in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
        found.add(f"{slug}-{repeats}" if slug in found else slug)
    return found
