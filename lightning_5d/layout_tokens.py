"""The words of a layout string: reading one, mending a misspelt one, and small changes to a list of them.

Knows nothing of which words go together; :mod:`lightning_5d.layout` does.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from itertools import combinations

from lightning_5d.layout_foreign import spellings, translate

CP_METHODS = ("ring", "ulysses", "allgather")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev")

# Names that take a number, in canonical order of the string; each is also the name of the field it sets.
SIZES = ("dp", "tp", "cp", "pp", "v", "ep", "zero", "rep", "mbs", "ac")
MAX_SIZE = 999_999
# Names that stand alone, with the field and the value they set.
WORDS: dict[str, tuple[str, int | str | bool]] = {
    "sp": ("sp", True),
    "nosp": ("sp", False),
    **{name: ("cp_method", name) for name in CP_METHODS},
    **{name: ("schedule", name) for name in SCHEDULES},
    "ac": ("ac", 1),
    "acsel": ("ac", "sel"),
}
ALLOWED = (
    f"dpN, tpN, sp, nosp, cpN, {', '.join(CP_METHODS)}, ppN, vN, "
    f"{', '.join(SCHEDULES)}, epN, zero0 to zero3, repN, mbsN, ac, acN, acsel"
)

_SIZE = re.compile(f"({'|'.join(SIZES)})(0|[1-9][0-9]{{0,5}})")
_RUN_TOGETHER = re.compile(f"(?:(?:{'|'.join(SIZES)})[0-9]{{1,6}}|{'|'.join(sorted(WORDS, key=len, reverse=True))})")
# How alike a misspelt name must be: high enough that "ddp_spawn" or "single_device" is not taken for a layout.
_LIKENESS = 0.74


def read_token(token: str) -> tuple[str, int | str | bool] | None:
    """``(field, value)`` of one lower-case token, or None if it is no token. A size out of range is read, not judged."""
    if token in WORDS:
        return WORDS[token]
    match = _SIZE.fullmatch(token)
    return (match[1], int(match[2])) if match else None


def in_range(field: str, value: object) -> bool:
    """Whether a size is allowed at all: ``zero`` 0 to 3, everything else 1 to ``MAX_SIZE``."""
    if not isinstance(value, int) or isinstance(value, bool):
        return True
    return 0 <= value <= 3 if field == "zero" else 1 <= value <= MAX_SIZE


def mend_token(token: str) -> list[str]:
    """The tokens that a wrong one most likely stands for: itself when right, several when run together, or none."""
    read = read_token(token)
    if read is not None and in_range(*read):
        return [token]
    bare = re.sub(r"[=:\s]", "", token)
    if bare != token and bare:
        return mend_token(bare)
    if not token:
        return []
    if token in SIZES:
        return [f"{token}{1 if token == 'zero' else 2}"]
    turned = re.fullmatch(r"([0-9]{1,6})x?([a-z]+)", token)
    if turned and turned[2] in SIZES:
        return mend_token(f"{turned[2]}{turned[1]}")
    pieces = _RUN_TOGETHER.findall(token)
    if len(pieces) > 1 and "".join(pieces) == token:
        return [mended for piece in pieces for mended in mend_token(piece)]
    words = difflib.get_close_matches(token, WORDS, n=1, cutoff=_LIKENESS)
    match = re.fullmatch(r"([a-z]+)([0-9]+)", token)
    if match:
        names = [match[1]] if match[1] in SIZES else difflib.get_close_matches(match[1], SIZES, n=1, cutoff=_LIKENESS)
        if match[1] in WORDS and match[1] not in SIZES:
            return [match[1]]  # a number where none belongs: sp2, zbv2
        if names:
            number = min(int(match[2][:6]), 3) if names[0] == "zero" else max(int(match[2][:6]), 1)
            return [f"{names[0]}{number}"]
    return words


def split(text: str) -> list[str]:
    """Lower-case tokens of ``text``, also when something other than ``_`` separates them, or a name from its number.

    Only used to mend.
    """
    tokens: list[str] = []
    for token in re.split(r"[_\-,;:+=()/\s]+", text.lower()):
        if tokens and tokens[-1] in SIZES and re.fullmatch("[0-9]{1,6}", token):
            tokens[-1] += token
        elif token:
            tokens.append(token)
    return tokens


def mend(text: str) -> list[str]:
    """``text`` with every token mended, those that resemble nothing left out, repeated ones once."""
    joined = translate("_".join(split(text)))
    return list(dict.fromkeys(mended for token in split(joined) for mended in mend_token(token)))


def foreign_problem(text: str) -> str | None:
    """How the names that other frameworks use are written here, or None when ``text`` has none of them."""
    joined = "_".join(split(text))
    if joined == "auto":
        return (
            "'auto' is no layout: sizes are named, not guessed; `lightning-5d advise` ranks the layouts of a model on a cluster."
        )
    said = [f"'{joined[start:end]}' is written '{tokens}' here" for start, end, tokens in spellings(joined)]
    return f"{'; '.join(said)}. Allowed are {ALLOWED}." if said else None


def looks_like_layout(text: str) -> bool:
    """Whether ``text`` was meant as a layout: most of its tokens are right or close to right."""
    tokens = split(text)
    near = sum(bool(mend_token(token)) for token in tokens)
    # "ddp2" and "fsdp2" are names that other frameworks use: a stock error serves their users better.
    foreign = any(re.fullmatch(r"(ddp|fsdp|deepspeed|xla|auto|single)[0-9]*", token) for token in tokens)
    return not foreign and near > len(tokens) / 2


def sounds_like_layout(text: str) -> bool:
    """Whether ``text`` says in another framework's words, and in nothing else, what a layout could say."""
    joined = "_".join(split(text))
    rest = [token for token in split(translate(joined)) if not mend_token(token)]
    return bool(spellings(joined)) and not rest


