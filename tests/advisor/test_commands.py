"""The commands as a person runs them: answers, files, and impossible questions."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_5d import Layout
from lightning_5d.advisor import advise, estimate
from lightning_5d.advisor.commands import BAD_QUESTION, NOTHING_FITS, advise_main, explain_main
from lightning_5d.advisor.model import PRESETS, describe_model
from lightning_5d.support import layout_problem

RECIPES = Path(__file__).parents[2] / "recipes"
QUESTION = ["--model", "llama-13b", "--gpus", "64", "--gpu", "a100-80gb", "--seq-len", "2048", "--global-batch", "2048"]


def changed(**changes: str) -> list[str]:
    question = list(QUESTION)
    for name, value in changes.items():
        question[question.index("--" + name.replace("_", "-")) + 1] = value
    return question


def test_the_table_shows_the_best_layouts(capsys) -> None:
    assert advise_main(QUESTION) == 0
    out = capsys.readouterr().out
    for text in (
        "llama-13b (14.0B) on 64 × A100-80GB-SXM",
        "layouts",
        "params",
        "optim",
        "activ",
        "logits",
        "bubble",
        "MFU",
        " wins",
    ):
        assert text in out
    assert sum("│" in line and "dp" in line for line in out.splitlines()) == 10


def test_json_and_csv_hold_the_same(capsys) -> None:
    assert advise_main([*QUESTION, "--json", "--top", "4"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert advise_main([*QUESTION, "--csv", "--top", "4"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [e["layout"] for e in answer["best"]] == [r["layout"] for r in rows] and len(rows) == 4
    first = answer["best"][0]
    assert float(rows[0]["memory_gib"]) == first["memory_gib"]
    assert float(rows[0]["activations_gib"]) == first["memory_parts_gib"]["activations"]
    assert float(rows[0]["bubble_s"]) == first["time_parts_s"]["bubble"]
    assert first["fits"] is True and answer["considered"] > 500


def test_constraints_and_framework(capsys) -> None:
    assert advise_main([*QUESTION, "--json", "--require", "tp8", "--no", "ac,zero3", "--framework", "lightning_5d"]) == 0
    for e in json.loads(capsys.readouterr().out)["best"]:
        layout = Layout.parse(e["layout"])
        assert layout.tp == 8 and layout.ac == 0 and layout.zero != 3
    assert advise_main([*QUESTION, "--json", "--framework", "aleph-alpha", "--attention", "flash1", "--no-fused-norm"]) == 0
    slow = json.loads(capsys.readouterr().out)["best"][0]
    assert advise_main([*QUESTION, "--json", "--framework", "aleph-alpha"]) == 0
    assert json.loads(capsys.readouterr().out)["best"][0]["mfu"] > slow["mfu"]


def test_a_recipe_is_what_lightning_cli_takes(tmp_path, capsys) -> None:
    out = tmp_path / "recipe.yaml"
    assert advise_main([*QUESTION, "--recipe", str(out)]) == 0
    recipe = yaml.safe_load(out.read_text())
    trainer = recipe["trainer"]
    assert trainer["devices"] * trainer["num_nodes"] == 64
    assert Layout.parse(trainer["strategy"]).resolve(64)
    assert recipe["model"]["init_args"]["config"] == "llama-13b"
    assert recipe["data"]["init_args"]["seq_len"] == 2048 and recipe["data"]["init_args"]["global_batch_size"] == 2048
    # The advisor reads its own recipes.
    assert describe_model(out).num_parameters == PRESETS["llama-13b"].num_parameters


LONG = ["--model", "llama3-8b", "--gpus", "64", "--gpu", "h100", "--seq-len", "32768", "--global-batch", "64", "--all-layouts"]


def test_a_recipe_is_for_a_layout_that_trains(tmp_path, capsys) -> None:
    out = tmp_path / "recipe.yaml"
    assert advise_main([*LONG, "--json", "--recipe", str(out)]) == 0
    captured = capsys.readouterr()
    first = json.loads(captured.out)["best"][0]["layout"]
    written = Layout.parse(yaml.safe_load(out.read_text())["trainer"]["strategy"])
    assert layout_problem(Layout.parse(first)) is not None and layout_problem(written) is None
    said = f"the recipe is for {written.resolve(64)}: {first} cannot be trained yet"
    assert said in captured.err and len(captured.err.splitlines()) == 1


def test_no_recipe_when_nothing_that_fits_trains(tmp_path, capsys) -> None:
    out = tmp_path / "recipe.yaml"
    assert advise_main([*LONG, "--require", "cp2", "--recipe", str(out)]) == BAD_QUESTION
    captured = capsys.readouterr()
    assert "no recipe is written" in captured.err and "cannot be trained yet" in captured.err and captured.out == ""
    assert not out.exists()


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*xa100.yaml")), ids=lambda path: path.stem)
def test_the_head_of_a_recipe_says_whether_it_fits(recipe: Path) -> None:
    content = yaml.safe_load(recipe.read_text())
    trainer, data = content["trainer"], content["data"]["init_args"]
    question = {
        "gpu": "a100-80gb",
        "num_gpus": trainer["devices"] * trainer["num_nodes"],
        "seq_len": data["seq_len"],
        "global_batch": data["global_batch_size"],
    }
    head = " ".join(line.removeprefix("#").strip() for line in recipe.read_text().splitlines() if line.startswith("#"))
    e = estimate(recipe, trainer["strategy"], **question)
    verdict = "It fits here" if e.fits else "It does not fit here"
    assert f"{verdict}: it needs {e.memory_gib:.1f} of {e.limit_gib:.1f} GiB" in head
    assert ("--trainer.strategy" in head) == (not e.fits)
    if not e.fits:
        best = advise(recipe, **question).best[0]
        assert f"float32 ({e.memory_parts_gib['gradients']:.1f} GiB)" in head
        assert f"names another layout first, which needs {best.memory_gib:.1f} GiB" in head
        assert head.endswith(f"--trainer.strategy {best.layout}")


def test_the_arguments_of_a_recipe_are_those_of_the_classes() -> None:
    import inspect

    from lightning_5d.advisor.advice import advise
    from lightning_5d.advisor.recipe import recipe
    from lightning_5d.data import TextDataModule
    from lightning_5d.models import LlamaConfig, LlamaModule

    advice = advise("llama2-7b", gpu="h100", num_gpus=12, seq_len=4096, global_batch=96)
    content = yaml.safe_load(recipe(advice.model, advice.best[0], advice.gpu))
    assert set(content["data"]["init_args"]) <= set(inspect.signature(TextDataModule.__init__).parameters)
    assert set(content["model"]["init_args"]) <= set(inspect.signature(LlamaModule.__init__).parameters)
    assert LlamaConfig.from_dict(content["model"]["init_args"]["config"]).hidden_size == 4096
    assert content["trainer"]["devices"] * content["trainer"]["num_nodes"] == 12


def test_explain_prints_everything(capsys) -> None:
    assert explain_main(["tp2_pp4_zbv_zero1", *QUESTION]) == 0
    out = capsys.readouterr().out
    for text in ("fits", "pipeline rank 0", "reduce-scatter", "tp2", "dp8", "network", "node", "bubble", "live micro-batches"):
        assert text in out, text
    picture = [line for line in out.splitlines() if line[:4].strip().isdigit() and "F" in line]
    assert len(picture) == 4 and all("b" in line and "w" in line for line in picture)


def test_explain_says_what_is_too_much(capsys) -> None:
    assert explain_main(["zero1_mbs4", *QUESTION]) == NOTHING_FITS
    out = capsys.readouterr().out
    assert "does not fit" in out and "GiB too much" in out and "nearest that fit" in out
    assert explain_main(["zero1_mbs4", *QUESTION, "--json"]) == NOTHING_FITS
    answer = json.loads(capsys.readouterr().out)
    assert answer["verdict"] == "oom" and answer["nearest"] and answer["collectives"]


def test_nothing_fits_is_told_with_what_to_try(capsys) -> None:
    code = advise_main(["--model", "llama3-405b", "--gpus", "8", "--gpu", "h100", "--seq-len", "8192", "--global-batch", "16"])
    out = capsys.readouterr().out
    assert code == NOTHING_FITS
    assert "nothing fits" in out and "OOM" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (changed(gpus="0"), "num_gpus must be a whole number of at least 1, not 0"),
        (changed(gpus="-4"), "num_gpus must be"),
        (changed(gpus="many"), "invalid int value"),
        (changed(gpus="47"), "no layout of llama-13b uses all 47 GPUs"),
        (changed(global_batch="0"), "global_batch must be"),
        (changed(global_batch="1"), "dp must divide the batch"),
        (changed(gpu="a100-81gb"), "unknown GPU 'a100-81gb' (did you mean a100-80gb"),
        (changed(gpu="nowhere.yaml"), "nowhere.yaml cannot be read"),
        (changed(model="llama-14b"), "no preset and no file is called 'llama-14b'"),
        ([*QUESTION, "--framework", "deepspeed"], "invalid choice"),
        ([*QUESTION, "--require", "tp9x"], "constraint 'tp9x'"),
        ([*QUESTION, "--top", "0"], "top must be"),
        (QUESTION[:-2], "required: --global-batch"),
        ([*QUESTION, "--html", "/nowhere/at/all.html"], "No such file"),
        (["--model", "mixtral-8x7b", *QUESTION[2:], "--recipe", "/dev/null"], "is no dense Llama"),
    ],
)
def test_impossible_questions_get_one_clear_line(arguments: list[str], said: str, capsys) -> None:
    assert advise_main(arguments) == BAD_QUESTION
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err and captured.out == ""


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("tp3", "does not divide the world size"),
        ("tp5_zero1", "nearest"),
        ("pp3_v7", "v"),
        ("zero1_mbs5", "mbs5 does not divide"),
        ("", "empty"),
    ],
)
def test_impossible_layouts_get_one_clear_line(layout: str, said: str, capsys) -> None:
    assert explain_main([layout, *QUESTION]) == BAD_QUESTION
    assert said.lower() in capsys.readouterr().err.lower()


@pytest.mark.parametrize("content", ["{", "[]", '{"hidden_size": 12}', '{"num_hidden_layers": "x"}', ""])
def test_a_broken_config_gets_one_clear_line(content: str, tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text(content)
    assert advise_main(changed(model=str(tmp_path / "config.json"))) == BAD_QUESTION
    err = capsys.readouterr().err
    assert err.startswith("lightning-5d advise: ") and len(err.splitlines()) == 1


def test_help_is_no_error(capsys) -> None:
    assert advise_main(["--help"]) == 0
    assert "--require" in capsys.readouterr().out


@pytest.mark.slow
def test_an_answer_needs_neither_torch_nor_lightning() -> None:
    program = (
        "import sys\n"
        "from lightning_5d.advisor.commands import advise_main\n"
        f"code = advise_main({QUESTION!r})\n"
        "print([m for m in ('torch', 'lightning', 'transformers', 'scipy', 'pandas', 'matplotlib') if m in sys.modules], code)\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[] 0"
