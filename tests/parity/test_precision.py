"""What each precision keeps in which dtype, and that it trains; and the two ways to weight replicas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_5d.models import LlamaConfig, LlamaModule
from tests.parity.harness import Data, assert_parity, difference, fit, reference, whole
from tests.parity.models import HandWritten, own_llama
from tests.ranks import run_ranks

slow = pytest.mark.slow


def adam(fused: bool = True) -> LlamaModule:
    config = own_llama().config
    return LlamaModule(LlamaConfig.from_dict(config.to_dict()), lr=1e-3, fused=fused, decay_steps=0)


def unfused_adam() -> LlamaModule:
    return adam(fused=False)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16), ("32-true", torch.float32)]
)
@pytest.mark.parametrize("layout", ["tp2", *(pytest.param(x, marks=slow) for x in ("dp2_zero0", "dp2_zero2", "pp2", "zero0"))])
def test_dtypes_and_losses(layout: str, precision: str, dtype: torch.dtype) -> None:
    """Fused AdamW with clipping: bf16-mixed has float32 parameters, gradients and optimizer state, bf16-true none of them."""
    world_size = 1 if layout == "zero0" else 2
    expected = reference(unfused_adam)
    for rank in run_ranks(world_size, fit, layout, world_size, adam, precision=precision):
        assert rank["dtypes"] == {(kind, dtype) for kind in ("parameter", "gradient", "state")}
        tolerance = 1e-5 if precision == "32-true" else 2e-2
        assert all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(rank["losses"], expected["losses"], strict=True))
        if precision != "32-true":
            assert rank["losses"] != expected["losses"], "computed in float32"
            assert all(math.isclose(a, b, rel_tol=0.1) for a, b in zip(rank["norms"], expected["norms"], strict=True))


def _ddp(world_size: int) -> dict[str, Any]:
    """Five steps of torch's DDP on uneven labels, without Lightning."""
    torch.manual_seed(0)
    module = HandWritten(lr=0.5)
    parallel, optimizer = DistributedDataParallel(module), torch.optim.SGD(module.parameters(), lr=0.5)
    module.loss = lambda batch: torch.nn.functional.cross_entropy(  # type: ignore[method-assign]
        parallel(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
    )
    data = Data(40)
    data.trainer = type("Trainer", (), {"strategy": None})()  # type: ignore[assignment]
    data.trainer.strategy = type("Strategy", (), {})()
    rank = torch.distributed.get_rank()
    data.trainer.strategy.distributed_sampler_kwargs = {"rank": rank, "num_replicas": world_size}
    losses = []
    for batch in data.train_dataloader():
        loss = module.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / world_size)
    return {"losses": losses, "weights": {n: whole(p) for n, p in module.named_parameters()}}


@slow
@pytest.mark.parametrize("layout", ["dp2_zero0", "dp2_zero2", "dp2_zero1_mbs2"])
def test_replica_weighting_is_ddps(layout: str) -> None:
    expected = run_ranks(2, _ddp, 2, init=True)[0]
    by_target = run_ranks(2, fit, layout, 2, hand)[0]
    assert difference(by_target["weights"]["tokens.weight"], expected["weights"]["tokens.weight"]) > 1e-4
    for rank in run_ranks(2, fit, layout, 2, hand, {"loss_weighting": "replica"}):
        assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(rank["losses"], expected["losses"], strict=True))
        assert all(difference(v, expected["weights"][n]) < 1e-5 for n, v in rank["weights"].items())


def hand() -> HandWritten:
    return HandWritten(lr=0.5)


class ByTarget(HandWritten):
    """Counts its own targets: a batch format of its own."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return {"x": batch["input_ids"], "y": batch["labels"]} if "labels" in batch else batch

    def num_targets(self, batch: Any) -> Any:
        return (batch["y"] != -100).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({"input_ids": batch["x"], "labels": batch["y"]}, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return super().validation_step({"input_ids": batch["x"], "labels": batch["y"]}, batch_idx)


@slow
@pytest.mark.parametrize("layout", ["pp2", "dp2_zero1_mbs2"])
def test_a_module_may_count_its_own_targets(layout: str) -> None:
    assert_parity(run_ranks(2, fit, layout, 2, ByTarget), reference(ByTarget))


class TheirModelOwnLoss(HandWritten):
    """transformers' model with the user's own loss: labels are shifted already, the first column is a target."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        from transformers import LlamaConfig as TheirConfig
        from transformers import LlamaForCausalLM

        del self.blocks, self.tokens, self.positions, self.final, self.to_vocab
        sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
        self.model, self.lr = LlamaForCausalLM(TheirConfig(**sizes, vocab_size=64)), 0.5

    def forward(self, ids: Any) -> Any:
        return self.model(ids).logits


@slow
@pytest.mark.parametrize("layout", ["pp2", "dp2_zero1", "tp2_mbs2"])
def test_a_transformers_model_with_the_users_loss(layout: str) -> None:
    assert_parity(run_ranks(2, fit, layout, 2, TheirModelOwnLoss), reference(TheirModelOwnLoss))
