"""The command ``lightning-5d``: training by LightningCLI, and what a layout costs before and after."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence

TRAINING = ("fit", "validate", "test", "predict")

_COMMANDS = {
    "advise": ("lightning_5d.advisor.commands", "advise_main", "which layout is best for a model on these GPUs"),
    "explain": ("lightning_5d.advisor.commands", "explain_main", "where the memory and the time of one layout go"),
    "dryrun": ("lightning_5d.advisor.dryrun_command", "dryrun_main", "one rank of a recipe on fake tensors: memory, traffic"),
    "parity": ("lightning_5d.parity", "main", "whether a recipe trains under a layout as it does in one process"),
    "export": ("lightning_5d.checkpoint.commands", "export_main", "a checkpoint as Hugging Face's or Lightning's files"),
    "import": ("lightning_5d.checkpoint.commands", "import_main", "Hugging Face's weights as a checkpoint"),
    "inspect": ("lightning_5d.checkpoint.commands", "inspect_main", "what is in a checkpoint"),
}

_USAGE = "usage: lightning-5d COMMAND ...\n\n{training}\n{commands}\n\nlightning-5d COMMAND --help tells a command's own options."


def usage() -> str:
    training = f"  {'|'.join(TRAINING):<28} train or evaluate, options as of any LightningCLI (--config recipe.yaml)"
    commands = "\n".join(f"  {name:<28} {what}" for name, (_, _, what) in _COMMANDS.items())
    return _USAGE.format(training=training, commands=commands)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    command = args[0]
    if command in TRAINING:
        train(args)
        return 0
    if command not in _COMMANDS:
        print(f"lightning-5d: {command!r} is no command; allowed are {', '.join([*TRAINING, *_COMMANDS])}", file=sys.stderr)
        return 2
    module, name, _ = _COMMANDS[command]
    run: Callable[[list[str]], int] = getattr(importlib.import_module(module), name)
    return run(args[1:])


def train(args: list[str]) -> None:
    """``fit``, ``validate``, ``test`` or ``predict`` of any LightningModule and data named in the options."""
    from lightning.pytorch.cli import LightningCLI

    # Lightning 2.6 with torch 2.13, on every rank; nothing a user can mend.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    from lightning_5d.layout import LayoutError

    # A child that Lightning starts for another rank runs the same command line.
    sys.argv = [sys.argv[0], *args]
    try:
        LightningCLI(save_config_kwargs={"overwrite": True})
    except LayoutError as error:
        print(f"lightning-5d: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    raise SystemExit(main())
