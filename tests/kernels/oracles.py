"""What every operation should give, as plain as torch allows, in float64: kernels and references are held against it."""

import torch
import torch.nn.functional as F


def rms_norm(x, weight, eps=1e-6, residual=None, zero_centred=False):
    s = x if residual is None else x + residual
    y = s / torch.sqrt((s * s).mean(-1, keepdim=True) + eps) * (1 + weight if zero_centred else weight)
    return y if residual is None else (y, s)


def glu(gate, up, activation):
    act = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda g: F.gelu(g, approximate="tanh")}[activation]
    return act(gate) * up


def rotary(x, cos, sin, interleaved=False, rotary_dim=None):
    """``x [batch, seq, heads, d]``, full or half tables ``[batch or 1, seq, .]``: one complex multiplication a pair."""
    r = rotary_dim or cos.shape[-1]
    if cos.shape[-1] == r:
        cos, sin = (t[..., 0::2] if interleaved else t[..., : r // 2] for t in (cos, sin))
    a, b = (x[..., 0:r:2], x[..., 1:r:2]) if interleaved else (x[..., : r // 2], x[..., r // 2 : r])
    turned = torch.complex(a, b) * torch.complex(cos, sin).unsqueeze(2)
    pairs = (turned.real, turned.imag)
    out = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((out, x[..., r:]), -1)


def float64_leaves(*tensors):
    """Copies in float64 that collect gradients; integers and None pass."""
    return [t.detach().double().requires_grad_() if t is not None and t.is_floating_point() else t for t in tensors]


# Relative to the largest element: float32 differs by summation order; the others by their one rounding (half a step, and
# now and then a whole one where float32 lands on the other side of a tie).
ULP = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def assert_rounded_once(actual, exact, min_equal=0.97):
    """``actual`` is ``exact`` (float64) rounded to its dtype: never more than a step away, and almost always equal."""
    assert actual.shape == exact.shape, f"{tuple(actual.shape)} instead of {tuple(exact.shape)}"
    assert torch.isfinite(actual).all()
    if actual.numel() == 0:
        return
    rounded = exact.to(actual.dtype)
    scale = exact.abs() if actual.dtype != torch.float32 else exact.abs().max()
    error = (actual.double() - rounded.double()).abs()
    allowed = scale * ULP[actual.dtype] + 1e-5 * exact.abs().max()
    assert (error <= allowed).all(), f"off by {(error / allowed).max().item():.2f} of what {actual.dtype} allows"
    if actual.dtype != torch.float32:
        equal = (actual == rounded).float().mean().item()
        assert equal >= min_equal, f"only {equal:.1%} equal the correctly rounded value"


def assert_gradients(actual, leaves, **kwargs):
    """Each gradient in ``actual`` is that of the float64 leaf, rounded once."""
    for grad, leaf in zip(actual, leaves, strict=True):
        assert_rounded_once(grad, leaf.grad, **kwargs)


def cross_entropy(logits, target, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=None, reduction="mean"):
    """torch's own loss, and the z-loss beside it; zero instead of NaN without targets."""
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    losses = F.cross_entropy(logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    losses = losses + z_loss * torch.where(target != ignore_index, torch.logsumexp(logits, -1) ** 2, 0)
    if reduction == "none":
        return losses
    return losses.sum() / ((target != ignore_index).sum().clamp(min=1) if reduction == "mean" else 1)
