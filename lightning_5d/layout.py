"""The layout string, for example ``tp4_pp2_zero1``: what it may say, what it means, and what to say when it is wrong.

Imports neither torch nor lightning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lightning_5d.layout_rules import find_problem, from_tokens, to_tokens, with_defaults
from lightning_5d.layout_tokens import CP_METHODS, SCHEDULES, edits, foreign_problem, mend, read_token

__all__ = ["CP_METHODS", "SCHEDULES", "Layout", "LayoutError", "check_model", "model_problems", "suggest"]

# Tokens that another one may be missing, with how far each takes a layout from what was written.
_PREREQUISITES = ((0.8, "zero1"), (1.4, "tp2"), (1.4, "cp2"), (1.4, "pp2"))
# Tokens that lift a restriction of the model without changing the number of ranks.
_RELIEFS = ((0.6, "nosp"), (0.6, "gpipe"))


class LayoutError(ValueError):
    """A layout that cannot be; the message names the token, what is allowed and the nearest valid strings (``nearest``)."""

    def __init__(self, message: str, nearest: Iterable[str] = ()) -> None:
        self.nearest = tuple(nearest)
        if self.nearest:
            message += f" Nearest that work: {', '.join(repr(name) for name in self.nearest)}."
        super().__init__(message)


@dataclass(frozen=True)
class Layout:
    """How a model and its batch are spread over ranks.

    Fields left at None take their default from the others; after construction only ``dp`` and ``mbs`` may still be None.
    Raises :class:`LayoutError` for values that are wrong or contradict each other.
    """

    dp: int | None = None
    """Data-parallel size; None until :meth:`resolve` derives it from the number of ranks."""
    rep: int = 1
    """Replica groups of hybrid sharding: ZeRO shards inside ``dp / rep`` ranks."""
    zero: int = 0
    """What data parallelism shards: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    tp: int = 1
    """Tensor-parallel size."""
    sp: bool | None = None
    """Sequence parallelism over the tensor-parallel group; default: when ``tp > 1``."""
    cp: int = 1
    """Context-parallel size."""
    cp_method: str = "ring"
    """How keys and values travel under ``cp``: "ring", "ulysses" or "allgather"."""
    pp: int = 1
    """Pipeline ranks."""
    v: int | None = None
    """Virtual stages per pipeline rank; default 1, and 2 for the schedules that need it."""
    schedule: str | None = None
    """Pipeline schedule; default "1f1b", or "interleaved" when ``v > 1``."""
    mbs: int | None = None
    """Sequences per micro-batch; None: 1 under ``pp``, else the whole batch."""
    ep: int = 1
    """Expert-parallel size, folded into ``dp * cp``."""
    ac: int | str = 0
    """Activation checkpointing: 0 none, 1 every layer, N every Nth layer, "sel" only the cheap operations."""

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        complete = with_defaults(given)
        problem = find_problem(complete)
        if problem is not None:
            tokens = to_tokens(given, complete=False)
            raise LayoutError(f"layout '{'_'.join(tokens) or 'zero0'}': {problem}", _nearest_valid(mend("_".join(tokens))))
        for name in ("sp", "v", "schedule"):
            object.__setattr__(self, name, complete[name])

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that ``text`` says: tokens joined by ``_`` in any order, case ignored. Raises :class:`LayoutError`."""
        if not isinstance(text, str):
            raise LayoutError(f"a layout is one string such as 'tp2_pp2_zero1', not {text!r} of type {type(text).__name__}.")
        values, problem = from_tokens(text.lower().split("_"))
        if problem is not None:
            problem = foreign_problem(text) or problem
        else:
            problem = find_problem(with_defaults(values))
        if problem is not None:
            raise LayoutError(f"layout {text!r}: {problem}", _nearest_valid(mend(text)))
        return cls(**values)

    def __str__(self) -> str:
        return "_".join(to_tokens(vars(self), complete=True)) or "zero0"

    def replace(self, **changes: Any) -> Layout:
        """A copy with ``changes``; ``sp``, ``v`` and ``schedule`` follow the others again where they stood at their defaults."""
        values = from_tokens(str(self).split("_"))[0]
        return Layout(**{**values, **changes})

    def resolve(self, world_size: int) -> Layout:
        """This layout with ``dp`` set for ``world_size`` ranks.

        Raises :class:`LayoutError` when ``tp * pp * cp`` does not divide the world, when a given ``dp`` does not fill it,
        or when ``rep`` or ``ep`` do not divide what they are folded into.
        """
        if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
            raise LayoutError(f"world size {world_size!r}; allowed is a whole number from 1.")

        def differs_in_ranks_only(other: Layout) -> bool:
            same = all(getattr(other, name) == getattr(self, name) for name in ("zero", "mbs", "ac"))
            return same and (other.tp == 1 or other.sp == self.sp)

        problem = _world_problem(self, world_size)
        if problem is not None:
            raise LayoutError(f"layout '{self}': {problem}", suggest(self, differs_in_ranks_only, world_size=world_size))
        return dataclasses.replace(self, dp=world_size // self.model_parallel_size)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one replica of the model: ``tp * pp * cp``."""
        return self.tp * self.pp * self.cp

    @property
    def world_size(self) -> int:
        """Ranks in all. Raises :class:`LayoutError` before :meth:`resolve`."""
        if self.dp is None:
            raise LayoutError(f"layout '{self}' has no world size yet: call resolve(world_size) or write dpN.")
        return self.dp * self.model_parallel_size

    @property
    def num_stages(self) -> int:
        """Pipeline stages in all: ``pp * v``."""
        assert self.v is not None
        return self.pp * self.v


