"""The fused loss in a transformers causal language model that computes its loss itself, given ``labels``.

The head's projection and the loss are then one operation, and ``outputs.logits`` is None: there are no logits. It happens
in training alone (``model.training`` and gradients on), for labels as transformers takes them, and where the head's weight
is whole at the time; otherwise the model's own code runs. The head is still called as a module, with its hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from . import probe

IGNORE_INDEX = -100


def computes_its_loss(module: nn.Module) -> bool:
    """Whether ``module`` is a transformers causal language model. Raises NotTheSame for one whose loss is another."""
    if not type(module).__name__.endswith("ForCausalLM") or not hasattr(module, "loss_function"):
        return False
    head = getattr(module, "lm_head", None)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise probe.NotTheSame("its head is no plain linear lm_head without bias")
    if getattr(module.loss_function, "__name__", "") != "ForCausalLMLoss":
        raise probe.NotTheSame("its loss is not transformers' causal language model loss")
    config = getattr(module, "config", None)
    for scaling in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, scaling, None) not in (None, 1, 1.0):
            raise probe.NotTheSame(f"it changes its logits by {scaling}")
    if "forward" in module.__dict__ or "forward" in head.__dict__:
        raise probe.NotTheSame("its forward or its head's was already replaced by someone else")
    return True


class FusedLoss:
    """The replaced forwards of one model and its head. With ``group``, the head's rows are split over it as ``torch.chunk``
    does, its input's gradient is summed by whoever gave every rank that input, and whoever gathers its logits lets a
    0-dimensional output pass."""

    def __init__(self, model: Any, linear_cross_entropy: Callable, group: dist.ProcessGroup | None) -> None:
        self.model, self.head, self.linear_cross_entropy, self.group = model, model.lm_head, linear_cross_entropy, group
        self.loss_function = model.loss_function
        self.vocab_size: int = model.config.vocab_size
        self._targets: tuple | None = None

    def install(self) -> Callable[[], None]:
        """Puts the forwards in; returns what takes them out."""
        self.head.__dict__["forward"] = self.head_forward
        self.model.__dict__["forward"] = self.model_forward
        self.model.loss_function = self.loss

        def undo() -> None:
            self.head.__dict__.pop("forward", None)
            self.model.__dict__.pop("forward", None)
            self.model.loss_function = self.loss_function

        return undo

    def model_forward(self, *args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        forward = functools.partial(type(self.model).forward, self.model, *args, labels=labels, **kwargs)
        keep = kwargs.get("logits_to_keep", 0)
        whole_sequence = isinstance(keep, int) and keep == 0
        if labels is None or not self.model.training or not torch.is_grad_enabled() or not whole_sequence:
            return forward()
        shifted = kwargs.get("shift_labels")
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
        self._targets = (shifted, kwargs.get("num_items_in_batch"), kwargs.get("ignore_index", IGNORE_INDEX))
        try:
            outputs = forward()
        finally:
            self._targets = None
        if isinstance(outputs, tuple):
            return (outputs[0], None, *outputs[2:]) if outputs[1].dim() == 0 else outputs
        if outputs.logits is not None and outputs.logits.dim() == 0:
            outputs.logits = None
        return outputs

    def head_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, or the loss while a training forward is under way."""
        weight = self.head.weight
        split = self._split(len(weight))
        if self._targets is None or split is None:
            return F.linear(hidden, weight)
        target, num_items, ignore_index = self._targets
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

    def loss(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return logits if logits.dim() == 0 else self.loss_function(logits, *args, **kwargs)
