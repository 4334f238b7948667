"""swiglu, geglu and rotary under Triton's interpreter, and the repair of the interpreter itself."""

import pytest
import torch
from lightning_5d.kernels import geglu, rotary, swiglu

from tests.kernels import oracles
from tests.kernels.interpreter import bf16_repair

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OPERATIONS = {
    "silu": swiglu,
    "gelu": lambda g, u=None: geglu(g, u, approximate="none"),
    "gelu_tanh": geglu,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", OPERATIONS)
def test_glu(activation, dtype):
    torch.manual_seed(0)
    gate, up = ((3 * torch.randn(2, 3, 50)).to(dtype).requires_grad_() for _ in range(2))
    leaves = oracles.float64_leaves(gate, up)
    y, exact = OPERATIONS[activation](gate, up), oracles.glu(*leaves, activation)
    oracles.assert_rounded_once(y, exact, min_equal=0.9)  # 1 + erf(g) cancels in float32 where gelu(g) is nearly zero
    dy = torch.randn_like(y)
    exact.backward(dy.double())
    oracles.assert_gradients(torch.autograd.grad(y, [gate, up], dy), leaves, min_equal=0.9)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_packed_glu_equals_separate(activation):
    torch.manual_seed(1)
    packed = torch.randn(3, 70, requires_grad=True)
    gate, up = (t.detach().clone().requires_grad_() for t in packed.chunk(2, -1))
    y, y2 = OPERATIONS[activation](packed), OPERATIONS[activation](gate, up)
    assert torch.equal(y, y2)
    y.sum().backward(), y2.sum().backward()
    assert torch.equal(packed.grad, torch.cat([gate.grad, up.grad], -1))


def test_glu_many_blocks_a_row_and_saturated_gates():
    gate = torch.linspace(-100, 100, 5000).repeat(2, 1)
    y = swiglu(gate, torch.ones_like(gate))
    oracles.assert_rounded_once(y, oracles.glu(gate.double(), torch.ones_like(gate).double(), "silu"))


def test_glu_empty():
    gate = torch.randn(0, 8, requires_grad=True)
    swiglu(gate, gate.detach()).sum().backward()
    assert gate.grad.shape == (0, 8)


def tables(seq, r, full, dtype=torch.float32, batch=1, interleaved=False):
    angle = torch.rand(batch, seq, r // 2) * 6.28
    if full:
        angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_rotary(dtype, interleaved, full):
    torch.manual_seed(2)
    q, k = (torch.randn(2, 3, heads, 12).to(dtype).requires_grad_() for heads in (5, 2))
    cos, sin = tables(3, 12, full, interleaved=interleaved)
    leaves = oracles.float64_leaves(q, k)
    out = rotary(q, k, cos, sin, interleaved=interleaved, rotary_dim=12)
    exact = [oracles.rotary(x, cos.double(), sin.double(), interleaved, 12) for x in leaves]
    grads = [torch.randn_like(x) for x in out]
    torch.autograd.backward(exact, [g.double() for g in grads])
    for a, e in zip(out, exact, strict=True):
        oracles.assert_rounded_once(a, e)
    oracles.assert_gradients(torch.autograd.grad(out, [q, k], grads), leaves)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("seq_dim", [1, 2])
def test_partial_rotary_by_layout_and_positions(interleaved, seq_dim):
    torch.manual_seed(3)
    shape = (2, 3, 2, 10) if seq_dim == 1 else (2, 2, 3, 10)
    q, k = (torch.randn(shape, requires_grad=True) for _ in range(2))
    cos, sin = tables(16, 6, True, interleaved=interleaved)
    positions = torch.tensor([[0, 5, 15], [7, 7, 1]])
    out = rotary(q, k, cos[0], sin[0], position_ids=positions, interleaved=interleaved, seq_dim=seq_dim)
    leaves = oracles.float64_leaves(q, k)
    for x, leaf, o in zip((q, k), leaves, out, strict=True):
        straight = leaf if seq_dim == 1 else leaf.transpose(1, 2)
        exact = oracles.rotary(straight, cos[0][positions].double(), sin[0][positions].double(), interleaved)
        exact = exact if seq_dim == 1 else exact.transpose(1, 2)
        oracles.assert_rounded_once(o, exact)
        dy = torch.randn_like(o)
        exact.backward(dy.double())
        oracles.assert_gradients(torch.autograd.grad(o, [x], dy, retain_graph=True), [leaf])


def test_rotary_with_a_table_a_sequence_and_strided_inputs():
    """Queries and keys cut out of one packed projection, and tables that differ between the sequences of a batch."""
    torch.manual_seed(4)
    packed = torch.randn(2, 3, 4, 8)
    q, k = packed[:, :, :3], packed[:, :, 3:]
    cos, sin = tables(3, 8, True, batch=2)
    for x, out in zip((q, k), rotary(q, k, cos, sin), strict=True):
        oracles.assert_rounded_once(out, oracles.rotary(x.double(), cos.double(), sin.double()))


def test_rotary_in_place():
    torch.manual_seed(5)
    leaf_q, leaf_k = torch.randn(1, 4, 2, 8, requires_grad=True), torch.randn(1, 4, 1, 8, requires_grad=True)
    cos, sin = tables(4, 8, True)
    q, k = leaf_q * 1, leaf_k * 1
    out_q, out_k = rotary(q, k, cos, sin, inplace=True)
    assert out_q.data_ptr() == q.data_ptr() and out_k.data_ptr() == k.data_ptr()
    ref_q, ref_k = rotary(leaf_q, leaf_k, cos, sin)
    assert torch.equal(out_q, ref_q) and torch.equal(out_k, ref_k)
    weight = torch.randn_like(out_q)
    got = torch.autograd.grad((out_q * weight).sum() + out_k.sum(), [leaf_q, leaf_k])
    want = torch.autograd.grad((ref_q * weight).sum() + ref_k.sum(), [leaf_q, leaf_k])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_unequal_halves_of_the_tables():
    """Backward is the transpose, which is the opposite rotation only where both halves of a table agree."""
    torch.manual_seed(6)
    q = torch.randn(1, 2, 1, 4, dtype=torch.float32, requires_grad=True)
    cos, sin = torch.rand(1, 2, 4), torch.rand(1, 2, 4)
    rotate_half = torch.cat([-q[..., 2:], q[..., :2]], -1)
    want = q * cos.unsqueeze(2) + rotate_half * sin.unsqueeze(2)
    got, _ = rotary(q, q.detach(), cos, sin)
    dy = torch.randn_like(got)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, q, dy)[0], torch.autograd.grad(want, q, dy)[0])


def test_the_repair_of_bfloat16_is_still_needed():
    """Stock Triton truncates float32 -> bfloat16; when this fails, delete bf16_repair.py."""
    gate = torch.full((1, 16), 30.0).bfloat16()
    up = torch.full((1, 16), 1.171875).bfloat16()  # the product 35.15625 lies above the middle of two bfloat16 numbers
    want = (gate.float() * up.float()).bfloat16()
    try:
        bf16_repair.uninstall()
        stock = swiglu(gate, up)
    finally:
        bf16_repair.install()
    assert torch.equal(swiglu(gate, up), want)
    assert not torch.equal(stock, want)
