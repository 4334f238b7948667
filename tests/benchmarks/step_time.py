"""Step time of a Trainer under a layout against a bare torch loop of the same model and parallelism.

    python -m tests.benchmarks.step_time [--sizes tiny small] [--layouts zero0 dp2_zero0 ...] [--steps 60]

The bare step runs inside the Trainer's data loader, so that blocks of ten steps of both alternate in one process and noise
cancels; the figure is the ratio of the medians. Lightning's own strategies stand beside.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import lightning_5d
import lightning_5d.strategy  # noqa: F401
from lightning_5d.models import Llama, LlamaConfig, LlamaModule
from lightning_5d.models.llama import rotary_tables
from lightning_5d.models.module import next_token_loss
from tests.ranks import run_ranks

SIZES = {
    # about 5 ms a step: what a host costs shows here
    "tiny": dict(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4
    ),
    # about 5 million parameters, 0.5 s a step
    "small": dict(
        vocab_size=1024, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8
    ),
}
BATCH = {"tiny": (8, 32), "small": (16, 128)}
LAYOUTS = {"zero0": 1, "dp2_zero0": 2, "tp2": 2, "pp2_mbs2": 2, "dp2_zero3": 2}

Step = Callable[[dict[str, Tensor]], None]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: dict[str, Tensor]) -> None:
        loss = next_token_loss(model(batch["input_ids"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def bare_tensor_parallel(model: Llama, mesh: DeviceMesh) -> Llama:
    """torch's own tensor and sequence parallelism, as its tutorial writes it."""
    parallelize_module(
        model,
        mesh,
        {
            "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        plan = {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        }
        plan |= {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"} | {
            f"mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")
        }
        plan |= {n: RowwiseParallel(output_layouts=Shard(1)) for n in ("self_attn.o_proj", "mlp.down_proj")}
        parallelize_module(layer, mesh, plan)
    return model


def bare_sharded(model: Llama, mesh: DeviceMesh) -> Llama:
    """torch's own FSDP2, a group a layer."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class HalfLlama(nn.Module):
    """One of two pipeline stages, written by hand."""

    def __init__(self, model: Llama, rank: int) -> None:
        super().__init__()
        self.model, self.rank = model, rank
        layers = list(model.layers)
        half = (len(layers) + 1) // 2
        model.layers = nn.ModuleList(layers[:half] if rank == 0 else layers[half:])
        if rank == 0:
            del model.norm, model.lm_head
        else:
            del model.embed_tokens

    def forward(self, x: Tensor) -> Tensor:
        model = self.model
        hidden = model.embed_tokens(x) if self.rank == 0 else x
        cos, sin = rotary_tables(model.config, torch.arange(x.shape[1]), hidden.dtype)
        for layer in model.layers:
            hidden = layer(hidden, cos, sin)
        return hidden if self.rank == 0 else model.lm_head(model.norm(hidden))


def pipeline_step(model: Llama, rank: int, size: str, microbatch_rows: int) -> Step:
    rows, seq = BATCH[size]
    stage_module = HalfLlama(model, rank)
    count = rows // microbatch_rows
    ids = torch.zeros(microbatch_rows, seq, dtype=torch.long)
    hidden = torch.zeros(microbatch_rows, seq, SIZES[size]["hidden_size"], requires_grad=True)
    logits = torch.zeros(microbatch_rows, seq, SIZES[size]["vocab_size"], requires_grad=True)
    io = dict(input_args=(ids,), output_args=(hidden,)) if rank == 0 else dict(input_args=(hidden,), output_args=(logits,))
    schedule = Schedule1F1B(PipelineStage(stage_module, rank, 2, torch.device("cpu"), **io), count, loss_fn=next_token_loss)
    optimizer = optimizer_of(stage_module)

    def step(batch: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(batch["input_ids"], return_outputs=False)
        else:
            schedule.step(target=batch["labels"], return_outputs=False)
        optimizer.step()

    return step


def bare_step(layout: str, size: str) -> Step:
    """The same parallelism as ``layout``, by torch alone; the process group exists."""
    model = Llama(LlamaConfig(**SIZES[size]), seed=0)
    if layout == "dp2_zero0":
        model = DistributedDataParallel(model)
    elif layout == "dp2_zero3":
        model = bare_sharded(model, init_device_mesh("cpu", (2,)))
    elif layout == "tp2":
        model = bare_tensor_parallel(model, init_device_mesh("cpu", (2,)))
    elif layout == "pp2_mbs2":
        return pipeline_step(model, torch.distributed.get_rank(), size, 2)
    return whole_step(model, optimizer_of(model))


class Alternating:
    """A loader that runs some bare steps before each few batches, and times both by the step.

    Ranks meet before each: else the faster one's wait for the other, made by one of the two, would be counted to the other. Few
    steps in a row and not one, since in training a rank may run ahead of another within a step.
    """

    BLOCK = 10

    def __init__(self, batch: dict[str, Tensor], steps: int) -> None:
        self.batch, self.blocks = batch, max(1, steps // self.BLOCK)
        self.bare: Step | None = None
        self.bare_s: list[float] = []
        self.ours_s: list[float] = []

    def __len__(self) -> int:
        return self.blocks * self.BLOCK

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        assert self.bare is not None
        for _ in range(self.blocks):
            start = self._start()
            for _ in range(self.BLOCK):
                self.bare(self.batch)
            self.bare_s.append((time.perf_counter() - start) / self.BLOCK)
            start = self._start()
            for _ in range(self.BLOCK):
                yield self.batch
            self.ours_s.append((time.perf_counter() - start) / self.BLOCK)

    @staticmethod
    def _start() -> float:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        return time.perf_counter()


class Measured(LlamaModule):
    """The benchmarked module: our LlamaModule with the bare loop's optimizer and no schedule."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


class ByHand(Measured):
    """What Lightning's ModelParallelStrategy asks of a module: its parallelism written into it."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Llama(self.config, seed=0)
            assert self.device_mesh is not None
            if self.device_mesh["tensor_parallel"].size() > 1:
                self.model = bare_tensor_parallel(self.model, self.device_mesh["tensor_parallel"])
            else:
                self.model = bare_sharded(self.model, self.device_mesh["data_parallel"])


STOCK: dict[str, tuple[Any, type[Measured]]] = {
    "zero0": (lambda: "auto", Measured),
    "dp2_zero0": (DDPStrategy, Measured),
    "tp2": (lambda: ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2), ByHand),
    "dp2_zero3": (lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), ByHand),
}
"""Lightning's own strategy for a layout, made in the rank, and the module it trains."""


def fit(is_ours: bool, layout: str, size: str, steps: int) -> tuple[float, float]:
    """Median seconds of a Trainer's step, under the layout or Lightning's own strategy for it, and of a bare step."""
    make_strategy, module_class = (lambda: layout, Measured) if is_ours else STOCK[layout]
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    torch.empty(16 << 20, dtype=torch.uint8).zero_()  # freed, it teaches malloc to keep memory: else whoever allocates first pays
    rows, seq = BATCH[size]
    world_size = LAYOUTS[layout]
    rows = rows // 2 if layout.startswith("dp2") else rows
    ids = torch.randint(0, SIZES[size]["vocab_size"], (rows, seq + 1))
    loader = Alternating({"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}, steps)

    class Prepare(lightning.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            loader.bare = bare_step(layout, size)

    trainer = lightning.Trainer(
        strategy=make_strategy(),
        accelerator="cpu",
        devices=world_size,
        max_steps=len(loader),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Prepare()],
    )
    trainer.fit(module_class(LlamaConfig(**SIZES[size])), loader)
    skip = loader.blocks // 5
    return statistics.median(loader.ours_s[skip:]), statistics.median(loader.bare_s[skip:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=100, help="at tiny, at least 30; a fifth of it, at least 30, at small")
    args = parser.parse_args()
    if args.steps < 30:
        parser.error(f"--steps is at least 30, not {args.steps}")
    table = Table("size", "layout", "bare loop, ms", "ours / bare", "Lightning's own / bare")
    for size in args.sizes:
        steps = args.steps if size == "tiny" else max(30, args.steps // 5)  # a Trainer's last block is not closed, so not counted
        for layout in args.layouts:
            ours, bare = run_ranks(LAYOUTS[layout], fit, True, layout, size, steps, timeout_s=1200)[0]
            stock = "-"
            if layout in STOCK:
                theirs, their_bare = run_ranks(LAYOUTS[layout], fit, False, layout, size, steps, timeout_s=1200)[0]
                stock = f"{theirs / their_bare:.3f}"
            print(size, layout, f"{bare * 1e3:.2f} ms", f"{ours / bare:.3f}", stock, flush=True)
            table.add_row(size, layout, f"{bare * 1e3:.2f}", f"{ours / bare:.3f}", stock)
    Console().print(table)


if __name__ == "__main__":
    main()
