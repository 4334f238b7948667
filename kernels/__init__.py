"""Fused operations for training transformers: Triton on a GPU, plain torch elsewhere, in any model by ``use_kernels(model)``.

Importing this package loads neither Triton nor a neighbour of this project. docs/kernels.md has the tables.
"""

from .glu import geglu, swiglu
from .linear_loss import linear_cross_entropy
from .loss import cross_entropy
from .norm import rms_norm
from .rope import rotary

__all__ = ["cross_entropy", "geglu", "linear_cross_entropy", "rms_norm", "rotary", "swiglu"]
