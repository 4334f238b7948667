"""The dry run of one rank against the closed forms: memory within 3%, bytes exactly. Each runs in a process of its own."""

import json
import subprocess
import sys

import pytest
import yaml

from lightning_5d.advisor import explain
from lightning_5d.advisor.model import ModelSpec

CONFIG = {
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 16000,
}
SPEC = ModelSpec("llama", 12, 2048, 16, 8, 5504, 16000)
QUESTION = {"seq_len": 2048, "global_batch": 128}


def recipe(tmp_path, **changes) -> str:
    content = {
        "trainer": {"strategy": "zero1_mbs1", "precision": "bf16-mixed"},
        "model": {"class_path": "lightning_5d.models.LlamaModule", "init_args": {"config": CONFIG}},
        "data": {"init_args": {"seq_len": 2048, "global_batch_size": 128}},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**content, **changes}))
    return str(path)


def run(*arguments: str) -> subprocess.CompletedProcess:
    program = "import sys; from lightning_5d.advisor.dryrun_command import dryrun_main; sys.exit(dryrun_main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=250)


def dry(tmp_path, layout: str, *more: str) -> list[dict]:
    done = run("--config", recipe(tmp_path), "--world-size", "16", "--layout", layout, "--json", *more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout[done.stdout.index("[\n") :])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero3_mbs2", "tp2_nosp_zero2_mbs1_ac", "tp2_pp2_zero1"])
def test_memory_within_three_percent_and_bytes_exact(tmp_path, layout: str) -> None:
    runs = dry(tmp_path, layout)
    x = explain(SPEC, layout, gpu="h100", num_gpus=16, **QUESTION)
    overhead = x.framework["overhead_gib"]
    for found, closed in zip(runs, x.memory_by_rank.values(), strict=True):
        assert sum(closed.values()) - overhead == pytest.approx(found["peak_gib"], rel=0.03), (layout, found, closed)
    norms = 2 * 12 + 1  # so small that the closed form leaves those of the embedding's stage out
    counted = {(t["operation"], t["axis"]): t["nbytes"] for t in runs[0]["traffic"]}
    for c in x.collectives:
        if c.axis == "dp":
            assert c.bytes_step == pytest.approx(counted[c.operation, "dp"], rel=1e-4, abs=norms * 4 * 2048 * 16)
        if c.axis == "pp":
            # The first stage sends forward; what comes back it receives.
            assert counted["send", "pp"] == pytest.approx(c.bytes_step / 2)


@pytest.mark.slow
def test_few_layers_and_micro_batches_tell_of_all(tmp_path) -> None:
    quick, exact = (dry(tmp_path, "tp2_pp2_zero1_mbs4", *more) for more in ((), ("--exact",)))
    for a, b in zip(quick, exact, strict=True):
        assert a["peak_gib"] == pytest.approx(b["peak_gib"], rel=0.01)
        assert a["tflops"] == pytest.approx(b["tflops"], rel=1e-6)
        counted = {(t["operation"], t["axis"]): (t["calls"], t["nbytes"]) for t in a["traffic"]}
        for t in b["traffic"]:
            if t["axis"] in ("tp", "pp", "dp") and t["nbytes"] > 2**20:
                assert counted[t["operation"], t["axis"]] == pytest.approx((t["calls"], t["nbytes"]), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "changes", "said"),
    [
        (("--world-size", "16", "--layout", "tp3"), {}, "does not divide the world size 16"),
        (("--world-size", "0"), {}, "world size"),
        (("--world-size", "16"), {"data": {}}, "seq_len and global_batch_size"),
        (("--world-size", "16"), {"model": {"class_path": "no.Such"}}, "cannot be imported"),
    ],
)
def test_what_cannot_be_run_is_told(tmp_path, arguments: tuple, changes: dict, said: str) -> None:
    done = run("--config", recipe(tmp_path, **changes), *arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
