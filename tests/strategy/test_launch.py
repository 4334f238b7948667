"""Through Lightning's own launcher and through torchrun: what users run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import free_port

SCRIPT = """
import json, sys, warnings
warnings.filterwarnings("ignore")
import lightning as L
import torch
import lightning_5d
from tests.parity.harness import Data
from tests.parity.models import HandWritten

if __name__ == "__main__":
    strategy, devices, out = sys.argv[1:]
    L.seed_everything(0, verbose=False)
    losses = []

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            losses.append(float(outputs["loss"]))

    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=int(devices), max_steps=3, logger=False, enable_checkpointing=False,
        use_distributed_sampler=False, callbacks=[Losses()], enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(HandWritten(lr=0.5), Data(24))
    with open(f"{out}.{trainer.global_rank}", "w") as file:
        json.dump(losses, file)
"""


def run(tmp_path: Path, strategy: str, devices: int, launcher: list[str]) -> list[list[float]]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    out = tmp_path / strategy
    root = Path(__file__).parents[2]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "HOME": str(tmp_path)}
    command = [sys.executable, *launcher, str(script), strategy, str(devices), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(devices)]


@pytest.mark.slow
def test_lightnings_launcher_and_torchrun(tmp_path: Path) -> None:
    (one,) = run(tmp_path, "zero0", 1, [])
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    for launcher in ([], torchrun):
        first, second = run(tmp_path, "tp2", 2, launcher)
        assert first == second
        assert first == pytest.approx(one, rel=1e-5)
