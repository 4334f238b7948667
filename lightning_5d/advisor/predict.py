"""Predicts one layout: memory of the worst rank, step time, MFU and what they are made of."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lightning_5d.advisor.cases import ATTENTION_KERNELS, Case, Cases, collect
from lightning_5d.advisor.hardware import Gpu
from lightning_5d.advisor.memory import GIB, RANKS, limit_gib, memory_parts
from lightning_5d.advisor.model import ModelSpec, describe_model
from lightning_5d.advisor.own_gpu import require_gpu
from lightning_5d.advisor.parameters import Framework, find_framework
from lightning_5d.advisor.schedules import V_SHAPED, stages_of_rank
from lightning_5d.advisor.search import lacks
from lightning_5d.advisor.simulate import Timeline, in_flight, simulate
from lightning_5d.advisor.stages import cut_layers
from lightning_5d.advisor.step import PARTS, StepTime, mfu, step_time
from lightning_5d.layout import Layout, LayoutError, check_model

TIGHT_GIB = 3.0
"""A layout that leaves less than this is called tight: the model's memory errors are of that size."""
SIMULATED = ("interleaved", "zb", "zbv", "dualpipev")
"""Schedules whose makespan `estimate` simulates; those of GPipe and 1F1B have exact closed forms."""


@dataclass(frozen=True)
class Estimate:
    """What one layout needs and gives. Times in seconds a step, memory in GiB a GPU."""

    layout: str
    model: str
    gpu: str
    framework: str
    num_gpus: int
    seq_len: int
    global_batch: int
    micro_batch: int
    num_microbatches: int

    fits: bool
    verdict: str
    """`fits`, `tight` (fits with less than 3 GiB to spare) or `oom`."""
    memory_gib: float
    """Worst rank."""
    memory_rank0_gib: float
    """First pipeline rank, what a monitor on rank 0 shows."""
    limit_gib: float
    worst_stage: int
    """Pipeline rank that needs most."""
    memory_parts_gib: dict[str, float]
    """Parameters, gradients, optimizer, activations, logits and buffers of the worst rank."""

    step_time_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    """0 to 1, by the `palm` formula and the dense bf16 peak."""
    bubble: float
    """Idle time of the pipeline as a share of its work."""
    exposed_communication: float
    """Share of the step that waits for communication of any kind."""
    time_parts_s: dict[str, float]

    @property
    def margin_gib(self) -> float:
        """Memory left before the limit; negative when it does not fit."""
        return self.limit_gib - self.memory_gib

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "margin_gib": self.margin_gib}


def estimate(
    model: Any,
    layout: str | Layout,
    *,
    gpu: str | Gpu,
    num_gpus: int,
    seq_len: int,
    global_batch: int,
    framework: str | Framework = "lightning_5d",
    **options: Any,
) -> Estimate:
    """Predict one layout.

    Args:
        model: preset's name, Hugging Face config (object, dict, path), `LlamaConfig`, or `ModelSpec`.
        layout: layout string or `Layout`; `dp` follows from `num_gpus`.
        gpu: name (`a100-80gb`, `h100`...) or `Gpu`.
        num_gpus: GPUs of the whole job.
        seq_len: tokens of a sequence.
        global_batch: sequences of a step.
        framework: whose behaviour to predict: `lightning_5d`, `aleph-alpha`, `nanotron`.
        options: `attention` (`flash2`, `flash1`, `fused`, `torch`) and `fused_norm`; default: the framework's.

    Raises:
        ValueError: anything that cannot be (LayoutError and ModelError are such); the message says what is allowed.
    """
    rules = framework if isinstance(framework, Framework) else find_framework(framework)
    case = make_case(model, layout, gpu, num_gpus, seq_len, global_batch, rules, **options)
    return estimate_cases([case], rules)[0]


