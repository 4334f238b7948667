"""Bytes that each operation keeps for backward, counted on fake tensors as on a GPU, against the table in docs/kernels.md."""

import functools
import re
from pathlib import Path

import pytest
import torch
from lightning_5d.kernels import (
    _triton,
    attention,
    cross_entropy,
    embedding,
    glu,
    linear_cross_entropy,
    linear_loss,
    loss,
    norm,
    permute_tokens,
    rms_norm,
    rope,
    rotary,
    swiglu,
    unpermute_tokens,
    use_kernels,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.memory import saved_bytes

DOCS = Path(__file__).parents[3] / "docs" / "kernels.md"
TOKENS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 4096, 14336, 32, 8, 128, 128_256  # Llama 3 8B


def half(*shape, grad=True):
    return torch.empty(shape, dtype=torch.bfloat16, requires_grad=grad)


def tokens(width):
    return half(1, TOKENS, width)


def heads(n):
    return half(1, TOKENS, n, HEAD_DIM)


def ids():
    return torch.empty(TOKENS, dtype=torch.long)


def residual_norm(x, r, w):
    return rms_norm(x, w, residual=r)


def layer(kernels):
    from lightning_5d.models.config import LlamaConfig
    from lightning_5d.models.llama import LlamaDecoderLayer

    sizes = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    made = LlamaDecoderLayer(LlamaConfig(num_hidden_layers=1, vocab_size=VOCAB, **sizes))
    use_kernels(made, kernels, verbose=False)
    table = half(TOKENS, HEAD_DIM, grad=False)
    return functools.partial(made, cos=table, sin=table), (tokens(HIDDEN),), list(made.parameters())


def cases():
    weight, head = half(HIDDEN), half(VOCAB, HIDDEN)
    table = half(TOKENS, HEAD_DIM, grad=False)
    slot, experts = torch.empty(TOKENS, 2, dtype=torch.int32), torch.zeros(TOKENS, 2, dtype=torch.long)
    return {
        "`rms_norm`": (rms_norm, (tokens(HIDDEN), weight), (weight,)),
        "`rms_norm` with residual": (residual_norm, (tokens(HIDDEN), tokens(HIDDEN), weight), (weight,)),
        "`swiglu`, `geglu`": (swiglu, (tokens(FFN), tokens(FFN)), ()),
        "`rotary`": (lambda q, k: rotary(q, k, table, table), (heads(HEADS), heads(KV_HEADS)), (table,)),
        "`attention`": (attention, (heads(HEADS), heads(KV_HEADS), heads(KV_HEADS)), ()),
        "`linear_cross_entropy`": (linear_cross_entropy, (half(TOKENS, HIDDEN), head, ids()), (head,)),
        "`cross_entropy`": (cross_entropy, (half(TOKENS, VOCAB), ids()), ()),
        "`embedding`": (lambda w: embedding(ids(), w), (head,), (head,)),
        "`permute_tokens`, top 2": (lambda x: permute_tokens(x, experts, 8)[0], (half(TOKENS, HIDDEN),), ()),
        "`unpermute_tokens`, top 2": (lambda y, p: unpermute_tokens(y, slot, p), (half(2 * TOKENS, HIDDEN), half(TOKENS, 2)), ()),
        "a layer with kernels": layer("auto"),
        "a layer without": layer("none"),
    }  # fmt: skip


def documented():
    """Bytes a token by name: the last column of the table of saved bytes."""
    section = DOCS.read_text().split("## Saved for backward")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    return {row[0]: float(row[-1].replace(",", "")) for row in rows if re.fullmatch(r"[\d,.]+", row[-1])}


@pytest.mark.slow
def test_saved_bytes_are_those_in_the_documentation(monkeypatch):
    measured = {}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode():
            operations = cases()  # before launches do nothing: use_kernels tries modules out
            monkeypatch.setattr(_triton.Kernel, "run", lambda *args: None)
            for module in (norm, glu, rope, loss):
                monkeypatch.setattr(module, "runs_on_triton", lambda x: True)
            for module in (loss, linear_loss):
                monkeypatch.setattr(module, "check_targets", lambda *args: None)
            for name, (function, inputs, parameters) in operations.items():
                measured[name] = saved_bytes(function, *inputs, parameters=parameters) / TOKENS
    finally:
        torch.set_default_dtype(default)
    print("\n".join(f"{name}: {value:,.1f} bytes a token" for name, value in measured.items()))
    table = documented()
    assert measured.keys() == table.keys()
    wrong = {name: (value, table[name]) for name, value in measured.items() if abs(value - table[name]) > 0.1}
    assert not wrong, f"(measured, documented): {wrong}"
