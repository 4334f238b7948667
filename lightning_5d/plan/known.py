"""Plans of the models we know: our own Llama, and Hugging Face's decoders."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_5d.plan.discovery import classify_layer, discover_plan
from lightning_5d.plan.meta import layer_returns_tuple
from lightning_5d.plan.plan import ParallelPlan


def plan_for_llama(model: nn.Module) -> ParallelPlan:
    """The plan of :class:`lightning_5d.models.Llama`, whose attention takes its number of heads from the width it is given."""
    config: Any = model.config
    return ParallelPlan(
        layers="layers",
        embedding="embed_tokens",
        norm="norm",
        head="lm_head",
        colwise=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
        rowwise=("self_attn.o_proj", "mlp.down_proj"),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        hidden_size=config.hidden_size,
        is_exact=True,
    )


def plan_for_transformers(model: nn.Module) -> ParallelPlan:
    """A plan for a decoder of Hugging Face's: its embedding and head by their own accessors, the rest by discovery."""
    plan = discover_plan(model)
    if plan is None:
        raise ValueError(f"{type(model).__name__} has no list of layers; give LayoutStrategy(plan=ParallelPlan(...))")
    names = {id(m): n for n, m in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    layer = next(iter(model.get_submodule(plan.layers).children()))
    config = model.config
    returns_tuple = layer_returns_tuple(model, plan.layers)
    hidden_size = getattr(config, "hidden_size", None)
    colwise, rowwise, per_head, refusal = classify_layer(layer, hidden_size)
    return ParallelPlan(
        layers=plan.layers,
        embedding=names.get(id(embedding)),
        norm=plan.norm,
        head=names.get(id(head)) if head is not None else None,
        first_only=plan.first_only,
        last_only=plan.last_only,
        colwise=tuple(colwise),
        rowwise=tuple(rowwise),
        per_head=tuple(per_head),
        no_tensor_parallel=refusal,
        tuple_output=_is_annotated_tuple(layer) if returns_tuple is None else returns_tuple,
        labels_shifted_by_model=type(model).__name__.endswith("ForCausalLM"),
        num_heads=getattr(config, "num_attention_heads", None),
        num_kv_heads=getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None),
        hidden_size=hidden_size,  # type: ignore[arg-type]
    )


def _is_annotated_tuple(layer: nn.Module) -> bool:
    """Whether the layer's forward is annotated to return a tuple, as the older families of transformers do."""
    annotation = str(getattr(type(layer).forward, "__annotations__", {}).get("return", ""))
    return "tuple" in annotation.lower()
