"""The advisor's description of the model that is being trained."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from lightning_5d.advisor.model import ModelSpec, describe_model
from lightning_5d.plan import ModelShape

TOLERANCE = 0.1
"""Share of the parameters that a description may miss: biases and learned positions, which are many in a small model."""


def spec_of(shape: ModelShape, module: nn.Module) -> ModelSpec:
    """The description of the dense decoder in ``module``: by its config, or by the sizes of its matrices.

    Whatever it is, it must count the parameters that the model has. ``module`` may be one rank's part.
    Raises ValueError with a sentence when there is none.
    """
    for spec in _by_config(module):
        if spec.num_experts:
            raise ValueError("the model is a mixture of experts, of which MFU counts every expert as used by every token")
        if _is_close(spec, shape):
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
    """Gated and plain MLPs of every width that the layers enter and leave."""
    assert shape.num_heads is not None
    for width in _inner_widths(shape.hidden_size, module):
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


def _inner_widths(hidden: int, module: nn.Module) -> list[int]:
    """Widths to which one matrix of a layer leads, alone or with a gate in it, and from which one leads back.

    The same on every rank: each holds a layer, and a DTensor's shape is that of the whole. What is in no list of layers
    (embeddings, learned positions, the head) is left out.
    """
    in_layer = re.compile(r"\.\d+\.")
    shapes: set[tuple[int, ...]] = {
        tuple(p.shape) for name, p in module.named_parameters() if p.ndim == 2 and in_layer.search(name)
    }
    widths = {size for sizes in shapes for size in sizes}

    def enters_and_leaves(width: int, matrices: set[tuple[int, ...]]) -> bool:
        return (hidden, width) in matrices and not matrices.isdisjoint({(width, hidden), (2 * width, hidden)})

    turned: set[tuple[int, ...]] = {(second, first) for first, second in shapes}  # Conv1D keeps its matrix the other way round
    return sorted(w for w in widths if enters_and_leaves(w, shapes) or enters_and_leaves(w, turned))
