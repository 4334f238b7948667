"""An average of the weights under a layout: what Lightning's own callback gives in one process, also over a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging as StockEMA

from lightning_5d.checkpoint import load_module
from lightning_5d.checkpoint.averaging import EMAWeightAveraging, WeightAveraging, refuse_stock_averaging
from tests.checkpoint.arranged import assemble, assert_same
from tests.checkpoint.trained import LAYOUTS, Hard, run
from tests.ranks import run_ranks


def train(layout: str | None, folder: Path, max_steps: int, ckpt_path: Path | None = None, save_at: int | None = None) -> Any:
    average = StockEMA(decay=0.7) if layout is None else EMAWeightAveraging(decay=0.7)
    options: dict[str, Any] = {
        "callbacks": [average],
        "limit_val_batches": 1,
        "val_check_interval": 2,
        "check_val_every_n_epoch": None,
    }
    return run(layout, folder, max_steps, ckpt_path=ckpt_path, every=save_at, **options)


def weights(results: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    found = assemble(result["last"] for result in results)
    return {key: tensor for key, tensor in found.items() if key.startswith("model.")}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2_zero1", "tp2_pp2"])
def test_an_average_is_that_of_one_process_and_goes_on(tmp_path: Path, layout: str) -> None:
    expected = run_ranks(1, train, None, tmp_path / "stock", 6)
    whole = run_ranks(LAYOUTS[layout], train, layout, tmp_path / "whole", 6, save_at=3)
    for key, tensor in weights(expected).items():  # at the end the average replaces the weights
        torch.testing.assert_close(weights(whole)[key], tensor, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole[0]["losses"], expected[0]["losses"], rtol=1e-5, atol=0)
    other = "dp1" if layout == "tp2_pp2" else layout
    resumed = run_ranks(LAYOUTS[other], train, other, tmp_path / "resumed", 6, ckpt_path=tmp_path / "whole" / "step=3.ckpt")
    torch.testing.assert_close(resumed[0]["losses"], whole[0]["losses"][3:], rtol=1e-5, atol=0)
    if other == layout:
        assert_same(weights(resumed), weights(whole))
    else:
        for key, tensor in weights(whole).items():
            torch.testing.assert_close(weights(resumed)[key], tensor, rtol=1e-4, atol=1e-5)
    # The checkpoint's weights are the average, as Lightning's are; what training goes on with is beside it.
    saved = load_module(Hard, tmp_path / "whole" / "step=3.ckpt")
    unlike = run_ranks(1, run, "dp1", tmp_path / "plain", 3)
    assert not torch.allclose(saved.net.norm.weight, weights(unlike)["model.net.norm.weight"])


def test_lightnings_own_callback_is_refused() -> None:
    refuse_stock_averaging([EMAWeightAveraging(), WeightAveraging()])
    with pytest.raises(ValueError, match=r"lightning_5d\.checkpoint\.averaging\.EMAWeightAveraging"):
        refuse_stock_averaging([StockEMA()])
