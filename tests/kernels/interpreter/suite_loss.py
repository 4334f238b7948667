"""cross_entropy and linear_cross_entropy under Triton's interpreter, against torch's own loss in float64."""

import pytest
import torch
from lightning_5d.kernels import cross_entropy, linear_cross_entropy, linear_loss, loss

from tests.kernels import oracles

OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 3.0},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 5.0, "reduction": "sum"},
}


def targets(n, vocab, ignored=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, vocab, (n,), generator=generator)
    return torch.where(torch.rand(n, generator=generator) < ignored, -100, target)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks a row and several tiles a vocabulary, for a vocabulary of a hundred."""
    monkeypatch.setattr(loss, "BLOCK", 32)
    monkeypatch.setattr(linear_loss, "tile_size", lambda width: 40)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_cross_entropy(name, dtype, small_blocks):
    torch.manual_seed(0)
    logits, target = (3 * torch.randn(6, 101)).to(dtype).requires_grad_(), targets(6, 101)
    (exact_logits,) = oracles.float64_leaves(logits)
    value, exact = cross_entropy(logits, target, **OPTIONS[name]), oracles.cross_entropy(exact_logits, target, **OPTIONS[name])
    torch.testing.assert_close(value.double(), exact, rtol=2e-6, atol=2e-6)
    value.backward(), exact.backward()
    oracles.assert_rounded_once(logits.grad, exact_logits.grad, min_equal=0.95)


@pytest.mark.parametrize("name", OPTIONS)
def test_linear_cross_entropy(name, small_blocks):
    torch.manual_seed(1)
    hidden, weight, target = (
        torch.randn(2, 5, 16, requires_grad=True),
        torch.randn(101, 16, requires_grad=True),
        targets(10, 101).view(2, 5),
    )
    exact_hidden, exact_weight = oracles.float64_leaves(hidden, weight)
    value = linear_cross_entropy(hidden, weight, target, **OPTIONS[name])
    exact = oracles.cross_entropy((exact_hidden @ exact_weight.t()).flatten(0, 1), target.flatten(), **OPTIONS[name])
    torch.testing.assert_close(value.double(), exact, rtol=2e-6, atol=2e-6)
    value.backward(), exact.backward()
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), exact_weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulated_micro_batches_with_ignored_targets(dtype, small_blocks):
    """Gradients summed over three micro-batches are as near to the exact ones as those of the unfused loss in the same dtype."""
    torch.manual_seed(2)
    hidden, target = torch.randn(3, 16, 32), targets(48, 101).view(3, 16)
    weight = 0.3 * torch.randn(101, 32)

    def gradients(dtype, loss_of):
        h, w = hidden.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_()
        for i in range(3):
            (loss_of(h[i], w, target[i]) / 3).backward()
        return h.grad.double(), w.grad.double()

    # the exact gradients are those of the rounded inputs
    hidden, weight = hidden.to(dtype).double(), weight.to(dtype).double()
    exact = gradients(torch.float64, lambda h, w, t: oracles.cross_entropy(h @ w.t(), t))
    unfused = gradients(dtype, lambda h, w, t: oracles.cross_entropy((h @ w.t()).float(), t))
    fused = gradients(dtype, linear_cross_entropy)
    for ours, theirs, want in zip(fused, unfused, exact, strict=True):
        error, their_error = (ours - want).norm() / want.norm(), (theirs - want).norm() / want.norm()
        assert error < max(1.1 * their_error, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ignored_is_zero_not_nan(dtype):
    hidden, weight = torch.randn(4, 8).to(dtype).requires_grad_(), torch.randn(20, 8).to(dtype).requires_grad_()
    target = torch.full((4,), -100)
    value = linear_cross_entropy(hidden, weight, target)
    value.backward()
    assert value.item() == 0
    assert hidden.grad.abs().sum() == 0 and weight.grad.abs().sum() == 0
    logits = torch.randn(4, 20).to(dtype).requires_grad_()
    value = cross_entropy(logits, target)
    value.backward()
    assert value.item() == 0 and logits.grad.abs().sum() == 0


def test_ignored_rows_may_hold_anything():
    logits = torch.randn(3, 20)
    logits[1] = torch.nan
    logits.requires_grad_()
    value = cross_entropy(logits, torch.tensor([4, -100, 7]))
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(logits.grad).all() and logits.grad[1].abs().sum() == 0


def test_impossible_entries():
    """Logits of minus infinity (entries that a sampler masked) count for nothing."""
    logits = torch.randn(2, 300)
    logits[:, :256] = -torch.inf
    logits.requires_grad_()
    cross_entropy(logits, torch.tensor([270, 299])).backward()
    want = logits.detach().clone().requires_grad_()
    torch.nn.functional.cross_entropy(want, torch.tensor([270, 299])).backward()
    torch.testing.assert_close(logits.grad, want.grad)


@pytest.mark.parametrize("shape", [(0, 12), (3, 1)])
def test_degenerate(shape):
    logits = torch.randn(shape, requires_grad=True)
    cross_entropy(logits, torch.zeros(shape[0], dtype=torch.long)).backward()
    assert logits.grad.abs().sum() < 1e-6
    hidden, weight = torch.randn(shape[0], 4, requires_grad=True), torch.randn(shape[1], 4, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(shape[0], dtype=torch.long)).backward()
    assert weight.grad.abs().sum() < 1e-5 and hidden.grad.shape == hidden.shape


def test_strided_logits_and_overwriting():
    torch.manual_seed(3)
    wide, target = torch.randn(5, 64), targets(5, 40)
    plain, strided = wide[:, :40].clone().requires_grad_(), wide[:, :40].detach().requires_grad_()
    cross_entropy(plain, target).backward(), cross_entropy(strided, target).backward()
    assert torch.equal(plain.grad, strided.grad)
    leaf = wide[:, :40].clone().requires_grad_()
    logits = leaf * 1
    cross_entropy(logits, target, overwrite_logits=True).backward()
    assert torch.equal(leaf.grad, plain.grad)
    assert torch.equal(logits.detach(), plain.grad), "the gradient was to be written over the logits"


def test_padded_vocabulary():
    """Entries past ``vocab_size`` count for nothing, whatever their logits, and get exact zeros."""
    torch.manual_seed(4)
    hidden, weight, target = torch.randn(6, 8), torch.randn(50, 8), targets(6, 43)
    padded, short = weight.clone().requires_grad_(), weight[:43].clone().requires_grad_()
    a = linear_cross_entropy(hidden, padded, target, vocab_size=43, label_smoothing=0.1)
    b = linear_cross_entropy(hidden, short, target, label_smoothing=0.1)
    a.backward(), b.backward()
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(padded.grad[:43], short.grad)
    assert padded.grad[43:].abs().sum() == 0
