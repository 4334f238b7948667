"""The order of the passes that turn a LightningModule into one rank's part of it.

cut -> (per leaf) give weights, split over tp -> recompute -> (per layer, then the rest) data parallelism
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from lightning_5d.layout import Layout, LayoutError
from lightning_5d.mesh import Mesh
from lightning_5d.parallel.data import DataParallel
from lightning_5d.parallel.materialize import Materializer
from lightning_5d.parallel.recompute import recompute_layers
from lightning_5d.parallel.replicas import Replicas
from lightning_5d.parallel.tensor import TensorParallel
from lightning_5d.pipeline.stage import Stage, split_layers
from lightning_5d.plan import ParallelPlan


@dataclass
class Parallelized:
    """One rank's part of a module."""

    stage: Stage
    data_parallel: DataParallel | Replicas | None
    partial_parameters: Callable[[], list[nn.Parameter]] | None
    """Parameters whose gradient must be summed over tp, once a forward pass has run."""


def parallelize(
    module: nn.Module,
    plan: ParallelPlan | None,
    layout: Layout,
    mesh: Mesh,
    materializer: Materializer,
    split: list[int] | None,
    compute_dtype: torch.dtype | None,
) -> Parallelized:
    """Cuts, fills, splits and wraps ``module`` in place. ``compute_dtype`` is given for mixed precision only."""
    if plan is None and (layout.tp > 1 or layout.pp > 1 or layout.ac):
        raise LayoutError(
            f"layout {layout}: no list of layers was found in {type(module).__name__}; "
            "give LayoutStrategy(plan=ParallelPlan(layers=...)) or use data parallelism alone"
        )
    layers = None
    if plan is not None:
        num_layers = len(list(module.get_submodule(plan.layers).children()))
        layers = split_layers(num_layers, layout.pp, split)[mesh.pp_rank]
    stage = Stage(module, plan, mesh.pp_rank, layers, layout.pp)

    tensor_parallel = None
    if layout.tp > 1:
        assert plan is not None
        tensor_parallel = TensorParallel(mesh["tp"], plan, bool(layout.sp))
        tensor_parallel.classify(stage)
        tensor_parallel.install(stage)
    recompute_layers(list(zip(stage.layer_indices, stage.local_layers, strict=True)), layout.ac)

    data_parallel: DataParallel | Replicas | None = None
    if compute_dtype is not None or (layout.dp != 1 and layout.zero > 0):
        data_parallel = DataParallel(mesh["dp"], layout.zero, compute_dtype)
    elif layout.dp != 1:
        data_parallel = Replicas(mesh.group("dp"))
    shard = tensor_parallel.shard if tensor_parallel is not None else None
    in_layers: set[int] = set()
    # Layer by layer: with ZeRO a layer's whole weights are freed before the next layer's are drawn.
    for layer in stage.local_layers:
        for leaf in layer.modules():
            in_layers.add(id(leaf))
            materializer.fill(leaf, shard)
        if data_parallel is not None:
            data_parallel.wrap_layer(layer)
    for leaf in stage.modules():
        if id(leaf) not in in_layers:
            materializer.fill(leaf, shard)
    if data_parallel is not None:
        data_parallel.wrap_root(stage)
    partial = None if tensor_parallel is None else functools.partial(tensor_parallel.partial_parameters, stage)
    return Parallelized(stage, data_parallel, partial)
