"""Published measurements as cases of the advisor: what each row ran, and what it measured."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_5d.advisor.cases import Case
from lightning_5d.advisor.hardware import find_gpu
from lightning_5d.advisor.model import PRESETS
from lightning_5d.layout import Layout

DATA = Path(__file__).parents[2] / "lightning_5d" / "advisor" / "data"
PAPER, PLAYBOOK, RUNS = (DATA / f"{name}.csv" for name in ("layouts_paper", "playbook_benchmarks", "published_runs"))


@dataclass(frozen=True)
class Row:
    """One measurement."""

    case: Case
    group: str
    """What is left out of the fit together."""
    model: str
    status: str
    """`ok`, `oom` (or a failure that may be one)."""
    step_time_s: float | None
    mfu_points: float | None
    tokens_per_s_per_gpu: float | None
    memory_gib: float | None
    anomaly: str = ""
    """Not empty: a known fault of the data; `narrow` or `wide`."""

    @property
    def measured_step_s(self) -> float:
        """Step time, from the tokens when it is not stated."""
        if self.step_time_s is not None:
            return self.step_time_s
        assert self.tokens_per_s_per_gpu is not None
        layout = self.case.layout
        tokens = self.case.num_microbatches * self.case.micro_batch * (layout.dp or 1) * self.case.seq_len
        return tokens / (self.tokens_per_s_per_gpu * layout.world_size)


class TableError(ValueError):
    """A file of measurements that cannot be used."""


@dataclass(frozen=True)
class Skipped:
    """A row that is not scored."""

    source: str
    model: str
    reason: str


class Cells(dict[str, str]):
    """The cells of a row by column. What cannot be read is a ValueError that names the column."""

    def one_of(self, column: str, allowed: Iterable[str]) -> str:
        if self[column] not in allowed:
            raise ValueError(
                f"{column} {self[column]!r}, not {' or '.join(allowed)}" if self[column] else f"incomplete: no {column}"
            )
        return self[column]

    def whole(self, column: str, lowest: int = 1) -> int:
        if not self[column]:
            raise ValueError(f"incomplete: no {column}")
        try:
            value = int(self[column])
        except ValueError:
            raise ValueError(f"{column} {self[column]!r} is no whole number") from None
        if not lowest <= value <= 10**7:
            raise ValueError(f"{column} {self[column]} is not from {lowest} to 10,000,000")
        return value

    def positive(self, column: str) -> float:
        if not self[column]:
            raise ValueError(f"incomplete: no {column}")
        try:
            value = float(self[column])
        except ValueError:
            raise ValueError(f"{column} {self[column]!r} is no number") from None
        if not 0 < value < 1e30:
            raise ValueError(f"{column} {self[column]} is not above 0")
        return value


def read_table(path: Path, needed: Sequence[str]) -> list[Cells]:
    """The rows of a CSV file; other columns than the `needed` may be there too.

    Raises:
        TableError: the file cannot be read, or lacks columns; the message names them.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or ()
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise TableError(f"{path} cannot be read: {said}; it must be a CSV file with the columns {', '.join(needed)}") from None
    missing = [c for c in needed if c not in columns]
    if missing:
        what = f"has no column {', '.join(missing)}" if columns else "is empty"
        raise TableError(f"{path} {what}; a CSV file with the columns {', '.join(needed)} is needed")
    return [Cells({k: (v or "").strip() for k, v in row.items() if k in needed}) for row in rows]


_PAPER_COLUMNS = (
    "model", "seq_len", "gpus", "global_batch_sequences", "micro_batch_size", "tp", "pp", "dp", "activation_checkpointing",
    "attention_kernel", "rmsnorm_kernel", "sequence_parallel", "zero_stage", "step_time_s", "mfu", "status",
)  # fmt: skip
_PLAYBOOK_COLUMNS = (
    "model", "gpus", "seq_len", "gbs", "mbs", "dp", "tp", "pp", "zero", "mfu_recomputed", "tok_s_gpu", "gpu_memory_gb", "status",
    "variant",
)  # fmt: skip


def paper_rows(path: Path = PAPER, skipped: list[Skipped] | None = None) -> list[Row]:
    """Rows of "Efficient Parallelization Layouts" that ran or were out of memory; `skipped` takes those that cannot be read."""
    table = [r for r in read_table(path, _PAPER_COLUMNS) if r["status"] not in ("kernel-unavailable", "other-error")]
    return _rows(table, _paper_row, path, skipped)


def _rows(table: Iterable[Cells], read: Callable[[Cells], Row], path: Path, skipped: list[Skipped] | None = None) -> list[Row]:
    rows = []
    for r in table:
        try:
            rows.append(read(r))
        except ValueError as error:  # LayoutError is one
            if skipped is not None:
                skipped.append(Skipped(Path(path).stem, r["model"], str(error)))
    return rows


