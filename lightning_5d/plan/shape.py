"""The sizes of a whole model that arithmetic needs (operations, memory), taken before it is cut."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lightning_5d.plan.plan import ParallelPlan


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a whole decoder, whatever part of it this rank holds."""

    num_parameters: int
    """All parameters, each once (a tied matrix counts once)."""
    num_embedding_parameters: int
    """Parameters of ONE embedding matrix, vocabulary times hidden size."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    tied: bool
    """Whether the output projection is the embedding."""
    num_heads: int | None = None
    num_kv_heads: int | None = None


def shape_of(module: nn.Module, plan: ParallelPlan) -> ModelShape | None:
    """Sizes of the model in ``module``; None when it has no embedding. ``module`` must not have been cut yet."""
    if plan.embedding is None:
        return None
    weight = getattr(module.get_submodule(plan.embedding), "weight", None)
    if weight is None:
        return None
    head = getattr(module.get_submodule(plan.head), "weight", None) if plan.head is not None else weight
    return ModelShape(
        num_parameters=sum(p.numel() for p in module.parameters()),
        num_embedding_parameters=weight.numel(),
        num_layers=len(list(module.get_submodule(plan.layers).children())),
        hidden_size=plan.hidden_size or weight.shape[1],
        vocab_size=weight.shape[0],
        tied=head is weight,
        num_heads=plan.num_heads,
        num_kv_heads=plan.num_kv_heads,
    )
