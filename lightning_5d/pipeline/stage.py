"""Cutting a module into the part of one pipeline stage, in place, so that its own ``training_step`` still runs.

Every stage runs the user's whole step. What lies before the stage is replaced by stand-ins that cost nothing, the received
hidden state enters in the place of the layer before the stage's first, and the layer after the stage's last raises
:class:`StageCut` with the hidden state to send. Names, the length of the layer list and plain attributes stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_5d.layout import LayoutError
from lightning_5d.plan import ParallelPlan


class StageCut(BaseException):
    """Carries the hidden state out of the user's step. Not an Exception: ``except Exception`` in user code must not catch it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class TokensSeen(BaseException):
    """Carries the shape ``(micro-batch, sequence)`` of the tokens out of a step that is run up to its embedding."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape


class Inbox:
    """What the stage received for the micro-batch that runs now."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        self.entered = False


class _StandIn(nn.Module):
    """Keeps the plain attributes of the module it stands for (``attention_type``, ``layer_idx``), and nothing that computes."""

    def __init__(self, original: nn.Module, name: str) -> None:
        super().__init__()
        plain = {
            k: v for k, v in original.__dict__.items() if not k.startswith("_") and k not in self.__dict__ and not callable(v)
        }
        self.__dict__.update(plain)
        self.training = original.training
        self.__dict__["stands_for"] = f"{name} ({type(original).__name__})"
        self.__dict__["_missing"] = frozenset([*original._parameters, *original._modules])

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_missing", ()):
            raise AttributeError(
                f"{self.stands_for} lives on another pipeline stage; its {name!r} is used outside of its forward. "
                "Use pp1 for this model"
            )
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        return f"for {self.stands_for}"


class Skip(_StandIn):
    """A layer of another stage."""

    def __init__(self, original: nn.Module, name: str, tuple_output: bool) -> None:
        super().__init__(original, name)
        self.tuple_output = tuple_output

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden, None, None) if self.tuple_output else hidden


class Entry(Skip):
    """The layer before the stage's first: gives the received hidden state, whatever came in."""

    def __init__(self, original: nn.Module, name: str, tuple_output: bool, inbox: Inbox) -> None:
        super().__init__(original, name, tuple_output)
        self.__dict__["inbox"] = inbox

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.inbox.entered = True
        return super().forward(self.inbox.hidden)


class Cut(_StandIn):
    """The layer after the stage's last: ends the step."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise StageCut(hidden)


class BeforeLayers(_StandIn):
    """An embedding, or what stands behind it, on a stage that does not hold it: zeros of the right shape, never used."""

    def __init__(self, original: nn.Module, name: str, inbox: Inbox, hidden_size: int) -> None:
        super().__init__(original, name)
        self.__dict__["inbox"] = inbox
        self.__dict__["hidden_width"] = hidden_size

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.inbox.entered:
            raise ValueError(
                f"{self.stands_for} was taken for a part before the layers, but runs behind them: name it in "
                "ParallelPlan(last_only=...). Or the step calls the model twice, which a pipeline cannot follow: call it once"
            )
        if x.is_floating_point():
            return x
        hidden = self.inbox.hidden
        dtype = torch.get_default_dtype() if hidden is None else hidden.dtype
        return torch.zeros((*x.shape, self.hidden_width), dtype=dtype, device=x.device)


class BehindLayers(_StandIn):
    """A norm or head on a stage that does not hold it. The cut comes first, so reaching it is an error."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"{self.stands_for} was taken for a part behind the layers, but runs before them: name it in "
            "ParallelPlan(first_only=...). Or it is of another model, such as a teacher: a pipeline cuts one, use tp or dp"
        )


def split_layers(num_layers: int, num_stages: int, split: list[int] | None = None) -> list[range]:
    """Which layers each stage holds: ``split`` as given, or evenly, with odd ones on the first stages (the last has the head)."""
    if split is None:
        base, odd = divmod(num_layers, num_stages)
        split = [base + (1 if stage < odd else 0) for stage in range(num_stages)]
    if len(split) != num_stages or sum(split) != num_layers or min(split) < 1:
        raise LayoutError(
            f"split={split} must give each of {num_stages} pipeline stages at least one layer "
            f"and add up to the model's {num_layers} layers"
        )
    starts = [sum(split[:i]) for i in range(num_stages)]
    return [range(start, start + size) for start, size in zip(starts, split, strict=True)]


