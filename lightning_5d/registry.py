"""Layout strings as Lightning's strategy names: ``Trainer(strategy="tp4_pp2_zero1")`` after ``import lightning_5d``.

Lightning holds its strategies in one dict object that it asks ``name in available_strategies()`` and ``get(name)``. There
are too many layouts to list, so that object is given a class which knows the grammar. Lightning itself is not imported
here: the class is changed when ``lightning.pytorch.strategies`` is imported, or at once when it has been.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_5d.layout import Layout, LayoutError
from lightning_5d.layout_tokens import looks_like_layout, sounds_like_layout

# Given without arguments on a command line, a class path reaches the Trainer as a lower-cased string.
_CLASS_PATHS = ("layoutstrategy", "lightning_5d.layoutstrategy", "lightning_5d.strategy.layoutstrategy")
# Methods that other plug-ins replace on the registry object, where they would hide those of its class.
_SHADOWING_METHODS = ("get", "available_strategies")


def register() -> None:
    """Makes every layout string a strategy name of ``lightning.pytorch``, now or when it is imported; may be called again.

    The twin package ``pytorch_lightning`` has classes of its own that do not mix with these: its Trainer is made to say so.
    """
    actions = {"lightning.pytorch.strategies": _extend_registry, "pytorch_lightning.strategies": _explain_in_twin}
    for name, action in actions.items():
        if name in sys.modules:
            action(sys.modules[name])
        elif not any(isinstance(finder, _AfterImport) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport(name, action))


def _make_strategy(**init_params: Any) -> Any:
    from lightning_5d.strategy import LayoutStrategy

    return LayoutStrategy(**init_params)


def _layout_name(name: object) -> str | None:
    """The layout string that a strategy name stands for, or None."""
    if not isinstance(name, str):
        return None
    if name.lower() in _CLASS_PATHS:
        return str(Layout())
    try:
        Layout.parse(name)
    except LayoutError:
        return None
    return name


def _reject_near_miss(name: object) -> None:
    """Raises :class:`LayoutError` for what was meant as a layout but is none; Lightning answers for everything else."""
    if isinstance(name, str):
        if looks_like_layout(name) or sounds_like_layout(name):
            Layout.parse(name)
    elif isinstance(name, Layout):
        raise LayoutError(f"strategy={name!r}: give the Trainer the string '{name}', or LayoutStrategy('{name}').")
    elif isinstance(name, (list, tuple)) and all(isinstance(part, str) and looks_like_layout(part) for part in name):
        raise LayoutError(f"strategy={name!r}: a layout is one string, '{'_'.join(name)}'.")


class _Names(list):
    """Names of registered strategies; also contains every layout string."""

    def __init__(self, registered: list) -> None:
        super().__init__(registered)
        self._registered = registered  # possibly another plug-in's list, with a rule of its own

    def __contains__(self, name: object) -> bool:
        if _layout_name(name) is not None or name in self._registered:
            return True
        _reject_near_miss(name)
        return False


class _LayoutNames(dict):
    """Mixed into the class of Lightning's registry."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or _layout_name(name) is not None

    def __missing__(self, name: str) -> dict[str, Any]:
        layout = _layout_name(name)
        if layout is None:
            other = getattr(super(), "__missing__", None)
            if other is None:
                raise KeyError(name)
            return other(name)
        return {"description": "", "strategy_name": name, "strategy": _make_strategy, "init_params": {"layout": layout}}

    def available_strategies(self) -> list:
        return _Names(super().available_strategies())  # type: ignore[misc]


def _extend_registry(strategies: ModuleType) -> None:
    _mix_in(strategies.StrategyRegistry, _LayoutNames)


class _TwinNames(list):
    """Names of the twin package's strategies; asked for one of ours, it says which import is right."""

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str):
            is_ours = _layout_name(name) is not None or looks_like_layout(name)
        else:
            is_ours = any(base.__module__.startswith("lightning_5d.") for base in type(name).__mro__)
        if is_ours:
            raise ValueError(
                f"strategy={name!r} works with the package `lightning`, but this Trainer comes from `pytorch_lightning`, whose"
                " classes do not mix with it. Import Trainer, LightningModule and callbacks from `lightning.pytorch` instead."
            )
        return super().__contains__(name)


class _TwinRegistry(dict):
    """Mixed into the class of the twin package's registry."""

    def available_strategies(self) -> list:
        return _TwinNames(super().available_strategies())  # type: ignore[misc]


def _explain_in_twin(strategies: ModuleType) -> None:
    _mix_in(strategies.StrategyRegistry, _TwinRegistry)


def _mix_in(registry: Any, mixin: type) -> None:
    """Puts ``mixin`` before the class of the one object that all modules hold; what other plug-ins did to it stays below."""
    if isinstance(registry, mixin):
        return
    shadowing = {name: staticmethod(vars(registry).pop(name)) for name in _SHADOWING_METHODS if name in vars(registry)}
    below = type("ChainedStrategyRegistry", (type(registry),), shadowing) if shadowing else type(registry)
    registry.__class__ = type("LayoutStrategyRegistry", (mixin, below), {})


class _AfterImport(MetaPathFinder):
    """Calls ``action(module)`` after the module ``name`` has been imported by whichever finder knows it."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._action = action
        self._asking = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then_act(module: ModuleType) -> None:
                execute(module)
                self._action(module)

            spec.loader.exec_module = execute_then_act  # type: ignore[method-assign]
        return spec
