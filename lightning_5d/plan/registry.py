"""Which plan belongs to which model: registered classes first, then what Hugging Face's models say, then discovery."""

from __future__ import annotations

import sys

from torch import nn

from lightning_5d.plan.discovery import classify_layer, discover_plan
from lightning_5d.plan.plan import MakePlan, ParallelPlan
from lightning_5d.plan.shape import ModelShape, shape_of

_PLANS: dict[type[nn.Module], MakePlan] = {}


def register_plan(model_class: type[nn.Module], make_plan: MakePlan) -> None:
    """Use ``make_plan(model)`` for instances of ``model_class``, wherever they sit in a LightningModule."""
    _PLANS[model_class] = make_plan


def find_plan(module: nn.Module) -> ParallelPlan | None:
    """The plan of the model inside ``module``, with names relative to ``module``; None when no layers are found."""
    for name, part in module.named_modules():
        make_plan = _make_plan_for(part)
        if make_plan is not None:
            return make_plan(part).under(name)
    return discover_plan(module)


def model_shape(module: nn.Module) -> ModelShape | None:
    """Sizes of the model inside ``module``, or None when they cannot be told. The module must be whole."""
    plan = find_plan(module)
    return None if plan is None else shape_of(module, plan)


def _make_plan_for(part: nn.Module) -> MakePlan | None:
    for cls in type(part).__mro__:
        if cls in _PLANS:
            return _PLANS[cls]
    transformers = sys.modules.get("transformers")  # a model of theirs cannot exist without it
    if transformers is not None and isinstance(part, transformers.PreTrainedModel):
        return plan_for_transformers
    return None


def plan_for_transformers(model: nn.Module) -> ParallelPlan:
    """A plan for a decoder of Hugging Face's: its embedding and head by their own accessors, the rest by discovery."""
    plan = discover_plan(model)
    if plan is None:
        raise ValueError(f"{type(model).__name__} has no list of layers; give LayoutStrategy(plan=ParallelPlan(...))")
    names = {id(m): n for n, m in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    layer = next(iter(model.get_submodule(plan.layers).children()))
    config = model.config
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
        tuple_output=_returns_tuple(layer),
        labels_shifted_by_model=type(model).__name__.endswith("ForCausalLM"),
        num_heads=getattr(config, "num_attention_heads", None),
        num_kv_heads=getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None),
        hidden_size=hidden_size,  # type: ignore[arg-type]
    )


def _returns_tuple(layer: nn.Module) -> bool:
    """Whether the layer's forward is annotated to return a tuple, as the older families of transformers do."""
    annotation = str(getattr(type(layer).forward, "__annotations__", {}).get("return", ""))
    return "tuple" in annotation.lower()
