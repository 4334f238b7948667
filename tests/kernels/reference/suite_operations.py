"""The plain torch path of every operation: gradients in float64, registration with torch, errors, and what it leaves alone."""

import subprocess
import sys

import pytest
import torch
from lightning_5d.kernels import (
    cross_entropy,
    embedding,
    geglu,
    grouped_matmul,
    linear_cross_entropy,
    permute_tokens,
    rms_norm,
    rotary,
    swiglu,
    unpermute_tokens,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels import oracles

ops = torch.ops.lightning_5d


def f64(*shape, grad=True):
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


def tables(seq, r):
    angle = torch.rand(1, seq, r, dtype=torch.float64) * 6
    return angle.cos(), angle.sin()


GRADCHECKS = {
    "rms_norm": lambda: (rms_norm, (f64(2, 3, 5), f64(5))),
    "rms_norm zero-centred": lambda: (lambda x, w: rms_norm(x, w, 1e-3, zero_centred=True), (f64(4, 5), f64(5))),
    "rms_norm residual": lambda: (lambda x, r, w: rms_norm(x, w, residual=r), (f64(4, 5), f64(4, 5), f64(5))),
    "swiglu": lambda: (swiglu, (f64(3, 4), f64(3, 4))),
    "swiglu packed": lambda: (swiglu, (f64(3, 8),)),
    "geglu": lambda: (geglu, (f64(3, 4), f64(3, 4))),
    "geglu exact": lambda: (lambda g, u: geglu(g, u, "none"), (f64(3, 4), f64(3, 4))),
    "rotary": lambda: (lambda q, k: rotary(q, k, *tables_of_4), (f64(2, 3, 2, 4), f64(2, 3, 1, 4))),
    "rotary interleaved, partial": lambda: (
        lambda q, k: rotary(q, k, *tables_of_4, interleaved=True),
        (f64(2, 3, 2, 6), f64(2, 3, 1, 6)),
    ),
    "cross_entropy": lambda: (lambda x: cross_entropy(x, TARGET, **ALL), (f64(4, 7),)),
    "cross_entropy, each token": lambda: (lambda x: cross_entropy(x, TARGET, reduction="none"), (f64(4, 7),)),
    "linear_cross_entropy": lambda: (lambda h, w: linear_cross_entropy(h, w, TARGET, **ALL), (f64(4, 3), f64(7, 3))),
    "embedding": lambda: (lambda w: embedding(torch.tensor([[1, 4], [4, 9]]), w, vocab_start=1), (f64(5, 3),)),
    "permute_tokens": lambda: (lambda x: permute_tokens(x, EXPERTS, 3)[0], (f64(4, 3),)),
    "unpermute_tokens": lambda: (lambda y, p: unpermute_tokens(y, SLOT, p), (f64(8, 3), f64(4, 2))),
    "unpermute_tokens, unweighted": lambda: (lambda y: unpermute_tokens(y, SLOT), (f64(8, 3),)),
    "grouped_matmul": lambda: (lambda x, w: grouped_matmul(x, w, torch.tensor([2, 0, 3])), (f64(5, 3), f64(3, 3, 2))),
}
EXPERTS = torch.tensor([[0, 2], [1, 0], [2, 1], [2, 0]])
SLOT = torch.tensor([[3, 0], [1, 6], [2, 5], [7, 4]], dtype=torch.int32)
TARGET = torch.tensor([3, -100, 0, 6])
ALL = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 2.0}
tables_of_4 = tables(3, 4)


@pytest.mark.parametrize("name", GRADCHECKS)
def test_gradcheck(name):
    torch.manual_seed(0)
    function, inputs = GRADCHECKS[name]()
    assert torch.autograd.gradcheck(function, inputs)


def test_values_equal_the_oracles():
    torch.manual_seed(1)
    x, r, w, gate, up = f64(3, 6), f64(3, 6), f64(6), f64(3, 5), f64(3, 5)
    torch.testing.assert_close(
        rms_norm(x, w, residual=r, zero_centred=True), oracles.rms_norm(x, w, residual=r, zero_centred=True)
    )
    torch.testing.assert_close(swiglu(gate, up), oracles.glu(gate, up, "silu"))
    torch.testing.assert_close(geglu(gate, up), oracles.glu(gate, up, "gelu_tanh"))
    torch.testing.assert_close(geglu(gate, up, "none"), oracles.glu(gate, up, "gelu"))
    logits = f64(4, 7)
    for options in ({}, ALL, {"reduction": "none"}, {"reduction": "sum"}):
        torch.testing.assert_close(cross_entropy(logits, TARGET, **options), oracles.cross_entropy(logits, TARGET, **options))
    q, k = f64(2, 3, 4, 8), f64(2, 3, 2, 8)
    cos, sin = tables(16, 3)
    positions = torch.tensor([[0, 9, 3], [15, 1, 1]])
    for interleaved in (False, True):
        out = rotary(q, k, cos, sin, position_ids=positions, rotary_dim=6, interleaved=interleaved)
        for got, x in zip(out, (q, k), strict=True):
            torch.testing.assert_close(got, oracles.rotary(x, cos[0][positions], sin[0][positions], interleaved, 6))


