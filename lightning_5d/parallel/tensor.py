"""Tensor and sequence parallelism: where each weight goes, and which collective stands at which module's door.

Weights are DTensors on the ``tp`` mesh, so that sharding composes, is saved and is resharded by torch; activations are plain
local tensors, so that the model's own code runs unchanged and at no extra host cost. Inside a module's forward its weights
are shadowed by their local parts.

With sequence parallelism the hidden state is split over the sequence from the first layer's door to the head's door, and
only inside attention and MLP is the sequence whole: all-gather in, reduce-scatter out. Without it: nothing in (an
all-reduce backward), all-reduce out. Either way four collectives a layer and direction pair, ``8 s b h (t-1)/t`` elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from lightning_5d.layout import LayoutError
from lightning_5d.parallel import collectives
from lightning_5d.parallel.local_shapes import use_local_head_counts
from lightning_5d.parallel.verify import verify_first_call
from lightning_5d.pipeline.stage import Stage
from lightning_5d.plan import ParallelPlan
from lightning_5d.plan.meta import meta_copy


@dataclass(frozen=True)
class Split:
    """How the parameters of one module are split over tp."""

    placements: dict[str, Placement]
    """By parameter name; parameters not named are whole on every rank."""
    partial: frozenset[str] = frozenset()
    """Whole parameters of which each rank sees only part of the gradient: summed over tp once a step."""


class TensorParallel:
    """Splits the modules of one pipeline stage over the ``tp`` mesh."""

    def __init__(self, mesh: DeviceMesh, plan: ParallelPlan, sequence_parallel: bool) -> None:
        if plan.no_tensor_parallel is not None:
            raise LayoutError(
                f"tp{mesh.size()} cannot split this model: {plan.no_tensor_parallel}. "
                "Say how in LayoutStrategy(plan=ParallelPlan(colwise=..., rowwise=...)), or use pp, zero3 or ac instead of tp"
            )
        self.mesh, self.plan, self.sequence_parallel = mesh, plan, sequence_parallel
        self.group: dist.ProcessGroup = mesh.get_group()
        self._splits: dict[int, Split] = {}
        self._sequence_is_split = False
        """While a step runs: between the first layer's door and the head's."""

    # ---- where each weight goes

    def classify(self, stage: Stage) -> None:
        """Decides the split of every module with parameters that is left in the stage."""
        row_partial = frozenset({"bias"}) if self.sequence_parallel else frozenset()
        residual = frozenset({"*"}) if self.sequence_parallel else frozenset()
        for layer in stage.local_layers:
            named = dict(layer.named_modules())
            for part in named.values():
                self._splits[id(part)] = Split({}, residual)
            for name in self.plan.colwise:
                self._splits[id(named[name])] = Split({"weight": Shard(0), "bias": Shard(0)})
                self._check_divides(named[name], name, "out_features")
            for name in self.plan.rowwise:
                self._splits[id(named[name])] = Split({"weight": Shard(1)}, row_partial)
                self._check_divides(named[name], name, "in_features")
            for name in self.plan.per_head:
                self._splits[id(named[name])] = Split({}, frozenset({"*"}))
        for name in filter(None, (self.plan.embedding, self.plan.head)):
            self._splits[id(stage.get_submodule(name))] = Split({"weight": Shard(0), "bias": Shard(0)})
        for part in self._behind_layers(stage):
            self._splits[id(part)] = Split({}, residual)

    def _behind_layers(self, stage: Stage) -> list[nn.Module]:
        names = filter(None, (self.plan.norm, *self.plan.last_only))
        return [part for name in names for part in stage.get_submodule(name).modules()]

    def _check_divides(self, part: nn.Module, name: str, attribute: str) -> None:
        features, tp = getattr(part, attribute), self.mesh.size()
        if features % tp:
            raise LayoutError(f"tp{tp} does not divide {name}'s {attribute} {features}")

    def shard(self, part: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """The DTensor of this rank's part of ``part``'s parameter ``name``, whose whole value is given."""
        placement = self._splits.get(id(part), Split({})).placements.get(name, Replicate())
        sharded = distribute_tensor(parameter.detach(), self.mesh, [placement], src_data_rank=None)
        local = sharded.to_local()
        if local.untyped_storage().nbytes() > local.numel() * local.element_size():
            # A view would keep the whole weight alive.
            sharded = DTensor.from_local(
                local.clone(), self.mesh, [placement], run_check=False, shape=sharded.shape, stride=sharded.stride()
            )
        return nn.Parameter(sharded, requires_grad=parameter.requires_grad)

    def partial_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """The whole parameters of which each rank sees part of the gradient, as they are now: after a first forward pass."""
        found: dict[nn.Parameter, None] = {}
        for part in module.modules():
            split = self._splits.get(id(part))
            for name, parameter in part._parameters.items():
                if split is None or parameter is None or name in split.placements:
                    continue
                if not split.partial.isdisjoint((name, "*")):
                    found[parameter] = None
        return list(found)

    # ---- which collective stands at which door

    def install(self, stage: Stage) -> None:
        """Hooks the modules of this stage; before their weights are sharded or filled."""
        module, local_layers, is_first, is_last = stage, stage.local_layers, stage.is_first, stage.is_last
        whole = meta_copy(local_layers[0]) if not self.plan.is_exact else None
        for part in module.modules():
            if part._parameters and any(p is not None for p in part._parameters.values()):
                _shadow_by_local(part)
        for layer in local_layers:
            self._install_layer(layer)
        if self.sequence_parallel:
            if is_first:
                local_layers[0].register_forward_pre_hook(self._on_first_tensor(collectives.split_sequence), with_kwargs=True)
            self._watch_sequence(stage)
            if is_last and self.plan.head is None:
                exit_module = module.get_submodule(self.plan.norm) if self.plan.norm else local_layers[-1]
                exit_module.register_forward_hook(lambda m, args, out: _map_first(out, collectives.merge_sequence, self.group))
        if is_first and self.plan.embedding is not None:
            self._install_embedding(module.get_submodule(self.plan.embedding))
        if is_last and self.plan.head is not None:
            self._install_head(module.get_submodule(self.plan.head))
        if whole is not None:
            verify_first_call(local_layers[0], whole, self.group, self.sequence_parallel)

    def _watch_sequence(self, stage: Stage) -> None:
        """What runs behind the head sees the whole sequence and its whole gradient; a plan does not tell where a part runs."""

        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._sequence_is_split = True

        def leave(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            self._sequence_is_split = False

        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._splits[id(module)] = Split({}, frozenset({"*"}) if self._sequence_is_split else frozenset())

        stage.local_layers[0].register_forward_pre_hook(enter)
        if stage.is_last:
            stage.get_submodule(self.plan.head or self.plan.norm or self.plan.layers).register_forward_hook(leave)
            for part in self._behind_layers(stage):
                part.register_forward_pre_hook(note)

    def _install_layer(self, layer: nn.Module) -> None:
        enter = collectives.gather_sequence if self.sequence_parallel else collectives.copy_to_group
        leave = collectives.reduce_scatter_from_group if self.sequence_parallel else collectives.reduce_from_group
        doors = {name.rpartition(".")[0] for name in self.plan.colwise}
        for door in doors:
            if door:
                part = layer.get_submodule(door)
                part.register_forward_pre_hook(self._on_first_tensor(enter), with_kwargs=True)
                if not self.plan.is_exact:
                    use_local_head_counts(part, self.mesh.size(), self._widest_output(layer, door))
        if "" in doors:
            if self.sequence_parallel:
                raise LayoutError(
                    f"sequence parallelism needs attention and MLP as modules of their own in {type(layer).__name__}: add `nosp`"
                )
            use_local_head_counts(layer, self.mesh.size(), self._widest_output(layer, ""))
            for name in self.plan.colwise:
                if "." not in name:
                    layer.get_submodule(name).register_forward_pre_hook(self._on_first_tensor(enter), with_kwargs=True)
        for name in self.plan.rowwise:
            _leave_rowwise(layer.get_submodule(name), leave, self.group)

    def _widest_output(self, layer: nn.Module, door: str) -> int:
        """Outputs of the query projection, the widest of those that ``door`` enters."""
        entered = [name for name in self.plan.colwise if name.rpartition(".")[0] == door]
        widths: list[Any] = [layer.get_submodule(name).out_features for name in entered]
        return max(widths)

    def _install_embedding(self, embedding: nn.Module) -> None:
        if getattr(embedding, "max_norm", None) is not None:
            raise LayoutError("an embedding with max_norm cannot be split over the vocabulary by tp")
        rows = _chunk_sizes(embedding.get_parameter("weight").shape[0], self.mesh.size())
        first = sum(rows[: self.group.rank()])
        count = rows[self.group.rank()]
        padding_idx: Any = getattr(embedding, "padding_idx", None)
        if padding_idx is not None:
            embedding.__dict__["padding_idx"] = padding_idx - first if first <= padding_idx < first + count else None

        def look_up_own_rows(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            local_ids = args[0] - first
            foreign = (local_ids < 0) | (local_ids >= count)
            module.__dict__["_foreign_ids"] = foreign
            return (local_ids.masked_fill(foreign, 0), *args[1:])

        def sum_over_rows(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
            foreign = module.__dict__.pop("_foreign_ids")
            return collectives.reduce_from_group(out.masked_fill(foreign.unsqueeze(-1), 0), self.group)

        embedding.register_forward_pre_hook(look_up_own_rows)
        embedding.register_forward_hook(sum_over_rows)

    def _install_head(self, head: nn.Module) -> None:
        enter = collectives.gather_sequence if self.sequence_parallel else collectives.copy_to_group
        columns = _chunk_sizes(head.get_parameter("weight").shape[0], self.mesh.size())
        head.register_forward_pre_hook(self._on_first_tensor(enter), with_kwargs=True)
        # A fused loss gives a scalar in place of logits: nothing to gather.
        head.register_forward_hook(lambda m, args, out: collectives.gather_last(out, self.group, columns) if out.ndim else out)

    def _on_first_tensor(self, collective: Any) -> Any:
        """A pre-hook that passes the first floating tensor among the arguments through a collective."""
        group = self.group

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if args and isinstance(args[0], Tensor):
                return (collective(args[0], group), *args[1:]), kwargs
            for name, value in kwargs.items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3:
                    return args, {**kwargs, name: collective(value, group)}
            raise ValueError(f"{type(module).__name__} was called without a hidden state [batch, seq, hidden]")

        return hook


def _chunk_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Sizes of ``torch.chunk``, which DTensor's Shard follows: equal ones, then a smaller one, then none."""
    size = -(-total // parts)
    return tuple(max(0, min(size, total - i * size)) for i in range(parts))


def _map_first(out: Any, fn: Any, group: dist.ProcessGroup) -> Any:
    return (fn(out[0], group), *out[1:]) if isinstance(out, tuple) else fn(out, group)


def _shadow_by_local(part: nn.Module) -> None:
    """During forward, ``part.weight`` is the local tensor of the DTensor parameter of that name."""
    names = tuple(name for name, p in part._parameters.items() if p is not None)
    parameters, attributes = part._parameters, part.__dict__

    def shadow(module: nn.Module, args: tuple[Any, ...]) -> None:
        for name in names:
            attributes[name] = parameters[name].to_local()  # type: ignore[union-attr]

    def unshadow(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        for name in names:
            attributes.pop(name, None)

    part.register_forward_pre_hook(shadow)
    part.register_forward_hook(unshadow, always_call=True)


def _leave_rowwise(linear: nn.Module, leave: Any, group: dist.ProcessGroup) -> None:
    """Sums the partial outputs of a row-split linear; its bias is added once, after the sum."""
    if linear._parameters.get("bias") is None:
        linear.register_forward_hook(lambda m, args, out: leave(out, group))
        return
    attributes = linear.__dict__

    def without_bias(module: nn.Module, args: tuple[Any, ...]) -> None:
        attributes["_bias_after_sum"], attributes["bias"] = attributes["bias"], None

    def add_bias(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return leave(out, group) + attributes.pop("_bias_after_sum")

    linear.register_forward_pre_hook(without_bias)
    linear.register_forward_hook(add_bias)


def sum_partial_gradients(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """One all-reduce over tp for all whole parameters of which each rank saw part of the gradient."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    if not local:
        return
    flat = torch.cat([g.reshape(-1) for g in local])
    dist.all_reduce(flat, group=group)
    for target, source in zip(local, flat.split([g.numel() for g in local]), strict=True):
        target.copy_(source.view_as(target))
