"""The fused loss in models that compute their own: the head's projection and the loss become one operation, without logits.

Two kinds are known: transformers' causal language models given ``labels`` (``outputs.logits`` is then None), and modules with a
``training_step`` that hands ``batch["labels"]`` and the logits of ``self.model`` to a function ``next_token_loss``, as this
project's LlamaModule does. It happens in training alone (gradients on, and ``model.training``); otherwise the model's own code
runs, and also where the head's weight is a shard of which nobody said how it is split. The head is still called as a module, with
its hooks; in place of logits it returns the loss, which has no dimensions, and whoever comes after lets that pass.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from . import probe

IGNORE_INDEX = -100
STEP_LOSS = "next_token_loss"


class FusedHead:
    """The replaced forward of a head. With ``group``, the head's rows are split over it as ``torch.chunk`` does, and its input's
    gradient is summed by whoever gave every rank that input."""

    def __init__(self, head: nn.Linear, linear_cross_entropy: Callable, group: dist.ProcessGroup | None) -> None:
        self.head, self.linear_cross_entropy, self.group = head, linear_cross_entropy, group
        self.vocab_size = head.out_features
        self.targets: tuple[torch.Tensor, Any, int] | None = None
        """While a training forward is under way: targets, what to divide their sum by (None: how many count), ignore_index."""

    def install(self) -> None:
        self.head.__dict__["forward"] = self.forward

    def remove(self) -> None:
        self.head.__dict__.pop("forward", None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, or the loss."""
        weight = self.head.weight
        split = self._split(len(weight))
        if self.targets is None or split is None:
            return F.linear(hidden, weight)
        target, num_items, ignore_index = self.targets
        reduction = "mean" if num_items is None else "sum"
        loss = self.linear_cross_entropy(hidden, weight, target, ignore_index, reduction=reduction, **split)
        if num_items is None:
            return loss
        return loss / (num_items.to(loss.device) if torch.is_tensor(num_items) else num_items)

    def _split(self, rows: int) -> dict[str, Any] | None:
        """How the head is split, as linear_cross_entropy's options; None for a shard of which nobody said how."""
        if self.group is None:
            return {} if rows == self.vocab_size else None
        shard = -(-self.vocab_size // dist.get_world_size(self.group))
        first = min(self.vocab_size, dist.get_rank(self.group) * shard)
        return {"group": self.group, "vocab_start": first, "vocab_size": self.vocab_size, "partial_hidden_grad": True}


def _plain_head(head: Any) -> nn.Linear:
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise probe.NotTheSame("its head is no linear lm_head without bias")
    if "forward" in head.__dict__:
        raise probe.NotTheSame("its head's forward was already replaced")
    return head


def fuse(module: nn.Module, linear_cross_entropy: Callable, group: dist.ProcessGroup | None) -> Callable[[], None] | None:
    """Fuses the loss of ``module``, if it is of a kind that computes one, and returns what undoes it; None if it is not.

    Raises NotTheSame for a module of such a kind whose head or loss is another.
    """
    if type(module).__name__.endswith("ForCausalLM") and hasattr(module, "loss_function"):
        return _CausalLM(module, linear_cross_entropy, group).install()
    step = inspect.unwrap(getattr(type(module), "training_step", lambda: None))
    if STEP_LOSS in getattr(getattr(step, "__code__", None), "co_names", ()):
        return _TrainingStep(module, linear_cross_entropy, group).install()
    return None


class _CausalLM:
    """A transformers causal language model."""

    def __init__(self, model: Any, linear_cross_entropy: Callable, group: dist.ProcessGroup | None) -> None:
        if getattr(model.loss_function, "__name__", "") != "ForCausalLMLoss":
            raise probe.NotTheSame("its loss is not transformers' causal language model loss")
        for scaling in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(model.config, scaling, None) not in (None, 1, 1.0):
                raise probe.NotTheSame(f"it changes its logits by {scaling}")
        if "forward" in model.__dict__:
            raise probe.NotTheSame("its forward was already replaced")
        self.head = FusedHead(_plain_head(getattr(model, "lm_head", None)), linear_cross_entropy, group)
        self.model, self.loss_function = model, model.loss_function

    def install(self) -> Callable[[], None]:
        self.head.install()
        self.model.__dict__["forward"] = self.forward
        self.model.loss_function = self.loss
        return self.remove

    def remove(self) -> None:
        self.head.remove()
        self.model.__dict__.pop("forward", None)
        self.model.loss_function = self.loss_function

    def forward(self, *args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        forward = functools.partial(type(self.model).forward, self.model, *args, labels=labels, **kwargs)
        keep = kwargs.get("logits_to_keep", 0)
        whole_sequence = isinstance(keep, int) and keep == 0
        if labels is None or not self.model.training or not torch.is_grad_enabled() or not whole_sequence:
            return forward()
        shifted = kwargs.get("shift_labels")
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
        self.head.targets = (shifted, kwargs.get("num_items_in_batch"), kwargs.get("ignore_index", IGNORE_INDEX))
        try:
            outputs = forward()
        finally:
            self.head.targets = None
        if isinstance(outputs, tuple):
            return (outputs[0], None, *outputs[2:]) if outputs[1].dim() == 0 else outputs
        if outputs.logits is not None and outputs.logits.dim() == 0:
            outputs.logits = None
        return outputs

    def loss(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return logits if logits.dim() == 0 else self.loss_function(logits, *args, **kwargs)


class _TrainingStep:
    """A module whose ``training_step(batch, ...)`` calls ``next_token_loss(logits, batch["labels"])``."""

    def __init__(self, module: Any, linear_cross_entropy: Callable, group: dist.ProcessGroup | None) -> None:
        if "training_step" in module.__dict__:
            raise probe.NotTheSame("its training_step was already replaced")
        self.head = FusedHead(_plain_head(getattr(getattr(module, "model", None), "lm_head", None)), linear_cross_entropy, group)
        step = type(module).training_step
        self.module, self.loss_function = module, inspect.unwrap(step).__globals__.get(STEP_LOSS)
        if not callable(self.loss_function) or not probe.is_next_token_loss(self.loss_function):
            raise probe.NotTheSame(f"its {STEP_LOSS} is not the mean over the labels that are not {IGNORE_INDEX}")
        self.step = probe.rebind(step, {STEP_LOSS: self.loss})

    def install(self) -> Callable[[], None]:
        self.head.install()
        self.module.__dict__["training_step"] = self.training_step
        return self.remove

    def remove(self) -> None:
        self.head.remove()
        self.module.__dict__.pop("training_step", None)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.module.training:
            self.head.targets = (batch["labels"], None, IGNORE_INDEX)
        try:
            return self.step(self.module, batch, *args, **kwargs)
        finally:
            self.head.targets = None

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits if logits.dim() == 0 else self.loss_function(logits, labels)
