"""What a user's step may do that would be wrong, silently, when its batch or its module is split. Seen while it runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class TargetsSeen(TorchFunctionMode):
    """Counts the valid targets of every cross entropy that is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.valid: list[int] = []
        self.all_valid = True
        self.sums: list[Tensor] = []
        """Cross entropies that were summed and not averaged."""
        self.has_class_weights = False

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.cross_entropy:
            target = kwargs.get("target", args[1] if len(args) > 1 else None)
            ignored = kwargs.get("ignore_index", args[4] if len(args) > 4 else -100)
            if isinstance(target, Tensor) and not target.is_floating_point():
                with torch.no_grad():
                    self.valid.append(int((target != ignored).sum()))
                self.all_valid = self.all_valid and self.valid[-1] == target.numel()
            if kwargs.get("reduction", args[6] if len(args) > 6 else "mean") == "sum":
                self.sums.append(out.detach())
            self.has_class_weights |= kwargs.get("weight", args[2] if len(args) > 2 else None) is not None
        return out

    def check(self, counted: float | None, loss: Any = None) -> None:
        """Raises ``ValueError`` when the step averaged over other targets than were counted (None: sequences were).

        Or not at all: it has class weights, or its ``loss`` is not the mean of the cross entropy that it summed.
        """
        if not self.valid:
            return
        if self.has_class_weights:
            raise ValueError(
                "a cross entropy has class weights, and so is no mean over its targets, as which the parts of a split batch are "
                "weighted. Define `num_targets(self, batch) -> int | Tensor` in the LightningModule: the weights of the batch's "
                "targets, summed"
            )
        if self.sums and isinstance(loss, Tensor) and loss.numel() == 1:
            mean = sum(float(s) for s in self.sums) / max(sum(self.valid), 1)
            if not math.isclose(float(loss), mean, rel_tol=0.02, abs_tol=1e-6):  # bf16 rounds by 0.4%
                raise ValueError(
                    f"a cross entropy was summed over {sum(self.valid)} targets, and the step's loss ({float(loss):.4g}) is not "
                    f"its mean ({mean:.4g}): the parts of a split batch are weighted as means. Say reduction='mean'; or where "
                    "the loss is a mean and has other terms, define `num_targets(self, batch) -> int | Tensor` in the "
                    "LightningModule"
                )
        agrees = self.all_valid if counted is None else counted in (*self.valid, sum(self.valid))
        if not agrees:
            rule = "sequences" if counted is None else f"{int(counted)} `labels` that are not -100"
            raise ValueError(
                f"the loss of a micro-batch was averaged over {self.valid} targets, but {rule} were counted to weight "
                "the parts of a split batch: another loss, silently. Define `num_targets(self, batch) -> int | Tensor` "
                "in the LightningModule, with the step's own shift and ignore_index"
            )


@contextlib.contextmanager
def sharded_weights_explained() -> Iterator[None]:
    """Inside, torch's error for a tensor-parallel weight that meets a plain tensor says what to do about it."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise ValueError(
            "under tensor parallelism the step uses a sharded weight outside of the module that holds it, such as "
            "F.linear(x, self.embedding.weight): call the module (a tied head is an nn.Linear that shares the embedding's weight)"
        ) from error


@contextlib.contextmanager
def whole_parameters_refused(module: nn.Module, layers: str) -> Iterator[None]:
    """Inside, iterating to the end over the parameters of ``module``, or of any part that holds all layers, is an error.

    A pipeline stage has only its own: a penalty over them would be the last stage's. Looking at the first one stays possible.
    """
    parts = layers.split(".")
    holders = [module.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1)]
    for holder in holders:
        holder.__dict__["named_parameters"] = _refusing_the_end(holder)
    try:
        yield
    finally:
        for holder in holders:
            holder.__dict__.pop("named_parameters", None)


def _refusing_the_end(holder: nn.Module) -> Callable[..., Iterator[tuple[str, nn.Parameter]]]:
    own = holder.named_parameters

    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from own(*args, **kwargs)
        raise ValueError(
            f"the step goes over all parameters of {type(holder).__name__}, of which a pipeline stage holds only its own: "
            "use the optimizer's weight_decay for a penalty, or pp1"
        )

    return named_parameters
