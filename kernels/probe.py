"""What a module computes, found by trying it: a small copy with random weights is run beside our operation, in float64.

So a model is recognised by its mathematics and not by a list of class names: every family that normalises, gates or rotates
as Llama, Qwen or Gemma do is found, and one that differs in anything is left alone, with the reason.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from . import glu, norm, rope

GATED_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("fc_1", "fc_2", "proj"))
"""(gate, up, down) in transformers and our Llama, in Meta's Llama, in litgpt."""
PACKED_NAMES = (("gate_up_proj", "down_proj"),)
ROTARY_NAMES = ("apply_rotary_pos_emb", "apply_rotary")
"""Functions that a module's forward may call to rotate, in transformers and in our Llama."""


class NotTheSame(Exception):
    """The module does not compute what the operation computes; the message says what was seen."""


@contextlib.contextmanager
def _plain_torch() -> Iterator[None]:
    """Real CPU tensors, whatever device or fake-tensor mode is on, and the random state left as it was."""
    with _disable_current_modes(), torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        yield


def _double(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _copy(module: nn.Module) -> nn.Module:
    """A shallow copy whose parameters and submodules can be replaced without touching the module."""
    twin = copy.copy(module)
    twin.__dict__ = {k: v.copy() if isinstance(v, dict) else v for k, v in module.__dict__.items() if k != "forward"}
    return twin


def _run(module: nn.Module, *args: Any) -> torch.Tensor:
    try:
        out = type(module).forward(module, *args)
    except Exception as error:
        raise NotTheSame(f"its forward could not be tried: {type(error).__name__}: {error}") from error
    if not isinstance(out, torch.Tensor):
        raise NotTheSame(f"its forward returns {type(out).__name__}, not a tensor")
    return out


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Norms compute in float32 whatever they are given.
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-5)


def looks_like_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.RMSNorm) or type(module).__name__.endswith("RMSNorm")


def norm_eps(module: nn.Module) -> float | None:
    """The module's eps under any of its usual names; None when torch's RMSNorm takes the dtype's own."""
    for name in ("eps", "variance_epsilon"):
        if name in module.__dict__:
            return module.__dict__[name]
    raise NotTheSame("it has neither eps nor variance_epsilon")


def norm_is_zero_centred(module: nn.Module) -> bool:
    """Whether the RMSNorm scales by ``1 + weight``. Raises NotTheSame when it is no RMSNorm of the last dimension."""
    own = [name for name, p in module._parameters.items() if p is not None]
    if own != ["weight"] or module._modules or any(b is not None for b in module._buffers.values()):
        raise NotTheSame(f"it holds {own or 'no parameters'}, where rms_norm takes one weight")
    if module._parameters["weight"].dim() != 1:  # type: ignore[union-attr]
        raise NotTheSame(f"its weight has shape {tuple(module._parameters['weight'].shape)}")  # type: ignore[union-attr]
    eps = norm_eps(module)
    with _plain_torch():
        x, weight, twin = 3 * _double(4, 16), _double(16), _copy(module)
        twin._parameters["weight"] = nn.Parameter(weight)
        if isinstance(module, nn.RMSNorm):
            twin.__dict__["normalized_shape"] = (16,)
        eps = torch.finfo(torch.float64).eps if eps is None else eps
        seen = _run(twin, x)
        for zero_centred in (False, True):
            if _close(seen, norm.rms_norm(x, weight, eps, zero_centred=zero_centred)):
                return zero_centred
    raise NotTheSame("it is called RMSNorm and computes something else")


def _linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=True, dtype=torch.float64)


def gated_names(module: nn.Module) -> tuple[str, ...] | None:
    """(gate, up, down), or (packed, down), where the module has linear children so named."""
    children = module._modules
    for names in (*GATED_NAMES, *PACKED_NAMES):
        if all(isinstance(children.get(name), nn.Module) for name in names):
            return names
    return None


