"""``use_kernels(model)``: fused operations in a model as it is, instance by instance.

A replaced module gets a ``forward`` of its own; its class, its parameters, its submodules and its hooks stay, so names in
checkpoints are the same and whatever parallelises the model works as before. Weights are read when forward runs: under
tensor parallelism ``module.weight`` may then be a local shard. Submodules are called as modules, so their hooks run.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from . import backends, causal_lm, probe
from ._triton import triton_is_installed

KERNELS = ("rms_norm", "swiglu", "rotary", "linear_cross_entropy")
"""What ``use_kernels`` can put into a model; ``swiglu`` stands for every gated unit."""


@dataclass
class KernelReport:
    """What ``use_kernels`` did: ``str()`` is the table that it prints."""

    backend: str
    replaced: dict[str, str] = field(default_factory=dict)
    """Operation by module path."""
    left: dict[str, str] = field(default_factory=dict)
    """Reason by module path, of modules that looked as if an operation fitted."""
    notes: list[str] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def count(self, operation: str) -> int:
        """Modules in which ``operation`` was put."""
        return sum(operation in name.split(", ") for name in self.replaced.values())

    def undo(self) -> None:
        """Gives every replaced module its own forward back."""
        while self._undo:
            self._undo.pop()()
        self.replaced.clear()

    def __str__(self) -> str:
        lines = [f"kernels ({self.backend}): {len(self.replaced)} modules replaced, {len(self.left)} left"]
        lines += [f"  {_summary(paths)}: {what}" for what, paths in _by_value(self.replaced).items()]
        lines += [f"  {_summary(paths)}: left, {why}" for why, paths in _by_value(self.left).items()]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _by_value(paths: dict[str, str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for path, value in paths.items():
        grouped.setdefault(value, []).append(path or "(the model itself)")
    return grouped


def _summary(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _rms_norm_forward(module: nn.Module, rms_norm: Callable, zero_centred: bool, x: torch.Tensor) -> torch.Tensor:
    eps = probe.norm_eps(module)
    return rms_norm(x, module.weight, torch.finfo(x.dtype).eps if eps is None else eps, zero_centred=zero_centred)


def _gated_forward(module: nn.Module, gated: Callable, into: tuple[str, ...], down: str, x: torch.Tensor) -> torch.Tensor:
    """``into`` names the gate's and the up projection, or the one that is both, packed."""
    return getattr(module, down)(gated(*(getattr(module, name)(x) for name in into)))


class _Swapper:
    def __init__(self, report: KernelReport, operations: dict[str, Callable], vocab_group: dist.ProcessGroup | None):
        self.report, self.operations, self.vocab_group = report, operations, vocab_group

    def put(self, path: str, module: nn.Module, what: str, forward: Callable) -> None:
        if "forward" in module.__dict__:
            raise probe.NotTheSame("its forward was already replaced")
        module.__dict__["forward"] = forward
        self.report.replaced[path] = what
        self.report._undo.append(functools.partial(module.__dict__.pop, "forward", None))

    def operation(self, name: str) -> Callable:
        if name not in self.operations:
            raise probe.NotTheSame(f"backend {self.report.backend!r} has no {name}")
        return self.operations[name]

    def rms_norm(self, path: str, module: nn.Module) -> None:
        if probe.looks_like_norm(module):
            zero_centred = probe.norm_is_zero_centred(module)
            what = "rms_norm, zero-centred" if zero_centred else "rms_norm"
            self.put(path, module, what, functools.partial(_rms_norm_forward, module, self.operation("rms_norm"), zero_centred))

    def swiglu(self, path: str, module: nn.Module) -> None:
        names = probe.gated_names(module)
        if names is None:
            return
        activation = probe.gate_activation(module, names)
        if activation == "gelu":
            exact = self.operation("geglu")
            if self.report.backend != "lightning_5d":
                raise probe.NotTheSame(f"backend {self.report.backend!r} has no exact gelu")
            gated: Callable = functools.partial(exact, approximate="none")
        else:
            gated = self.operation("swiglu" if activation == "silu" else "geglu")
        if len(names) == 2 and self.report.backend != "lightning_5d":
            raise probe.NotTheSame(f"backend {self.report.backend!r} takes no packed projection")
        what = "swiglu" if activation == "silu" else f"swiglu, by {activation}"
        self.put(path, module, what, functools.partial(_gated_forward, module, gated, names[:-1], names[-1]))

    def rotary(self, path: str, module: nn.Module) -> None:
        name = probe.rotary_name(module)
        if name is None:
            return
        forward = type(module).forward
        function = inspect.unwrap(forward).__globals__.get(name)
        if not callable(function):
            raise probe.NotTheSame(f"{name} in its forward is no function of its module")
        replacement = probe.rotary_replacement(function, self.operation("rotary"))
        self.put(path, module, "rotary", functools.partial(probe.rebind(forward, {name: replacement}), module))

    def linear_cross_entropy(self, path: str, module: nn.Module) -> None:
        operation = self.operations.get("linear_cross_entropy")
        if operation is None or (self.vocab_group is not None and self.report.backend != "lightning_5d"):
            return  # noted once, for the whole model
        undo = causal_lm.fuse(module, operation, self.vocab_group)
        if undo is not None:
            self.report._undo.append(undo)
            self.report.replaced[path] = "linear_cross_entropy"


