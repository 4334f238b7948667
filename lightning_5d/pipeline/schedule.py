"""Runs the micro-batches of a step over the pipeline stages: torch's schedules, and our own loop forward only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from lightning_5d.pipeline.stage import Stage

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}

RunMicrobatch = Callable[[int, Tensor | None], Tensor]
"""``run(index, hidden) -> hidden of the stage's end, or the weighted loss on the last stage``."""


class _Shell(nn.Module):
    """What torch's schedule calls. Not an FSDP2 module itself, so that the schedule leaves FSDP2's flags to us."""

    run: RunMicrobatch

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.__dict__["run"] = None

    def forward(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        if self.is_first:
            return self.run(int(x[0]), None)
        assert index is not None
        return self.run(int(index[0]), x)


class Pipeline:
    """The stages of one pipeline-parallel group, seen from one of them. With one stage the schedule is a loop."""

    def __init__(self, stage: Stage, group: dist.ProcessGroup | None, schedule: str, device: torch.device) -> None:
        self.stage, self.group, self.schedule, self.device = stage, group, schedule, device
        self._schedules: dict[tuple[int, torch.Size, torch.dtype], tuple[Any, _Shell]] = {}

    def train(
        self,
        num_microbatches: int,
        run: RunMicrobatch,
        hidden_shape: torch.Size | None,
        dtype: torch.dtype,
        before_last_backward: Callable[[], None],
    ) -> None:
        """Forward and backward of every micro-batch. ``before_last_backward`` is called when the last one's backward begins."""
        last = num_microbatches - 1
        if self.group is None:
            for index in range(num_microbatches):
                loss = run(index, None)
                if index == last:
                    before_last_backward()
                loss.backward()
            return
        assert hidden_shape is not None

        def run_hooked(index: int, hidden: Tensor | None) -> Tensor:
            out = run(index, hidden)
            if index == last and out.requires_grad:
                out.register_hook(lambda grad: before_last_backward())
            return out

        schedule, shell = self._schedule(num_microbatches, hidden_shape, dtype)
        shell.__dict__["run"] = run_hooked
        indices = torch.arange(num_microbatches)
        try:
            args = (indices,) if self.stage.is_first else ()
            target = indices if self.stage.is_last else None
            schedule.step(*args, index=indices, target=target, return_outputs=False)
        finally:
            shell.__dict__["run"] = None

    def _schedule(self, num_microbatches: int, hidden_shape: torch.Size, dtype: torch.dtype) -> tuple[Any, _Shell]:
        """Schedules are kept per shape. Shapes are given, not probed: probing would run the user's step once more."""
        key = (num_microbatches, hidden_shape, dtype)
        if key not in self._schedules:
            stage, shell = self.stage, _Shell(self.stage.is_first)
            hidden = torch.empty(hidden_shape, dtype=dtype, device=self.device, requires_grad=True)
            loss = torch.zeros((), device=self.device, requires_grad=True)
            torch_stage = PipelineStage(
                shell,
                stage.index,
                stage.num_stages,
                self.device,
                input_args=(torch.zeros(1, dtype=torch.long),) if stage.is_first else (hidden,),
                output_args=(loss,) if stage.is_last else (hidden,),
                group=self.group,
            )
            name = self.schedule
            if name == "1f1b" and num_microbatches < stage.num_stages:
                name = "gpipe"  # a short last batch: the same gradients, 1F1B needs a micro-batch per stage
            schedule = SCHEDULES[name](torch_stage, num_microbatches, loss_fn=lambda loss, target: loss, scale_grads=False)
            self._schedules[key] = (schedule, shell)
        return self._schedules[key]

    @torch.no_grad()
    def forward_only(
        self, num_microbatches: int, run: RunMicrobatch, hidden_shape: torch.Size | None, dtype: torch.dtype
    ) -> None:
        """Forward of every micro-batch, any number of them and any shape."""
        stage, group = self.stage, self.group
        sends: list[tuple[Any, Tensor]] = []
        for index in range(num_microbatches):
            hidden = None
            if not stage.is_first:
                assert hidden_shape is not None and group is not None
                hidden = torch.empty(hidden_shape, dtype=dtype, device=self.device)
                dist.recv(hidden, group=group, group_src=stage.index - 1)
            out = run(index, hidden)
            if not stage.is_last:
                out = out.contiguous()
                sends.append((dist.isend(out, group=group, group_dst=stage.index + 1), out))
        for work, _ in sends:
            if work is not None:
                work.wait()
