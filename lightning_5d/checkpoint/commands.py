"""``lightning-5d export``, ``import`` and ``inspect``: functions that take the command line's arguments, and entry points."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser

from lightning_5d.checkpoint.convert import export_huggingface, export_lightning, import_huggingface
from lightning_5d.checkpoint.inspect import Inspection

DtypeName = Literal["float32", "bfloat16", "float16"]


def export(
    checkpoint: str,
    out: str,
    format: Literal["hf", "lightning"] = "hf",
    dtype: DtypeName | None = None,
    max_file_gib: float = 4.66,
    tokenizer: str | None = None,
    config: str | None = None,
    weights_only: bool = True,
) -> None:
    """Writes a checkpoint for other programs to read.

    Args:
        checkpoint: The checkpoint, a directory.
        out: For hf a folder, which must be empty or new; for lightning a file.
        format: hf: a folder for transformers. lightning: one file for load_from_checkpoint and a stock Trainer.
        dtype: Of the weights, hf only; as saved when not given.
        max_file_gib: Size of a weights file in GiB, hf only.
        tokenizer: A tokenizer.json, or a folder with a tokenizer's files, to put beside the weights; hf only.
        config: A config.json to use instead of the model's own; hf only.
        weights_only: False also reads entries that are not of plain types, and may run code in them; lightning only.
    """
    if format == "lightning":
        given = [name for name, value in (("dtype", dtype), ("tokenizer", tokenizer), ("config", config)) if value is not None]
        if given:
            raise ValueError(f"--{', --'.join(given)}: for --format hf alone")
        print(f"wrote {export_lightning(checkpoint, out, weights_only)}")
        return
    files = export_huggingface(checkpoint, out, max_file_gib, _dtype(dtype), tokenizer, config)
    print(f"wrote {len(files)} weights file{'s' if len(files) > 1 else ''} and config.json to {out}")


def import_(source: str, out: str, dtype: DtypeName | None = None) -> None:
    """Makes a checkpoint of LlamaModule from a Hugging Face Llama: weights alone, for PretrainedWeights or ``validate``.

    Args:
        source: The folder with config.json and safetensors.
        out: The checkpoint to write, a directory.
        dtype: Of the weights; as they are when not given.
    """
    import_huggingface(Path(source), out, _dtype(dtype))
    print(f"wrote {out}")


def inspect(checkpoint: str, all_tensors: bool = False) -> None:
    """Prints a checkpoint's layout, step and completeness, and names, shapes, dtypes and sizes of its tensors.

    Args:
        checkpoint: The checkpoint, a directory.
        all_tensors: Also optimizer state and random number generators.
    """
    print(Inspection.of(checkpoint).report(all_tensors))


def export_main(args: Sequence[str]) -> int:
    return _run("export", export, "checkpoint", args)


def import_main(args: Sequence[str]) -> int:
    return _run("import", import_, "source", args)


def inspect_main(args: Sequence[str]) -> int:
    return _run("inspect", inspect, "checkpoint", args)


def _run(command: str, function: Callable[..., None], positional: str, args: Sequence[str]) -> int:
    parser = ArgumentParser(prog=f"lightning-5d {command}", description=(function.__doc__ or "").partition("\n")[0])
    parser.add_argument(positional, type=str)
    parser.add_function_arguments(function, skip={positional}, as_group=False)
    options: dict[str, Any] = parser.parse_args(list(args)).as_dict()
    try:
        function(**options)
    except ValueError as error:
        print(f"lightning-5d {command}: {error}", file=sys.stderr)
        return 2
    return 0


def _dtype(name: DtypeName | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
