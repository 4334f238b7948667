"""Trains a module under a layout and under Lightning's own single-process strategy, and compares all that is left."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_5d.strategy import LayoutStrategy
from tests.parity.models import ROWS, loader
from tests.ranks import run_ranks

TOLERANCE = 1e-5
STEPS = 5


def whole(tensor: Tensor) -> Tensor:
    """The tensor of all ranks. Every rank that holds a part must call it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().float().clone()


class Record(L.Callback):
    """Loss, gradients (before clipping) and their norm of every optimizer step."""

    def __init__(self, losses_only: bool = False) -> None:
        self.losses_only = losses_only
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.norms: list[float] = []
        self.dtypes: set[tuple[str, torch.dtype]] = set()

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        if self.losses_only:
            return
        named = [(n, p) for n, p in module.named_parameters() if p.grad is not None]
        self.dtypes |= {("parameter", p.dtype) for _, p in named} | {("gradient", p.grad.dtype) for _, p in named}
        self.gradients.append({n: whole(p.grad) for n, p in named})

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, out: Any, batch: Any, index: int) -> None:
        self.losses.append(float(out["loss"]) * trainer.accumulate_grad_batches)
        if self.losses_only:
            return
        if len(self.norms) < trainer.global_step and trainer.gradient_clip_algorithm != "value":
            if isinstance(trainer.strategy, LayoutStrategy):
                assert trainer.strategy.grad_norm is not None
                self.norms.append(float(trainer.strategy.grad_norm))
            else:
                self.norms.append(float(torch.stack([g.norm() for g in self.gradients[-1].values()]).norm()))
        self.dtypes |= {
            ("state", value.dtype)
            for optimizer in trainer.optimizers
            for state in optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        }


def trainer_of(layout: str | LayoutStrategy | None, world_size: int = 1, **options: Any) -> L.Trainer:
    """A quiet CPU trainer; ``layout`` None is Lightning's own strategy for one process."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    strategy = LayoutStrategy(layout) if isinstance(layout, str) else layout or "auto"
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=world_size, **{**quiet, **options})


class Data(L.LightningDataModule):
    """Global batches of ``rows``, in order, of which a data-parallel replica gets its part."""

    def __init__(self, num_rows: int, rows: int = ROWS, edit: Callable[[Any], None] | None = None, **tokens: Any) -> None:
        super().__init__()
        self.num_rows, self.rows, self.edit, self.tokens = num_rows, rows, edit, tokens

    def _loader(self, num_rows: int) -> Any:
        made = loader(self.trainer, num_rows, self.rows, **self.tokens)
        if self.edit is not None:
            self.edit(made.dataset)
        return made

    def train_dataloader(self) -> Any:
        return self._loader(self.num_rows)

    def predict_dataloader(self) -> Any:
        return self._loader(self.num_rows)

    def val_dataloader(self) -> Any:
        return self._loader(self.rows + self.rows // 2)  # the second batch is smaller


def fit(
    layout: str | None,
    world_size: int,
    make: Callable[[], L.LightningModule],
    strategy_options: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    losses_only: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Runs in a rank: ``STEPS`` optimizer steps and a validation; returns what one rank can see of them."""
    torch.manual_seed(0)
    module, record = make(), Record(losses_only)
    strategy = None if layout is None else LayoutStrategy(layout, **(strategy_options or {}))
    options = {"gradient_clip_val": 0.5, "max_epochs": 1, **options}
    trainer = trainer_of(strategy, world_size, use_distributed_sampler=False, callbacks=[record], **options)
    rows = STEPS * ROWS * options.get("accumulate_grad_batches", 1)
    trainer.fit(module, datamodule=Data(**{"num_rows": rows, **(data or {})}))
    return {
        "losses": record.losses,
        "gradients": record.gradients,
        "norms": record.norms,
        "dtypes": record.dtypes,
        "weights": {n: whole(p) for n, p in module.named_parameters()},
        "metrics": {n: float(v) for n, v in trainer.callback_metrics.items()},
    }


_REFERENCES: dict[str, dict[str, Any]] = {}


def reference(make: Callable[[], L.LightningModule], **options: Any) -> dict[str, Any]:
    """The same training in one process under Lightning's own strategy; run once for each module and options."""
    key = repr((make, sorted(options.items())))  # functions by their address
    if key not in _REFERENCES:
        (_REFERENCES[key],) = run_ranks(1, fit, None, 1, make, **options)
    return _REFERENCES[key]


def difference(a: Tensor, b: Tensor) -> float:
    """Relative to ``b``'s norm."""
    assert a.shape == b.shape, (a.shape, b.shape)
    size = float(b.norm())
    return float((a - b).norm()) / size if size > 0 else float(a.norm())


def close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(b), 1e-3)


def assert_parity(ranks: list[dict[str, Any]], expected: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    """Losses, norms and metrics on every rank; gradients and weights on the ranks that hold them, all held by some rank."""
    for index, rank in enumerate(ranks):
        assert rank["losses"] == ranks[0]["losses"] and rank["metrics"] == ranks[0]["metrics"], f"rank {index} saw other values"
        assert len(rank["losses"]) == len(expected["losses"])
        for kind in ("losses", "norms"):
            pairs = list(zip(rank[kind], expected[kind], strict=True))
            assert all(close(a, b, tolerance) for a, b in pairs), f"{kind} of rank {index}: {pairs}"
    assert set(ranks[0]["metrics"]) == set(expected["metrics"])
    wrong = {
        n: (ranks[0]["metrics"][n], v) for n, v in expected["metrics"].items() if not close(ranks[0]["metrics"][n], v, tolerance)
    }
    assert not wrong, f"metrics (seen, expected): {wrong}"
    for step, gradients in enumerate(expected["gradients"]):
        _assert_tensors([r["gradients"][step] for r in ranks], gradients, tolerance, f"gradients of step {step}")
    _assert_tensors([r["weights"] for r in ranks], expected["weights"], tolerance, "weights")


def _assert_tensors(ranks: list[dict[str, Tensor]], expected: dict[str, Tensor], tolerance: float, what: str) -> None:
    held = set().union(*ranks)
    # A tied matrix has one name in one process, and on a later stage its second owner's.
    assert set(expected) <= held, f"{what}: no rank holds {set(expected) - held}"
    wrong = {
        f"{name} (rank {index})": difference(value, expected[name])
        for index, rank in enumerate(ranks)
        for name, value in rank.items()
        if name in expected and not difference(value, expected[name]) <= tolerance
    }
    assert not wrong, f"{what} differ: {dict(sorted(wrong.items(), key=lambda item: -item[1])[:6])}"


def moved(run: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest relative distance between the weights of two runs."""
    return max(difference(v, other["weights"][n]) for n, v in run["weights"].items())
