"""The advisor's description of the model that is being trained."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lightning_5d.advisor.model import ModelSpec, describe_model
from lightning_5d.plan import ModelShape

TOLERANCE = 0.03
"""Share of the parameters that a description may miss: biases, learned positions."""


def spec_of(shape: ModelShape, module: nn.Module) -> ModelSpec:
    """The description of the dense decoder in ``module``: by its config, or by the sizes of its matrices.

    Whatever it is, it must count the parameters that the model has. ``module`` may be one rank's part.
    Raises ValueError with a sentence when there is none.
    """
    for spec in _by_config(module):
        if _is_close(spec, shape):
            if spec.num_experts:
                raise ValueError("the model is a mixture of experts, of which MFU counts every expert as used by every token")
            return spec
    name = type(module).__name__
    if shape.num_heads is None:
        raise ValueError(
            f"the number of attention heads of {name} is not known: give it a `config` with Hugging Face's names, or a plan "
            "with num_heads (register_plan)"
        )
    found = min(_by_matrices(shape, module), key=lambda spec: abs(spec.num_parameters - shape.num_parameters), default=None)
    if found is None or not _is_close(found, shape):
        nearest = f"the nearest it can describe has {found.num_parameters:,}" if found else "it can describe none with its sizes"
        raise ValueError(
            f"{name} is no decoder that the advisor can describe (attention and one dense MLP a layer): it has "
            f"{shape.num_parameters:,} parameters, {nearest}"
        )
    return found


def _is_close(spec: ModelSpec, shape: ModelShape) -> bool:
    return abs(spec.num_parameters - shape.num_parameters) <= TOLERANCE * shape.num_parameters


def _by_config(module: nn.Module) -> Iterator[ModelSpec]:
    for part in module.modules():
        config = getattr(part, "config", None)
        if config is None or isinstance(config, str):
            continue
        try:
            yield describe_model(config)
        except (ValueError, TypeError):  # a config of something else
            continue


def _by_matrices(shape: ModelShape, module: nn.Module) -> Iterator[ModelSpec]:
    """Gated and plain MLPs of every width that a matrix of the model has (a DTensor's shape is that of the whole)."""
    assert shape.num_heads is not None
    widths = sorted({size for p in module.parameters() if p.ndim == 2 for size in p.shape})
    for width in widths:
        for gated in (True, False):
            try:
                yield ModelSpec(
                    name=type(module).__name__,
                    num_layers=shape.num_layers,
                    hidden_size=shape.hidden_size,
                    num_heads=shape.num_heads,
                    num_kv_heads=shape.num_kv_heads or shape.num_heads,
                    intermediate_size=width,
                    vocab_size=shape.vocab_size,
                    tied=shape.tied,
                    gated_mlp=gated,
                )
            except ValueError:  # heads that do not divide: no width changes that
                return
