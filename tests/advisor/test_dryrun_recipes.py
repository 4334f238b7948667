"""The dry run's command on recipes of all kinds: users' own modules and data, and what cannot be run, told in one sentence."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401  (seconds that each forked rank would take)
import transformers.models.llama.modeling_llama  # noqa: F401
import yaml

import lightning_5d.advisor.dryrun_recipe  # noqa: F401
from lightning_5d.advisor.dryrun_command import dryrun_main
from tests.parity.models import VOCAB
from tests.ranks import run_ranks

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}
RECIPE: dict[str, Any] = {
    "trainer": {"strategy": "zero1_mbs1", "precision": "bf16-mixed", "max_steps": 10, "gradient_clip_val": 1.0},
    "model": {"class_path": "lightning_5d.models.LlamaModule", "init_args": {"config": TINY}},
    "data": {"class_path": "lightning_5d.data.TextDataModule", "init_args": {"seq_len": 16, "global_batch_size": 32}},
}


def _main(arguments: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = dryrun_main(arguments)
    return status, out.getvalue(), err.getvalue()


def arguments(folder: Path, changes: dict[str, Any]) -> list[str]:
    """For the recipe with ``changes`` of its sections, None to leave one out."""
    content = {k: v for k, v in {**RECIPE, **changes}.items() if v is not None}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return ["--config", str(path), "--world-size", "4", "--json"]


def run(folder: Path, changes: dict[str, Any], *more: str) -> tuple[int, str, str]:
    """In a forked rank: a dry run takes the process's only process group."""
    return run_ranks(1, _main, [*arguments(folder, changes), *more])[0]


def found(folder: Path, changes: dict[str, Any], *more: str) -> list[dict[str, Any]]:
    status, out, err = run(folder, changes, *more)
    assert status == 0, err
    return json.loads(out[out.index("[\n") :])


def own(name: str) -> dict[str, Any]:
    return {"model": {"class_path": f"tests.advisor.own_modules.{name}"}}


NESTED = {"data": {"class_path": "tests.advisor.own_modules.NestedData", "init_args": {"batch_size": 4}}}
MESSAGE = 16 * 32 * 2
"""Bytes of a sequence's hidden state."""


def test_our_own_data_needs_no_files(tmp_path: Path) -> None:
    (one,) = found(tmp_path, {"data": {**RECIPE["data"], "init_args": {**RECIPE["data"]["init_args"], "path": "/no/such"}}})
    assert one["layers"] == 4 and one["peak_gib"] == pytest.approx(sum(one["memory_gib"].values()))
    assert set(one["memory_gib"]) >= {"parameters", "gradients", "optimizer", "activations", "logits", "buffers"}


@pytest.mark.slow
def test_a_batch_of_any_form_is_the_datas_own_first_one(tmp_path: Path) -> None:
    first, last = found(tmp_path, {**own("Nested"), **NESTED}, "--layout", "tp2_pp2_nosp_mbs1")
    # Four sequences a replica, so four messages.
    sent = {(t["operation"], t["axis"]): t for t in first["traffic"]}["send", "pp"]
    assert (sent["calls"], sent["nbytes"]) == (4, 4 * MESSAGE) and last["pp_rank"] == 1


@pytest.mark.slow
def test_the_options_replace_the_data(tmp_path: Path) -> None:
    changes = {**own("HandWritten"), "data": None}
    changes["model"]["class_path"] = "tests.parity.models.HandWritten"
    first, _ = found(tmp_path, changes, "--layout", "pp2_zero1_mbs2", "--seq-len", "8", "--global-batch", "16")
    sent = {(t["operation"], t["axis"]): t for t in first["traffic"]}["send", "pp"]
    assert (sent["calls"], sent["nbytes"]) == (4, 8 * MESSAGE / 2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2_zero1_mbs1", "pp2_zero1_mbs1_ac"])
def test_a_llama_of_transformers(tmp_path: Path, layout: str) -> None:
    runs = found(tmp_path, own("Theirs"), "--layout", layout)
    assert all(r["tflops"] > 0 and r["state_gib"]["parameters"] > 0 for r in runs)


STRATEGY = {"class_path": "lightning_5d.LayoutStrategy", "init_args": {"layout": "pp2_mbs1", "split": [3, 1]}}


@pytest.mark.slow
def test_a_strategy_with_a_split(tmp_path: Path) -> None:
    first, last = found(tmp_path, {"trainer": {**RECIPE["trainer"], "strategy": STRATEGY}})
    assert (first["layers"], last["layers"]) == (3, 1)


def trainer(**changes: Any) -> dict[str, Any]:
    return {"trainer": {**RECIPE["trainer"], **changes}}


BEFORE_IT_RUNS = [
    ({}, ("--layout", "tp3"), "does not divide the world size 4"),
    ({}, ("--layout", "tp8x"), "tp8x"),
    ({}, ("--global-batch", "3", "--seq-len", "16"), "does not divide over dp4"),
    ({}, ("--layout", "pp4_tp1_mbs1", "--global-batch", "0"), "above 0"),
    (trainer(strategy="ddp"), (), "'ddp' is no layout: give --layout"),
    ({"trainer": {}}, (), "no layout: set trainer.strategy"),
    (trainer(strategi="tp2"), (), "trainer has no 'strategi'; did you mean 'strategy'?"),
    (trainer(strategy={**STRATEGY, "init_args": {"laout": "pp2"}}), (), "has no 'laout'; did you mean 'layout'?"),
    (trainer(strategy={**STRATEGY, "init_args": {"layout": "pp2_mbs1", "split": [3, 2]}}), (), "add up to"),
    (trainer(precision="16-mixed"), (), "'16-mixed' does not run under a layout"),
    (trainer(accumulate_grad_batches=4), (), "takes one batch a step"),
    ({"modle": {}}, (), "has no 'modle'; did you mean 'model'?"),
    ({"model": None}, (), "it has no `model`"),
    ({"model": {"class_path": "no.Such"}}, (), "'no.Such' cannot be imported"),
    ({"model": {**RECIPE["model"], "init_args": {"config": TINY, "learning": 1}}}, (), "learning"),
    ({"data": None}, (), "give --seq-len and --global-batch"),
    ({"data": {"class_path": "tests.advisor.own_modules.NoData"}}, (), "FileNotFoundError: /data/none.bin"),
]
WHILE_IT_RUNS = [
    (own("ReadsLoss"), (), "reads a value on the host"),
    (own("ReadsLoss"), ("--layout", "pp2_mbs1"), "reads a value on the host"),
    (own("ChoosesRows"), (), "needs values"),
    (own("Broken"), (), "KeyError: 'no_such_key'"),
]


def one_sentence(answer: tuple[int, str, str], said: str) -> None:
    status, out, err = answer
    assert status == 2 and said in err and "Traceback" not in err and not out, err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("changes", "more", "said"), BEFORE_IT_RUNS)
def test_a_wrong_recipe_is_told_in_one_sentence(tmp_path: Path, changes: Any, more: Any, said: str) -> None:
    one_sentence(_main([*arguments(tmp_path, changes), *more]), said)


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "more", "said"), WHILE_IT_RUNS)
def test_a_step_that_cannot_be_run_is_told_in_one_sentence(tmp_path: Path, changes: Any, more: Any, said: str) -> None:
    one_sentence(run(tmp_path, changes, *more), said)


def test_a_missing_file_and_no_world(tmp_path: Path) -> None:
    one_sentence(_main(["--config", str(tmp_path / "none.yaml"), "--world-size", "4"]), "No such file")
    one_sentence(_main([*arguments(tmp_path, {}), "--world-size", "0"]), "world size")
