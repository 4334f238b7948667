"""What a dry run needs of a recipe of `lightning-5d fit`: how to build the module, its batches, its layout and trainer."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentError
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_5d.data import TextDataModule
from lightning_5d.layout import Layout, LayoutError
from lightning_5d.pipeline.microbatch import num_rows
from lightning_5d.plan import ParallelPlan

SECTIONS = ("seed_everything", "trainer", "model", "data", "ckpt_path")
PRECISIONS = {"None": "32-true", "32": "32-true", "bf16": "bf16-mixed"}


@dataclass
class Batches:
    """The batches of a run, by shape."""

    make: Callable[[int], Any]
    """``make(rows)``: a batch of so many sequences."""
    rows: int | None = None
    """Sequences of one replica's batch."""
    global_batch: int | None = None
    """Sequences of a step over all replicas, when it is not ``rows`` times the replicas."""


@dataclass
class Recipe:
    """A recipe, read and checked."""

    make_module: Callable[[], LightningModule]
    layout: Layout
    trainer: dict[str, Any]
    strategy: dict[str, Any]
    """Arguments of LayoutStrategy but for its layout."""
    data: dict[str, Any] | None

    @property
    def options(self) -> dict[str, Any]:
        """Of :func:`dry_run`."""
        steps, plan = self.trainer.get("max_steps"), self.strategy.get("plan")
        precision = str(self.trainer.get("precision"))
        return {
            "precision": PRECISIONS.get(precision, precision),
            "clip": bool(self.trainer.get("gradient_clip_val")) and self.trainer.get("gradient_clip_algorithm") != "value",
            "max_steps": steps if isinstance(steps, int) and steps > 0 else 1000,
            "split": self.strategy.get("split"),
            "plan": ParallelPlan(**(plan.get("init_args") or plan)) if isinstance(plan, dict) else plan,
            "replica_weighting": self.strategy.get("loss_weighting", "target") == "replica",
        }


def read_recipe(path: Path, layout: str | None = None) -> Recipe:
    """Reads a recipe; ``layout`` replaces its own.

    Raises:
        ValueError: what is wrong with the recipe, in one sentence; OSError, yaml.YAMLError when it cannot be read.
    """
    content = yaml.safe_load(path.read_text())
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ValueError(f"{path} is no recipe: it has no `model` with class_path and init_args")
    _check_names(content, SECTIONS, f"{path}")
    trainer = content.get("trainer") or {}
    _check_names(trainer, inspect.signature(Trainer.__init__).parameters, "trainer")
    if (trainer.get("accumulate_grad_batches") or 1) != 1:
        raise ValueError("trainer.accumulate_grad_batches: a dry run takes one batch a step; give a larger batch and mbs instead")
    chosen, strategy = _layout(trainer.get("strategy"), layout)
    return Recipe(_builder("model", LightningModule, content["model"]), chosen, trainer, strategy, content.get("data"))


def _layout(strategy: Any, replacement: str | None) -> tuple[Layout, dict[str, Any]]:
    from lightning_5d.strategy import LayoutStrategy

    arguments: dict[str, Any] = {}
    if isinstance(strategy, dict):
        cls = _import(strategy.get("class_path", ""), "trainer.strategy")
        if not (isinstance(cls, type) and issubclass(cls, LayoutStrategy)):
            raise ValueError(f"trainer.strategy {strategy.get('class_path')!r} is no layout: give --layout, such as zero1")
        arguments = dict(strategy.get("init_args") or {})
        _check_names(arguments, inspect.signature(cls.__init__).parameters, "trainer.strategy.init_args")
        strategy = arguments.pop("layout", "zero0")
    if arguments.get("kernels", "none") != "none":
        raise ValueError("trainer.strategy.init_args.kernels: a dry run knows the model without kernels; set it to none")
    if replacement is None and not isinstance(strategy, str):
        raise ValueError("the recipe has no layout: set trainer.strategy, or give --layout, such as zero1")
    try:
        return Layout.parse(replacement or strategy), arguments
    except LayoutError as error:
        if replacement is None and strategy in ("auto", "ddp", "fsdp", "deepspeed", "single_device"):
            raise ValueError(f"trainer.strategy {strategy!r} is no layout: give --layout, such as zero1") from None
        raise error from None


