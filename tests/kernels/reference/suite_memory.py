"""Peak and saved bytes, counted on fake tensors at full size as a GPU would hold them: kernels are taken, and launch nothing."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning_5d.kernels import _triton, linear_cross_entropy, linear_loss, loss
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.memory import LiveBytes

DOCS = Path(__file__).parents[3] / "docs" / "kernels.md"


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The path that launches kernels, with launches that do nothing, and operations that are not opaque to a dispatch mode."""
    monkeypatch.setattr(_triton.Kernel, "run", lambda *args: None)
    monkeypatch.setattr(loss, "runs_on_triton", lambda x: True)
    monkeypatch.setattr(loss, "check_targets", lambda *args: None)
    monkeypatch.setattr(linear_loss, "check_targets", lambda *args: None)
    monkeypatch.setattr(linear_loss, "_statistics", linear_loss._statistics_op)
    monkeypatch.setattr(linear_loss, "_gradient", linear_loss._gradient_op)
    monkeypatch.setattr(linear_loss, "_float32_product", lambda a, b: (a @ b).new_empty(len(a), b.shape[1], dtype=torch.float32))


def peak_bytes(loss_of, n, h, vocab, dtype=torch.bfloat16):
    with FakeTensorMode():
        hidden, weight = (
            torch.empty(n, h, dtype=dtype, requires_grad=True),
            torch.empty(vocab, h, dtype=dtype, requires_grad=True),
        )
        target = torch.empty(n, dtype=torch.long)
        with LiveBytes() as bytes_:
            loss_of(hidden, weight, target).backward()
        assert weight.grad is not None and hidden.grad is not None
        return bytes_.peak


def unfused(hidden, weight, target):
    return F.cross_entropy((hidden @ weight.t()).float(), target)


@pytest.mark.parametrize("n", [4096, 8192, 16384, 32768])
def test_peak_of_linear_cross_entropy(n, as_on_a_gpu):
    """Llama 3's vocabulary and its 8B's hidden size: a tenth of the unfused peak beside the gradients, which both have to hold,
    and with them from 16k tokens on."""
    ours, theirs = peak_bytes(linear_cross_entropy, n, 4096, 128_256), peak_bytes(unfused, n, 4096, 128_256)
    gradients = 2 * 128_256 * 4096 + 2 * n * 4096
    share = (ours - gradients) / (theirs - gradients)
    row = f"| {n:,} | {ours / 2**30:.3f} | {theirs / 2**30:.3f} | {ours / theirs:.3f} | {share:.3f} |"
    print(f"n={n}: fused {ours / 2**30:.3f} GiB, unfused {theirs / 2**30:.3f} GiB, ratio {ours / theirs:.4f}")
    assert theirs > 10 * n * 128_256  # bf16 logits, float32 logits and their log-softmax at the same time
    assert share < 0.1
    assert row in DOCS.read_text()
    if n >= 16384:
        assert ours < 0.1 * theirs