def _paper_row(r: Cells) -> Row:
    status = r.one_of("status", ("ok", "oom"))
    model = r.one_of("model", ("13B", "30B", "65B"))
    kernels = {"flash1": "flash1", "flash2": "flash2", "torch": "torch", "megatron": "fused"}
    tp, pp, b, seq_len, gpus = (r.whole(c) for c in ("tp", "pp", "micro_batch_size", "seq_len", "gpus"))
    layout = Layout(
        dp=r.whole("dp"),
        tp=tp,
        pp=pp,
        zero=r.whole("zero_stage", 0),
        mbs=b,
        sp=r.one_of("sequence_parallel", ("True", "False")) == "True" and tp > 1,
        ac=1 if r.one_of("activation_checkpointing", ("none", "every_layer")) == "every_layer" else 0,
    )
    a100 = find_gpu("a100-80gb")
    assert a100 is not None
    case = Case(
        model=PRESETS[f"llama-{model.lower()}"],
        layout=layout,
        gpu=a100,
        seq_len=seq_len,
        global_batch=r.whole("global_batch_sequences"),
        attention=kernels[r.one_of("attention_kernel", kernels)],
        fused_norm=r.one_of("rmsnorm_kernel", ("True", "False")) == "True",
    )
    anomaly = ""
    if model == "13B" and seq_len == 2048 and pp == 2 and case.attention == "flash2":
        if layout.ac and gpus == 64:
            anomaly = "narrow"
        elif b >= 2:
            anomaly = "wide"
    ok = status == "ok"
    return Row(
        case=_checked(case, gpus),
        group=f"{model} {seq_len // 1024}k {gpus} GPUs",
        model=model,
        status=status,
        step_time_s=r.positive("step_time_s") if ok else None,
        mfu_points=r.positive("mfu") if ok else None,
        tokens_per_s_per_gpu=None,
        memory_gib=None,
        anomaly=anomaly,
    )


def _checked(case: Case, gpus: int) -> Case:
    """Raises a ValueError when the ranks or the batch of a row contradict its other columns."""
    layout = case.layout
    if layout.world_size != gpus:
        raise ValueError(f"layout {layout} has {layout.world_size} ranks, the row {gpus} GPUs")
    if case.global_batch % ((layout.dp or 1) * case.micro_batch):
        raise ValueError(f"batch {case.global_batch} does not divide over dp{layout.dp} and micro-batches of {case.micro_batch}")
    return case


def playbook_rows(path: Path = PLAYBOOK, skipped: list[Skipped] | None = None) -> list[Row]:
    """Rows of the Ultra-Scale Playbook's sweep; failures mix crashes with out of memory; `skipped` as in `paper_rows`."""
    return _rows(read_table(path, _PLAYBOOK_COLUMNS), _playbook_row, path, skipped)


def _playbook_row(r: Cells) -> Row:
    status = r.one_of("status", ("ok", "crashed-or-oom"))
    name = r.one_of("model", ("1B", "3B", "80B"))
    model = PRESETS[f"playbook-{name.lower()}"]
    variant = r.one_of("variant", ("mha_v131072", "mha_v49152", "gqa8_v131072"))
    if variant == "mha_v49152":
        model = replace(model, vocab_size=49152)
    elif variant == "gqa8_v131072":
        model = replace(model, num_kv_heads=8)
    layout = Layout(dp=r.whole("dp"), tp=r.whole("tp"), pp=r.whole("pp"), zero=r.whole("zero", 0), mbs=r.whole("mbs"))
    h100 = find_gpu("h100")
    assert h100 is not None
    gpus = r.whole("gpus")
    case = Case(model, layout, h100, r.whole("seq_len"), r.whole("gbs"), attention="flash2", fused_norm=False)
    ok = status == "ok"
    return Row(
        case=_checked(case, gpus),
        group=f"{name} {gpus} GPUs",
        model=name,
        status="ok" if ok else "failed",
        step_time_s=None,
        mfu_points=r.positive("mfu_recomputed") if ok else None,
        tokens_per_s_per_gpu=r.positive("tok_s_gpu") if ok else None,
        memory_gib=r.positive("gpu_memory_gb") if ok else None,
    )


def groups(rows: Iterable[Row], key: Callable[[Row], str] = lambda r: r.group) -> list[str]:
    """Distinct values of `key`, in order of appearance."""
    return list(dict.fromkeys(key(r) for r in rows))


def values(rows: Iterable[Row], name: str) -> Any:
    """A column of the rows as a numpy array."""
    import numpy as np

    return np.array([getattr(r, name) for r in rows], dtype=float)
