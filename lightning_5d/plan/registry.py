"""Which plan belongs to which model: registered classes first, then what Hugging Face's models say, then discovery."""

from __future__ import annotations

import sys

from torch import nn

from lightning_5d.plan.discovery import discover_plan
from lightning_5d.plan.known import plan_for_llama, plan_for_transformers
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
    # A model of theirs cannot exist before its module was imported. `transformers` alone, which torchmetrics imports, would
    # import it when asked for a class: 0.2 s and more in every process.
    models = sys.modules.get("lightning_5d.models.llama")
    if models is not None and isinstance(part, models.Llama):
        return plan_for_llama
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is not None and isinstance(part, transformers.PreTrainedModel):
        return plan_for_transformers
    return None
