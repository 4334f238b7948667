"""Which checkpoint to go on from after a crash."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_5d.checkpoint.commit import complete_checkpoints, read_complete


def latest(folder: str | Path) -> Path | None:
    """The complete checkpoint with the most steps in ``folder``, for ``trainer.fit(ckpt_path=latest(folder))``; None without one.

    Says which it is, and names those that it leaves out and why.
    """
    folder = Path(folder)
    found = complete_checkpoints(folder)
    for entry in sorted(folder.glob("*.ckpt")):
        if entry.is_dir() and not entry.is_symlink() and entry not in found:
            try:
                read_complete(entry)
            except ValueError as error:
                rank_zero_warn(f"Not resuming from {entry.name}: {error}")
    if not found:
        rank_zero_info(f"No complete checkpoint in {folder}")
        return None
    rank_zero_info(
        f"The latest complete checkpoint in {folder} is {found[-1].name}, at step {read_complete(found[-1])['global_step']}"
    )
    return found[-1]
