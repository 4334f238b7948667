import os

if os.environ.get("TRITON_INTERPRET"):
    raise RuntimeError(
        "kernels are not compiled in a process with TRITON_INTERPRET; tests/kernels/test_suites.py starts one without"
    )
