"""Trains Llama shapes on one GPU for thirty steps with each set of kernels, and prints time, MFU and peak memory.

    python -m tests.benchmarks.single_gpu [--model 1b 3b] [--sets none rms_norm ...] [--steps 30] [--batch 4] [--seq 4096]
        [--csv FILE]

bf16 weights, torch's fused AdamW, random tokens. Sets add up: none, rms_norm, + swiglu, + rotary, + linear_cross_entropy (the
head fused with its loss). The loss after the last step is printed too: it is nearly the same for all sets. MFU is the
model's operations (6 N + 12 L h s a token, N without the embedding) over the dense peak of a known GPU; of an unknown one it is
not printed. Without a GPU it runs a tiny model for three steps, as a check of itself.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning_5d.kernels import linear_cross_entropy, use_kernels
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_5d.advisor.hardware import find_gpu
from lightning_5d.models import Llama, LlamaConfig


def sizes(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab,
    }  # fmt: skip


SIZES = {
    "tiny": sizes(2, 64, 96, 4, 2, 250),
    "1b": sizes(16, 2048, 8192, 32, 8, 128_256),
    "3b": sizes(28, 3072, 8192, 24, 8, 128_256),
}
SETS = {
    "none": (),
    "rms_norm": ("rms_norm",),
    "rms_norm, swiglu": ("rms_norm", "swiglu"),
    "rms_norm, swiglu, rotary": ("rms_norm", "swiglu", "rotary"),
    "all, with the loss": ("rms_norm", "swiglu", "rotary", "linear_cross_entropy"),
}


class HeadApart(nn.Module):
    """A Llama whose head and loss are computed here, fused or not."""

    def __init__(self, config: LlamaConfig, fused_loss: bool) -> None:
        super().__init__()
        self.body = Llama(config, seed=0)
        self.head, self.body.lm_head = self.body.lm_head, nn.Identity()
        self.fused_loss = fused_loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.body(ids)
        if self.fused_loss:
            return linear_cross_entropy(hidden, self.head.weight, labels)
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), labels.flatten())


def flops_per_token(model: nn.Module, config: LlamaConfig, seq: int) -> int:
    embedding = config.vocab_size * config.hidden_size
    weights = sum(p.numel() for p in model.parameters()) - embedding
    return 6 * weights + 12 * config.num_hidden_layers * config.hidden_size * seq


def train(size: str, names: Sequence[str], batch: int, seq: int, steps: int, device: torch.device) -> dict:
    config = LlamaConfig(**SIZES[size])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = HeadApart(config, "linear_cross_entropy" in names).to(dtype)
    inside = [name for name in names if name != "linear_cross_entropy"]
    use_kernels(model, inside if inside else "none", verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (batch, seq + 1), generator=generator).to(device)
    finish: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, loss = [], torch.zeros(())
    for _ in range(steps):
        finish()
        start = time.perf_counter()
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        finish()
        times.append(time.perf_counter() - start)
    step_s = statistics.median(times[min(5, steps // 2) :])
    row = {"model": size, "kernels": "", "loss": loss.item(), "step_s": step_s, "tokens_per_s": batch * seq / step_s}
    row["tflops"] = flops_per_token(model, config, seq) * row["tokens_per_s"] / 1e12
    gpu = find_gpu(torch.cuda.get_device_name()) if device.type == "cuda" else None
    peak = gpu.peak("bf16") if gpu else None
    row["mfu"] = row["tflops"] / peak if peak else None
    row["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return row


def show(rows: list[dict]) -> None:
    table = Table(title="one GPU" if rows and rows[0]["peak_memory_gib"] else "CPU: a check, the times mean nothing")
    for name in ("model", "kernels", "loss", "step", "tokens/s", "TFLOP/s", "MFU", "peak memory"):
        table.add_column(name)
    for row in rows:
        mfu = "unknown GPU" if row["mfu"] is None else f"{row['mfu']:.1%}"
        memory = "" if row["peak_memory_gib"] is None else f"{row['peak_memory_gib']:.1f} GiB"
        figures = (f"{row['loss']:.4f}", f"{row['step_s']:.4f} s", f"{row['tokens_per_s']:,.0f}", f"{row['tflops']:.3g}")
        table.add_row(row["model"], row["kernels"], *figures, mfu, memory)
    Console(width=150).print(table)


def main(arguments: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", nargs="+", choices=SIZES, help="default: 1b on a GPU, tiny without")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--steps", type=int, help="default: 30 on a GPU, 3 without")
    parser.add_argument("--batch", type=int, help="sequences a step (default: 4, 2 without a GPU)")
    parser.add_argument("--seq", type=int, help="tokens a sequence (default: 4096, 16 without a GPU)")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    batch, seq, steps = (
        options.batch or (4 if gpu else 2),
        options.seq or (4096 if gpu else 16),
        options.steps or (30 if gpu else 3),
    )
    rows = []
    for size in options.model or (["1b"] if gpu else ["tiny"]):
        for name in options.sets:
            rows.append(train(size, SETS[name], batch, seq, steps, device) | {"kernels": name})
            if gpu:
                torch.cuda.empty_cache()
    show(rows)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return rows


if __name__ == "__main__":
    main()
