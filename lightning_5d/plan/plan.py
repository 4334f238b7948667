"""Where things are in a model: the only knowledge about it that cutting and sharding need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ParallelPlan:
    """Names of a model's parts, relative to the module the plan is for (a LightningModule, or the model inside it)."""

    layers: str
    """The list of layers (``nn.ModuleList`` or ``nn.Sequential``): what pipeline stages share out."""
    embedding: str | None = None
    """The token embedding, called with integer ids; split over the vocabulary by tensor parallelism."""
    norm: str | None = None
    """The norm behind the last layer."""
    head: str | None = None
    """The projection to the vocabulary; split over the vocabulary by tensor parallelism, its output is gathered."""
    first_only: tuple[str, ...] = ()
    """Further modules with parameters that run before the layers (learned positions, an embedding norm)."""
    last_only: tuple[str, ...] = ()
    """Further modules with parameters that run after the layers."""
    colwise: tuple[str, ...] = ()
    """Linear modules inside a layer that are split by output (query, key, value, gate, up)."""
    rowwise: tuple[str, ...] = ()
    """Linear modules inside a layer that are split by input (attention's output, down)."""
    per_head: tuple[str, ...] = ()
    """Modules inside a layer that work on each head alone (query and key norms): whole on every tensor-parallel rank."""
    no_tensor_parallel: str | None = None
    """Why this model cannot be split by tensor parallelism; None when it can."""
    tuple_output: bool = False
    """Whether layers return ``(hidden, ...)`` instead of ``hidden``."""
    labels_shifted_by_model: bool = False
    """Whether the model itself shifts ``labels`` by one: their first column is then no target."""
    is_exact: bool = False
    """Whether layers are known to run on some of their heads. Otherwise they are helped to, and checked when they are split."""
    num_heads: int | None = None
    num_kv_heads: int | None = None
    hidden_size: int | None = None
    """Width of the hidden state between layers; None: the embedding's width."""

    def under(self, prefix: str) -> ParallelPlan:
        """The same plan with every module name below ``prefix``."""
        if not prefix:
            return self

        def move(name: str | None) -> str | None:
            return None if name is None else f"{prefix}.{name}"

        return dataclasses.replace(
            self,
            layers=f"{prefix}.{self.layers}",
            embedding=move(self.embedding),
            norm=move(self.norm),
            head=move(self.head),
            first_only=tuple(f"{prefix}.{name}" for name in self.first_only),
            last_only=tuple(f"{prefix}.{name}" for name in self.last_only),
        )

    def validate(self, module: nn.Module) -> None:
        """Raises ``ValueError`` naming the first part that ``module`` does not have."""
        for field in ("layers", "embedding", "norm", "head"):
            name = getattr(self, field)
            if name is not None:
                _require(module, field, name)
        for field in ("first_only", "last_only"):
            for name in getattr(self, field):
                _require(module, field, name)
        layers = module.get_submodule(self.layers)
        if not isinstance(layers, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) or not len(layers):
            raise ValueError(
                f"ParallelPlan(layers={self.layers!r}) must name a non-empty ModuleList, got {type(layers).__name__}"
            )
        for field in ("colwise", "rowwise", "per_head"):
            for name in getattr(self, field):
                for index, layer in layers.named_children():
                    try:
                        layer.get_submodule(name)
                    except AttributeError:
                        raise ValueError(f"ParallelPlan({field}=...): layer {index} has no module {name!r}") from None


def _require(module: nn.Module, field: str, name: str) -> None:
    try:
        module.get_submodule(name)
    except AttributeError:
        near = [n for n, _ in module.named_modules() if n.rpartition(".")[2] == name.rpartition(".")[2]][:3]
        hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"ParallelPlan({field}={name!r}): {type(module).__name__} has no module of that name{hint}") from None


MakePlan = Callable[[nn.Module], ParallelPlan]
