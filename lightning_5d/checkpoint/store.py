"""Directories of tensors on a file system that every rank sees: torch's distributed format, committed by rename.

    <name>.ckpt/  .metadata  __<rank>_<n>.distcp   torch's: where each piece of each tensor is, and the pieces
                  meta.pt                          entries of plain types, reads under weights_only=True
                  extra.pt                         only if there are other entries
                  complete.json                    written last: format, layout, global_step, files with their sizes

Every method is called by all ranks of the group, and either works on all of them or raises the same error on all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_5d.checkpoint import commit, meta
from lightning_5d.checkpoint.agree import is_distributed, on_every_rank, on_first_rank, rank_of
from lightning_5d.checkpoint.background import Background
from lightning_5d.checkpoint.torch_metadata import Reader, read_metadata, tensors_of


class _CommitWriter(FileSystemWriter):
    """torch's writer, which ends by making the directory a checkpoint: only on rank 0, after every rank has written."""

    def __init__(self, temporary: Path, target: Path, files: Mapping[str, bytes], layout: str, global_step: int) -> None:
        super().__init__(temporary)
        self.temporary, self.target, self._files = temporary, target, files
        self._layout, self._global_step = layout, global_step

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        for name, content in self._files.items():
            commit.write_durably(self.temporary / name, content)
        commit.write_complete(self.temporary, self._layout, self._global_step)
        commit.commit(self.temporary, self.target)


