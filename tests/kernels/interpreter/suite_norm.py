import pytest
import torch
from lightning_5d.kernels import norm, rms_norm

from tests.kernels import oracles

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(x, weight, residual=None, zero_centred=False, eps=1e-6):
    x, weight = x.requires_grad_(), weight.requires_grad_()
    leaves = oracles.float64_leaves(x, weight, residual)
    y = rms_norm(x, weight, eps, residual, zero_centred=zero_centred)
    if residual is None:
        exact = oracles.rms_norm(*leaves[:2], eps, zero_centred=zero_centred)
        oracles.assert_rounded_once(y, exact)
        dy = torch.randn_like(y)
        grads = torch.autograd.grad(y, [x, weight], dy)
        exact.backward(dy.double())
        oracles.assert_gradients(grads, leaves[:2], min_equal=0.9)
        return
    # The sum is rounded to the dtype before it is normalised, so the exact value is that of the rounded sum.
    total = (x + residual).detach()
    (s,) = oracles.float64_leaves(total)
    exact = oracles.rms_norm(s, leaves[1], eps, zero_centred=zero_centred)
    assert torch.equal(y[1], total)
    oracles.assert_rounded_once(y[0], exact)
    dy, dsum = torch.randn_like(y[0]), torch.randn_like(total)
    dx, dw, dres = torch.autograd.grad(y, [x, weight, residual], [dy, dsum])
    torch.autograd.backward([exact, s], [dy.double(), dsum.double()])
    assert torch.equal(dx, dres)
    oracles.assert_gradients([dx, dw], [s, leaves[1]], min_equal=0.9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_rows_share_a_program(dtype):
    torch.manual_seed(0)
    check(torch.randn(3, 7, 33).to(dtype), torch.randn(33).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_residual(dtype, zero_centred):
    torch.manual_seed(1)
    x, residual = (torch.randn(5, 100).to(dtype) for _ in range(2))
    check(x, torch.randn(100).to(dtype), residual.requires_grad_(), zero_centred)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_residual", [False, True])
def test_wide_rows_go_through_in_blocks(dtype, with_residual, monkeypatch):
    for name in ("MAX_FORWARD_BLOCK", "MAX_BACKWARD_BLOCK"):
        monkeypatch.setattr(norm, name, 32)
    torch.manual_seed(2)
    residual = torch.randn(3, 75).to(dtype).requires_grad_() if with_residual else None
    check(torch.randn(3, 75).to(dtype), torch.randn(75).to(dtype), residual)


@pytest.mark.slow
@pytest.mark.parametrize("width", [5, 127, 4096, 8192, 16384, 20000])
def test_widths(width):
    torch.manual_seed(3)
    check(torch.randn(3, width), torch.randn(width))


def test_strided_rows_are_read_in_place():
    torch.manual_seed(4)
    packed = torch.randn(4, 3, 40)
    check(packed[:, 1], torch.randn(40))
    check(torch.randn(6, 12).t(), torch.randn(6))


def test_mixed_dtypes_keep_the_dtype_of_x_and_of_weight():
    torch.manual_seed(5)
    x, weight = torch.randn(4, 24).bfloat16().requires_grad_(), torch.randn(24, requires_grad=True)
    y = rms_norm(x, weight)
    dx, dw = torch.autograd.grad(y.sum(), [x, weight])
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_empty(shape):
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(8, requires_grad=True)
    y = rms_norm(x, weight)
    y.sum().backward()
    assert y.shape == shape and x.grad.shape == shape
    assert weight.grad.abs().sum() == 0


def test_frozen_weight_costs_no_gradient():
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16)
    rms_norm(x, weight).sum().backward()
    assert x.grad is not None


def test_one_large_and_tiny_rows():
    """Rows of zeros, tiny and huge values: eps rules the first, float32 inside carries the last."""
    x = torch.stack([torch.zeros(16), torch.full((16,), 1e-20), torch.full((16,), 1e4)]).to(torch.bfloat16)
    y = rms_norm(x, torch.ones(16, dtype=torch.bfloat16))
    oracles.assert_rounded_once(y, oracles.rms_norm(x.double(), torch.ones(16).double()))
