"""torch's ``.metadata`` file, read without running what is in it.

torch unpickles it freely, and a checkpoint may come from somewhere else. It only holds sizes, offsets and dtypes, so
everything but the classes for those is refused. Private torch names are kept to this file.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

_ALLOWED = {
    "torch": {"Size"},  # and dtypes, below
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "WindowsPath"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _ALLOWED.get(module, ()):
            raise ValueError(f"it refers to {module}.{name}, which no checkpoint metadata needs: it is damaged or malicious")
        return super().find_class(module, name)


class Reader(FileSystemReader):
    """torch's reader with the metadata read once, by :func:`read_metadata`."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


def read_metadata(path: Path) -> Metadata:
    """The sizes, dtypes and places of every tensor of a checkpoint.

    Raises:
        ValueError: The file is damaged, or holds something that metadata does not consist of.
    """
    try:
        with open(path / ".metadata", "rb") as file:
            return _Unpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path / '.metadata'} cannot be read: {error}") from None


def tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The global size, dtype and pieces of every tensor, by key; this format holds nothing but tensors."""
    return {key: value for key, value in metadata.state_dict_metadata.items() if isinstance(value, TensorStorageMetadata)}