class Stage(nn.Module):
    """One pipeline stage: owns the same children as the LightningModule, and is what a step is called through.

    With one stage nothing is cut. As FSDP2's root it gathers and reduces what no layer holds.
    """

    inbox: Inbox
    local_layers: list[nn.Module]

    def __init__(self, module: nn.Module, plan: ParallelPlan | None, index: int, layers: range | None, num_stages: int) -> None:
        super().__init__()
        self.__dict__["inbox"] = Inbox()
        self.index, self.num_stages = index, num_stages
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        all_layers = [] if plan is None else list(module.get_submodule(plan.layers).children())
        self.layer_indices = layers if layers is not None else range(len(all_layers))
        self.__dict__["local_layers"] = [all_layers[i] for i in self.layer_indices]
        if num_stages > 1:
            assert plan is not None
            _cut(module, plan, self)
        # The same dictionaries, not copies: what FSDP2 and sharding replace here is replaced in the LightningModule.
        self.__dict__["_modules"] = module.__dict__["_modules"]
        self.__dict__["_parameters"] = module.__dict__["_parameters"]
        self.__dict__["_buffers"] = module.__dict__["_buffers"]

    def forward(self, step: Any, hidden: Tensor | None) -> Any:
        """Runs ``step()``; returns the hidden state at the stage's end, or what the step returned on the last stage."""
        self.inbox.hidden, self.inbox.entered = hidden, False
        try:
            out = step()
        except StageCut as cut:
            hidden = cut.hidden
            cut.__traceback__ = None  # it holds every local of the user's step
            # torch's split backward detaches stage outputs in place, which views refuse.
            return hidden.clone() if hidden._is_view() else hidden
        finally:
            self.inbox.hidden = None
        if not self.is_last:
            raise ValueError("the step ended without calling the layers: a pipeline stage has nothing to send on")
        return out

    def probe(self, module: nn.Module, plan: ParallelPlan, step: Any) -> tuple[torch.Size | None, bool]:
        """Runs ``step()`` up to the embedding: the shape of its ids, ``(micro-batch, sequence)``, and whether the model was
        given ``labels`` to compute the loss itself. No shape: the step never called the embedding.
        """
        assert plan.embedding is not None
        has_labels = False

        def see(embedding: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = args[0] if args else next(iter(kwargs.values()))
            raise TokensSeen(ids.shape)

        def note_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal has_labels
            has_labels = has_labels or kwargs.get("labels") is not None

        names = plan.embedding.split(".")
        around = [module.get_submodule(".".join(names[:i])) for i in range(1, len(names))]
        handles = [part.register_forward_pre_hook(note_labels, with_kwargs=True, prepend=True) for part in around]
        embedding = module.get_submodule(plan.embedding)
        handles.append(embedding.register_forward_pre_hook(see, with_kwargs=True, prepend=True))
        try:
            with torch.no_grad():
                step()
        except TokensSeen as seen:
            return seen.shape, has_labels
        finally:
            for handle in handles:
                handle.remove()
        return None, has_labels


def _cut(module: nn.Module, plan: ParallelPlan, stage: Stage) -> None:
    """Replaces what other stages hold, wherever it is referred to (a second attribute may name the same module)."""
    if plan.embedding is None or (plan.head is None and plan.norm is None):
        raise LayoutError(
            f"pipeline parallelism needs to know the embedding and the head of {type(module).__name__}: "
            "give LayoutStrategy(plan=ParallelPlan(...))"
        )
    first = [plan.embedding, *plan.first_only]
    last = [name for name in (plan.norm, plan.head, *plan.last_only) if name is not None]
    _check_all_placed(module, plan, [*first, *last])
    embedding = module.get_submodule(plan.embedding)
    hidden_size = plan.hidden_size or embedding.get_parameter("weight").shape[1]
    replaced: dict[int, nn.Module] = {}
    layers = module.get_submodule(plan.layers)
    start, end = stage.layer_indices.start, stage.layer_indices.stop
    for index, (key, layer) in enumerate(layers.named_children()):
        name = f"{plan.layers}.{key}"
        if index == start - 1:
            replaced[id(layer)] = Entry(layer, name, plan.tuple_output, stage.inbox)
        elif index == end:
            replaced[id(layer)] = Cut(layer, name)
        elif not start <= index < end:
            replaced[id(layer)] = Skip(layer, name, plan.tuple_output)
    if not stage.is_first:
        replaced.update({id(m): BeforeLayers(m, n, stage.inbox, hidden_size) for n, m in _parts(module, first)})
    if not stage.is_last:
        replaced.update({id(m): BehindLayers(m, n) for n, m in _parts(module, last)})
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in replaced:
                parent._modules[name] = replaced[id(child)]


def _parts(module: nn.Module, names: Iterable[str]) -> list[tuple[str, nn.Module]]:
    return [(name, module.get_submodule(name)) for name in names]


def _check_all_placed(module: nn.Module, plan: ParallelPlan, names: list[str]) -> None:
    """Every parameter must belong to exactly one stage: one left on all of them would train differently on each."""
    placed = {id(p) for name in [*names, plan.layers] for p in module.get_submodule(name).parameters()}
    lost = [name for name, p in module.named_parameters() if id(p) not in placed]
    if lost:
        raise LayoutError(
            f"pipeline parallelism cannot tell which stage holds {', '.join(lost[:5])}{' ...' if len(lost) > 5 else ''}: "
            "name their modules in ParallelPlan(first_only=...) or ParallelPlan(last_only=...)"
        )
