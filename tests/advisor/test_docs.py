"""docs/advisor.md says what the code does: its example runs, its tables are those of the carried parameters."""

import re
from pathlib import Path

import pytest

from tests.benchmarks.advisor_docs import parameter_tables, write_docs

DOCS = Path(__file__).parents[2] / "docs" / "advisor.md"


def test_the_example_runs(capsys) -> None:
    for code in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S):
        exec(compile(code, str(DOCS), "exec"), {})
    assert capsys.readouterr().out.startswith("True ")


def test_the_yaml_of_an_own_gpu_is_read(tmp_path) -> None:
    from lightning_5d.advisor.own_gpu import load_own_gpu

    path = tmp_path / "gpu.yaml"
    path.write_text(re.search(r"```yaml\n(name: my accelerator.*?)```", DOCS.read_text(), re.S)[1])
    assert load_own_gpu(path).peak("bf16") == 400


def test_parameters_are_the_carried_ones() -> None:
    block = re.search(r"<!-- parameters -->\n(.*?)\n<!-- end -->", DOCS.read_text(), re.S)[1]
    assert block == parameter_tables(), "run python -m tests.benchmarks.advisor --docs docs/advisor.md"


def test_pictures_are_there() -> None:
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", DOCS.read_text())
    assert len(pictures) == 4 and all((DOCS.parent / p).stat().st_size > 5000 for p in pictures)


def test_a_page_without_the_block_is_refused(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="no block <!-- scores -->"):
        write_docs(page, {"scores": "x"})