def make_case(
    model: Any,
    layout: str | Layout,
    gpu: str | Gpu,
    num_gpus: int,
    seq_len: int,
    global_batch: int,
    framework: Framework,
    attention: str | None = None,
    fused_norm: bool | None = None,
) -> Case:
    """The checked, resolved case of an `estimate`."""
    spec = describe_model(model)
    device = gpu if isinstance(gpu, Gpu) else require_gpu(gpu)
    check_sizes(num_gpus=num_gpus, seq_len=seq_len, global_batch=global_batch)
    kernel = attention or framework.attention
    if kernel == "megatron":
        kernel = "fused"  # the paper's name for it
    if kernel not in ATTENTION_KERNELS:
        raise ValueError(f"unknown attention {attention!r}; allowed: {', '.join(ATTENTION_KERNELS)}")
    if not isinstance(layout, (str, Layout)):
        raise ValueError(f"layout must be a layout string such as tp2_zero1 or a Layout, not {reprlib.repr(layout)}")
    parsed = Layout.parse(layout) if isinstance(layout, str) else layout
    resolved = parsed.resolve(int(num_gpus))
    case = Case(
        spec,
        resolved,
        device,
        int(seq_len),
        int(global_batch),
        kernel,
        framework.fused_norm if fused_norm is None else fused_norm,
    )
    check_case(case, framework)
    return case


LARGEST = {"num_gpus": 10_000_000, "seq_len": 1_000_000_000, "global_batch": 1_000_000_000}
"""Sizes that are answered: far above any job, and few enough for the search, which tries all divisors."""


