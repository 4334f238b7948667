"""Embedding backward and token permutation under Triton's interpreter."""

import pytest
import torch
from lightning_5d.kernels import embedding, permute_tokens, unpermute_tokens

from tests.kernels import oracles

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype):
    """Runs of equal ids, ids of other ranks, and rows that no id names."""
    torch.manual_seed(0)
    weight = torch.randn(5, 20).to(dtype).requires_grad_()
    ids = torch.tensor([[3, 7, 7, 0], [7, 5, 4, 99], [7, 3, 3, 3]])
    (exact_weight,) = oracles.float64_leaves(weight)
    padded = torch.cat([torch.zeros(3, 20).double(), exact_weight, torch.zeros(99, 20).double()])  # weight begins at entry 3
    out, exact = embedding(ids, weight, vocab_start=3), torch.nn.functional.embedding(ids, padded)
    assert torch.equal(out.double(), exact)
    dout = torch.randn_like(out)
    exact.backward(dout.double())
    out.backward(dout)
    oracles.assert_rounded_once(weight.grad, exact_weight.grad)
    assert weight.grad[3].abs().sum() == 0  # entry 6


def test_embedding_without_rows_or_tokens():
    weight = torch.randn(4, 8, requires_grad=True)
    embedding(torch.zeros(0, dtype=torch.long), weight).sum().backward()
    assert weight.grad.abs().sum() == 0
    empty = torch.randn(0, 8, requires_grad=True)
    out = embedding(torch.tensor([1, 2]), empty, vocab_start=64)
    out.sum().backward()
    assert out.abs().sum() == 0 and empty.grad.shape == (0, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_there_and_back(dtype, weighted):
    torch.manual_seed(1)
    x = torch.randn(5, 24).to(dtype).requires_grad_()
    weights = torch.rand(5, 2).to(dtype).requires_grad_() if weighted else None
    experts = torch.tensor([[2, 0], [0, 1], [2, 3], [2, 0], [3, 1]])
    copies, counts, slot = permute_tokens(x, experts, 5)
    assert counts.tolist() == [3, 2, 3, 2, 0]
    for token in range(5):
        for j in range(2):
            assert torch.equal(copies[slot[token, j]], x[token])
    assert torch.equal(experts.flatten()[slot.flatten().argsort()], experts.flatten().sort().values)
    y = copies * (1 + torch.arange(10))[:, None]  # each copy changed by its expert
    out = unpermute_tokens(y, slot, weights)
    exact_x, exact_weights = oracles.float64_leaves(x, weights)
    factor = (1 + slot).double() * (exact_weights if weighted else 1)
    exact = exact_x * factor.sum(1, keepdim=True)
    dout = torch.randn_like(out)
    exact.backward(dout.double())
    out.backward(dout)
    limit = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]  # several roundings on the way
    for got, want in [(out, exact), (x.grad, exact_x.grad)] + ([(weights.grad, exact_weights.grad)] if weighted else []):
        torch.testing.assert_close(got.double(), want.double(), rtol=limit, atol=limit * want.abs().max().item())


def test_several_blocks_a_row(monkeypatch):
    from lightning_5d.kernels import experts

    monkeypatch.setattr(experts, "BLOCK", 16)
    test_there_and_back(torch.float32, True)
