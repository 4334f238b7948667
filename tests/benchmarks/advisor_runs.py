"""Rows of `published_runs.csv` that the advisor can be asked about, and why not of the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lightning_5d.advisor.cases import Case
from lightning_5d.advisor.hardware import Gpu, find_gpu
from lightning_5d.advisor.model import ModelSpec
from lightning_5d.layout import Layout
from tests.benchmarks.advisor_rows import RUNS, Cells, Row, Skipped, read_table

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
_COLUMNS = (
    *_NEEDED, "source", "model", "params_b", "kv_heads", "gpu_type", "global_batch_seqs", "sp", "vpp", "cp", "ep", "zero_stage",
    "activation_ckpt", "precision", "framework", "tokens_per_s_per_gpu", "mem_gib_per_gpu", "oom", "kernels", "task",
)  # fmt: skip


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
    for r in read_table(path, _COLUMNS):
        try:
            found = _row(r)
        except ValueError as error:  # LayoutError and ModelError are such
            found = str(error)
        if isinstance(found, str):
            skipped.append(Skipped(r["source"], r["model"], found))
        else:
            rows.append((found, "nanotron" if r["framework"] == "nanotron" else "lightning_5d"))
    return rows, skipped


def _row(r: Cells) -> Row | str:
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
    dp, mbs = r.whole("dp"), r.whole("micro_batch")
    batch = r.whole("global_batch_seqs") if r["global_batch_seqs"] else dp * mbs  # charts: no accumulation
    if batch % (dp * mbs):
        return f"batch {batch} does not divide over dp{dp} and micro-batches of {mbs}"
    kernels, ac = r["kernels"], r["activation_ckpt"]
    if ac not in ("", "none", "full") and not ac.startswith("selective"):
        return f"recomputation {ac!r} has no token"
    stage = r["zero_stage"]
    zero = 3 if stage.startswith("FSDP") else r.whole("zero_stage", 0) if stage else 0
    tp, pp = r.whole("tp"), r.whole("pp")
    cp, v = (r.whole(c) if r[c] else 1 for c in ("cp", "vpp"))
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
    if layout.world_size != r.whole("gpus"):
        return f"layout {layout} has {layout.world_size} ranks, the row {r['gpus']} GPUs"
    fused = r["framework"] != "nanotron" and kernels != "eager"
    case = Case(_model(r), layout, gpu, r.whole("seq_len"), batch, "flash2", fused)
    return Row(
        case=case,
        group=r["source"],
        model=r["model"],
        status="ok",
        step_time_s=None,
        mfu_points=None,
        tokens_per_s_per_gpu=r.positive("tokens_per_s_per_gpu"),
        memory_gib=r.positive("mem_gib_per_gpu") if r["mem_gib_per_gpu"] else None,
    )


def _model(r: Cells) -> ModelSpec:
    """The description whose number of parameters is nearest to the stated one: gated or not, tied or not."""
    candidates = [
        ModelSpec(
            name=r["model"],
            num_layers=r.whole("layers"),
            hidden_size=r.whole("hidden"),
            num_heads=r.whole("heads"),
            num_kv_heads=r.whole("kv_heads" if r["kv_heads"] else "heads"),
            intermediate_size=r.whole("ffn"),
            vocab_size=r.whole("vocab") if r["vocab"] else 131072,
            tied=tied,
            gated_mlp=gated,
        )
        for gated in (True, False)
        for tied in (False, True)
    ]
    if not r["params_b"]:
        return candidates[0]
    return min(candidates, key=lambda m: abs(m.num_parameters / 1e9 - r.positive("params_b")))