def check_sizes(**sizes: Any) -> None:
    """Raises a ValueError for a size that is no whole number of at least 1, or above those that are answered."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {reprlib.repr(value)}")
        if name in LARGEST and value > LARGEST[name]:
            raise ValueError(f"{name} must be at most {LARGEST[name]:,}, not {reprlib.repr(value)}")


def check_case(case: Case, framework: Framework) -> None:
    """Raises a ValueError that says why a case cannot run at all."""
    layout, spec = case.layout, case.model
    assert layout.dp is not None
    if case.global_batch % layout.dp:
        raise LayoutError(
            f"layout '{layout}': a global batch of {case.global_batch} sequences does not divide over dp{layout.dp}"
        )
    per_replica = case.global_batch // layout.dp
    if per_replica % case.micro_batch:
        raise LayoutError(
            f"layout '{layout}': mbs{case.micro_batch} does not divide the {per_replica} sequences of a replica "
            f"(global batch {case.global_batch} over dp{layout.dp})"
        )
    if layout.ep > 1 and (spec.num_experts == 0 or spec.num_experts % layout.ep):
        have = f"has {spec.num_experts} experts" if spec.num_experts else "has no experts"
        raise LayoutError(f"layout '{layout}': ep{layout.ep} does not work, {spec.name} {have}")
    if isinstance(layout.ac, int) and layout.ac > spec.num_layers:
        raise LayoutError(
            f"layout '{layout}': ac{layout.ac} recomputes every {layout.ac}th of {spec.num_layers} layers, which is none"
        )
    lacking = lacks(framework, layout)
    if lacking is not None:
        raise LayoutError(f"layout '{layout}': {lacking}")
    # nanotron puts embedding, last norm, head, cast and loss on stages of their own: 28 layers did run on 32 stages.
    fewer_layers = framework.name == "nanotron" and layout.num_stages <= spec.num_layers + 5
    check_model(
        layout,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        num_layers=None if fewer_layers else spec.num_layers,
        seq_len=case.seq_len,
        # Fewer micro-batches than stages are refused by torch's schedules only: nanotron ran them.
        batch_size_per_replica=per_replica if framework.name == "lightning_5d" else None,
    )


def estimate_cases(cases: Sequence[Case], framework: Framework, columns: Cases | None = None) -> list[Estimate]:
    """Estimates of many cases at once; `columns` when they have been collected already."""
    c = collect(cases, framework) if columns is None else columns
    parts = memory_parts(c, framework)
    totals = np.stack([sum(parts[rank].values()) for rank in RANKS]) / GIB
    limits = limit_gib(c, framework)
    time = step_time(c, framework)
    shares = mfu(c, time.total_s)
    results = []
    for i, case in enumerate(cases):
        worst = int(totals[:, i].argmax())
        seconds, scale, bubble_s = float(time.total_s[i]), 1.0, float(time.parts["bubble"][i])
        if case.layout.pp > 1 and case.layout.schedule in SIMULATED:
            lost = idle_s(case, framework, time, i)
            scale = (seconds - bubble_s + lost) / seconds
            seconds, bubble_s = seconds - bubble_s + lost, lost
        time_parts = {k: float(time.parts[k][i]) for k in PARTS}
        time_parts["bubble"] = bubble_s
        work = seconds - sum(time_parts[k] for k in ("bubble", "data_parallel", "optimizer", "constant"))
        talk = sum(
            time_parts[k]
            for k in ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_transfer", "data_parallel")
        )
        memory = float(totals[worst, i])
        limit = float(limits[i])
        results.append(
            Estimate(
                layout=str(case.layout),
                model=case.model.name,
                gpu=case.gpu.name,
                framework=framework.name,
                num_gpus=case.layout.world_size,
                seq_len=case.seq_len,
                global_batch=case.global_batch,
                micro_batch=case.micro_batch,
                num_microbatches=case.num_microbatches,
                fits=memory <= limit,
                verdict="oom" if memory > limit else "tight" if memory > limit - TIGHT_GIB else "fits",
                memory_gib=memory,
                memory_rank0_gib=float(totals[0, i]),
                limit_gib=limit,
                worst_stage=(0, 1, case.layout.pp - 1)[worst],
                memory_parts_gib={k: float(v[i]) / GIB for k, v in parts[RANKS[worst]].items()},
                step_time_s=seconds,
                tokens_per_s_per_gpu=case.seq_len * case.global_batch / (seconds * case.layout.world_size),
                mfu=float(shares[i]) / scale,
                bubble=bubble_s / work if work > 0 else 0.0,
                exposed_communication=talk / seconds,
                time_parts_s=time_parts,
            )
        )
    return results


def idle_s(case: Case, framework: Framework, time: StepTime, i: int) -> float:
    """Idle time of the slowest pipeline rank by event simulation. What repeats in a long batch is not simulated again."""
    pp, many = case.layout.pp, case.num_microbatches
    m = many
    if many > 6 * pp and case.layout.schedule in V_SHAPED:
        m = 4 * pp + many % pp  # any number runs
    elif many > 6 * pp:
        rounds = many // pp
        m = 4 * pp if many % pp == 0 else many if many % rounds or rounds < 2 else 4 * (many // rounds)
        m = m if _runs(case, m) else many
    timeline = pipeline_timeline(case, framework, time, i, m)
    return max(timeline.makespan_s - m * float(time.slowest_s[i]), 0.0)


def _runs(case: Case, m: int) -> bool:
    from lightning_5d.advisor.schedules import schedule_problem

    layout = case.layout
    return schedule_problem(str(layout.schedule), layout.pp, layout.v or 1, m) is None


def pipeline_timeline(
    case: Case, framework: Framework, time: StepTime, i: int, num_microbatches: int, keep_events: bool = False
) -> Timeline:
    """The schedule's actions run with the predicted durations of each stage; a stage's transfers are part of its durations."""
    layout, spec = case.layout, case.model
    assert layout.v is not None and layout.schedule is not None
    head_layers = spec.vocab_size * spec.hidden_size / spec.dense_layer_parameters
    counts = cut_layers(spec.num_layers, layout.num_stages, framework.cut, head_layers)
    send = float(time.p2p_s[i]) / layout.v / 2
    forward, backward = float(time.layer_forward_s[i]), float(time.layer_backward_s[i])
    weight = float(time.layer_weight_s[i])
    head = [0.0] * (len(counts) - 1) + [float(time.head_s[i])]
    return simulate(
        layout.schedule,
        layout.pp,
        layout.v,
        num_microbatches,
        [n * forward + h / 3 + send for n, h in zip(counts, head, strict=True)],
        [n * (backward - weight) + h / 3 + send for n, h in zip(counts, head, strict=True)],
        [n * weight + h / 3 for n, h in zip(counts, head, strict=True)],
        keep_events=keep_events,
    )


def layers_by_rank(spec: ModelSpec, layout: Layout, framework: Framework) -> list[int]:
    """Layers of each pipeline rank."""
    assert layout.v is not None and layout.schedule is not None
    head_layers = spec.vocab_size * spec.hidden_size / spec.dense_layer_parameters
    counts = cut_layers(spec.num_layers, layout.num_stages, framework.cut, head_layers)
    return [sum(counts[s] for s in stages_of_rank(layout.schedule, layout.pp, layout.v, r)) for r in range(layout.pp)]


def live_by_rank(case: Case) -> tuple[float, ...]:
    """Micro-batches alive at once on each pipeline rank."""
    layout = case.layout
    assert layout.v is not None and layout.schedule is not None
    return in_flight(layout.schedule, layout.pp, layout.v, case.num_microbatches)
