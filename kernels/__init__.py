"""Fused operations for training transformers: Triton on a GPU, plain torch elsewhere, in any model by ``use_kernels(model)``.

Importing this package loads neither Triton nor a neighbour of this project. docs/kernels.md has the tables.
"""

if __name__ == "lightning_5d.kernels":
    from .attend import attention
    from .experts import grouped_matmul, permute_tokens, unpermute_tokens
    from .glu import geglu, swiglu
    from .linear_loss import linear_cross_entropy
    from .loss import cross_entropy
    from .norm import rms_norm
    from .rope import rotary
    from .swap import KernelReport, use_kernels
    from .vocabulary import embedding

    __all__ = [
        "KernelReport",
        "attention",
        "cross_entropy",
        "embedding",
        "geglu",
        "grouped_matmul",
        "linear_cross_entropy",
        "permute_tokens",
        "rms_norm",
        "rotary",
        "swiglu",
        "unpermute_tokens",
        "use_kernels",
    ]
# Else this folder was found as a top-level `kernels`, because the project's root is on sys.path: transformers looks for Hugging
# Face's package of that name there, and is to find something without a version, and not these operations a second time.
