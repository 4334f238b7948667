"""What a layout cannot do yet or at all, said at setup with the reason and the nearest layout that works."""

from __future__ import annotations

from typing import Any

from lightning_5d.layout import Layout, LayoutError, suggest

RUNNABLE_SCHEDULES = ("gpipe", "1f1b")


def layout_problem(layout: Layout) -> str | None:
    """Why no module can train under ``layout`` with this version; None when it can."""
    if layout.cp > 1:
        return f"cp{layout.cp}: context parallelism is not built yet"
    if layout.ep > 1:
        return f"ep{layout.ep}: expert parallelism is not built yet"
    if layout.rep > 1:
        return f"rep{layout.rep}: hybrid sharding is not built yet"
    if layout.pp > 1 and layout.schedule not in RUNNABLE_SCHEDULES:
        return f"{layout.schedule}: of the schedules only {' and '.join(RUNNABLE_SCHEDULES)} run yet"
    if layout.v != 1:
        return f"v{layout.v}: virtual stages are not built yet"
    return None


def refuse_layout(layout: Layout) -> None:
    """Raises :class:`LayoutError` for a layout of the grammar that does not run."""
    problem = layout_problem(layout)
    if problem is not None:
        raise LayoutError(f"layout '{layout}': {problem}.", suggest(layout, lambda other: layout_problem(other) is None))


def refuse_module(module: Any, layout: Layout, fitting: bool) -> None:
    """Raises ``ValueError`` for what a LightningModule does that cannot be right when its step is split."""
    # Here, since the advisor asks about layouts without Lightning, which takes seconds to import.
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    if not fitting:
        return
    if not module.automatic_optimization:
        raise ValueError(
            f"layout '{layout}': manual optimization (several optimizers) needs the gradients inside training_step, "
            "where a layout does not have them yet. Use automatic optimization with one optimizer"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError("training_step(dataloader_iter) cannot be split into micro-batches: take a batch instead")
    if is_overridden("backward", module):
        raise ValueError(
            "an overridden LightningModule.backward would not be called: a layout runs the backward itself, in training_step"
        )
