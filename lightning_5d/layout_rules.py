"""The rules of a layout string: which tokens go together, what the absent ones default to, and what is wrong with a bad set.

Works on plain dicts from field name to value; :mod:`lightning_5d.layout` makes them a class.
"""

from __future__ import annotations

from typing import Any

from lightning_5d.layout_tokens import ALLOWED, CP_METHODS, MAX_SIZE, SCHEDULES, SIZES, WORDS, in_range, mend, read_token

DEFAULTS: dict[str, Any] = {
    "dp": None,
    "rep": 1,
    "zero": 0,
    "tp": 1,
    "sp": None,
    "cp": 1,
    "cp_method": "ring",
    "pp": 1,
    "v": None,
    "schedule": None,
    "mbs": None,
    "ep": 1,
    "ac": 0,
}
_TWO_STAGE_SCHEDULES = ("zbv", "dualpipev")


def with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """All fields, the absent and those at None filled in by the rules of the grammar (``dp`` and ``mbs`` stay None)."""
    values = DEFAULTS | given
    if values["sp"] is None:
        values["sp"] = values["tp"] != 1
    if values["v"] is None:
        values["v"] = 2 if values["schedule"] in ("interleaved", *_TWO_STAGE_SCHEDULES) else 1
    if values["schedule"] is None:
        values["schedule"] = "1f1b" if values["v"] == 1 else "interleaved"
    return values


def to_tokens(values: dict[str, Any], complete: bool) -> list[str]:
    """Tokens of ``values`` in canonical order without defaults; ``complete`` says that derived fields are filled in already."""
    plain = with_defaults({}) | {"dp": None}
    tokens: dict[str, str] = {
        name: f"{name}{values[name]}" for name in SIZES if values[name] is not None and values[name] != plain[name]
    }
    if values["ac"] in (1, "sel"):
        tokens["ac"] = "ac" if values["ac"] == 1 else "acsel"
    if values["sp"] is not None and not (complete and values["sp"] == (values["tp"] != 1)):
        tokens["sp"] = "sp" if values["sp"] else "nosp"
    if values["cp_method"] != "ring":
        tokens["cp_method"] = str(values["cp_method"])
    schedule = values["schedule"]
    if schedule in _TWO_STAGE_SCHEDULES and values["v"] == 2:
        tokens.pop("v", None)
    if schedule is not None and not (complete and schedule == ("1f1b" if values["v"] == 1 else "interleaved")):
        tokens["schedule"] = str(schedule)
    order = ("dp", "tp", "sp", "cp", "cp_method", "pp", "v", "schedule", "ep", "zero", "rep", "mbs", "ac")
    return [tokens[name] for name in order if name in tokens]


def from_tokens(tokens: list[str]) -> tuple[dict[str, Any], str | None]:
    """``(fields, None)``, or the fields so far and what is wrong with a token by itself or beside another of its kind."""
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    for token in tokens:
        read = read_token(token)
        if read is None:
            return values, _token_problem(token)
        field, value = read
        if not in_range(field, value):
            return values, _token_problem(token)
        if field in source:
            twice = (
                f"token '{token}' is there twice"
                if source[field] == token
                else f"tokens '{source[field]}' and '{token}' contradict"
            )
            return values, f"{twice}; allowed is one of a kind."
        values[field], source[field] = value, token
    # A token that does nothing is a mistake; fields at their default cannot tell, tokens can.
    for field, size, meaning in (("cp_method", "cp", "context"), ("schedule", "pp", "pipeline")):
        if field in source and values.get(size, 1) == 1:
            return (
                values,
                f"token '{source[field]}' does nothing without {meaning} parallelism; allowed beside {size}N with N > 1.",
            )
    return values, None


def _token_problem(token: str) -> str:
    """What is wrong with one token, and what is allowed in its place."""
    if token == "":
        return "an empty token; allowed are tokens joined by one '_' each, such as 'tp2_pp2_zero1'."
    name = token.rstrip("0123456789")
    if token.startswith("zero") and name == "zero":
        return f"token '{token}': allowed are zero0, zero1, zero2 and zero3."
    if name in SIZES:
        return f"token '{token}': {name} needs a whole number from 1 to {MAX_SIZE} without leading zeros, such as {name}2."
    if name in WORDS:
        return f"token '{token}': '{name}' takes no number; allowed is '{name}'."
    mended = mend(token)
    meant = f" (did you mean '{'_'.join(mended)}'?)" if mended else ""
    return f"unknown token '{token}'{meant}; allowed are {ALLOWED}."


def find_problem(values: dict[str, Any]) -> str | None:
    """The first rule that complete ``values`` break, with the token and what is allowed; None when they are a layout."""
    for name in SIZES:
        size = values[name]
        if size is None and name in ("dp", "mbs"):
            continue
        if name == "ac":
            if size != "sel" and (not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_SIZE):
                return f"ac={size!r}; allowed are 0 (none), 1 (all layers), N (every Nth layer) and 'sel'."
        elif not isinstance(size, int) or isinstance(size, bool) or not in_range(name, size):
            return f"{name}={size!r}; allowed is a whole number {'from 0 to 3' if name == 'zero' else f'from 1 to {MAX_SIZE}'}."
    for name, names in (("cp_method", CP_METHODS), ("schedule", SCHEDULES), ("sp", (True, False))):
        if values[name] not in names or type(values[name]) is not type(names[0]):
            return f"{name}={values[name]!r}; allowed are {', '.join(str(allowed) for allowed in names)}."

    dp, rep, tp, cp, pp, v, ep = (values[name] for name in ("dp", "rep", "tp", "cp", "pp", "v", "ep"))
    schedule = values["schedule"]
    if values["sp"] and tp == 1:
        return "token 'sp' does nothing with tp1; allowed beside tpN with N > 1."
    if values["cp_method"] != "ring" and cp == 1:
        return f"token '{values['cp_method']}' does nothing with cp1; allowed beside cpN with N > 1."
    if pp == 1 and v > 1:
        return f"token 'v{v}' needs a pipeline; allowed beside ppN with N > 1."
    if pp == 1 and schedule != "1f1b":
        return f"token '{schedule}' does nothing with pp1; allowed beside ppN with N > 1."
    if schedule in ("gpipe", "1f1b") and v != 1:
        return f"token 'v{v}': {schedule} has one stage per rank; allowed with v{v} are {_schedules_for(v)}."
    if schedule == "interleaved" and v == 1:
        return "token 'v1': interleaved needs v2 or more; allowed with v1 are gpipe, 1f1b and zb."
    if schedule in _TWO_STAGE_SCHEDULES and v != 2:
        return f"token 'v{v}': {schedule} has exactly two stages per rank; allowed is v2."
    if rep > 1 and values["zero"] == 0:
        return f"token 'rep{rep}' does nothing without sharding; allowed beside zero1, zero2 or zero3."
    if dp is not None and dp % rep:
        return f"token 'rep{rep}' does not divide dp{dp}; allowed are divisors of {dp}."
    if dp is not None and (dp * cp) % ep:
        return f"token 'ep{ep}' does not divide dp·cp = {dp}·{cp} = {dp * cp}; allowed are divisors of {dp * cp}."
    return None


def _schedules_for(v: int) -> str:
    return "interleaved, zb, zbv and dualpipev" if v == 2 else "interleaved and zb"
