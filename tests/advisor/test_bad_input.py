"""Bad input of the advisor is told in one sentence that names what is wrong, and never a traceback, a hang or another model."""

import csv
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_5d import Layout, LayoutError
from lightning_5d.advisor import ModelSpec, estimate
from lightning_5d.advisor.commands import BAD_QUESTION, advise_main, explain_main
from lightning_5d.advisor.model import PRESETS, ModelError, describe_model, model_config
from lightning_5d.advisor.own_gpu import require_gpu
from lightning_5d.advisor.parameters import find_framework
from lightning_5d.advisor.predict import LARGEST, check_case
from lightning_5d.advisor.search import SPACES, Constraints, divisors, enumerate_layouts, lacks
from lightning_5d.models import LlamaConfig
from tests.advisor.cases import PAPER, predict
from tests.benchmarks.advisor import main as score
from tests.benchmarks.advisor_rows import PAPER as PAPER_CSV
from tests.benchmarks.advisor_rows import PLAYBOOK as PLAYBOOK_CSV
from tests.benchmarks.advisor_rows import RUNS as RUNS_CSV
from tests.benchmarks.advisor_rows import Skipped, paper_rows, playbook_rows

QUESTION = ["--model", "llama-13b", "--gpus", "64", "--gpu", "a100-80gb", "--seq-len", "2048", "--global-batch", "2048"]

# ---------------------------------------------------------------- models

DENSE = {**model_config(PRESETS["llama3-8b"]), "head_dim": 128}
MIXTURE = {
    **model_config(PRESETS["mixtral-8x7b"]),
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 0,
}


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        *((DENSE, key, value) for key in DENSE if key != "tie_word_embeddings" for value in (-4, 1.5, "8", True, [8])),
        *((MIXTURE, key, -4) for key in MIXTURE),
        (DENSE, "vocab_size", float("inf")),
        (DENSE, "vocab_size", float("nan")),
        (DENSE, "hidden_size", 10**400),
        (DENSE, "num_hidden_layers", 10**6),
        (DENSE, "intermediate_size", 0),
        (DENSE, "head_dim", 0),
        (DENSE, "tie_word_embeddings", "false"),
        (DENSE, "tie_word_embeddings", 1),
        (DENSE, "gated_mlp", "no"),
    ],
)
def test_a_key_of_a_config_is_named_with_its_file(config: dict[str, Any], key: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, key: value}))
    with pytest.raises(ModelError) as caught:
        describe_model(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: {key} must be ") and len(said.splitlines()) == 1 and len(said) < 300


def test_the_key_is_named_as_it_was_written() -> None:
    old = {"n_layer": -12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "model_type": "gpt2"}
    with pytest.raises(ModelError, match="n_layer must be a whole number from 1 to 10,000, not -12"):
        describe_model(old)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ModelSpec)])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 10**400, "x", [1]])
def test_every_field_of_a_spec_is_checked(field: str, value: object) -> None:
    spec = PRESETS["mixtral-8x7b"]
    if field == "name" and isinstance(value, str):
        return
    with pytest.raises(ModelError, match="must be"):
        dataclasses.replace(spec, **{field: value})


def test_every_preset_lies_within_the_bounds_and_floats_are_whole() -> None:
    for spec in PRESETS.values():
        assert describe_model(json.loads(json.dumps(model_config(spec)))).num_parameters == spec.num_parameters
    assert describe_model({**DENSE, "hidden_size": 4096.0}).hidden_size == 4096


# ---------------------------------------------------------------- GPUs

