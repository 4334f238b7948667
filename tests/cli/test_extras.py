"""Without any extra installed: the core imports and trains, and what needs an extra says which in one sentence."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

EXTRAS = ("transformers", "safetensors", "triton", "flash_attn", "matplotlib", "pyarrow", "liger_kernel", "quack")

# As if they were not installed: also for libraries that ask before they import.
HIDE = """
import importlib.machinery
found = importlib.machinery.PathFinder.find_spec
hide = lambda name, path=None, target=None: None if name.split(".")[0] in {} else found(name, path, target)
importlib.machinery.PathFinder.find_spec = hide
import importlib.metadata
installed = importlib.metadata.Distribution.from_name
def distribution(name):
    if name.lower().replace("-", "_") in {}:
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)
importlib.metadata.Distribution.from_name = distribution
"""


def run_without_extras(code: str) -> str:
    block = HIDE.format(EXTRAS, EXTRAS)
    done = subprocess.run([sys.executable, "-c", block + textwrap.dedent(code)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_core_imports_and_trains() -> None:
    out = run_without_extras("""
        import importlib, pkgutil, warnings
        warnings.filterwarnings("ignore")
        import lightning as L
        import lightning_5d
        for part in pkgutil.walk_packages(lightning_5d.__path__, "lightning_5d."):
            if not part.name.endswith("__main__"):
                importlib.import_module(part.name)
        import lightning_5d.kernels
        from tests.parity.models import Tokens, own_llama
        from torch.utils.data import DataLoader
        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer = L.Trainer(strategy="zero0_mbs2_ac", accelerator="cpu", devices=1, max_steps=2, **quiet)
        trainer.fit(own_llama(), DataLoader(Tokens(16), batch_size=8))
        print("steps", trainer.global_step)
    """)
    assert "steps 2" in out


@pytest.mark.slow
def test_what_needs_an_extra_names_it() -> None:
    out = run_without_extras("""
        import pathlib, tempfile
        from lightning_5d.data import TextDataModule
        file = pathlib.Path(tempfile.mkdtemp()) / "text.parquet"
        file.write_bytes(b"PAR1")
        try:
            TextDataModule(path=str(file), cache_dir=str(file.parent)).prepare_data()
        except (ImportError, ValueError) as error:
            print(error)

        import contextlib, sys
        from lightning_5d.cli import main
        from lightning_5d.models import LlamaConfig
        from lightning_5d.checkpoint.weight_map import llama_config_json
        import json
        (file.parent / "config.json").write_text(json.dumps(llama_config_json(LlamaConfig.from_preset("tiny"))))
        (file.parent / "model.safetensors").write_bytes(b"")
        with contextlib.redirect_stderr(sys.stdout):
            assert main(["import", str(file.parent), "--out", str(file.parent / "a.ckpt")]) == 2
    """)
    assert "pip install 'lightning-5d[parquet]'" in out and "pip install 'lightning-5d[hf]'" in out
