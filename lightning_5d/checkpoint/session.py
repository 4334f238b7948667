"""What a strategy does with checkpoints, for one Trainer: the five operations that Lightning asks of it.

Lightning reads the checkpoint before the model is cut and sharded, and the weights can only be loaded after. So ``open``
reads everything but tensors and remembers the path; ``load_weights`` and ``load_optimizers`` fill what is there later.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_5d.checkpoint import optimizers as optim
from lightning_5d.checkpoint import state
from lightning_5d.checkpoint.agree import CheckpointError, gather_objects, on_every_rank, on_first_rank, rank_of
from lightning_5d.checkpoint.commit import FORMAT, leftovers
from lightning_5d.checkpoint.names import Names, listing, plain
from lightning_5d.checkpoint.rng import restore_rng, rng_tensors
from lightning_5d.checkpoint.store import CheckpointStore
from lightning_5d.checkpoint.weight_map import HuggingFaceNames, find_huggingface_names

# The entry of a checkpoint's dict that is ours; everything else in it is Lightning's and the user's.
ENTRY = "lightning_5d"
_KEPT_AS = "_checkpoint_session"


class _Part(NamedTuple):
    """What one rank tells the others at a save."""

    rest: dict[str, Any]
    groups: list[dict[str, Any]]
    sharded: list[str]


class CheckpointSession:
    """Saves a sharded module and its optimizers, and opens and loads checkpoints written under any layout.

    Args:
        layout: The canonical layout string, noted in each checkpoint.
        group: The ranks that take part; the whole world when not given.
        background: Whether saves can be left to a thread; all ranks must then make the session together.
    """

    def __init__(self, layout: str, group: dist.ProcessGroup | None = None, background: bool = False) -> None:
        self.layout = layout
        self.store = CheckpointStore(group, background)
        self.names: Names | None = None
        self.huggingface: HuggingFaceNames | None = None
        self._path: Path | None = None
        self._weights_due = False
        self._strict = True
        self._entry: dict[str, Any] = {}
        self._rest: dict[str, Any] = {}

    @classmethod
    def of(cls, module: nn.Module) -> CheckpointSession:
        """The session that knows ``module``'s names; a new one for a module that was not cut or sharded."""
        session = module.__dict__.get(_KEPT_AS)
        if session is None:
            session = cls("dp1")
            session.names = Names.of(module)
            session.huggingface = find_huggingface_names(module, session.names)
        return session

    def take_names(self, module: nn.Module) -> None:
        """To be called once, before ``module`` is cut or sharded; it may be on the meta device. Kept for :meth:`of`, too."""
        self.names = Names.of(module)
        self.huggingface = find_huggingface_names(module, self.names)
        module.__dict__[_KEPT_AS] = self

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """This rank's part of ``module.state_dict()``, for Lightning and for hooks that edit it; live tensors, not copies."""
        return {plain(name): value for name, value in module.state_dict().items()}

    def save(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        background: bool = False,
    ) -> None:
        """Writes Lightning's checkpoint dict and the tensors that belong to it; on every rank.

        With ``background`` (and a session made for it) it returns once everything is copied; parameters, optimizers and
        entries may change then. An error shows in ``save_has_failed`` and is raised by the next ``save``, ``wait`` or ``close``.

        Optimizers are written when Lightning put ``optimizer_states`` into the dict. A further entry that is a dict of the
        model's names to tensors (an average of the weights) is written like the weights, each rank its part. Of anything else
        rank 0's is written.

        Raises:
            CheckpointError: Optimizer state or an entry cannot be stored; or ``path`` is a directory that is no checkpoint.
            RuntimeError: A rank could not write.
        """
        names, group = self._names(), self.store.group
        path = Path(on_first_rank(lambda: str(path), group))  # a file name made from metrics may differ in the last digit
        has_optimizers = "optimizer_states" in checkpoint

        def collect() -> tuple[dict[str, torch.Tensor], _Part]:
            entries = dict(checkpoint)
            tensors, rest = state.split_state_dict(entries.pop("state_dict", None) or self.state_dict(module), names)
            named, entries = state.split_entries(entries, names)
            tensors.update(named)
            groups: list[dict[str, Any]] = []
            if has_optimizers:
                param_names = state.parameter_names(module, names)
                tensors.update(optim.optimizer_tensors(optimizers, param_names))
                groups = optim.optimizer_groups(optimizers, param_names)
            return tensors, _Part(rest, groups, sorted(set(checkpoint) - set(entries) - {"state_dict"}))

        tensors, part = on_every_rank(collect, group)
        parts = gather_objects(part, group)
        tensors.update(rng_tensors(rank_of(group)))
        sharded = sorted({name for part in parts for name in part.sharded})
        entries = {name: value for name, value in checkpoint.items() if name not in sharded}
        # What of the state dict is no parameter or buffer (extra states, metrics) comes from the first rank that has it.
        entries["state_dict"] = {name: value for part in reversed(parts) for name, value in part.rest.items()}
        if has_optimizers:
            entries["optimizer_states"] = []
        entries[ENTRY] = {
            "format": FORMAT,
            "layout": self.layout,
            "world_size": len(parts),
            "tied": names.tied,
            "huggingface": None if self.huggingface is None else self.huggingface.to_plain(),
            "optimizers": optim.merge_groups([part.groups for part in parts], names) if has_optimizers else None,
            "sharded_entries": sharded,
        }
        self.store.save(tensors, entries, path, self.layout, int(entries.get("global_step", 0)), background)

    def open(self, path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Lightning's checkpoint dict without the tensors; remembers ``path`` for ``load_weights`` and ``load_optimizers``.

        Raises:
            CheckpointError: No complete checkpoint is there, or it needs ``weights_only=False``.
        """
        self.store.wait()
        path = Path(on_first_rank(lambda: str(path), self.store.group))
        entries = self.store.read_entries(path, weights_only)
        self._entry = entries.pop(ENTRY)
        self._path, self._strict, self._weights_due = path, True, True
        self._rest = entries.get("state_dict", {})
        rank_zero_info(f"Opened {path}, written under {self._entry['layout']} at step {entries.get('global_step')}")
        if rank_of(self.store.group) == 0 and (left := leftovers(path.resolve().parent)):
            names = ", ".join(entry.name for entry in left)
            rank_zero_warn(f"{path.parent} holds an interrupted save ({names}); it is not used, and the next save deletes it.")
        return {**entries, "state_dict": dict(self._rest), **{name: {} for name in self._entry["sharded_entries"]}}

    def close(self) -> None:
        """Waits for a save in the background, and forgets the open checkpoint. Raises what went wrong with the save.

        Asks no other rank: it may be called after an error on this one.
        """
        self._path, self._weights_due = None, False
        self.store.wait_alone()

    @property
    def save_has_failed(self) -> bool:
        """Whether a save in the background failed, and nobody was told yet. Does not block, and asks no other rank."""
        return self.store.background is not None and self.store.background.has_failed

    def wait(self) -> None:
        """Until the save in the background is committed; on every rank. Raises what went wrong with it."""
        self.store.wait()

    def set_strict(self, strict: bool) -> None:
        """Whether ``load_weights`` refuses missing and unexpected names; Lightning tells it before the weights can be loaded."""
        self._strict = strict

    def load_weights(self, module: nn.Module) -> None:
        """Fills this rank's parameters and persistent buffers, once for each ``open``; otherwise does nothing.

        Raises:
            CheckpointError: On every rank: a name is missing or unexpected (unless not strict), or a shape or dtype differs.
        """
        if not self._weights_due:
            return
        assert self._path is not None
        names, path = self._names(), self._path
        saved = self.store.read_metadata(path)
        missing, unexpected = state.compare_names(names, saved)
        if self._strict and (missing or unexpected):
            raise CheckpointError(state.mismatch(str(path), names, missing, unexpected, self._entry["tied"]))
        if missing or unexpected:
            left, unused = listing(missing) or "none", listing(unexpected) or "none"
            rank_zero_warn(f"{path}: not in the checkpoint, left as they are: {left}. In it, but not in the model: {unused}.")
        self.store.load(state.model_tensors(module, names), path, strict=self._strict)
        on_every_rank(lambda: state.load_rest(module, self._rest), self.store.group)
        self._weights_due = False

    def load_entry(self, name: str, module: nn.Module) -> None:
        """Fills ``module``, after ``load_weights``, with a further entry of the open checkpoint, where that has values."""
        assert self._path is not None and name in self._entry["sharded_entries"]
        tensors = [(key.replace("model.", f"entry.{name}.", 1), t) for key, t in state.model_tensors(module, self._names())]
        self.store.load(tensors, self._path, strict=False)

    def check_optimizers(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """To be called once they are built, before the first step.

        Raises:
            CheckpointError: A checkpoint could not hold them: a tensor that is not the module's, state that cannot be sharded,
                or copies of a tied parameter in different groups.
        """
        names, group = self._names(), self.store.group

        def check() -> dict[str, tuple[int, int]]:
            param_names = state.parameter_names(module, names)
            for optimizer in optimizers:
                optim.check_shardable(optimizer)
            return optim.group_indices(optimizers, param_names)

        indices = gather_objects(on_every_rank(check, group), group)
        on_every_rank(lambda: optim.check_tied_groups(indices, names.tied), group)

    def load_optimizers(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Fills the optimizers' state and hyper-parameters from the open checkpoint, after ``load_weights``.

        Raises:
            CheckpointError: Optimizers, groups or the parameters in them are not those that were saved.
        """
        assert self._path is not None, "Lightning restores optimizers only after it has opened a checkpoint"
        names, group, then = self._names(), self.store.group, self._entry.get("optimizers")
        if then is None:
            raise CheckpointError(
                f"{self._path} holds weights alone (save_weights_only=True): it can be loaded, but training cannot resume from it"
            )
        param_names = state.parameter_names(module, names)
        parts = gather_objects(on_every_rank(lambda: optim.optimizer_groups(optimizers, param_names), group), group)
        on_every_rank(lambda: optim.check_groups(optim.merge_groups(parts, names), then), group)
        optim.make_slots(optimizers, param_names, self.store.read_metadata(self._path))
        self.store.load(optim.optimizer_tensors(optimizers, param_names), self._path)
        optim.restore_groups(optimizers, then, param_names)

    def load_rng(self) -> bool:
        """Puts the random number generators back where they were at the save.

        Returns:
            Whether it did: only under the layout and the world size of the save.
        """
        assert self._path is not None
        same = (self._entry["layout"], self._entry["world_size"]) == (self.layout, len(gather_objects(None, self.store.group)))
        if not same:
            return False
        prefix = f"rng.{rank_of(self.store.group)}."
        saved = self.store.read_metadata(self._path)
        states = {
            key: torch.empty(stored.size, dtype=stored.properties.dtype)
            for key, stored in saved.items()
            if key.startswith(prefix)
        }
        self.store.load(states, self._path)
        restore_rng(rank_of(self.store.group), states)
        return True

    def remove(self, path: str | Path) -> None:
        """Deletes a checkpoint; on every rank, rank 0's path."""
        self.store.remove(on_first_rank(lambda: str(path), self.store.group))

    def _names(self) -> Names:
        assert self.names is not None, "take_names must be called on the whole module, before it is cut"
        return self.names