def batches(recipe: Recipe, seq_len: int | None, global_batch: int | None) -> Batches:
    """Batches of ``input_ids`` and ``labels`` as the options say or our own data would give; or like the data's own first one.

    Raises:
        ValueError: there is neither data nor options, or the data gives no batch on this host.
    """
    data, arguments = recipe.data, (recipe.data or {}).get("init_args") or {}
    if data is None and (seq_len is None or global_batch is None):
        raise ValueError("the recipe has no `data`: give --seq-len and --global-batch for batches of input_ids and labels")
    if data is not None and seq_len is None:
        cls = _import(data.get("class_path", ""), "data.class_path")
        if not (isinstance(cls, type) and issubclass(cls, TextDataModule)):
            made = _of_data(data)
            made.global_batch = global_batch
            return made
        defaults = {name: p.default for name, p in inspect.signature(cls.__init__).parameters.items()}
        _check_names(arguments, defaults, "data.init_args")
        seq_len = arguments.get("seq_len", defaults.get("seq_len"))
        if global_batch is None:
            global_batch = arguments.get("global_batch_size", defaults.get("global_batch_size"))
    if not all(isinstance(n, int) and n > 0 for n in (seq_len, global_batch)):
        raise ValueError(
            f"seq_len {seq_len!r} and the global batch {global_batch!r} must be whole numbers above 0: "
            "see --seq-len and --global-batch"
        )

    def make(rows: int) -> dict[str, Tensor]:
        return {name: torch.zeros(rows, seq_len or 0, dtype=torch.long) for name in ("input_ids", "labels")}

    return Batches(make, global_batch=global_batch)


def _of_data(section: dict[str, Any]) -> Batches:
    """Batches like the first training batch of a data module, which is made on this host, without ``prepare_data``."""
    data = _builder("data", LightningDataModule, section)()
    try:
        data.setup("fit")
        batch = _first_batch(data.train_dataloader())
        rows = num_rows(batch)
    except Exception as error:
        raise ValueError(
            f"{type(data).__name__} gives no batch on this host ({type(error).__name__}: {error}): "
            "give --seq-len and --global-batch for batches of input_ids and labels"
        ) from error

    def make(rows_wanted: int) -> Any:
        def like(t: Tensor) -> Tensor:
            return torch.zeros((rows_wanted, *t.shape[1:]) if t.ndim and t.shape[0] == rows else t.shape, dtype=t.dtype)

        return apply_to_collection(batch, Tensor, like)

    return Batches(make, rows=rows)


def _first_batch(loader: Any) -> Any:
    if isinstance(loader, DataLoader) and loader.batch_sampler is not None and hasattr(loader.dataset, "__getitem__"):
        # Without its workers, which would be started for one batch.
        indices = next(iter(loader.batch_sampler))
        whole = getattr(loader.dataset, "__getitems__", None)
        return loader.collate_fn(whole(indices) if callable(whole) else [loader.dataset[i] for i in indices])
    return next(iter(loader))


def _builder(key: str, base: type, section: Any) -> Callable[[], Any]:
    """What builds a class as `fit` would: jsonargparse checks and converts the arguments."""
    if not isinstance(section, dict) or not isinstance(section.get("class_path"), str):
        raise ValueError(f"{key}.class_path is missing")
    _import(section["class_path"], f"{key}.class_path")
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(base, key, subclass_mode=True, required=True)  # type: ignore[arg-type]
    try:
        config = parser.parse_object({key: section})
    except (ArgumentError, TypeError) as error:
        raise ValueError(f"{key}: {' '.join(str(error).split())}") from None
    return lambda: parser.instantiate_classes(config)[key]


def _import(class_path: str, where: str) -> Any:
    module, _, name = class_path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        raise ValueError(f"{where} {class_path!r} cannot be imported") from None


def _check_names(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    allowed = [name for name in known if name != "self"]
    for name in given:
        if name not in allowed:
            near = difflib.get_close_matches(str(name), allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; allowed are {', '.join(allowed)}"
            raise ValueError(f"{where} has no {name!r}{hint}")
