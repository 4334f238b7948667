"""Checkpoints belong to the model, not to the layout: saved under one, loaded under any other."""

from lightning_5d.checkpoint.agree import CheckpointError
from lightning_5d.checkpoint.names import Names
from lightning_5d.checkpoint.session import CheckpointSession
from lightning_5d.checkpoint.store import CheckpointStore

__all__ = ["CheckpointError", "CheckpointSession", "CheckpointStore", "Names"]
