"""The free numbers of the advisor's model: what each means, in which unit, between which bounds it may lie.

Values belong to the framework being predicted, not to the GPU: they live in `data/frameworks.yaml`, which
`python -m tests.benchmarks.advisor --refit` writes from published measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Parameter:
    """One number of the model: bounds are what is physically plausible, not what fits."""

    unit: str
    low: float
    high: float
    meaning: str


PARAMETERS: dict[str, Parameter] = {
    # memory
    "gradient_bytes": Parameter("B/parameter", 2, 8, "gradients: 2 in bf16, 4 accumulated in fp32, more when both are alive"),
    "norm_bytes": Parameter("B/(token·h·layer)", 2, 16, "kept by two fused norms: their inputs and outputs"),
    "gathered_bytes": Parameter(
        "B/(token·h·layer)", 0, 8, "norm outputs when they stay whole on every tp rank, even under sequence parallelism"
    ),
    "unfused_norm_bytes": Parameter("B/(token·h·layer)", 0, 30, "extra kept by two norms written in plain torch: fp32 copies"),
    "attention_bytes": Parameter("B/(token·h·layer)", 4, 12, "queries, keys, values and the attention's output"),
    "mlp_bytes": Parameter("B/(token·ffn·layer)", 2, 12, "gate, up, activation and product of the MLP"),
    "score_bytes": Parameter("B/(token·head·key)", 2, 14, "attention probabilities kept by kernels without flash attention"),
    "score_transient_bytes": Parameter("B/(token·head·key)", 0, 20, "the same while one layer's backward runs"),
    "logit_bytes": Parameter("B/(token·vocabulary)", 4, 30, "logits, their fp32 copy, softmax and gradient on the last stage"),
    "extra_in_flight": Parameter(
        "micro-batches", 0, 1.5, "held by a pipeline stage beyond the schedule's own: receive buffers, one being freed"
    ),
    "overhead_gib": Parameter("GiB", 0, 6, "device context, communicators, fragmentation"),
    "usable_share": Parameter("1", 0.8, 1, "of the GPU's memory that a run of this framework reached before it failed"),
    # computation
    "matmul_efficiency": Parameter("1", 0.4, 1.05, "share of the best measured matrix product that large shapes reach"),
    "operand_traffic": Parameter("1", 0.2, 5, "scale of a product's operand traffic, added to its time: small shapes are slower"),
    "flash2_efficiency": Parameter("1", 0.15, 0.9, "share of peak of flash attention 2, counting causal operations"),
    "flash1_efficiency": Parameter("1", 0.08, 0.9, "the same of flash attention 1"),
    "torch_score_traffic": Parameter("B/score", 4, 200, "memory traffic of plain attention, forward"),
    "fused_score_traffic": Parameter("B/score", 2, 200, "the same of Megatron's fused softmax"),
    "norm_traffic": Parameter(
        "B/(token·h)", 0, 150, "memory traffic of a layer's two fused norms and residuals, forward and backward"
    ),
    "unfused_norm_traffic": Parameter("B/(token·h)", 0, 400, "extra traffic of norms written in plain torch"),
    "elementwise_traffic": Parameter("B/(token·h)", 0, 600, "traffic of the rest: rotary, SwiGLU, casts"),
    "head_traffic": Parameter("B/(token·vocabulary)", 0, 100, "traffic of the loss over the logits"),
    "host_layer_s": Parameter("s", 0, 6e-3, "time Python needs to launch one layer, forward and backward: a floor"),
    "host_layer_tp_s": Parameter("s", 0, 2e-2, "the same with tensor parallelism"),
    "host_tp_pp_s": Parameter("s/tp rank", 0, 1e-2, "added per tp rank when tensor and pipeline parallelism meet across nodes"),
    "step_s": Parameter("s", 0, 1, "constant time of a step: optimizer launch, data, logging"),
    "optimizer_traffic": Parameter("B/parameter", 12, 60, "memory traffic of the optimizer's update"),
    # communication
    "tp_bandwidth_share": Parameter(
        "1", 0.1, 1, "of the scale-up link's one-way bandwidth that tensor-parallel collectives reach"
    ),
    "tp_hidden_share": Parameter("1", 0, 0.9, "of tensor-parallel traffic inside a node that hides behind computing"),
    "tp_latency_s": Parameter(
        "s",
        0,
        1e-3,
        "of one exchange of two tensor-parallel ranks: its start and the wait for the later one; grows as their latest does",
    ),
    "tp_exchanges": Parameter(
        "1/layer", 4, 5, "tensor-parallel exchanges, forward and backward; 4.5 when inputs are gathered again"
    ),
    "tp_across_nodes": Parameter("1", 0.1, 20, "speed of tensor parallelism across nodes, relative to the measured table"),
    "dp_bandwidth_gb_s": Parameter("GB/s", 1, 300, "of data-parallel collectives at 8 nodes"),
    "dp_exponent": Parameter("1", 0, 2, "how that bandwidth falls with nodes"),
    "dp_table_scale": Parameter("1", 0.1, 3, "time of a data-parallel collective, relative to the measured table"),
    "dp_overlap": Parameter("1", 0, 1, "share of the last backward pass that hides data-parallel traffic"),
    "reduce_bytes": Parameter("B/parameter", 2, 4, "element size of the gradient reduction"),
    "pp_bandwidth_gb_s": Parameter("GB/s", 1, 50, "between pipeline stages, per rank"),
}


@dataclass(frozen=True)
class Framework:
    """How a training framework behaves, as far as the model needs it."""

    name: str
    about: str
    reference_gpu: str
    """GPU the numbers were found on; others are scaled by their specifications."""
    logits: str
    """`gathered` (whole on every tp rank) or `sharded` over the vocabulary."""
    cut: str
    """How layers are cut into stages: `uniform`, `parameters` or `cumulative`."""
    dp_law: str
    """`power`, `table` (measured all-gather bandwidth by nodes) or `topology` (network cards of the ranks of the group)."""
    rank_order: str
    """`pp_inner`: neighbouring stages may share a node; `pp_outer`: a stage boundary always crosses the network."""
    reduces_early: bool = False
    """Gradients are scattered during the backward of a step's only micro-batch, so ZeRO-1 need not hold them whole."""
    receives_ahead: bool = False
    """A pipeline stage holds a receive buffer for every micro-batch of the step (torch.distributed.pipelining)."""
    attention: str = "flash2"
    fused_norm: bool = True
    values: dict[str, float] = field(default_factory=dict)
    fits: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each fitted parameter: `left_out` (range when a group is left out) and `rows` (what it was fitted on)."""

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def with_values(self, **values: float) -> Framework:
        """The same framework with some parameters changed."""
        unknown = set(values) - set(PARAMETERS)
        if unknown:
            raise ValueError(f"unknown parameters {sorted(unknown)}; allowed: {', '.join(PARAMETERS)}")
        return replace(self, values={**self.values, **values})


@lru_cache(maxsize=1)
def load_frameworks() -> dict[str, Framework]:
    """All frameworks of `data/frameworks.yaml`, by name."""
    loaded = yaml.safe_load((DATA / "frameworks.yaml").read_text())
    frameworks = {}
    for name, entry in loaded.items():
        parameters = entry.pop("parameters")
        values = {k: float(p["value"] if isinstance(p, dict) else p) for k, p in parameters.items()}
        assert set(values) == set(PARAMETERS), f"{name}: {set(values) ^ set(PARAMETERS)}"
        for k, value in values.items():
            assert PARAMETERS[k].low <= value <= PARAMETERS[k].high, f"{name}: {k} = {value} is out of bounds"
        fits = {k: p for k, p in parameters.items() if isinstance(p, dict)}
        frameworks[name] = Framework(name=name, values=values, fits=fits, **entry)
    return frameworks


def find_framework(name: str) -> Framework:
    """The framework of that name.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    frameworks = load_frameworks()
    if name not in frameworks:
        raise ValueError(f"unknown framework {name!r}; known: {', '.join(frameworks)}")
    return frameworks[name]