def gate_activation(module: nn.Module, names: tuple[str, ...]) -> str:
    """Which of ``glu.ACTIVATIONS`` the gated MLP uses. Raises NotTheSame when it is no plain gated MLP."""
    with _plain_torch():
        x, twin = 2 * _double(5, 8), _copy(module)
        *into, down = names
        packed = len(into) == 1
        for name in into:
            twin._modules[name] = _linear(8, 24 if packed else 12)
        twin._modules[down] = _linear(12, 8)
        seen = _run(twin, x)
        gate, up = twin._modules[into[0]](x).chunk(2, -1) if packed else [twin._modules[name](x) for name in into]  # type: ignore[misc]
        for activation in glu.ACTIVATIONS:
            if _close(seen, twin._modules[down](glu._gated("probe", gate, up, activation))):  # type: ignore[misc]
                return activation
    raise NotTheSame("it is no down(act(gate) * up) with silu or gelu")


def rotary_name(module: nn.Module) -> str | None:
    """The name of the rotating function that the module's own forward calls, if any."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return next((name for name in ROTARY_NAMES if code is not None and name in code.co_names), None)


def rotary_replacement(function: Callable, rotate: Callable) -> Callable:
    """``rotate`` (our signature) under the signature of ``function``. Raises NotTheSame when the two differ in what they do."""
    parameters = list(inspect.signature(function).parameters)
    if parameters[:4] == ["q", "k", "cos", "sin"]:
        adapt, shapes = _pair_of, [(2, 4, 3, 8), (2, 2, 3, 8)]
    elif parameters == ["x", "cos", "sin"]:
        adapt, shapes = _one_of, [(2, 4, 3, 8)]
    else:
        raise NotTheSame(f"its {function.__name__}({', '.join(parameters)}) is not a signature we know")
    with _plain_torch():
        angle = _double(2, 3, 4).repeat(1, 1, 2)
        tables = (angle.cos(), angle.sin()) if len(shapes) == 2 else (angle.cos().unsqueeze(1), angle.sin().unsqueeze(1))
        heads = [_double(*shape) for shape in shapes]
        try:
            seen = function(*heads, *tables)
            ours = adapt(rope.rotary)(*heads, *tables)
        except Exception as error:
            raise NotTheSame(f"its {function.__name__} could not be tried: {type(error).__name__}: {error}") from error
        as_tuple = (lambda t: t) if isinstance(seen, tuple) else (lambda t: (t,))
        if not all(_close(a, b) for a, b in zip(as_tuple(seen), as_tuple(ours), strict=True)):
            raise NotTheSame(f"its {function.__name__} does not rotate half against half")
    return adapt(rotate)


def _pair_of(rotate: Callable) -> Callable:
    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        return rotate(q, k, cos, sin, seq_dim=2 if unsqueeze_dim == 1 else 1)

    return apply_rotary_pos_emb


def _one_of(rotate: Callable) -> Callable:
    def apply_rotary(x, cos, sin):
        return rotate(x, x[:, :0], cos.squeeze(-3), sin.squeeze(-3), seq_dim=2)[0]

    return apply_rotary


def is_next_token_loss(function: Callable) -> bool:
    """Whether ``function(logits [b, s, v], labels [b, s])`` is the mean cross-entropy over the labels that are not -100."""
    with _plain_torch():
        logits, labels = torch.randn(2, 3, 5), torch.tensor([[1, -100, 4], [0, 2, -100]])
        try:
            seen = function(logits, labels)
        except Exception:
            return False
        return _close(seen, torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def rebind(function: Callable, replacements: dict[str, Callable]) -> Callable:
    """A copy of ``function``, decorators included, in which the global names in ``replacements`` mean something else.

    So one call inside a long forward is replaced, for one instance, without repeating the rest of that forward here.
    Raises NotTheSame when a decorator hides the function it wraps.
    """
    assert isinstance(function, types.FunctionType)
    inner = getattr(function, "__wrapped__", None)
    closure, names = function.__closure__, function.__globals__
    if inner is None:
        # Without __name__, torch.compile takes these names from this dictionary, and not from the module of that name.
        names = {k: v for k, v in names.items() if k != "__name__"} | replacements
    else:
        if not any(cell.cell_contents is inner for cell in closure or ()):
            raise NotTheSame("a decorator hides its forward")
        rebound = rebind(inner, replacements)
        closure = tuple(types.CellType(rebound) if c.cell_contents is inner else c for c in closure or ())
    new = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    new.__kwdefaults__ = function.__kwdefaults__
    return new
