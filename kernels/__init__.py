"""Fused operations for training transformers: Triton on a GPU, plain torch elsewhere, in any model by ``use_kernels(model)``.

Importing this package loads neither Triton nor a neighbour of this project. docs/kernels.md has the tables.
"""

from .glu import geglu, swiglu
from .norm import rms_norm
from .rope import rotary

__all__ = ["geglu", "rms_norm", "rotary", "swiglu"]
