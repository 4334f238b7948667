"""What one pipeline rank holds: its layers, embedding and head, and the elements of its weights on the first tp rank."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_5d.advisor.model import ModelSpec
from lightning_5d.advisor.parameters import Framework
from lightning_5d.advisor.schedules import stages_of_rank
from lightning_5d.advisor.stages import cut_layers
from lightning_5d.layout import Layout


def ceil_div(a: int, b: int) -> int:
    """The least whole number of at least a / b."""
    return -(-a // b)


@dataclass(frozen=True)
class RankPart:
    """One pipeline rank's part of a model."""

    layers: tuple[int, ...]
    """Their numbers in the whole model."""
    has_embedding: bool
    has_head: bool
    sends: int
    """Messages to other ranks with every micro-batch: hidden states on, their gradients back."""

    def recomputed(self, ac: int | str) -> int:
        """Layers whose forward pass runs again: all, or every Nth of the whole model."""
        if ac == 0:
            return 0
        return sum((i + 1) % (1 if ac == "sel" else int(ac)) == 0 for i in self.layers)


def rank_part(model: ModelSpec, layout: Layout, framework: Framework, pp_rank: int) -> RankPart:
    """What rank ``pp_rank`` of a resolved layout's pipeline holds."""
    assert layout.v is not None and layout.schedule is not None
    head_layers = model.vocab_size * model.hidden_size / model.dense_layer_parameters
    counts = cut_layers(model.num_layers, layout.num_stages, framework.cut, head_layers)
    own = {r: stages_of_rank(layout.schedule, layout.pp, layout.v, r) for r in range(layout.pp)}
    rank_of = {stage: r for r, stages in own.items() for stage in stages}
    layers = [i for s in own[pp_rank] for i in range(sum(counts[:s]), sum(counts[: s + 1]))]
    # The V schedules put neighbouring stages on one rank: between those nothing is sent.
    sends = sum(rank_of.get(near, pp_rank) != pp_rank for s in own[pp_rank] for near in (s - 1, s + 1))
    return RankPart(tuple(layers), rank_of[0] == pp_rank, rank_of[layout.num_stages - 1] == pp_rank, sends)


def weight_elements(model: ModelSpec, layout: Layout, part: RankPart, shards: int) -> float:
    """Elements of all weights on the first tp rank, the first dimension of each filled up to a multiple of ``shards``."""
    h, tp = model.hidden_size, layout.tp

    def matrix(rows: int, columns: int = 1) -> float:
        return ceil_div(rows, shards) * shards * columns

    up = (2 if model.gated_mlp else 1) * matrix(model.intermediate_size // tp, h)
    dense = up + matrix(h, model.intermediate_size // tp)
    attention = matrix(model.attention_width // tp, h) + 2 * matrix(model.kv_width // tp, h)
    attention += matrix(h, model.attention_width // tp) + 2 * matrix(h)
    shared = 3 * h * model.shared_intermediate_size / tp + model.num_experts * h
    experts = model.expert_parameters / layout.ep / (1 if layout.ep > 1 else tp)
    mixtures = sum(model.num_experts > 0 and i >= model.num_dense_layers for i in part.layers)
    total = len(part.layers) * attention + (len(part.layers) - mixtures) * dense + mixtures * (shared + experts)
    vocabulary = matrix(ceil_div(model.vocab_size, tp), h)
    once = model.tied and part.has_embedding and part.has_head
    return total + vocabulary * (part.has_embedding + part.has_head - once) + part.has_head * matrix(h)
