"""Floating-point operations per token of a decoder, by the name of the formula: an MFU without its formula means little.

Per token, forward and backward, with ``N`` parameters, ``L`` layers, ``h`` hidden size, ``s`` sequence length, ``V`` vocabulary:

======== ============================== ===================================================== ================================
name     operations                     N                                                     used by
======== ============================== ===================================================== ================================
`palm`   ``6 N + 12 L h s``             all parameters (untied: both embedding matrices)      PaLM, the layouts paper, playbook
`nemo`   ``6 N + 12 L h s``             without the input embedding, which multiplies nothing NeMo 24.x, DGXC recipes
`causal` ``6 N + 6 L h s``              as `nemo`; attention counts the unmasked half         Megatron-Bridge from 25.09
======== ============================== ===================================================== ================================

A tied matrix is ONE parameter matrix and ONE matrix product (the head's), so it counts once, and `palm` equals `nemo`. Counting
it twice, as some published runs do, overstates a small model by 10 to 17%.

Counted are matrix products and attention: two operations a multiply-add, the backward pass twice the forward. Norms, rotary
embeddings, softmax and the loss are not (their few parameters are in N, as published). The forward pass is a third.
"""

from __future__ import annotations

from typing import Protocol

FORMULAS = ("palm", "nemo", "causal")
_ATTENTION = {"palm": 12, "nemo": 12, "causal": 6}


class Shape(Protocol):
    """What is needed to know of a model; a `ModelShape` has it."""

    @property
    def num_parameters(self) -> int:
        """All parameters, a tied matrix once."""

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of ONE embedding matrix, ``V h``."""

    @property
    def num_layers(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def tied(self) -> bool:
        """Whether the output projection is the embedding."""


def check_formula(formula: str) -> str:
    """``formula`` when it is one of :data:`FORMULAS`; raises ValueError otherwise."""
    if formula not in FORMULAS:
        raise ValueError(f"unknown FLOPs formula {formula!r}; allowed: {', '.join(FORMULAS)}")
    return formula


def flops_per_token(shape: Shape, seq_len: int, formula: str = "palm") -> int:
    """Operations a token, forward and backward, nothing recomputed; ``seq_len`` tokens a sequence. ValueError for no formula."""
    attention = _ATTENTION[check_formula(formula)] * shape.num_layers * shape.hidden_size * seq_len
    return 6 * _counted_parameters(shape, formula) + attention


def recomputed_flops_per_token(shape: Shape, seq_len: int, ac: int | str = 0, formula: str = "palm") -> int:
    """Operations a token that activation checkpointing ``ac`` of a layout runs again: the forward pass of the recomputed layers.

    The head is in no layer and never recomputed (the last norm's few parameters are taken for a layer's). What a fused attention
    kernel recomputes inside itself is not counted.
    """
    attention = _ATTENTION[check_formula(formula)] * shape.num_layers * shape.hidden_size * seq_len
    num_matrices = 1 if shape.tied else 2
    in_layers = shape.num_parameters - num_matrices * shape.num_embedding_parameters
    return (6 * in_layers + attention) * num_recomputed_layers(ac, shape.num_layers) // (3 * shape.num_layers)


def num_recomputed_layers(ac: int | str, num_layers: int) -> int:
    """Layers whose matrix products run again under ``ac`` of a layout.

    0: none; 1: all; N: layers N, 2N, ... counted from 1; "sel" keeps matrix products and attention, so none.
    Raises ValueError for anything else.
    """
    if ac in (0, "sel"):
        return 0
    if not isinstance(ac, int) or ac < 0:
        raise ValueError(f"activation checkpointing is 0 (none), 1 (every layer), N (every Nth layer) or 'sel', not {ac!r}")
    return num_layers // ac


def utilization(tokens_per_s: float, flops_per_token: float, num_gpus: int, peak_tflops: float) -> float:
    """MFU (or HFU, with the recomputed operations added) as a share of 1.

    ``tokens_per_s`` of the whole job, ``num_gpus`` all its GPUs, ``peak_tflops`` the dense peak of one.
    """
    return tokens_per_s * flops_per_token / (num_gpus * peak_tflops * 1e12)


def _counted_parameters(shape: Shape, formula: str) -> int:
    if formula == "palm" or shape.tied:
        return shape.num_parameters
    return shape.num_parameters - shape.num_embedding_parameters
