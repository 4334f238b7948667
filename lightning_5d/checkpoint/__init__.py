"""Checkpoints belong to the model, not to the layout: saved under one, loaded under any other."""

from lightning_5d.checkpoint.agree import CheckpointError
from lightning_5d.checkpoint.convert import export_huggingface, export_lightning, import_huggingface, load_module
from lightning_5d.checkpoint.latest import latest
from lightning_5d.checkpoint.names import Names
from lightning_5d.checkpoint.pretrained import PretrainedWeights, load_pretrained
from lightning_5d.checkpoint.session import CheckpointSession
from lightning_5d.checkpoint.store import CheckpointStore
from lightning_5d.checkpoint.weight_map import Source, WeightMap, register_weight_map

__all__ = [
    "CheckpointError",
    "CheckpointSession",
    "CheckpointStore",
    "Names",
    "PretrainedWeights",
    "Source",
    "WeightMap",
    "export_huggingface",
    "export_lightning",
    "import_huggingface",
    "latest",
    "load_module",
    "load_pretrained",
    "register_weight_map",
]