GPU = {
    "name": "mine",
    "bf16_tflops": 312,
    "hbm_gib": 80,
    "hbm_tb_s": 2.0,
    "scaleup_uni_gb_s": 300,
    "scaleup_domain_gpus": 8,
    "internode_uni_gb_s": 25,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({1: 2}, "unknown: 1"),
        ({None: 2, "bf16": 3}, "unknown: None, bf16"),
        ({"hbm_gib": float("nan")}, "hbm_gib must be a positive number"),
        ({"bf16_tflops": float("inf")}, "bf16_tflops must be a positive number"),
        ({"hbm_tb_s": 10**400}, "hbm_tb_s must be a positive number"),
        ({"hbm_tb_s": 1e-300}, "hbm_tb_s must be a positive number"),
        ({"internode_uni_gb_s": True}, "internode_uni_gb_s must be a positive number"),
        ({"scaleup_domain_gpus": 0.5}, "scaleup_domain_gpus must be a whole number, not 0.5"),
        ({"scaleup_domain_gpus": 8.7}, "scaleup_domain_gpus must be a whole number, not 8.7"),
        ({"measured_bf16_tflops": 400}, "measured_bf16_tflops 400 is above bf16_tflops 312"),
        ({"usable_gib": 81}, "usable_gib 81 is above hbm_gib 80"),
        ({"name": None}, "name is empty"),
    ],
)
def test_a_figure_of_a_gpu_file_is_named(changes: dict[Any, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.yaml"
    path.write_text(yaml.safe_dump({**GPU, **changes}))
    with pytest.raises(ValueError, match=said) as caught:
        require_gpu(str(path))
    assert str(caught.value).startswith(str(path))


def test_a_whole_gpu_file_is_read_from_its_path(tmp_path: Path) -> None:
    path = tmp_path / "gpu.yaml"
    path.write_text(yaml.safe_dump({**GPU, "scaleup_domain_gpus": 8.0, "measured_bf16_tflops": 312}))
    assert require_gpu(path).scaleup_domain_gpus == 8


# ---------------------------------------------------------------- questions


@pytest.mark.parametrize("size", LARGEST)
@pytest.mark.parametrize("times", [10**3, 10**20, 10**400])
def test_sizes_that_no_search_would_end_for_are_refused(size: str, times: int) -> None:
    with pytest.raises(ValueError, match=f"{size} must be at most {LARGEST[size]:,}"):
        predict("zero1_mbs1", **{size: LARGEST[size] * times})


def test_the_largest_sizes_are_answered() -> None:
    """Also a prime number of micro-batches, of which a simulation of all would not end."""
    assert predict("pp4_zbv_mbs1", num_gpus=4, global_batch=999_999_937).num_microbatches == 999_999_937
    assert predict("tp8_pp4_mbs1", "llama3-8b", num_gpus=LARGEST["num_gpus"], global_batch=LARGEST["global_batch"]).mfu > 0


def test_divisors_of_large_numbers() -> None:
    for n in (1, 36, 97, 9_999_991, 10_000_000):
        assert divisors(n)[0] == 1 and divisors(n)[-1] == n and all(n % d == 0 for d in divisors(n))
    assert len(divisors(10_000_000)) == 64


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"layout": 5}, "layout must be a layout string such as .* or a Layout, not 5"),
        ({"layout": None}, "layout must be .*, not None"),
        ({"gpu": None}, "gpu must be a name such as h100, .*, not None"),
        ({"gpu": 100}, "gpu must be"),
        ({"model": 5}, "cannot describe a model from int"),
        ({"num_gpus": None}, "num_gpus must be a whole number"),
    ],
)
def test_arguments_of_another_type_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        estimate(**{"model": "llama-13b", "layout": "zero1", **PAPER, **arguments})


@pytest.mark.parametrize("command", [advise_main, lambda a: explain_main(["zero1_mbs1", *a])])
def test_only_one_form_is_printed(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*QUESTION, "--json", "--csv"]) == BAD_QUESTION
    assert "--csv: not allowed with argument --json" in capsys.readouterr().err


# ---------------------------------------------------------------- recipes


