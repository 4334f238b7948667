"""LlamaModule under a stock Trainer: it knows nothing of layouts."""

import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from torch.utils.data import DataLoader

from lightning_5d.models import LlamaConfig, LlamaModule
from lightning_5d.models.module import WarmupCosine, next_token_loss
from tests.models.forked import forked
from tests.ranks import run_ranks

TINY = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 32}
QUIET = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
         "enable_model_summary": False}  # fmt: skip


def rows(n, seq=8):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 32, (n, seq + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[::2, 3:] = -100
    return [{"input_ids": a, "labels": b} for a, b in zip(tokens[:, :-1], labels, strict=True)]


def fit(directory):
    torch.manual_seed(0)
    module = LlamaModule(TINY, lr=0.05, warmup_steps=2, weight_decay=0.1)
    trainer = Trainer(max_epochs=3, **QUIET)
    trainer.fit(module, DataLoader(rows(16), 4), DataLoader(rows(6), 3))
    with torch.no_grad():
        batch = torch.utils.data.default_collate(rows(6))
        total = F.cross_entropy(module(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        mean = total / (batch["labels"] != -100).sum()
    trainer.save_checkpoint(directory / "a.ckpt")
    loaded = LlamaModule.load_from_checkpoint(directory / "a.ckpt", weights_only=True)
    same = all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), loaded.state_dict().values(), strict=True))
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    lrs = trainer.optimizers[0].param_groups[0]["lr"], trainer.optimizers[0].param_groups[1]["weight_decay"]
    return metrics, mean.item(), same, loaded.config == module.config, lrs


def test_trains_validates_and_loads_without_pickled_code(tmp_path):
    metrics, mean, same_weights, same_config, (lr, norm_decay) = run_ranks(1, fit, tmp_path)[0]
    assert set(metrics) == {"train_loss", "val_loss", "val_perplexity"}
    assert metrics["train_loss"] < math.log(32)
    assert metrics["val_perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)
    assert same_weights
    assert same_config
    assert lr == pytest.approx(0.05 * 0.1)  # the cosine ends with the trainer's own 12 steps
    assert norm_decay == 0.0


def test_decay_groups():
    module = LlamaModule(TINY, optimizer="sgd", decay_steps=10, fused=False)
    module.configure_model()
    module.model.lm_head.weight.requires_grad_(False)
    made = module.configure_optimizers()
    decayed, kept = made["optimizer"].param_groups
    assert isinstance(made["optimizer"], torch.optim.SGD)
    assert {id(p) for p in decayed["params"]} == {id(p) for p in module.parameters() if p.ndim == 2 and p.requires_grad}
    assert [p.ndim for p in kept["params"]] == [1] * 3
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert made["lr_scheduler"]["interval"] == "step"


@pytest.mark.parametrize(("asked", "fused"), [(None, True), (False, False)])
def test_fused_adamw_where_the_device_has_it(asked, fused):
    module = LlamaModule(TINY, decay_steps=10, fused=asked)
    module.configure_model()
    assert module.configure_optimizers()["optimizer"].defaults["fused"] is fused


def test_warmup_and_cosine():
    factor = WarmupCosine(4, 12, 0.1)
    assert [factor(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(4) == pytest.approx(1.0)
    assert factor(8) == pytest.approx(0.55)
    assert factor(12) == factor(1000) == pytest.approx(0.1)
    assert WarmupCosine(0, 0, 0.1)(10**9) == 1.0


def test_loss_is_the_mean_over_valid_labels():
    logits, labels = torch.randn(2, 5, 7, dtype=torch.bfloat16), torch.randint(0, 7, (2, 5))
    labels[0] = -100
    expected = F.cross_entropy(logits[1].float(), labels[1])
    torch.testing.assert_close(next_token_loss(logits, labels), expected)


@forked
def test_a_batch_without_valid_labels_has_zero_loss_and_gradient():
    logits = torch.randn(1, 4, 7, requires_grad=True)
    loss = next_token_loss(logits, torch.full((1, 4), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.all(logits.grad == 0)


def test_every_way_to_name_a_shape(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "num_attention_heads": 4}')
    assert LlamaModule("llama3-8b").config == LlamaConfig.from_preset("llama3-8b")
    assert LlamaModule(str(tmp_path)).config.hidden_size == 64
    assert LlamaModule(tmp_path / "config.json", vocab_size=48).config.vocab_size == 48
    config = LlamaConfig.from_dict(TINY)
    assert LlamaModule(config).config == LlamaModule(TINY).config == config
    for wrong, message in (
        ("llama3-9b", "llama3-8b"),
        ("nowhere/config.json", "no such file"),
        ({"heads": 3}, "no field 'heads'"),
    ):
        with pytest.raises(ValueError, match=message):
            LlamaModule(wrong)
    with pytest.raises(ValueError, match="'adamw' or 'sgd'"):
        LlamaModule(optimizer="lion")
    with pytest.raises(ValueError, match="min_lr_ratio"):
        LlamaModule(min_lr_ratio=2)


@pytest.mark.parametrize(
    ("arguments", "hidden"),
    [(["--m.config=tiny"], 128), (["--m.config={hidden_size: 64, num_attention_heads: 4}", "--m.lr=1e-2"], 64)],
)
def test_command_line_arguments(arguments, hidden):
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(LlamaModule, "m")
    made = parser.instantiate_classes(parser.parse_args(arguments)).m
    assert made.config.hidden_size == hidden
    assert made.hparams["betas"] == (0.9, 0.95)


def test_not_built_yet_is_said():
    with pytest.raises(RuntimeError, match="configure_model"):
        LlamaModule(TINY)(torch.zeros(1, 2, dtype=torch.long))
