"""The command line as a user types it: the recipe under every layout, wrong options, commands."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_5d import parity
from lightning_5d.cli import TRAINING, main
from tests.ranks import run_ranks

RECIPE = Path(__file__).parents[2] / "recipes" / "llama_tiny_cpu.yaml"
LAYOUTS = {
    "tp2_nosp": 2,
    "pp4": 4,
    "pp2_gpipe": 2,
    "dp2_pp2_zero1": 4,
    "dp2_tp2_zero3": 4,
    "dp4_zero0": 4,
    "dp4_zero1": 4,
    "dp4_zero2": 4,
    "dp4_zero3": 4,
    "tp2_pp2": 4,
}
STEPS = 3


def losses(strategy: str, world_size: int, folder: str) -> list[float]:
    """In a rank: the recipe in float32 with SGD for a few steps; rank 0's losses."""
    record = Path(folder) / f"{strategy}.json"
    args = [
        *("fit", "--config", str(RECIPE), "--trainer.strategy", strategy, "--trainer.devices", str(world_size)),
        *("--trainer.max_steps", str(STEPS), "--trainer.limit_val_batches", "0", "--trainer.logger", "false"),
        *(
            "--trainer.enable_checkpointing",
            "false",
            "--trainer.enable_progress_bar",
            "false",
            "--trainer.default_root_dir",
            folder,
        ),
        *("--model.optimizer", "sgd", "--model.lr", "0.5", "--data.seq_len", "64", "--data.cache_dir", folder),
        *("--trainer.callbacks+", "lightning_5d.parity.RecordLosses", "--trainer.callbacks.path", str(record)),
    ]
    os.chdir(folder)
    assert main(args) == 0
    return json.loads(record.read_text()) if os.environ["RANK"] == "0" else []


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    folder = str(tmp_path_factory.mktemp("recipe"))
    return folder, run_ranks(1, losses, "auto", 1, folder)[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_recipe_under_every_layout_has_the_losses_of_one_process(layout: str, one_process: tuple[str, list[float]]) -> None:
    folder, expected = one_process
    assert len(expected) == STEPS and expected[-1] < expected[0]
    found = run_ranks(LAYOUTS[layout], losses, layout, LAYOUTS[layout], folder)[0]
    assert found == pytest.approx(expected, rel=1e-5)


def run(*args: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "lightning_5d", *args], capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


def test_usage_and_unknown_commands() -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert (main([]), main(["--help"]), main(["trian"])) == (2, 0, 2)
    for command in (*TRAINING, "advise", "explain", "parity", "export", "import", "inspect"):
        assert command in out.getvalue()
    assert "'trian' is no command" in err.getvalue()


@pytest.mark.slow
def test_a_wrong_layout_is_one_sentence_and_no_traceback(tmp_path: Path) -> None:
    status, text = run("fit", "--config", str(RECIPE), "--trainer.strategy", "tp3", "--trainer.default_root_dir", str(tmp_path))
    assert status == 2 and "does not divide the world size 4" in text and "Traceback" not in text, text


@pytest.mark.slow
def test_parity_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The command starts a process for each rank itself; two steps of the recipe as it is."""
    assert main(["parity", "--config", str(RECIPE), "--steps", "2", "tp2"]) == 0
    assert "equal" in capsys.readouterr().out


def test_parity_of_other_losses_and_of_failed_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = {"zero0": [2.0, 1.0], "dp1_tp2": [2.0, 1.00002], "dp2": None}
    monkeypatch.setattr(parity, "run_recipe", lambda config, layout, *rest: made[layout])
    assert parity.main(["--config", "recipe.yaml", "tp2"]) == 1
    assert "DIFFERS" in capsys.readouterr().out
    assert parity.main(["--config", "recipe.yaml", "--tolerance", "1e-4", "tp2"]) == 0
    assert parity.main(["--config", "recipe.yaml", "dp2"]) == 2
    assert parity.main(["--config", "recipe.yaml", "tp3x"]) == 2
    assert "tp3x" in capsys.readouterr().err