def _wanted(kernels: str | Iterable[str]) -> Sequence[str]:
    if isinstance(kernels, str) and kernels in ("auto", "all"):
        return KERNELS
    if isinstance(kernels, str) and kernels == "none":
        return ()
    names = (kernels,) if isinstance(kernels, str) else tuple(kernels)
    unknown = [name for name in names if name not in KERNELS]
    if unknown:
        allowed = ", ".join(("'auto'", "'all'", "'none'", *(repr(k) for k in KERNELS)))
        raise ValueError(f"use_kernels: kernels={kernels!r} names {unknown[0]!r}, allowed are {allowed}")
    return names


def use_kernels(
    model: nn.Module,
    kernels: str | Iterable[str] = "auto",
    *,
    backend: str = "lightning_5d",
    vocab_group: dist.ProcessGroup | None = None,
    verbose: bool = True,
) -> KernelReport:
    """Puts fused operations into ``model``, in place, and returns (and prints, when ``verbose``) what was replaced and what not.

    ``kernels`` is ``"auto"`` (every operation that fits somewhere), ``"all"`` (all of ``KERNELS``), ``"none"``, or names out of
    ``KERNELS``; what is asked for by name, or by ``"all"``, must fit somewhere. ``backend`` is whose kernels they are:
    ``"lightning_5d"``, or ``"liger"`` or ``"quack"`` where installed. ``vocab_group`` is the group over which the head's rows are
    split, if they are (see causal_lm.py). Modules are recognised by what they compute (see probe.py); one whose forward was
    already replaced is left alone. Works before or after the model is initialised, sharded or moved; on the CPU, and without
    Triton, the operations take their plain torch path.
    Raises ValueError on unknown names, backends that are not installed, and named operations that fit nowhere.
    """
    wanted = _wanted(kernels)
    report = KernelReport(backend)
    operations = backends.operations(backend) if wanted else {}
    if wanted and not triton_is_installed():
        report.notes.append("Triton is not installed: operations run their plain torch reference, also on a GPU")
    if "linear_cross_entropy" in wanted and backend != "lightning_5d":
        if "linear_cross_entropy" not in operations:
            report.notes.append(f"backend {backend!r} has no linear_cross_entropy")
        elif vocab_group is not None:
            report.notes.append(f"backend {backend!r} has no linear_cross_entropy over a split vocabulary")
    swapper = _Swapper(report, operations, vocab_group)
    for path, module in model.named_modules():
        for name in wanted:
            try:
                getattr(swapper, name)(path, module)
            except probe.NotTheSame as reason:
                report.left[path] = f"{name}: {reason}"
    missing = [name for name in wanted if not report.count(name)]
    if missing and kernels != "auto":
        why = [f"{path}: {reason}" for path, reason in report.left.items()][:3]
        report.undo()
        raise ValueError(f"use_kernels: {missing[0]} fits nowhere in {type(model).__name__}" + "".join(f"; {w}" for w in why))
    if verbose:
        print(report)
    return report
