"""Which part of a step runs: hooks on the layers of a stage tell the trace, forward and backward.

The peak of each part of a step grows by the same amount with every layer and micro-batch, the peak of the whole step does not: it
moves from one part to another. So parts are told apart, and layers by their distance from either end of the stage.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_5d.advisor.trace import Trace
from lightning_5d.pipeline.stage import Stage

BEFORE, BEHIND = "before the layers", "behind the layers"


def watch_layers(stage: Stage, trace: Trace, edge: int) -> None:
    """Keeps ``trace.regions`` up to date. The first and last ``edge`` layers are regions of their own."""
    layers = stage.local_layers

    def enter(way: str, names: tuple[str, ...]) -> None:
        way = f"last {way}" if trace.is_last and way == "backward" else way
        trace.regions = tuple(f"{way}, {name}" for name in names)

    def watch(layer: Any, names: tuple[str, ...], before: tuple[str, ...], behind: tuple[str, ...]) -> None:
        def on_enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            enter("forward", names)
            hidden = _hidden((*args, *kwargs.values()))
            if hidden is not None and hidden.requires_grad:
                hidden.register_hook(lambda gradient: enter("backward", before))

        def on_leave(module: Any, args: tuple[Any, ...], out: Any) -> None:
            enter("forward", behind)
            hidden = _hidden(out if isinstance(out, (tuple, list)) else (out,))
            if hidden is not None and hidden.requires_grad:
                hidden.register_hook(lambda gradient: enter("backward", names))

        # Around the hooks of tensor parallelism and FSDP2, whose work is the layer's.
        layer.register_forward_pre_hook(on_enter, with_kwargs=True, prepend=True)
        layer.register_forward_hook(on_leave)

    names = [_names(i, len(layers), edge) for i in range(len(layers))]
    for index, layer in enumerate(layers):
        before = names[index - 1] if index else (BEFORE,)
        behind = names[index + 1] if index + 1 < len(layers) else (BEHIND,)
        watch(layer, names[index], before, behind)


def _names(index: int, num_layers: int, edge: int) -> tuple[str, ...]:
    from_end = num_layers - 1 - index
    named = [f"layer {index + 1}"] if index < edge else []
    named += [f"layer {from_end + 1} from the end"] if from_end < edge else []
    return tuple(named) or ("layers in between",)


def _hidden(values: Any) -> Tensor | None:
    return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)