def _build(tokens: list[str], world_size: int | None = None) -> Layout | None:
    """The layout of ``tokens``, with ``dp`` set for ``world_size`` when that is given; None when there is no such layout."""
    values, problem = from_tokens(tokens)
    if problem is None and world_size is not None:
        values["dp"], rest = divmod(world_size, values.get("tp", 1) * values.get("pp", 1) * values.get("cp", 1))
        if rest:
            return None
    return Layout(**values) if problem is None and find_problem(with_defaults(values)) is None else None


def _nearest_valid(tokens: list[str], limit: int = 3) -> list[str]:
    """Canonical strings of the layouts nearest to ``tokens``, each of which reads alone but not with the others."""
    found: dict[str, int] = {}
    readable = [token for token in tokens if read_token(token) is not None]
    if not readable:
        return []
    for num_changes, candidate in edits(readable, _PREREQUISITES):
        if len(found) == limit or num_changes > min(found.values(), default=num_changes):
            break
        if (layout := _build(candidate)) is not None:
            found.setdefault(str(layout), num_changes)
    if not found:  # too many faults for two changes: keep what goes together
        kept: list[str] = []
        for token in readable:
            if _build([*kept, token]) is not None:
                kept.append(token)
        found[str(_build(kept))] = len(readable) - len(kept)
    return list(found)


def _world_problem(layout: Layout, world_size: int) -> str | None:
    """Why ``layout`` cannot have ``world_size`` ranks, or None."""
    size = layout.model_parallel_size
    product = "·".join(f"{name}{getattr(layout, name)}" for name in ("tp", "pp", "cp") if getattr(layout, name) > 1)
    if world_size % size:
        return f"{product} = {size} does not divide the world size {world_size}; allowed are multiples of {size} ranks."
    dp = world_size // size
    if layout.dp not in (None, dp):
        product = f"dp{layout.dp}·{product}" if product else f"dp{layout.dp}"
        return f"{product} = {layout.dp * size} ranks, but the world size is {world_size}; allowed is dp{dp}, or no dp token."
    return find_problem(vars(layout) | {"dp": dp})


def suggest(layout: Layout, is_valid: Callable[[Layout], bool], limit: int = 3, world_size: int | None = None) -> list[str]:
    """Canonical strings of the layouts nearest to ``layout`` for which ``is_valid``, nearest first, at most ``limit``.

    Sizes change, tokens are left out, ``nosp`` or ``gpipe`` is added. With a known number of ranks (``world_size``, or that
    of a resolved ``layout``) every candidate fits it and is resolved before ``is_valid`` sees it.
    """
    if world_size is None and layout.dp is not None:
        world_size = layout.world_size
    tokens = [token for token in str(layout).split("_") if not token.startswith("dp")]
    found: dict[str, int] = {}
    for num_changes, candidate_tokens in edits(tokens, _RELIEFS):
        if len(found) == limit or num_changes > max(1, min(found.values(), default=num_changes)):
            break
        candidate = _build(candidate_tokens, world_size)
        if candidate is not None and candidate != layout and is_valid(candidate):
            shown = dataclasses.replace(candidate, dp=None) if layout.dp is None else candidate
            found.setdefault(str(shown), num_changes)
    return list(found)


