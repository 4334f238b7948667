"""Rows of `published_runs.csv` that the advisor can be asked about, and why not of the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lightning_5d.advisor.cases import Case
from lightning_5d.advisor.hardware import Gpu, find_gpu
from lightning_5d.advisor.model import ModelError, ModelSpec
from lightning_5d.layout import Layout, LayoutError
from tests.benchmarks.advisor_rows import RUNS, Row, _number, _read

_GPUS = {
    "A100-40GB-SXM": "a100-40gb",
    "A100-80GB-SXM": "a100-80gb",
    "H100-80GB-SXM": "h100",
    "B200": "b200",
    "GB200": "gb200",
    "GB300": "gb300",
    "H200-141GB-SXM": "h200",
}
_NEEDED = ("layers", "hidden", "heads", "ffn", "vocab", "seq_len", "gpus", "micro_batch", "tp", "pp", "dp")


@dataclass(frozen=True)
class Skipped:
    """A row that is not scored."""

    source: str
    model: str
    reason: str


def _gpu(name: str) -> Gpu | None:
    if name == "H100-96GB-HBM2e-500W":  # Meta's part: the chip of an H100 SXM, slower memory
        h100 = find_gpu("h100")
        assert h100 is not None
        return replace(h100, name=name, hbm_gib=96, usable_gib=95, hbm_tb_s=2.4)
    return find_gpu(_GPUS[name]) if name in _GPUS else None


def run_rows(path: Path = RUNS) -> tuple[list[tuple[Row, str]], list[Skipped]]:
    """Dense bf16 training rows with a complete layout, each with the framework that predicts it; the others with the reason."""
    rows: list[tuple[Row, str]] = []
    skipped: list[Skipped] = []
    for r in _read(path):
        found = _row(r)
        if isinstance(found, str):
            skipped.append(Skipped(r["source"], r["model"], found))
        else:
            rows.append((found, "nanotron" if r["framework"] == "nanotron" else "lightning_5d"))
    return rows, skipped


def _row(r: dict[str, str]) -> Row | str:
    if r["task"] != "pretrain":
        return f"not pre-training but {r['task']}"
    if r["precision"].lower() not in ("bf16", "amp_bf16", "bfloat16"):
        return f"precision {r['precision'] or 'not stated'}"
    if r["oom"] not in ("", "0"):
        return "ran out of memory"
    if r["ep"] not in ("", "1"):
        return "mixture of experts"
    speed = r["tokens_per_s_per_gpu"]
    if not speed or "-" in speed:
        return "no single figure for tokens/s"
    missing = [k for k in _NEEDED if not r[k] and not (k == "vocab" and r["framework"] == "nanotron")]
    if missing:
        return f"incomplete: no {', '.join(missing)}"
    gpu = _gpu(r["gpu_type"])
    if gpu is None:
        return f"GPU {r['gpu_type']} is not in the table"
    dp, mbs = int(r["dp"]), int(r["micro_batch"])
    batch = int(r["global_batch_seqs"]) if r["global_batch_seqs"] else dp * mbs  # charts: no accumulation
    if batch % (dp * mbs):
        return f"batch {batch} does not divide over dp{dp} and micro-batches of {mbs}"
    kernels, ac = r["kernels"], r["activation_ckpt"]
    if ac not in ("", "none", "full") and not ac.startswith("selective"):
        return f"recomputation {ac!r} has no token"
    stage = r["zero_stage"]
    zero = 3 if stage.startswith("FSDP") else int(stage or 0)
    tp, pp, cp = int(r["tp"]), int(r["pp"]), int(r["cp"] or 1)
    v = int(r["vpp"] or 1)
    try:
        layout = Layout(
            dp=dp,
            tp=tp,
            sp=r["sp"] != "0" if tp > 1 else False,
            cp=cp,
            pp=pp,
            v=v if pp > 1 else 1,
            zero=zero,
            mbs=mbs,
            ac={"full": 1}.get(ac, "sel" if ac.startswith("selective") else 0),
        )
        if layout.world_size != int(r["gpus"]):
            return f"layout {layout} has {layout.world_size} ranks, the row {r['gpus']} GPUs"
        model = _model(r)
    except (LayoutError, ModelError) as error:
        return str(error)
    fused = r["framework"] != "nanotron" and kernels != "eager"
    case = Case(model, layout, gpu, int(r["seq_len"]), batch, "flash2", fused)
    return Row(
        case=case,
        group=r["source"],
        model=r["model"],
        status="ok",
        step_time_s=None,
        mfu_points=None,
        tokens_per_s_per_gpu=_number(speed),
        memory_gib=_number(r["mem_gib_per_gpu"]),
    )


def _model(r: dict[str, str]) -> ModelSpec:
    """The description whose number of parameters is nearest to the stated one: gated or not, tied or not."""
    candidates = [
        ModelSpec(
            name=r["model"],
            num_layers=int(r["layers"]),
            hidden_size=int(r["hidden"]),
            num_heads=int(r["heads"]),
            num_kv_heads=int(r["kv_heads"] or r["heads"]),
            intermediate_size=int(r["ffn"]),
            vocab_size=int(r["vocab"] or 131072),
            tied=tied,
            gated_mlp=gated,
        )
        for gated in (True, False)
        for tied in (False, True)
    ]
    if not r["params_b"]:
        return candidates[0]
    return min(candidates, key=lambda m: abs(m.num_parameters / 1e9 - float(r["params_b"])))
