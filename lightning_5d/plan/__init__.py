"""Where things are in a model: registered plans, Hugging Face's models, discovery."""

from lightning_5d.plan.plan import ParallelPlan
from lightning_5d.plan.registry import find_plan, model_shape, register_plan
from lightning_5d.plan.shape import ModelShape, shape_of

__all__ = ["ModelShape", "ParallelPlan", "find_plan", "model_shape", "register_plan", "shape_of"]
