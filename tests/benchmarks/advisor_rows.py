"""Published measurements as cases of the advisor: what each row ran, and what it measured."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_5d.advisor.cases import Case
from lightning_5d.advisor.hardware import find_gpu
from lightning_5d.advisor.model import PRESETS, ModelSpec
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


def _read(path: Path) -> list[dict[str, str]]:
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _number(text: str) -> float | None:
    return float(text) if text else None


def paper_rows(path: Path = PAPER) -> list[Row]:
    """Rows of "Efficient Parallelization Layouts" that ran or were out of memory."""
    a100 = find_gpu("a100-80gb")
    assert a100 is not None
    kernels = {"flash1": "flash1", "flash2": "flash2", "torch": "torch", "megatron": "fused"}
    rows = []
    for r in _read(path):
        if r["status"] not in ("ok", "oom"):
            continue
        tp, pp, b = int(r["tp"]), int(r["pp"]), int(r["micro_batch_size"])
        layout = Layout(
            dp=int(r["dp"]),
            tp=tp,
            pp=pp,
            zero=int(r["zero_stage"]),
            mbs=b,
            sp=r["sequence_parallel"] == "True" and tp > 1,
            ac=1 if r["activation_checkpointing"] == "every_layer" else 0,
        )
        case = Case(
            model=PRESETS[f"llama-{r['model'].lower()}"],
            layout=layout,
            gpu=a100,
            seq_len=int(r["seq_len"]),
            global_batch=int(r["global_batch_sequences"]),
            attention=kernels[r["attention_kernel"]],
            fused_norm=r["rmsnorm_kernel"] == "True",
        )
        anomaly = ""
        if r["model"] == "13B" and r["seq_len"] == "2048" and pp == 2 and r["attention_kernel"] == "flash2":
            if layout.ac and r["gpus"] == "64":
                anomaly = "narrow"
            elif b >= 2:
                anomaly = "wide"
        rows.append(
            Row(
                case=case,
                group=f"{r['model']} {int(r['seq_len']) // 1024}k {r['gpus']} GPUs",
                model=r["model"],
                status=r["status"],
                step_time_s=_number(r["step_time_s"]),
                mfu_points=_number(r["mfu"]),
                tokens_per_s_per_gpu=None,
                memory_gib=None,
                anomaly=anomaly,
            )
        )
    return rows


def playbook_rows(path: Path = PLAYBOOK) -> list[Row]:
    """Rows of the Ultra-Scale Playbook's sweep; failures mix crashes with out of memory."""
    h100 = find_gpu("h100")
    assert h100 is not None
    rows = []
    for r in _read(path):
        name = f"playbook-{r['model'].lower()}"
        base = PRESETS[name]
        model = base
        if r["variant"] == "mha_v49152":
            model = ModelSpec(
                name,
                base.num_layers,
                base.hidden_size,
                base.num_heads,
                base.num_kv_heads,
                base.intermediate_size,
                49152,
                base.tied,
            )
        elif r["variant"] == "gqa8_v131072":
            model = ModelSpec(
                name, base.num_layers, base.hidden_size, base.num_heads, 8, base.intermediate_size, base.vocab_size, base.tied
            )
        pp = int(r["pp"])
        layout = Layout(dp=int(r["dp"]), tp=int(r["tp"]), pp=pp, zero=int(r["zero"]), mbs=int(r["mbs"]))
        case = Case(model, layout, h100, int(r["seq_len"]), int(r["gbs"]), attention="flash2", fused_norm=False)
        ok = r["status"] == "ok"
        rows.append(
            Row(
                case=case,
                group=f"{r['model']} {r['gpus']} GPUs",
                model=r["model"],
                status="ok" if ok else "failed",
                step_time_s=None,
                mfu_points=_number(r["mfu_recomputed"]) if ok else None,
                tokens_per_s_per_gpu=_number(r["tok_s_gpu"]) if ok else None,
                memory_gib=_number(r["gpu_memory_gb"]) if ok else None,
            )
        )
    return rows


def groups(rows: Iterable[Row], key: Callable[[Row], str] = lambda r: r.group) -> list[str]:
    """Distinct values of `key`, in order of appearance."""
    return list(dict.fromkeys(key(r) for r in rows))


def values(rows: Iterable[Row], name: str) -> Any:
    """A column of the rows as a numpy array."""
    import numpy as np

    return np.array([getattr(r, name) for r in rows], dtype=float)
