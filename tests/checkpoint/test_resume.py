"""Trained under one layout, resumed under another by ``trainer.fit(ckpt_path=...)``: as if nothing had happened."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_5d.checkpoint import commit
from lightning_5d.checkpoint.commit import read_complete
from tests.checkpoint.arranged import assemble, assert_same
from tests.checkpoint.trained import BATCH, LAYOUTS, run, samples
from tests.ranks import run_ranks

SAVED, END = 3, 8  # steps; an epoch is 5
FIVE = ["dp1", "tp2", "pp2", "dp2_zero3", "tp2_pp2"]


def whole(results: list[dict[str, Any]], when: str) -> dict[str, torch.Tensor]:
    return assemble(result[when] for result in results)


def resume_all(layout: str, folder: Path, sources: list[str]) -> dict[str, Any]:
    return {
        source: run(layout, folder / source, END, ckpt_path=folder / source / f"step={SAVED}.ckpt", every=SAVED)
        for source in sources
    }


def check_resume(folder: Path, sources: list[str], targets: list[str]) -> None:
    expected = run_ranks(1, run, "dp1", folder / "uninterrupted", END, every=1)
    lrs, ids = expected[0]["lrs"], samples(expected)
    saved = {}
    for source in sources:
        saved[source] = run_ranks(LAYOUTS[source], run, source, folder / source, SAVED, every=SAVED)
        assert samples(saved[source]) == ids[:SAVED]
        assert read_complete(folder / source / f"step={SAVED}.ckpt")["global_step"] == SAVED
    for target in targets:
        results = run_ranks(LAYOUTS[target], resume_all, target, folder, sources, timeout_s=240)
        for source in sources:
            of_pair = [result[source] for result in results]
            assert_same(whole(of_pair, "first"), whole(saved[source], "last"))
            assert samples(of_pair) == ids[SAVED:], (source, target)
            for result in of_pair:
                torch.testing.assert_close(result["losses"], expected[0]["losses"][SAVED:], rtol=1e-5, atol=0)
                assert result["lrs"] == lrs[SAVED:]
                assert result["global_step"] == END and result["epoch"] == expected[0]["epoch"]
                # The best two of both halves: the list was restored, and went on.
                at = {f"step={step}.ckpt": expected[0]["losses"][step - 1] for step in (SAVED, 2 * SAVED)}
                assert sorted(result["top_k"]) == sorted(at)
                torch.testing.assert_close(result["top_k"], at, rtol=1e-5, atol=0)
            link = folder / source / "last-v1.ckpt"  # the first run's own link stays, Lightning's way
            assert link.is_symlink() and read_complete(link)["global_step"] == 2 * SAVED
            for left in [link, *(folder / source).glob("step=6*")]:
                commit.remove(left)


def test_two_pairs(tmp_path: Path) -> None:
    check_resume(tmp_path, ["tp2_pp2"], ["dp2_zero3", "dp1"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_pair_of_five(tmp_path: Path) -> None:
    check_resume(tmp_path, FIVE, FIVE)


def carry_over(layout: str, folder: Path) -> dict[str, Any]:
    """Loads the one truth under ``layout`` and saves it again, without a step."""
    return run(layout, folder, SAVED, ckpt_path=folder / "truth.ckpt", save_to=folder / f"{layout}.ckpt")


def two_steps(layout: str, folder: Path, truth: dict[str, Any]) -> dict[str, Any]:
    """Two steps from every layout's checkpoint, and two from the truth put in place by hand."""
    independent = ({key: torch.from_numpy(array) for key, array in truth["tensors"].items()}, truth["rest"])
    return {
        "independent": run(layout, folder, 2, independent=independent),
        **{source: run(layout, folder, SAVED + 2, ckpt_path=folder / f"{source}.ckpt") for source in LAYOUTS},
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_ordered_pair_of_nine(tmp_path: Path) -> None:
    (first,) = run_ranks(1, run, "dp1", tmp_path, SAVED, save_to=tmp_path / "truth.ckpt")
    truth = whole([first], "last")
    for source in LAYOUTS:
        results = run_ranks(LAYOUTS[source], carry_over, source, tmp_path)
        assert_same(whole(results, "last"), truth)
    (uninterrupted,) = run_ranks(1, run, "dp1", tmp_path, SAVED + 1)
    rest = {"lrs": uninterrupted["lrs"][SAVED], "step": SAVED, "epoch": 0, "consumed": SAVED * BATCH}
    given = {"tensors": {key: tensor.numpy() for key, tensor in truth.items()}, "rest": rest}
    for target in LAYOUTS:
        results = run_ranks(LAYOUTS[target], two_steps, target, tmp_path, given, timeout_s=280)
        independent = [result["independent"] for result in results]
        for source in LAYOUTS:
            of_pair = [result[source] for result in results]
            assert_same(whole(of_pair, "first"), truth)
            assert samples(of_pair) == samples(independent)
            assert [r["lrs"] for r in of_pair] == [r["lrs"] for r in independent]
            assert [r["losses"] for r in of_pair] == [r["losses"] for r in independent], (source, target)
            assert_same(whole(of_pair, "last"), whole(independent, "last"))
