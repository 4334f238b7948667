"""Activation checkpointing that a model does itself."""

from __future__ import annotations

from torch import nn


def is_checkpointed(module: nn.Module) -> bool:
    """Torch's checkpoint wrapper (FSDP, torchtitan), or the flag of transformers and diffusers."""
    is_wrapper = any(cls.__name__ == "CheckpointWrapper" for cls in type(module).__mro__)
    return is_wrapper or getattr(module, "gradient_checkpointing", False) is True
