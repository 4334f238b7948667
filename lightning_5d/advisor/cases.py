"""The cases to predict, as arrays: one entry a (model, layout, GPU, batch). Every formula of the advisor works on these.

Symbols are those of the field: h hidden, f MLP width, a heads, s sequence, b micro-batch, m micro-batches a step, t tp, p pp,
c cp, d data-parallel ranks that ZeRO shards over, T = s·b/c tokens of a micro-batch on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_5d.advisor.hardware import Gpu, find_gpu
from lightning_5d.advisor.model import ModelSpec
from lightning_5d.advisor.parameters import Framework
from lightning_5d.advisor.schedules import V_SHAPED, stages_of_rank
from lightning_5d.advisor.simulate import in_flight, unit_bubble
from lightning_5d.advisor.stages import cut_layers
from lightning_5d.layout import Layout

Array = NDArray[np.float64]
ATTENTION_KERNELS = ("flash2", "flash1", "fused", "torch")
"""`fused` is Megatron's fused softmax; it and `torch` keep the scores."""


@dataclass(frozen=True)
class Case:
    """One thing to predict. `layout` must be resolved (dp known) and say its micro-batch size."""

    model: ModelSpec
    layout: Layout
    gpu: Gpu
    seq_len: int
    global_batch: int
    attention: str = "flash2"
    fused_norm: bool = True

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch; by default 1 under pp, else a data-parallel rank's whole batch."""
        if self.layout.mbs is not None:
            return self.layout.mbs
        return 1 if self.layout.pp > 1 else max(1, self.global_batch // (self.layout.dp or 1))

    @property
    def num_microbatches(self) -> int:
        return max(1, self.global_batch // ((self.layout.dp or 1) * self.micro_batch))


class Cases:
    """Columns of many cases (numpy arrays of equal length), named by the symbols above where they have one."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = columns
        self.__dict__.update(columns)

    def __getattr__(self, name: str) -> Any:  # for the type checker: columns are set in __init__
        raise AttributeError(name)

    def __len__(self) -> int:
        return len(self.columns["tp"])

    def select(self, mask: NDArray[Any]) -> Cases:
        """The cases at a boolean mask or at indices."""
        return Cases({k: v[mask] for k, v in self.columns.items()})


def collect(cases: Sequence[Case], framework: Framework) -> Cases:
    """The columns of `cases`, with their layers cut into stages as the framework does."""
    gpus = {id(case.gpu): case.gpu for case in cases}
    gpu_columns = {key: _gpu_columns(gpu, framework) for key, gpu in gpus.items()}
    rows = [(*_model_columns(case.model), *_layout_columns(case, framework), *gpu_columns[id(case.gpu)]) for case in cases]
    table = np.array(rows, dtype=np.float64).reshape(len(cases), -1)
    names = (*_MODEL, *_LAYOUT, *_GPU)
    return derive({name: table[:, i].copy() for i, name in enumerate(names)})


_MODEL = (
    "layers", "h", "a", "attention_width", "kv_width", "ffn", "mlp_matrices",
    "vocab", "tied",
    "dense_parameters", "moe_parameters", "expert_parameters", "num_experts", "experts_per_token", "expert_ffn",
    "shared_ffn", "moe_share",
)  # fmt: skip
_LAYOUT = (
    "dp", "rep", "zero", "tp", "sp", "cp", "cp_ring", "cp_allgather", "cp_ulysses", "pp", "chunks", "gpipe", "b", "m", "ep",
    "recomputed", "selective",
    "s", "gpus", "flash", "flash1", "fused_scores", "plain_scores", "unfused",
    "layers_first", "layers_middle", "layers_last", "layers_slow", "embedding_first", "head_first", "embedding_last", "head_last",
    "live_first", "live_middle", "live_last", "bubble_units",
)  # fmt: skip
_GPU = ("peak_flops", "ceiling_flops", "hbm_bytes_s", "usable_gib", "node", "scaleup_gb_s", "nic_gb_s", "nic_scale")


@lru_cache(maxsize=256)
def _model_columns(m: ModelSpec) -> tuple[float, ...]:
    return (
        m.num_layers, m.hidden_size, m.num_heads, m.attention_width, m.kv_width, m.intermediate_size,
        3 if m.gated_mlp else 2, m.vocab_size, m.tied,
        m.dense_layer_parameters, m.moe_layer_shared_parameters if m.num_experts else 0,
        m.expert_parameters if m.num_experts else 0,
        m.num_experts, m.experts_per_token, m.expert_intermediate_size, m.shared_intermediate_size,
        m.num_moe_layers / m.num_layers,
    )  # fmt: skip


def _gpu_columns(gpu: Gpu, framework: Framework) -> tuple[float, ...]:
    peak = gpu.peak("bf16") or 0.0
    reference = find_gpu(framework.reference_gpu)
    assert reference is not None and reference.internode_uni_gb_s is not None
    nic = gpu.internode_uni_gb_s or reference.internode_uni_gb_s
    return (
        peak * 1e12, gpu.measured_tflops.get("bf16", 0.8 * peak) * 1e12,
        gpu.hbm_tb_s * 1e12, gpu.usable_gib or 0.99 * gpu.hbm_gib,
        gpu.scaleup_domain_gpus, gpu.scaleup_uni_gb_s, nic, nic / reference.internode_uni_gb_s,
    )  # fmt: skip


def _layout_columns(case: Case, framework: Framework) -> tuple[float, ...]:
    x, model = case.layout, case.model
    assert x.dp is not None and x.v is not None and x.schedule is not None
    m = case.num_microbatches
    ac = x.ac
    recomputed = 0.0 if ac in (0, "sel") else (model.num_layers // int(ac)) / model.num_layers
    return (
        x.dp, x.rep, x.zero, x.tp, bool(x.sp), x.cp,
        x.cp_method == "ring", x.cp_method == "allgather", x.cp_method == "ulysses", x.pp, x.v, x.schedule == "gpipe",
        case.micro_batch, m, x.ep, recomputed, ac == "sel", case.seq_len, x.world_size,
        case.attention in ("flash1", "flash2"), case.attention == "flash1", case.attention == "fused",
        case.attention == "torch", not case.fused_norm,
        *stage_columns(model, framework.cut, x.pp, x.v, x.schedule), *schedule_columns(x.schedule, x.pp, x.v, m),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def stage_columns(model: ModelSpec, cut: str, pp: int, chunks: int, schedule: str) -> tuple[float, ...]:
    """Layers of the first rank, most of any between, of the last and of the slowest; who holds embedding and head."""
    head_layers = model.vocab_size * model.hidden_size / model.dense_layer_parameters
    counts = cut_layers(model.num_layers, pp * chunks, cut, head_layers)
    per_rank = [sum(counts[s] for s in stages_of_rank(schedule, pp, chunks, r)) for r in range(pp)]
    both_first = pp == 1 or schedule in V_SHAPED
    two = 0 if model.tied and both_first else 1  # a tied matrix is there once on a rank that has both ends
    return (
        per_rank[0], max(per_rank[1:-1], default=0), per_rank[-1],
        max(per_rank[:-1] if pp > 1 else per_rank),
        1 + two if both_first else 1, both_first,
        0 if both_first and pp > 1 else (1 + two if pp == 1 else 1), not both_first or pp == 1,
    )  # fmt: skip


def schedule_columns(schedule: str, pp: int, chunks: int, m: int) -> tuple[float, ...]:
    """Live micro-batches of the first, second and last rank, and idle time in units of one micro-batch on a rank."""
    live = in_flight(schedule, pp, chunks, m)
    return live[0], max(live[1:-1], default=0.0), live[-1], unit_bubble(schedule, pp, chunks, m)


def derive(columns: dict[str, Any]) -> Cases:
    """Adds what follows from the columns: tokens, divisors, parameters of each rank."""
    c = Cases(dict(columns))
    add: dict[str, Any] = {}
    add["tokens"] = c.s * c.b / c.cp
    add["sp_tp"] = np.where(c.sp > 0, c.tp, 1.0)
    """Divisor of what sequence parallelism shards."""
    add["shard"] = c.dp * c.cp / c.rep
    add["expert_shard"] = np.maximum(add["shard"] / c.ep, 1.0)
    add["layer_parameters"] = ((1 - c.moe_share) * c.dense_parameters + c.moe_share * c.moe_parameters) / c.tp
    add["layer_experts"] = c.moe_share * c.expert_parameters / c.ep / np.where(c.ep > 1, 1.0, c.tp)
    add["embedding_parameters"] = c.vocab * c.h / c.tp
    return Cases({**c.columns, **add})


def concatenate(parts: Iterable[Cases]) -> Cases:
    """All cases in one."""
    parts = list(parts)
    return Cases({k: np.concatenate([p.columns[k] for p in parts]) for k in parts[0].columns})
