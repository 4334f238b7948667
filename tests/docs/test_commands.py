"""Every command that the pages show exists, with the options they show."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import re
import sys
from pathlib import Path

import pytest

from lightning_5d.cli import main
from tests.docs.pages import PAGES, ROOT, code, name

# A command ends where the next begins, or where what it prints is described.
_OURS = re.compile(r"lightning-5d ([a-z]\S*)((?: (?!\s|&&).*?)*?)(?=\s\s|\s&&|$)")
_MODULE = re.compile(r"python -m ([\w.]+)([^&\n]*)")
_OPTION = re.compile(r"(?<![\w-])--[a-zA-Z][\w.\-]*")


@functools.cache
def help_of(command: str) -> str:
    return printed_by(command, "--help")


def printed_by(*arguments: str) -> str:
    """What a command prints that ends well; AssertionError with what it said when it does not."""
    out, err = io.StringIO(), io.StringIO()
    before, code = sys.argv, 0  # LightningCLI reads it, and the command sets it
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
    sys.argv = before
    assert code == 0, err.getvalue()
    return out.getvalue()


def commands(page: Path, pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """``(name, the rest of the line)`` of each."""
    return [match for line in code(page) for match in pattern.findall(line)]


def is_option(option: str, help_text: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", help_text) is not None


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_our_commands_have_the_options_shown(page: Path) -> None:
    for command, rest in commands(page, _OURS):
        text = help_of(command)
        for option in _OPTION.findall(rest):
            if ".init_args." in option:  # of a class that the recipe names: no help lists it
                recipe = re.search(r"--config (\S+)", rest)
                assert recipe is not None
                assert_recipe_takes(ROOT / recipe.group(1), option)
            else:
                assert is_option(option, text), f"lightning-5d {command} has no {option}"
        for file in re.findall(r"(?<!\S)(?:recipes|tests|docs)/\S+", rest):
            assert (ROOT / file).exists(), file


def assert_recipe_takes(recipe: Path, option: str) -> None:
    argument = option.rsplit(".", 1)[1]
    assert f"{argument}: a-word" in printed_by("fit", "--config", str(recipe), option, "a-word", "--print_config")


def test_options_that_do_not_exist_are_seen() -> None:
    with pytest.raises(AssertionError, match="hardwear"):
        assert_recipe_takes(ROOT / "recipes/llama_tiny_cpu.yaml", "--trainer.callbacks.init_args.hardwear")
    assert is_option("--gpu", help_of("advise")) and not is_option("--gp", help_of("advise"))
    assert not is_option("--strategy", help_of("fit")) and is_option("--trainer.strategy", help_of("fit"))
    with pytest.raises(AssertionError, match="is no command"):
        help_of("inspekt")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_modules_that_are_run_have_the_options_shown(page: Path) -> None:
    for module, rest in commands(page, _MODULE):
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None, f"python -m {module}: no such module"
        source = Path(spec.origin).read_text(encoding="utf-8")
        assert '__name__ == "__main__"' in source, f"python -m {module} does nothing"
        for option in _OPTION.findall(rest):
            assert f'"{option}"' in source, f"python -m {module} has no {option}"


def test_there_are_commands_to_look_at() -> None:
    ours = [command for page in PAGES for command, _ in commands(page, _OURS)]
    assert {"fit", "advise", "explain", "parity", "export", "import", "inspect"} <= set(ours)
    assert sum(len(commands(page, _MODULE)) for page in PAGES) >= 4