def f32(*shape):
    return torch.randn(shape)


SAMPLES = {
    "rms_norm": lambda: (f32(2, 3, 8), f32(8), 1e-6, 0.0),
    "add_rms_norm": lambda: (f32(2, 8), f32(2, 8), f32(8), 1e-6, 1.0),
    "rms_norm_backward": lambda: (f32(2, 8), f32(2, 8), f32(2, 8), f32(8), f32(2), 0.0, True),
    "glu": lambda: (f32(2, 3, 8), f32(2, 3, 8), 0),
    "glu_backward": lambda: (f32(2, 8), f32(2, 8), f32(2, 8), 1),
    "glu_packed_backward": lambda: (f32(2, 8), f32(2, 16), 2),
    "rotary": lambda: (f32(2, 4, 3, 8).transpose(1, 2), f32(2, 3, 2, 8), f32(1, 3, 8), f32(1, 3, 8), None, False, 8, False),
    "cross_entropy_statistics": lambda: (f32(4, 7), TARGET, 0, 7, 0.0),
    "cross_entropy_gradient": lambda: (f32(4, 7), TARGET, f32(4), f32(4), 0, 7, 7, 0.1, 0.01, 2.0),
    "cross_entropy_gradient_": lambda: (f32(4, 7), TARGET, f32(4), f32(4), 0, 7, 7, 0.0, 0.0, 0.0),
    "linear_cross_entropy_statistics": lambda: (f32(4, 3), f32(7, 3), TARGET, 0, 7, 0.0, 4),
    "linear_cross_entropy_gradient": lambda: (
        f32(4, 3),
        f32(7, 3),
        TARGET,
        f32(4),
        f32(4),
        0,
        7,
        7,
        0.0,
        0.0,
        0.0,
        4,
        True,
        True,
    ),
    "embedding": lambda: (f32(5, 3), torch.tensor([[1, 4], [4, 9]]), 1),
    "embedding_backward": lambda: (f32(2, 2, 3), torch.tensor([[1, 4], [4, 9]]), 5, 1),
    "spread_tokens": lambda: (f32(4, 3), SLOT),
    "spread_tokens_weighted": lambda: (f32(4, 3), SLOT, f32(8, 3), f32(4, 2)),
    "gather_tokens": lambda: (f32(8, 3), SLOT, f32(4, 2)),
    "rotary_": lambda: (
        f32(2, 3, 4, 8),
        f32(2, 3, 2, 8),
        f32(1, 9, 3),
        f32(1, 9, 3),
        torch.tensor([[0, 1, 2], [6, 7, 8]]),
        True,
        6,
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name):
    torch.library.opcheck(getattr(ops, name).default, SAMPLES[name]())


def test_fake_tensors_on_a_gpu_that_is_not_here():
    with FakeTensorMode():
        x, w = torch.empty(4, 8, device="cuda", dtype=torch.bfloat16), torch.empty(8, device="cuda")
        assert rms_norm(x, w).device.type == "cuda"
        assert swiglu(x, x).dtype == torch.bfloat16
        q, table = torch.empty(2, 3, 4, 8, device="cuda"), torch.empty(1, 3, 8, device="cuda")
        assert rotary(q, q, table, table)[0].shape == q.shape


@pytest.mark.slow
def test_compiles_without_a_graph_break():
    def block(x, w, gate, up, q, cos, sin):
        return rms_norm(x, w), swiglu(gate, up), *rotary(q, q * 2, cos, sin)

    args = [torch.randn(shape, requires_grad=True) for shape in [(2, 8), (8,), (2, 4), (2, 4), (1, 3, 2, 4)]] + [
        torch.randn(3, 4)
    ] * 2
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    got, want = compiled(*args), block(*args)
    torch.testing.assert_close(got, want)
    leaves = [a for a in args if a.requires_grad]
    torch.testing.assert_close(
        torch.autograd.grad(sum(o.sum() for o in got), leaves), torch.autograd.grad(sum(o.sum() for o in want), leaves)
    )


@pytest.mark.parametrize("vocab", [7, 20_000])
def test_tiles_make_no_difference(vocab):
    torch.manual_seed(2)
    hidden, weight, target = f32(4, 8).requires_grad_(), f32(vocab, 8).requires_grad_(), TARGET
    fused = torch.autograd.grad(linear_cross_entropy(hidden, weight, target), [hidden, weight])
    unfused = torch.autograd.grad(torch.nn.functional.cross_entropy(hidden @ weight.t(), target), [hidden, weight])
    torch.testing.assert_close(fused, unfused)


def test_flops_of_the_fused_loss_are_counted():
    import lightning_5d.kernels.flops  # noqa: F401
    from torch.utils.flop_counter import FlopCounterMode

    hidden, weight = f32(4, 8).requires_grad_(), f32(7, 8).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(hidden, weight, TARGET).backward()
    assert counter.get_total_flops() == 4 * (2 * 4 * 8 * 7)  # forward, its recomputation, and two gradients


def test_autocast_takes_its_dtype():
    hidden, weight = f32(4, 8).requires_grad_(), f32(7, 8).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value = linear_cross_entropy(hidden, weight, TARGET)
    want = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), TARGET)
    assert torch.equal(value, want) and value.dtype == torch.float32
    value.backward()
    assert weight.grad.dtype == torch.float32


