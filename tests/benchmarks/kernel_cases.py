"""What the kernel benchmark runs: each operation at a model's shape, who competes, and the bytes and operations counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning_5d.kernels import attention_backends, backends
from lightning_5d.kernels.attend import _describe

from lightning_5d import kernels
from tests.kernels import oracles


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that its operations depend on, and how many tokens a step has."""

    tokens: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


SHAPES = {
    "tiny": Shape(64, 64, 96, 4, 2, 16, 250),
    "8b": Shape(8192, 4096, 14_336, 32, 8, 128, 128_256),
    "70b": Shape(8192, 8192, 28_672, 64, 8, 128, 128_256),
}


@dataclass
class Case:
    operation: str
    inputs: Callable[[], list]
    """New inputs; those that need a gradient have it on."""
    contenders: dict[str, Callable]
    """The same computation by name; ours first."""
    exact: Callable | None
    """In float64, for the check; None where another contender is the measure."""
    forward_bytes: float
    backward_bytes: float
    flops: float = 0.0
    """Of matrix products, forward; backward has twice as many (attention: 2.5 times). 0 where memory is the limit."""
    backward_flops: float = 0.0


def unfused_loss(hidden, weight, target):
    return F.cross_entropy((hidden @ weight.t()).float(), target)


def eager_rotary(q, k, cos, sin):
    def turn(x):
        a, b = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]

    return turn(q), turn(k)


def others(name: str, device: torch.device) -> dict[str, Callable]:
    """The operation of Liger and quack, where they are installed and there is a GPU for them."""
    found = {}
    for backend in backends.BACKENDS[1:]:
        if device.type != "cuda":
            continue
        try:
            operations = backends.operations(backend)
        except ValueError:
            continue
        if name in operations:
            found[backend] = operations[name]
    return found


def cases(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Case]:
    n, h, f, v = shape.tokens, shape.hidden, shape.ffn, shape.vocab
    d, d_kv, size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, dtype.itemsize

    def tensor(*sizes, grad=True, scale=1.0) -> torch.Tensor:
        return (scale * torch.randn(sizes, device=device)).to(dtype).requires_grad_(grad)

    def targets() -> torch.Tensor:
        drawn = torch.randint(0, v, (n,), device=device)
        return torch.where(torch.rand(n, device=device) < 0.1, -100, drawn)

    def heads(count: int) -> torch.Tensor:
        return tensor(1, n, count, shape.head_dim)

    angle = torch.rand(n, shape.head_dim // 2, device=device).repeat(1, 2)
    tables = (angle.cos().to(dtype), angle.sin().to(dtype))
    norm_others = {"torch": lambda x, w: F.rms_norm(x, (h,), w, 1e-6), **others("rms_norm", device)}
    liger_rotary = {
        name: lambda q, k, rotate=rotate: tuple(
            t.transpose(1, 2) for t in rotate(q.transpose(1, 2), k.transpose(1, 2), *(t.unsqueeze(0) for t in tables), seq_dim=2)
        )
        for name, rotate in others("rotary", device).items()
    }
    made = [
        Case("rms_norm", lambda: [tensor(n, h), tensor(h)], {"lightning_5d": kernels.rms_norm, **norm_others},
             oracles.rms_norm, 2 * n * h * size, 3 * n * h * size),
        Case("rms_norm + residual", lambda: [tensor(n, h), tensor(n, h), tensor(h)],
             {"lightning_5d": lambda x, r, w: kernels.rms_norm(x, w, residual=r),
              "torch": lambda x, r, w: (F.rms_norm(x + r, (h,), w, 1e-6), x + r)},
             None, 4 * n * h * size, 4 * n * h * size),
        Case("swiglu", lambda: [tensor(n, f), tensor(n, f)],
             {"lightning_5d": kernels.swiglu, "torch": lambda g, u: F.silu(g) * u, **others("swiglu", device)},
             lambda g, u: oracles.glu(g, u, "silu"), 3 * n * f * size, 5 * n * f * size),
        Case("rotary", lambda: [heads(shape.heads), heads(shape.kv_heads)],
             {"lightning_5d": lambda q, k: kernels.rotary(q, k, *tables),
              "torch": lambda q, k: eager_rotary(q, k, *tables), **liger_rotary},
             None, 2 * n * (d + d_kv) * size, 2 * n * (d + d_kv) * size),
        Case("cross_entropy", lambda: [tensor(n, v, scale=3.0), targets()],
             {"lightning_5d": kernels.cross_entropy, "torch": lambda x, t: F.cross_entropy(x.float(), t)},
             oracles.cross_entropy, n * v * size, 2 * n * v * size),
        Case("linear_cross_entropy", lambda: [tensor(n, h), tensor(v, h, scale=h**-0.5), targets()],
             {"lightning_5d": kernels.linear_cross_entropy, "torch": unfused_loss, **others("linear_cross_entropy", device)},
             lambda x, w, t: oracles.cross_entropy(x @ w.t(), t), 0, 0, 2 * n * h * v, 4 * n * h * v),
        Case("embedding", lambda: [torch.randint(0, v, (n,), device=device), tensor(v, h)],
             {"lightning_5d": kernels.embedding, "torch": F.embedding}, F.embedding,
             2 * n * h * size, n * h * size + v * h * size),
    ]  # fmt: skip
    if device.type == "cuda" or dtype != torch.float16:
        made.append(attention_case(shape, heads))
    return made


def attention_case(shape: Shape, heads: Callable[[int], torch.Tensor]) -> Case:
    """Causal attention by every backend that can, the chosen one as ours."""
    q, k = heads(shape.heads), heads(shape.kv_heads)
    call = _describe(q, k, True, None, False, False)
    able = [name for name, backend in attention_backends.BACKENDS.items() if backend.why_not(call) is None]
    if call.device == "cuda":
        able.remove("plain")
    contenders: dict[str, Callable] = {"lightning_5d": kernels.attention}
    for name in able:
        contenders[name] = lambda q, k, v, name=name: kernels.attention(q, k, v, backend=name)
    flops = 2 * shape.tokens**2 * shape.heads * shape.head_dim  # causal: half of all pairs

    def inputs() -> list:
        return [heads(shape.heads), heads(shape.kv_heads), heads(shape.kv_heads)]

    def exact(q, k, v):
        return kernels.attention(q, k, v, backend="plain")

    return Case("attention", inputs, contenders, exact, 0, 0, flops, 2.5 * flops)


def outputs_of(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def leaves_of(inputs: list) -> list[torch.Tensor]:
    return [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
