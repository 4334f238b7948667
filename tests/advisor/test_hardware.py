"""The table of accelerators: names are found whole or not at all, and peaks are dense."""

import subprocess
import sys

import pytest

from lightning_5d.advisor.hardware import find_gpu, load_gpus, peaks_table

BF16_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA L40S": 362,
    "NVIDIA A10": 125,
    "NVIDIA GeForce RTX 4090": 165.2,
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI300X OAM": 1307.4,
    "AMD Instinct MI250X": 191.5,  # torch sees one of the card's two dies
}


@pytest.mark.parametrize("device_name", BF16_TFLOPS)
def test_a_device_of_torch_has_its_dense_peak(device_name):
    gpu = find_gpu(device_name)
    assert gpu is not None
    assert gpu.peak("bf16") == gpu.peak("bfloat16") == gpu.peak("torch.bfloat16") == BF16_TFLOPS[device_name]


@pytest.mark.parametrize(
    "device_name",
    [
        "Foo",
        "",
        "cpu",
        "NVIDIA",
        "NVIDIA H1000",
        "NVIDIA H100",  # parts of different speed have carried this name
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "AMD Instinct MI250X / MI250",
    ],
)
def test_an_unknown_device_is_none_and_never_a_guess(device_name):
    assert find_gpu(device_name) is None


@pytest.mark.parametrize(
    ("short_name", "name"),
    [
        ("a100-80gb", "A100-80GB-SXM"),
        ("a100-40gb", "A100-40GB-SXM"),
        ("h100", "H100-80GB-SXM"),
        ("h200", "H200-141GB-SXM"),
        ("B200", "B200-180GB-SXM"),
        ("mi300x", "MI300X"),
        ("H100-80GB-SXM", "H100-80GB-SXM"),
        ("A100-SXM4-80GB", "A100-80GB-SXM"),  # as older drivers call it
    ],
)
def test_short_names(short_name, name):
    assert find_gpu(short_name).name == name


def test_float32_and_tf32_are_told_apart():
    gpu = find_gpu("a100-80gb")
    assert (gpu.peak("float32"), gpu.peak("tf32"), gpu.peak("fp16")) == (19.5, 156, 312)
    assert gpu.peak("fp8") is None
    with pytest.raises(ValueError, match=r"int3.*allowed: fp32"):
        gpu.peak("int3")


def test_every_row_is_complete_and_plausible():
    gpus = load_gpus()
    assert len(gpus) > 20
    for gpu in gpus:
        assert gpu.source and gpu.short_names, gpu.name
        assert gpu.hbm_gib > 0 and gpu.hbm_tb_s > 0 and gpu.scaleup_uni_gb_s > 0 and gpu.scaleup_domain_gpus >= 1
        assert gpu.usable_gib is None or 0.95 * gpu.hbm_gib < gpu.usable_gib <= gpu.hbm_gib
        for dtype, measured in gpu.measured_tflops.items():
            assert 0.4 < measured / gpu.peak(dtype) < 1, f"{gpu.name}: {dtype} measured over peak"
        if gpu.peak("tf32") and gpu.peak("bf16"):  # a figure with sparsity would be twice another
            assert gpu.peak("bf16") / gpu.peak("tf32") == pytest.approx(2, rel=0.02), gpu.name
        if gpu.peak("fp8") and gpu.peak("bf16"):
            assert gpu.peak("fp8") / gpu.peak("bf16") == pytest.approx(2, rel=0.03), gpu.name


def test_the_documented_table_is_the_carried_one():
    with open("docs/mfu.md", encoding="utf-8") as file:
        assert peaks_table() in file.read(), "run python -m lightning_5d.advisor.hardware and put its output into docs/mfu.md"


def test_needs_neither_torch_nor_lightning():
    modules = "lightning_5d.advisor.hardware, lightning_5d.advisor.flops"
    # A bare package stands in for ours, whose __init__ may import what it likes.
    package = (
        "import sys, types; sys.modules['lightning_5d'] = p = types.ModuleType('lightning_5d'); p.__path__ = ['lightning_5d']"
    )
    code = f"{package}; import {modules}; print(sorted({{'torch', 'lightning'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