def test_recompute_gives_the_same_gradients():
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    plain = torch.autograd.grad(swiglu(rms_norm(x, w), x).sum(), [x, w])
    again = torch.utils.checkpoint.checkpoint(lambda x, w: swiglu(rms_norm(x, w), x), x, w, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(plain, torch.autograd.grad(again.sum(), [x, w]), strict=True))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: rms_norm(f32(2, 8), f32(7)), r"weight has shape \(7,\), expected \(8,\)"),
        (lambda: rms_norm(f32(2, 8), f32(8), residual=f32(2, 7)), r"residual is torch.float32 \(2, 7\)"),
        (lambda: swiglu(f32(2, 8), f32(2, 7)), "gate and up differ"),
        (lambda: swiglu(f32(2, 7)), "its last size even"),
        (lambda: geglu(f32(2, 8), f32(2, 8), "fast"), "allowed are 'tanh' and 'none'"),
        (lambda: rotary(f32(1, 3, 2, 8), f32(1, 3, 2, 8), f32(4, 8), f32(4, 8)), r"tables have shapes \(1, 4, 8\)"),
        (lambda: rotary(f32(1, 3, 2, 8), f32(1, 3, 2, 8), f32(3, 10), f32(3, 10)), "at most the head dimension 8"),
        (lambda: rotary(f32(1, 3, 2, 8), f32(1, 4, 2, 8), f32(3, 8), f32(3, 8)), "only their heads may differ"),
        (lambda: rotary(f32(1, 3, 2, 8), f32(1, 3, 2, 8), f32(3, 8).requires_grad_(), f32(3, 8)), "tables get none"),
        (lambda: rotary(f32(1, 3, 2, 8), f32(1, 3, 2, 8), f32(3, 8), f32(3, 8), seq_dim=3), "allowed are 1"),
        (lambda: cross_entropy(f32(4, 6), TARGET), "targets lie from -100 to 6; allowed are 0 to 5, or ignore_index -100"),
        (lambda: cross_entropy(f32(4, 7), TARGET[:3]), r"logits \(4, 7\) do not fit targets \(3,\)"),
        (lambda: cross_entropy(f32(4, 7), TARGET, softcap=-1.0), "softcap=-1.0, allowed are positive"),
        (lambda: cross_entropy(f32(4, 7), TARGET, label_smoothing=2), "allowed are 0 to 1"),
        (lambda: cross_entropy(f32(4, 7), TARGET, reduction="max"), "allowed are 'mean', 'sum' and 'none'"),
        (lambda: embedding(f32(4), f32(4, 3)), "ids are torch.float32, expected integers"),
        (lambda: permute_tokens(f32(4, 3), EXPERTS[:3], 3), r"are not \[n, h\] and \[n, k\]"),
        (lambda: unpermute_tokens(f32(7, 3), SLOT), r"are not \[n k, h\]"),
        (lambda: grouped_matmul(f32(4, 3), f32(2, 4, 5), torch.tensor([2, 2])), r"are not \[m, in\]"),
        (lambda: linear_cross_entropy(f32(4, 3), f32(7, 4), TARGET), r"shapes \(4, 3\), \(7, 4\) and \(4,\) do not fit"),
    ],
)
def test_errors_name_what_was_wrong(call, says):
    with pytest.raises(ValueError, match=says):
        call()


WITHOUT_TRITON = """
import sys
import torch

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('triton', 'transformers'):
            raise ModuleNotFoundError(f"{name} was imported", name=name)

sys.meta_path.insert(0, Blocked())
from lightning_5d.kernels import linear_cross_entropy, rms_norm, rotary, swiglu
x = torch.randn(2, 3, 4, 8, requires_grad=True)
y = rms_norm(x, torch.ones(8))
(swiglu(y, x) + sum(rotary(x, x, torch.ones(3, 8), torch.zeros(3, 8)))).sum().backward()
linear_cross_entropy(x, torch.randn(5, 8), torch.zeros(2, 3, 4, dtype=torch.long)).backward()
assert x.grad.shape == x.shape
"""


def test_cpu_tensors_need_no_triton_and_no_neighbour():
    """In a process where importing Triton fails: nothing tries to, and everything works."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
