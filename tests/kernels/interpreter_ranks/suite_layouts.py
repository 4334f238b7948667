"""Layouts with interpreted kernels train what one process trains without: losses, gradients, weights, norms and metrics.

A process apart from the interpreter's other tests: ranks are forked from it, so it may run no backward pass itself.
"""

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning_5d.kernels import _triton, causal_lm

from tests.kernels.models import transformers_model
from tests.parity.harness import assert_parity, fit, reference
from tests.parity.models import own_llama
from tests.ranks import run_ranks


class Transformers(LightningModule):
    """A causal language model of transformers that computes its loss itself."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.model = transformers_model(family)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.3)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


MODELS: dict[str, Any] = {"Llama of this project": functools.partial(own_llama, lr=0.5)} | {
    family: functools.partial(Transformers, family) for family in ("Llama", "Qwen3", "Gemma3")
}
KERNELS = {"norm.forward", "norm.backward", "glu.forward", "glu.backward", "rope.rotary"}


def counted_fit(*args: Any, **kwargs: Any) -> tuple[dict[str, Any], Counter]:
    """``fit``, and which kernels were launched and how many fused losses computed in this rank."""
    launched: Counter = Counter()
    run, head_forward = _triton.Kernel.run, causal_lm.FusedHead.forward

    def count(kernel, *launch):
        launched[f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.name.strip('_').removesuffix('_kernel')}"] += 1
        run(kernel, *launch)

    def count_loss(self, hidden):
        out = head_forward(self, hidden)
        launched["fused loss"] += out.dim() == 0
        return out

    _triton.Kernel.run, causal_lm.FusedHead.forward = count, count_loss
    return fit(*args, **kwargs), launched


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
@pytest.mark.parametrize("name", MODELS)
def test_layout(name: str, layout: str) -> None:
    data = {"num_rows": 4, "rows": 2, "vocab": 61, "seq": 6}
    options = {"limit_val_batches": 0}
    expected = reference(MODELS[name], data=data, **options)
    ranks = run_ranks(2, counted_fit, layout, 2, MODELS[name], {"kernels": "auto"}, data=data, timeout_s=200, **options)
    assert_parity([result for result, _ in ranks], expected, tolerance=3e-5)
    for _, launched in ranks:
        assert set(launched) >= KERNELS, "a rank computed without kernels"
    fused = ranks[1][1]["fused loss"]  # the last stage's, under pp
    assert fused == 2 * (2 if layout == "pp2" else 1), "the loss of a training step was not fused"