def _other_sizes(field: str, size: int) -> Iterator[tuple[float, int]]:
    """``(cost, other size)``: close ones, divisors and powers of two; growing costs twice as much as shrinking."""
    if field == "zero":
        yield from ((0.5 * abs(other - size), other) for other in range(4) if other != size)
        return
    near = range(max(1, size - 4), size + 5) if size > 8 else range(1, 2 * size + 1)
    divisors = (d for d in range(1, min(size, 4096)) if size % d == 0)
    powers = (2**k for k in range(min(size.bit_length() + 1, 20)))
    for other in sorted({*near, *divisors, *powers, 3 * size // 4, 3 * size // 2} - {0, size}):
        ratio = math.log2(other / size)
        yield (-ratio if ratio < 0 else 2 * ratio), other


def edits(tokens: list[str], additions: Iterable[tuple[float, str]] = ()) -> Iterator[tuple[int, list[str]]]:
    """``(number of changes, tokens)``, nearest first: ``tokens`` itself, one change, then two, then no parallelism at all.

    A change gives a token another size, leaves it out, or adds one of ``additions`` (``(cost, token)``).
    """
    changes: list[tuple[float, int, str | None]] = []
    for index, token in enumerate(tokens):
        read = read_token(token)
        assert read is not None, token
        field, value = read
        drop_cost = 1.0
        if token not in WORDS and isinstance(value, int):
            changes += [(cost, index, f"{field}{other}") for cost, other in _other_sizes(field, value)]
            drop_cost = 0.1 + max(1.0, math.log2(max(value, 1)))
        changes.append((drop_cost, index, None))
    changes += [(cost, len(tokens) + i, token) for i, (cost, token) in enumerate(additions)]
    changes.sort(key=lambda change: change[0])

    def apply(*chosen: tuple[float, int, str | None]) -> list[str]:
        by_index = {index: token for _, index, token in chosen}
        kept = [by_index.pop(index, token) for index, token in enumerate(tokens)]
        return [token for token in (*kept, *by_index.values()) if token is not None]

    yield 0, tokens
    for change in changes:
        yield 1, apply(change)
    for pair in sorted(combinations(changes, 2), key=lambda pair: pair[0][0] + pair[1][0]):
        if pair[0][1] != pair[1][1]:
            yield 2, apply(*pair)
    yield len(tokens), [token for token in tokens if token.startswith(("zero", "mbs", "ac"))]
