import os

import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("these tests need a process with TRITON_INTERPRET=1; tests/kernels/test_suites.py starts one")

import triton  # noqa: F401  (tells lightning_5d.kernels that kernels are interpreted here)

from tests.kernels.interpreter import bf16_repair

bf16_repair.install()
torch.set_num_threads(1)