def model_problems(
    layout: Layout,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    num_layers: int | None = None,
    seq_len: int | None = None,
    batch_size_per_replica: int | None = None,
) -> list[str]:
    """What keeps ``layout`` from running a model and batch of these sizes, one sentence each; sizes at None are not checked."""
    problems = []

    def must_divide(option: str, divisor: int, what: str, size: int | None) -> None:
        if size is not None and size % divisor:
            problems.append(f"{option} does not divide {what} = {size}")

    tp, cp, pp = f"tp{layout.tp}", f"cp{layout.cp}", f"pp{layout.pp}"
    must_divide(tp, layout.tp, "num_heads", num_heads)
    must_divide(tp, layout.tp, "num_kv_heads", num_kv_heads)
    if layout.cp > 1 and layout.cp_method == "ulysses":
        if num_heads is not None and num_heads % layout.tp == 0:
            must_divide(cp, layout.cp, f"num_heads / {tp}" if layout.tp > 1 else "num_heads", num_heads // layout.tp)
        must_divide(cp, layout.cp, "seq_len", seq_len)
    elif layout.cp > 1:  # each rank holds an early and a late chunk, so that the causal mask gives all the same work
        must_divide(f"2·{cp} = {2 * layout.cp}", 2 * layout.cp, "seq_len", seq_len)
    if layout.sp and seq_len is not None and seq_len % layout.cp == 0:
        must_divide(f"{tp} (sp)", layout.tp, f"seq_len / {cp}" if layout.cp > 1 else "seq_len", seq_len // layout.cp)

    if num_layers is not None:
        if num_layers < layout.num_stages:
            stages = f"{pp}·v{layout.v} = {layout.num_stages} stages need" if layout.v != 1 else f"{pp} needs"
            problems.append(f"{stages} at least {layout.num_stages} layers, but num_layers = {num_layers}")
        if isinstance(layout.ac, int) and layout.ac > num_layers:
            problems.append(f"ac{layout.ac} recomputes every {layout.ac}th layer, but num_layers = {num_layers}")
    if batch_size_per_replica is not None:
        problems += _micro_batch_problems(layout, batch_size_per_replica)
    return problems


def _micro_batch_problems(layout: Layout, batch_size: int) -> list[str]:
    mbs = layout.mbs or (1 if layout.pp > 1 else batch_size)
    if batch_size % mbs:
        return [f"mbs{mbs} does not divide the batch size per data-parallel replica = {batch_size}"]
    count = batch_size // mbs
    have = f"but a batch of {batch_size} sequences per replica in micro-batches of {mbs} gives {count}"
    if layout.pp == 1 or layout.schedule in ("gpipe", "zbv"):
        return []
    if layout.schedule in ("1f1b", "dualpipev"):
        if count < layout.num_stages:
            return [f"{layout.schedule} needs at least {layout.num_stages} micro-batches for {layout.num_stages} stages, {have}"]
        return []
    num_rounds = max(1, count // layout.pp)  # torch.distributed.pipelining.ScheduleInterleaved1F1B
    if count % num_rounds:
        return [f"{layout.schedule} needs micro-batches in equal rounds of at least pp{layout.pp}, {have}"]
    return []


def check_model(
    layout: Layout,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    num_layers: int | None = None,
    seq_len: int | None = None,
    batch_size_per_replica: int | None = None,
) -> None:
    """Raises :class:`LayoutError` when a model or batch of these sizes cannot run under ``layout``.

    ``seq_len`` is in tokens, ``batch_size_per_replica`` in sequences of one step; None leaves a size unchecked. The
    vocabulary need not divide: uneven shards are supported. The error names each pair of numbers
    and the nearest layouts that work.
    """
    sizes: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "num_layers": num_layers,
        "seq_len": seq_len,
        "batch_size_per_replica": batch_size_per_replica,
    }
    problems = model_problems(layout, **sizes)
    if problems:
        raise LayoutError(
            f"layout '{layout}': {'; '.join(problems)}.", suggest(layout, lambda other: not model_problems(other, **sizes))
        )