@pytest.mark.parametrize("changes", [{}, {"vocab_size": 32_000}, {"tie_word_embeddings": True}, {"intermediate_size": 13_696}])
@pytest.mark.parametrize("folder", ["llama-13b", "mine"])
def test_a_recipe_trains_the_model_that_was_asked_about(
    changes: dict[str, Any], folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config.json is called as its folder, which may be a preset's name."""
    config, out = tmp_path / folder / "config.json", tmp_path / "recipe.yaml"
    config.parent.mkdir()
    config.write_text(json.dumps({**model_config(PRESETS["llama-13b"]), **changes}))
    assert advise_main(["--model", str(config), *QUESTION[2:], "--recipe", str(out)]) == 0
    written = yaml.safe_load(out.read_text())["model"]["init_args"]["config"]
    trained = LlamaConfig.from_preset(written) if isinstance(written, str) else LlamaConfig.from_dict(written)
    assert trained.num_parameters == describe_model(config).num_parameters == describe_model(out).num_parameters
    assert isinstance(written, str) == (folder == "llama-13b" and not changes)


# ---------------------------------------------------------------- frameworks


@pytest.mark.parametrize("framework", SPACES)
@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("tp3_zero1_mbs1", "tp3 does not divide num_heads = 40"),
        ("tp64_zero0_mbs1", "tp64 does not divide num_heads = 40"),
        ("pp64_mbs1", "pp64 needs at least 64 layers"),
        ("pp32_v2_mbs1", "stages need at least 64 layers"),
    ],
)
def test_heads_and_layers_must_divide_for_every_framework(framework: str, layout: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        predict(layout, num_gpus=192, global_batch=192 * 64, framework=framework)


@pytest.mark.parametrize("framework", ["aleph-alpha", "nanotron"])
@pytest.mark.parametrize(
    ("layout", "said"),
    [("zero3_mbs1", "has no zero3; allowed: up to zero1"), ("cp2_mbs1", "has no context parallelism; leave cp2 out")],
)
def test_what_a_framework_never_had_is_refused(framework: str, layout: str, said: str) -> None:
    with pytest.raises(LayoutError, match=f"{framework} {said}"):
        predict(layout, framework=framework)
    assert predict(layout).mfu > 0


@pytest.mark.parametrize("framework", SPACES)
def test_the_search_proposes_nothing_that_is_refused(framework: str) -> None:
    rules, gpu = find_framework(framework), require_gpu("h100")
    for gpus in (1, 16):  # one GPU has nothing to shard over
        layouts = list(enumerate_layouts(PRESETS["llama3-8b"], gpu, gpus, 8192, 64, SPACES[framework], Constraints()))
        assert layouts and all(lacks(rules, x) is None for x in layouts)


def test_every_published_run_is_still_answered() -> None:
    """Also nanotron's 28 layers on 32 stages, and its fewer micro-batches than stages."""
    rows = [(r, "aleph-alpha") for r in paper_rows()] + [(r, "nanotron") for r in playbook_rows()]
    ran = [(r, f) for r, f in rows if r.status == "ok"]
    assert len(ran) == 317 + 1265
    for row, framework in ran:
        check_case(row.case, find_framework(framework))
    assert any(r.case.layout.pp > r.case.model.num_layers for r, _ in ran)
    with pytest.raises(LayoutError, match="at least 34 layers"):
        predict("pp34_mbs1", PRESETS["playbook-3b"], num_gpus=34, global_batch=64, framework="nanotron")
    assert Layout.parse("pp33").num_stages == PRESETS["playbook-3b"].num_layers + 5


# ---------------------------------------------------------------- files of measurements

FILES = {"--paper": PAPER_CSV, "--playbook": PLAYBOOK_CSV, "--runs": RUNS_CSV}


def read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        return list(reader.fieldnames or ()), list(reader)


def write(path: Path, columns: list[str], rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def few(folder: Path, count: int, **changed: Path) -> list[str]:
    """Arguments with files of few rows each."""
    arguments = []
    for option, path in FILES.items():
        columns, rows = read(path)
        name = option.removeprefix("--")
        arguments += [option, str(changed.get(name) or write(folder / f"few_{name}.csv", columns, rows[:count]))]
    return arguments


@pytest.mark.parametrize("option", FILES)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        ("", "is empty"),
        ("a,b\n1,2\n", "has no column "),
        ("\x00\xff", ""),
    ],
)
def test_a_file_that_cannot_be_used_is_told_in_one_sentence(
    option: str, content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "measured.csv"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    assert score([option, str(path)]) == 2
    captured = capsys.readouterr()
    assert f"{path} {said}" in captured.err and "model" in captured.err
    assert len(captured.err.splitlines()) == 1 and captured.out == ""


@pytest.mark.parametrize("option", FILES)
def test_a_missing_column_is_named(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns, rows = read(FILES[option])
    path = write(tmp_path / "measured.csv", [c for c in columns if c not in ("tp", "model")], rows)
    assert score([option, str(path)]) == 2
    err = capsys.readouterr().err
    assert f"{path} has no column " in err and "tp" in err.split(";")[0] and "model" in err.split(";")[0]


@pytest.mark.parametrize("count", [0, 2])
def test_few_rows_give_the_scores_there_are(count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score(few(tmp_path, count)) == 0
    out = capsys.readouterr().out
    assert f"{count} runs" in out and "no rows" in out and not re.search(r"\bnan\b", out)
    if count:
        assert "100.0% (0 false alarms, 0 missed)" in out


@pytest.mark.parametrize("option", ["--refit", "--docs", "--pictures"])
def test_few_rows_are_too_few_to_write_what_others_read(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = [option] if option == "--refit" else [option, str(tmp_path / "out")]
    assert score([*few(tmp_path, 0), *extra]) == 2
    assert "need runs of two groups" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_blank_and_broken_cells_are_listed_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns, rows = read(PAPER_CSV)
    ran = [r for r in rows if r["status"] == "ok"][:9]
    broken = [
        {"tp": ""}, {"mfu": ""}, {"dp": "many"}, {"mfu": "nan"}, {"model": "7B"}, {"gpus": "65"}, {"status": "[/ok]"},
        {"pp": "0"},
    ]  # fmt: skip
    changed = [{**r, **c, "more": "x"} for r, c in zip(ran, broken, strict=False)]
    skipped: list[Skipped] = []
    one_whole = write(tmp_path / "one_whole.csv", [*columns, "more"], [*changed, ran[8]])
    assert len(paper_rows(one_whole, skipped)) == 1 and len(skipped) == len(broken)
    assert score(few(tmp_path, 0, paper=write(tmp_path / "mine.csv", columns, changed))) == 0
    out = capsys.readouterr().out
    for reason in (
        "incomplete: no tp",
        "incomplete: no mfu",
        "dp 'many' is no whole number",
        "mfu nan is not above 0",
        "model '7B', not 13B or 30B or 65B",
        "the row 65 GPUs",
        "status '[/ok]', not ok or oom",
        "pp 0 is not from 1",
    ):
        assert reason in out, reason


@pytest.mark.parametrize(("read_rows", "path"), [(paper_rows, PAPER_CSV), (playbook_rows, PLAYBOOK_CSV)])
def test_no_published_row_is_skipped_and_others_may_have_more(read_rows: Any, path: Path, tmp_path: Path) -> None:
    columns, rows = read(path)
    skipped: list[Skipped] = []
    wider = write(tmp_path / "wider.csv", ["first", *columns, "last"], [*rows, rows[0]])
    assert len(read_rows(wider, skipped)) == len(read_rows()) + 1 and not skipped
