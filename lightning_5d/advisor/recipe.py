"""A LightningCLI recipe for a layout, ready to run with `lightning-5d fit --config`."""

from __future__ import annotations

from typing import Any

import yaml

from lightning_5d.advisor.hardware import Gpu
from lightning_5d.advisor.model import PRESETS, ModelSpec, model_config
from lightning_5d.advisor.predict import Estimate

_LLAMA_NAMES = ("tiny", "llama-13b", "llama-30b", "llama-65b", "llama3-8b", "llama3-70b", "llama3-405b")
LLAMA_PRESETS = tuple(PRESETS[name] for name in _LLAMA_NAMES)
"""Presets that `lightning_5d.models.LlamaConfig` has too."""


def recipe(spec: ModelSpec, best: Estimate, gpu: Gpu) -> str:
    """The recipe's YAML, with the prediction in its head.

    Raises:
        ValueError: the model is no dense Llama, which is what `LlamaModule` trains.
    """
    if spec.num_experts or not spec.gated_mlp:
        raise ValueError(
            f"{spec.name} is no dense Llama: a recipe can only name lightning_5d.models.LlamaModule; use --json for the layout"
        )
    per_node = min(gpu.scaleup_domain_gpus if gpu.scaleup_domain_gpus <= 8 else 8, best.num_gpus)
    while best.num_gpus % per_node:
        per_node -= 1
    # dp follows from the world, so that the same file runs on more nodes.
    strategy = "_".join(t for t in best.layout.split("_") if t.rstrip("0123456789") != "dp") or "zero0"
    content: dict[str, Any] = {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "gpu",
            "devices": per_node,
            "num_nodes": best.num_gpus // per_node,
            "strategy": strategy,
            "precision": "bf16-mixed",
            "max_steps": 1000,
            "gradient_clip_val": 1.0,
            "log_every_n_steps": 1,
            "callbacks": [{"class_path": "lightning_5d.MFUMonitor"}],
        },
        "model": {
            "class_path": "lightning_5d.models.LlamaModule",
            # A config.json may be called as a preset and have other sizes.
            "init_args": {"config": spec.name if spec in LLAMA_PRESETS else model_config(spec)},
        },
        "data": {
            "class_path": "lightning_5d.data.TextDataModule",
            "init_args": {
                "path": None,
                "vocab_size": min(spec.vocab_size, 8192),
                "seq_len": best.seq_len,
                "global_batch_size": best.global_batch,
            },
        },
    }
    head = (
        f"# {spec.name} on {best.num_gpus} × {best.gpu}: {best.layout}\n"
        f"# predicted: {best.memory_gib:.1f} of {best.limit_gib:.1f} GiB, {best.step_time_s:.2f} s a step, MFU {best.mfu:.1%}\n"
        "# data.init_args.path: your text; null trains on Python's own documentation, as a trial\n"
    )
    return head + yaml.safe_dump(content, sort_keys=False)
