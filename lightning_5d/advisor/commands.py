"""The commands `lightning-5d advise` and `lightning-5d explain`. Nonsense is answered in one line, with exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from lightning_5d.advisor.advice import LOOKED_AT, Advice, advise
from lightning_5d.advisor.cases import ATTENTION_KERNELS
from lightning_5d.advisor.explanation import Explanation, explain
from lightning_5d.advisor.parameters import load_frameworks
from lightning_5d.advisor.predict import Estimate
from lightning_5d.layout import Layout
from lightning_5d.support import layout_problem

NOTHING_FITS, BAD_QUESTION = 1, 2
"""Exit codes."""


def advise_main(argv: Sequence[str] | None = None) -> int:
    """`lightning-5d advise ...`: prints the best layouts. 0; 1 when nothing fits; 2 when the question makes no sense."""
    parser = _parser("advise", "The best layouts for a model on some GPUs: memory, step time and MFU, predicted without a GPU.")
    parser.add_argument("--top", type=int, default=10, help="layouts to show (default 10)")
    parser.add_argument(
        "--require", action="append", default=[], metavar="TOKENS", help="only layouts with these tokens, such as tp8,zero1"
    )
    parser.add_argument("--no", action="append", default=[], metavar="TOKENS", help="no layouts with these tokens, such as ac,cp")
    parser.add_argument("--all-layouts", action="store_true", help="also layouts that the framework cannot train yet")
    parser.add_argument("--recipe", type=Path, metavar="OUT.yaml", help="write a recipe that trains with the first layout")
    parser.add_argument("--html", type=Path, metavar="OUT.html", help="write a page with the drawings, in one file")
    return _answer(parser, argv, _advise)


def explain_main(argv: Sequence[str] | None = None) -> int:
    """`lightning-5d explain LAYOUT ...`: prints one layout in full. 0; 1 when it does not fit; 2 on nonsense."""
    parser = _parser(
        "explain", "One layout in full: where memory and time go, every collective, the pipeline, what keeps it from fitting."
    )
    parser.add_argument("layout", help="layout string, such as tp2_pp4_zero1_mbs1")
    return _answer(parser, argv, _explain)


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"lightning-5d {name}", description=about, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="preset, Hugging Face config.json or its folder, or a recipe")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of the whole job")
    parser.add_argument("--gpu", required=True, help="GPU, such as a100-80gb, h100, b200; or a YAML file that describes yours")
    parser.add_argument("--seq-len", type=int, required=True, help="tokens of a sequence")
    parser.add_argument("--global-batch", type=int, required=True, help="sequences of a step")
    parser.add_argument("--framework", default="lightning_5d", choices=list(load_frameworks()), help="whose behaviour to predict")
    parser.add_argument("--attention", choices=ATTENTION_KERNELS, help="attention kernel (default: the framework's)")
    parser.add_argument(
        "--fused-norm", action=argparse.BooleanOptionalAction, default=None, help="fused RMSNorm (default: the framework's)"
    )
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="print JSON")
    printed.add_argument("--csv", action="store_true", help="print CSV")
    return parser


def _answer(parser: argparse.ArgumentParser, argv: Sequence[str] | None, run: Callable[[argparse.Namespace], int]) -> int:
    try:
        return run(parser.parse_args(argv))
    except SystemExit as stop:  # argparse has said what is wrong, or printed its help
        return int(stop.code or 0) if isinstance(stop.code, int) or stop.code is None else BAD_QUESTION
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return BAD_QUESTION


def _tokens(given: Sequence[str]) -> tuple[str, ...]:
    return tuple(t.strip().lower() for text in given for t in text.replace("_", ",").split(",") if t.strip())


def _advise(args: argparse.Namespace) -> int:
    from lightning_5d.advisor.report import advice_json, advice_table, estimates_csv

    advice = _asked(args, args.top, args.all_layouts)
    written = _write_files(args, advice)
    if args.json:
        print(advice_json(advice))
    elif args.csv:
        print(estimates_csv(advice.best or advice.closest), end="")
    else:
        console = _console()
        console.print(advice_table(advice))
        console.print(advice.why, style="bold" if advice.best else "red", soft_wrap=True, highlight=False)
        for path in written:
            console.print(f"wrote {path}", soft_wrap=True, highlight=False)
    return 0 if advice.best else NOTHING_FITS


def _asked(args: argparse.Namespace, top: int, all_layouts: bool) -> Advice:
    return advise(
        args.model,
        gpu=args.gpu,
        num_gpus=args.gpus,
        seq_len=args.seq_len,
        global_batch=args.global_batch,
        framework=args.framework,
        top=top,
        require=_tokens(args.require),
        forbid=_tokens(args.no),
        attention=args.attention,
        fused_norm=args.fused_norm,
        all_layouts=all_layouts,
    )


def _first_that_trains(args: argparse.Namespace, advice: Advice) -> Estimate:
    """The best layout that this version trains, said on stderr when it is not the first of the table."""
    first = advice.best[0]
    problem = layout_problem(Layout.parse(first.layout))
    if problem is None:
        return first
    try:
        known = _asked(args, LOOKED_AT, all_layouts=False).best
    except ValueError:  # a required token does not train
        known = ()
    best = next((e for e in known if layout_problem(Layout.parse(e.layout)) is None), None)
    if best is None:
        raise ValueError(f"no recipe is written: {first.layout} cannot be trained yet ({problem}), and nor can any that fits")
    print(f"the recipe is for {best.layout}: {first.layout} cannot be trained yet ({problem})", file=sys.stderr)
    return best


def _write_files(args: argparse.Namespace, advice: Advice) -> list[Path]:
    from lightning_5d.advisor.html import page
    from lightning_5d.advisor.recipe import recipe

    written = []
    if args.recipe is not None:
        if not advice.best:
            raise ValueError(f"no recipe is written, since {advice.why}")
        args.recipe.write_text(recipe(advice.model, _first_that_trains(args, advice), advice.gpu), encoding="utf-8")
        written.append(args.recipe)
    if args.html is not None:
        args.html.write_text(page(advice, _pictured(args, advice)), encoding="utf-8")
        written.append(args.html)
    return written


def _pictured(args: argparse.Namespace, advice: Advice) -> Explanation | None:
    """The first layout with a pipeline, explained."""
    shown = next((e for e in advice.best if "_pp" in f"_{e.layout}"), None)
    if shown is None:
        return None
    return explain(
        advice.model, shown.layout, gpu=advice.gpu, num_gpus=advice.num_gpus, seq_len=advice.seq_len,
        global_batch=advice.global_batch, framework=advice.framework, attention=args.attention, fused_norm=args.fused_norm,
    )  # fmt: skip


def _explain(args: argparse.Namespace) -> int:
    from lightning_5d.advisor.report import estimates_csv, explanation_json, explanation_tables

    x = explain(
        args.model, args.layout, gpu=args.gpu, num_gpus=args.gpus, seq_len=args.seq_len, global_batch=args.global_batch,
        framework=args.framework, attention=args.attention, fused_norm=args.fused_norm,
    )  # fmt: skip
    if args.json:
        print(explanation_json(x))
    elif args.csv:
        print(estimates_csv([x.estimate]), end="")
    else:
        _console().print(explanation_tables(x))
    return 0 if x.estimate.fits else NOTHING_FITS


def _console() -> Console:
    """A terminal's own width; a file gets lines wide enough for the table."""
    console = Console()
    return console if console.is_terminal and console.width >= 160 else Console(width=max(console.width, 160))
