"""Runs a LightningModule's own steps on the micro-batches of a stage, and makes one loss and one log of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_5d.layout import Layout, LayoutError, check_model
from lightning_5d.mesh import Mesh
from lightning_5d.pipeline.delayed import DelayedFlag
from lightning_5d.pipeline.guards import TargetsSeen, sharded_weights_explained, whole_parameters_refused
from lightning_5d.pipeline.logs import LogExchange, LogItem, LogRecorder
from lightning_5d.pipeline.microbatch import (
    LossWeights,
    SameCount,
    count_targets,
    has_labels,
    may_hold_no_target,
    microbatch_rows,
    num_rows,
    refuse_unclear_rows,
    refuse_unseen_ignored_targets,
    split_batch,
    stop_gradient_where,
)
from lightning_5d.pipeline.schedule import Pipeline
from lightning_5d.pipeline.stage import Stage
from lightning_5d.plan import ParallelPlan

Context = Callable[[], AbstractContextManager]


def _loss_of(out: Any) -> Any:
    return out["loss"] if isinstance(out, dict) and "loss" in out else out


class StepRunner:
    """Everything between Lightning's ``strategy.training_step(batch)`` and the gradients on the parameters."""

    def __init__(
        self,
        module: Any,
        stage: Stage,
        layout: Layout,
        mesh: Mesh,
        plan: ParallelPlan | None,
        device: torch.device,
        hidden_dtype: torch.dtype,
        replica_weighting: bool,
        host_pp_group: dist.ProcessGroup | None,
        host_dp_group: dist.ProcessGroup | None,
    ) -> None:
        self.module, self.stage, self.layout, self.mesh, self.plan = module, stage, layout, mesh, plan
        self.device, self.hidden_dtype, self.replica_weighting = device, hidden_dtype, replica_weighting
        self.pipeline = Pipeline(stage, mesh.group("pp") if layout.pp > 1 else None, layout.schedule or "1f1b", device)
        self.recorder = LogRecorder(module)
        contributes = stage.is_last and mesh.tp_rank == 0 and mesh.cp_rank == 0
        self.exchange = LogExchange(module, device, contributes, mesh.size("dp"))
        self.exchange.host_pp_group = host_pp_group
        self.exchange.last_stage_rank = layout.pp - 1
        self.same_count = SameCount(host_dp_group)
        self.num_microbatches = 1
        self.in_step = False
        self._stop_requests = DelayedFlag(device)
        self._token_shapes: dict[Any, torch.Size] = {}
        self._labels_shifted: dict[str, bool] = {}
        self._targets_checked = False
        self._moved_batch_checked = False
        self._captures = dist.get_world_size() > 1
        self._may_hold_no_target: bool | None = None
        self._empty: Tensor | None = None
        if stage.is_last and plan is not None and plan.head is not None:
            module.get_submodule(plan.head).register_forward_hook(self._guard_logits)

    def train(
        self,
        args: tuple[Any, ...],
        context: Context,
        *,
        loss_scale: float,
        stop: bool,
        before_last_backward: Callable[[], None],
    ) -> Any:
        """Forward and backward of ``training_step`` on a batch; whether gradients are reduced is data parallelism's.

        Returns what the user's step returned, with the loss of the whole batch over all replicas in it.
        """
        out = self._run("training_step", args, context, loss_scale, stop, before_last_backward)
        if out is None:
            raise ValueError("training_step returned None: skipping a step is not possible when other ranks take it")
        return out

    def evaluate(self, name: str, args: tuple[Any, ...], context: Context) -> Any:
        """Forward only of ``validation_step`` or ``test_step``."""
        # Lightning evaluates under inference mode on accelerators; inference tensors cannot enter a later backward.
        with torch.inference_mode(False), torch.no_grad():
            return self._run(name, args, context, 1.0, False, None)

    def predict(self, args: tuple[Any, ...], context: Context) -> Any:
        """``predict_step`` on the whole batch. ``ValueError`` under pp, where its outputs would be on the last stage alone."""
        if self.layout.pp > 1:
            raise ValueError(f"layout '{self.layout}': predict_step does not run under pipeline parallelism: predict with pp1")

        def user_step() -> Any:
            with context():
                return self.module.predict_step(*args)

        with torch.inference_mode(False), torch.no_grad():
            return self.stage(user_step, None)

    def is_stop_requested(self) -> bool:
        """Whether some rank was asked to stop; the same answer on every rank at the same step."""
        return self._stop_requests.pop()

    def _run(
        self,
        name: str,
        args: tuple[Any, ...],
        context: Context,
        loss_scale: float,
        stop: bool,
        before_last_backward: Callable[[], None] | None,
    ) -> Any:
        batch, rest = args[0], args[1:]
        step = getattr(self.module, name)
        if self.splits_batches:
            refuse_unclear_rows(batch)
        rows = num_rows(batch)
        mbs = self.layout.mbs or (1 if self.layout.pp > 1 else None)
        count = rows // microbatch_rows(rows, mbs)
        self.same_count.announce(count)
        batches = split_batch(batch, count)
        weights = self._weights(name, batch, count, lambda: step(batches[0], *rest))
        may_be_empty = weights is not None and self._may_hold_no_target is not False
        guarded = may_be_empty and before_last_backward is not None
        self._may_hold_no_target = None
        checks_targets = before_last_backward is not None and not self._targets_checked
        hidden_shape = self._hidden_shape(batches[0], lambda: step(batches[0], *rest))
        outs: list[Any] = []
        losses: list[Tensor] = []
        capture = self._captures or count > 1
        launched: list[LogItem] | None = None

        def launch(items: list[LogItem]) -> None:
            nonlocal launched
            launched = items
            self.exchange.launch(items, self.recorder.records, losses, weights, rows, stop)

        def before_backward() -> None:
            # With one stage all is known after the last forward: the sum over the world overlaps with the backward.
            if capture and self.layout.pp == 1:
                launch(self.recorder.items)
            assert before_last_backward is not None
            before_last_backward()

        def run(index: int, hidden: Tensor | None) -> Any:
            def user_step() -> Any:
                with context(), sharded_weights_explained():
                    return step(batches[index], *rest)

            self.recorder.microbatch = index
            self._empty = weights.empty[index] if guarded and weights is not None else None
            if checks_targets and weights is not None and self.stage.is_last:
                with TargetsSeen() as seen:
                    out = self.stage(user_step, hidden)
                seen.check(float(weights.counts[index]) if has_labels(batch) else None, _loss_of(out))
            else:
                out = self.stage(user_step, hidden)
            if not self.stage.is_last:
                self._check_hidden(out, hidden_shape)
                return out
            outs.append(out)
            loss = _loss_of(out)
            if before_last_backward is None:
                if isinstance(loss, Tensor) and loss.numel() == 1:
                    losses.append(loss.detach().reshape(()))
                return loss
            if not isinstance(loss, Tensor):
                raise ValueError(f"{name} must return the loss or a dict with 'loss', got {type(out).__name__}")
            losses.append(loss.detach())
            if weights is not None:
                if may_be_empty:
                    loss = loss.masked_fill(weights.empty[index], 0.0)
                loss = loss * weights[index]
            return loss * loss_scale if loss_scale != 1.0 else loss

        guard = whole_parameters_refused(self.module, self.plan.layers) if self.layout.pp > 1 and self.plan else nullcontext()
        self.same_count.check()
        self.in_step = True
        try:
            with guard, self.recorder if capture else nullcontext():
                if before_last_backward is None:
                    self.pipeline.forward_only(count, run, hidden_shape, self.hidden_dtype)
                else:
                    self.num_microbatches = count
                    self.pipeline.train(count, run, hidden_shape, self.hidden_dtype, before_backward)
                    self._targets_checked = True
        finally:
            self.in_step = False
        if not capture:
            return self._with_loss(outs[0], losses[0]) if losses else outs[0]
        is_training = before_last_backward is not None
        if launched is None:
            launch(self.exchange.share_signature(self.recorder.items, self.stage.is_last))
        assert launched is not None
        loss, values, sizes, all_rows, stop_requests = self.exchange.finish(launched)
        if is_training:
            self._stop_requests.push(stop_requests)
        self.exchange.log(launched, values, sizes, all_rows)
        if len(outs) == 1 and self.layout.pp == 1:
            return self._with_loss(outs[0], loss) if losses else outs[0]
        return loss if is_training or losses else None

    @staticmethod
    def _with_loss(out: Any, loss: Tensor) -> Any:
        return {**out, "loss": loss} if isinstance(out, dict) else loss

    # ---- weights

    @property
    def splits_batches(self) -> bool:
        """Whether a batch is more than one loss: micro-batches, or parts on several replicas."""
        return self.layout.mbs is not None or self.layout.pp > 1 or self.mesh.size("dp") > 1

    def look_on_host(self, batch: Any) -> None:
        """Sees the next batch before it moves to the device: most have a target in each sequence, and need no guard."""
        if not callable(getattr(self.module, "num_targets", None)):
            refuse_unseen_ignored_targets(batch)
            self._may_hold_no_target = may_hold_no_target(batch, self.plan is not None and self.plan.labels_shifted_by_model)

    def _labels_shifted_by_model(self, name: str, step: Callable[[], Any]) -> bool:
        """Whether the model, which would shift labels, is given any: with a loss of the user's own it is not."""
        if self.plan is None or not self.plan.labels_shifted_by_model:
            return False
        if name not in self._labels_shifted:
            with self.recorder:
                self._labels_shifted[name] = self.stage.probe(self.module, self.plan, step)[1]
        return self._labels_shifted[name]

    def _guard_logits(self, head: Any, args: Any, logits: Any) -> Any:
        if self._empty is None or not isinstance(logits, Tensor) or not logits.requires_grad:
            return logits
        return stop_gradient_where(logits, self._empty)

    def _weights(self, name: str, batch: Any, count: int, step: Callable[[], Any]) -> LossWeights | None:
        if count == 1 and self.mesh.size("dp") == 1:
            return None
        num_targets = getattr(self.module, "num_targets", None)
        if callable(num_targets):
            self._targets_checked = True
            counts = torch.stack(
                [torch.as_tensor(num_targets(b), dtype=torch.float32, device=self.device) for b in split_batch(batch, count)]
            )
        else:
            if not self._moved_batch_checked:
                self._moved_batch_checked = (
                    True  # once, for a batch that the module's own transfer makes; look_on_host sees the others
                )
                refuse_unseen_ignored_targets(batch)
            counts = count_targets(batch, count, self._labels_shifted_by_model(name, step), self.device)
        return LossWeights(counts, self.mesh.group("dp") if self.mesh.size("dp") > 1 else None, self.replica_weighting)

    # ---- shapes between stages

    def _hidden_shape(self, batch: Any, step: Callable[[], Any]) -> torch.Size | None:
        """``[micro-batch, local sequence, hidden]``: what stages send. Static, so that no message is of a wrong size."""
        if self.plan is None or self.plan.embedding is None or (self.layout.pp == 1 and not self.layout.sp):
            return None
        shapes: list[tuple[int, ...]] = []
        apply_to_collection(batch, Tensor, lambda t: shapes.append(tuple(t.shape)))
        key = tuple(shapes)
        if key not in self._token_shapes:
            with self.recorder:
                tokens, _ = self.stage.probe(self.module, self.plan, step)
            if tokens is None:
                if self.layout.pp == 1:
                    return None
                raise ValueError(
                    f"the step never called the model's embedding {self.plan.embedding!r}: under pipeline parallelism each "
                    "stage must know what the others send it, so a step calls the model, once"
                )
            if len(tokens) != 2:
                raise ValueError(f"the embedding is called with ids of shape {tuple(tokens)}, expected [batch, seq]")
            check_model(self.layout, seq_len=tokens[1])
            self._token_shapes[key] = tokens
        rows, seq = self._token_shapes[key]
        seq_local = seq // self.layout.tp if self.layout.sp else seq
        hidden_size = self.plan.hidden_size or self.module.get_submodule(self.plan.embedding).__dict__.get("hidden_width")
        if hidden_size is None:
            hidden_size = self.module.get_submodule(self.plan.embedding).weight.shape[1]
        return torch.Size((rows, seq_local, hidden_size))

    def _check_hidden(self, hidden: Tensor, expected: torch.Size | None) -> None:
        if hidden.shape != expected or hidden.dtype != self.hidden_dtype:
            raise LayoutError(
                f"a layer gives a hidden state {tuple(hidden.shape)} {hidden.dtype}, pipeline stages exchange "
                f"{tuple(expected or ())} {self.hidden_dtype}. If layers return tuples, say ParallelPlan(tuple_output=True)"
            )