class CheckpointStore:
    """Saves and loads flat dicts of tensors and one dict of everything else.

    Args:
        group: The ranks that save and load together; the whole world when not given, this process alone without a world.
        background: Whether saves can be left to a thread of their own.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, background: bool = False) -> None:
        self.group = group
        self.background = Background() if background else None
        self._kept: tuple[tuple[Path, int, int], Metadata] | None = None
        # Its messages must not mix with those of training, and it needs the CPU: a group of its own. All ranks must come here.
        self._background_group = _clone(group) if background and is_distributed() else group

    def save(
        self,
        tensors: Mapping[str, torch.Tensor],
        entries: Mapping[str, Any],
        path: str | Path,
        layout: str = "",
        global_step: int = 0,
        background: bool = False,
    ) -> None:
        """Writes this rank's ``tensors`` (its shards of DTensors) and rank 0's ``entries``; returns when all is on disk.

        What was at ``path`` stays untouched until then, and is replaced at once. What interrupted saves left there is deleted.
        With ``background``, it returns when all is copied, and writes while training goes on; it waits for the last one first.

        Raises:
            CheckpointError: ``path`` is a directory that is no checkpoint.
            RuntimeError: A rank could not write; the message says which and why. In the background it is :meth:`wait` that tells.
        """
        self.wait()
        writer = self._writer(entries, Path(path), layout, global_step)
        if background and self.background is not None:
            staged = writer.stage(dict(tensors))
            self.background.start(lambda: self._write(staged, writer, self._background_group))
            return
        with _quiet():
            self._write(dict(tensors), writer, self.group)

    def wait(self) -> None:
        """Until the save in the background is committed. Raises what went wrong with it, on every rank."""
        background = self.background
        if background is not None:
            on_every_rank(background.wait, self.group)

    def wait_alone(self) -> None:
        """As :meth:`wait`, without asking the other ranks, which may be gone."""
        if self.background is not None:
            self.background.wait()

    def after_commit(self, action: Callable[[], None]) -> None:
        """Has ``action`` done on this rank once the save in the background is committed; now, if there is none."""
        if self.background is None:
            action()
        else:
            self.background.after(action)

    def _write(self, tensors: dict[str, torch.Tensor], writer: _CommitWriter, group: dist.ProcessGroup | None) -> None:
        try:
            dcp.save(tensors, storage_writer=writer, planner=_planner(), process_group=group, no_dist=not is_distributed())
        except dcp.CheckpointException as exception:
            self._clean_up(writer)
            raise _save_error(writer.target, exception) from exception
        except BaseException:
            self._clean_up(writer)
            raise

    def read_entries(self, path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """The entries that ``save`` was given; ones that are not of plain types only with ``weights_only=False``.

        Raises:
            CheckpointError: No checkpoint, an incomplete or damaged one, a newer format, or needed entries are not plain.
        """
        path = Path(path)
        self.check_complete(path)

        def read() -> dict[str, Any]:
            extra = path / "extra.pt"
            return meta.from_bytes(
                (path / "meta.pt").read_bytes(), extra.read_bytes() if extra.exists() else None, weights_only, str(path)
            )

        return on_every_rank(read, self.group)

    def check_complete(self, path: str | Path) -> dict[str, Any]:
        """What ``complete.json`` says. Raises ``CheckpointError`` if no complete checkpoint of a known format is there."""

        def check() -> dict[str, Any]:
            commit.check_local(path)
            commit.recover(Path(path))
            return commit.read_complete(Path(path))

        return on_first_rank(check, self.group)

    def read_metadata(self, path: str | Path) -> dict[str, TensorStorageMetadata]:
        """The global size and dtype of every tensor of a checkpoint, by key."""
        return on_every_rank(lambda: tensors_of(self._metadata_of(Path(path))), self.group)

    def load(
        self,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        path: str | Path,
        strict: bool = True,
        convert: bool = False,
    ) -> list[str]:
        """Fills this rank's tensors in place, each from the pieces that it overlaps; any sharding from any other.

        Args:
            tensors: By key; as pairs, a key may come more than once.
            strict: When false, keys that the checkpoint has not are left as they are.
            convert: Whether a tensor may have another dtype than in the checkpoint.

        Returns:
            The keys left as they were.

        Raises:
            CheckpointError: On every rank, before anything is changed: a key is missing, a shape or a dtype differs.
        """
        path = Path(path)
        wanted = list(tensors.items()) if isinstance(tensors, Mapping) else list(tensors)
        self.check_complete(path)

        def check() -> tuple[Metadata, list[str]]:
            metadata = self._metadata_of(path)
            saved = tensors_of(metadata)
            missing = sorted({key for key, _ in wanted if key not in saved})
            problems = [f"{key} is missing" for key in missing] if strict else []
            problems += [text for key, tensor in wanted if key in saved for text in difference(key, saved[key], tensor, convert)]
            if problems:
                raise ValueError(
                    f"{path} does not fit: "
                    + "; ".join(problems[:12])
                    + (f"; and {len(problems) - 12} more" if len(problems) > 12 else "")
                )
            return metadata, missing

        metadata, missing = on_every_rank(check, self.group)
        on_every_rank(
            lambda: _read(path, metadata, [(key, tensor) for key, tensor in wanted if key not in set(missing)]), self.group
        )
        return missing

    def remove(self, path: str | Path) -> None:
        """Deletes a checkpoint (or a file, or a link) that ``save`` wrote; nothing when it is not there.

        While a save is in the background, it waits for that one's commit: there is always a checkpoint.
        """
        if self.background is not None and on_first_rank(lambda: self.background.is_busy, self.group):  # type: ignore[union-attr]
            if rank_of(self.group) == 0:
                self.background.after(lambda: commit.remove(Path(path)))
            return
        self.wait()  # which tells of a save that failed, instead of removing what is left
        on_first_rank(lambda: commit.remove(Path(path)), self.group)

    def is_complete(self, path: str | Path) -> bool:
        """Whether a whole checkpoint of a known format is at ``path``; the same answer on every rank."""
        return on_first_rank(lambda: commit.is_complete(Path(path)), self.group)

    def _metadata_of(self, path: Path) -> Metadata:
        """Kept until another is asked for: a resume asks several times, and of a thousand ranks it takes seconds to read."""
        status = (path / ".metadata").stat()
        key = (path, status.st_mtime_ns, status.st_size)
        if self._kept is None or self._kept[0] != key:
            self._kept = (key, read_metadata(path))
        return self._kept[1]

    def _writer(self, entries: Mapping[str, Any], target: Path, layout: str, global_step: int) -> _CommitWriter:
        def prepare() -> Path:
            commit.check_local(target)
            commit.check_replaceable(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            commit.sweep(target.parent)
            temporary = commit.new_temporary(target)
            temporary.mkdir()
            return temporary

        is_first = rank_of(self.group) == 0
        files = on_every_rank(lambda: meta.to_bytes(entries) if is_first else {}, self.group)
        return _CommitWriter(on_first_rank(prepare, self.group), target, files, layout, global_step)

    def _clean_up(self, writer: _CommitWriter) -> None:
        if rank_of(self.group) == 0:
            commit.discard(writer.temporary)


def difference(key: str, stored: TensorStorageMetadata, tensor: torch.Tensor, convert: bool = False) -> list[str]:
    """What keeps a stored tensor from being loaded into ``tensor`` exactly, in words; torch would cast the dtype silently."""
    found = []
    if tuple(stored.size) != tuple(tensor.shape):
        found.append(f"{key} has shape {tuple(stored.size)} in the checkpoint and {tuple(tensor.shape)} in the model")
    if stored.properties.dtype != tensor.dtype and not convert:
        theirs, ours = str(stored.properties.dtype).removeprefix("torch."), str(tensor.dtype).removeprefix("torch.")
        found.append(f"{key} is {theirs} in the checkpoint and {ours} in the model (use the precision it was saved with)")
    return found


def _read(path: Path, metadata: Metadata, wanted: list[tuple[str, torch.Tensor]]) -> None:
    while wanted:
        batch: dict[str, torch.Tensor] = {}
        again = []
        for key, tensor in wanted:
            if key in batch:
                again.append((key, tensor))
            else:
                batch[key] = tensor
        # Without torch's collectives: where each piece is stands in the metadata, so no rank needs another.
        try:
            with _quiet():
                dcp.load(
                    batch,
                    storage_reader=Reader(path, metadata),
                    planner=DefaultLoadPlanner(flatten_state_dict=False),
                    no_dist=True,
                )
        except dcp.CheckpointException as exception:
            cause, _ = next(iter(exception.failures.values()))
            raise ValueError(f"{path} cannot be read: {type(cause).__name__}: {cause}") from exception
        wanted = again


def _clone(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    ranks = None if group is None else dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo")


def _planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=False)


def _save_error(path: str | Path, exception: dcp.CheckpointException) -> RuntimeError:
    rank, (cause, _) = next(iter(exception.failures.items()))
    return RuntimeError(
        f"saving {path} failed on rank {rank}: {type(cause).__name__}: {cause}. What was there before is untouched."
    )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
