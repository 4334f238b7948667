"""Lightning's contract, and nothing else: what Lightning asks of a strategy, answered by the parts that know."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_5d.checkpoint.averaging import refuse_stock_averaging
from lightning_5d.checkpoint.lightning_links import defer_links
from lightning_5d.data.resumable import resumable
from lightning_5d.gradients import Gradients, find_tied, tied_across_stages
from lightning_5d.kernels import use_kernels
from lightning_5d.layout import Layout, check_model
from lightning_5d.lightning_private import SigtermAgreement
from lightning_5d.lightning_quick import QuickSteps
from lightning_5d.mesh import host_group
from lightning_5d.parallel.materialize import Materializer, broadcast_from_rank_zero
from lightning_5d.parallel.parallelize import Parallelized, parallelize
from lightning_5d.pipeline.metrics import check_metrics, connect_metrics
from lightning_5d.pipeline.microbatch import communicates_each
from lightning_5d.pipeline.step import StepRunner
from lightning_5d.plan import ModelShape, ParallelPlan, find_plan, shape_of
from lightning_5d.precision import layout_precision
from lightning_5d.strategy_checkpoints import CheckpointedStrategy
from lightning_5d.support import refuse_module


class LayoutStrategy(CheckpointedStrategy):
    """Trains an ordinary LightningModule under a layout such as ``tp4_pp2_zero1``.

    Args:
        layout: the layout string, or a :class:`Layout`. See docs/layouts.md.
        plan: where things are in the model; found by itself for known models and most hand-written ones.
        split: layers per pipeline stage, such as ``[9, 8, 8, 7]``; even when not given.
        loss_weighting: "target": the loss of a split batch is the loss of the whole batch, each replica and micro-batch weighted
            by its valid targets. "replica": each data-parallel replica counts the same, as under DDP.
        kernels: fused operations to put into the model: "auto", "all", "none" or names. See docs/kernels.md.
        async_save: write checkpoints while training goes on, one at a time. See docs/checkpoints.md.
        process_group_backend: of ``torch.distributed``; by the device when not given.
        timeout_s: of collectives, in seconds.

    Raises:
        LayoutError: the layout is wrong, or does not fit the world size, the model or the batch.
    """

    def __init__(
        self,
        layout: str | Layout = "zero0",
        plan: ParallelPlan | None = None,
        split: list[int] | None = None,
        loss_weighting: Literal["target", "replica"] = "target",
        kernels: str | list[str] = "none",
        async_save: bool = False,
        process_group_backend: str | None = None,
        timeout_s: float = 1800.0,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            layout, process_group_backend, timeout_s, accelerator, parallel_devices, cluster_environment, precision_plugin
        )
        if loss_weighting not in ("target", "replica"):
            raise ValueError(f"loss_weighting={loss_weighting!r} must be 'target' or 'replica'")
        self.plan, self.split, self.loss_weighting = plan, split, loss_weighting
        self.kernels, self.async_save = kernels, async_save
        self.model_shape: ModelShape | None = None
        self.grad_norm: Tensor | None = None
        """Global 2-norm of the last step's gradients, before clipping; None unless gradients are clipped by norm."""
        self._parts: Parallelized | None = None
        self._runner: StepRunner | None = None
        self._gradients: Gradients | None = None
        self._tied: list[list[str]] = []
        self._sigterm: SigtermAgreement | None = None
        self._quick: QuickSteps | None = None
        self._reduce_now = True
        self._batch_stays = False

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the last training batch."""
        return self._runner.num_microbatches if self._runner is not None else 1

    # ---- the model

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """What ``configure_model`` builds is built on the meta device and filled part by part in :meth:`setup`."""
        meta = torch.device("meta") if empty_init is not False else contextlib.nullcontext()
        with meta, self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        self.precision_plugin = layout_precision(self.precision_plugin, lambda: self._whole_gradients, self._keep_norm)
        if self._layer_sync is not None:
            raise ValueError("Trainer(sync_batchnorm=True) is not applied under a layout: convert the module's layers yourself")
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self._quick is not None:
            self._quick.end()
        if self._runner is None or self._runner.module is not module:
            refuse_module(module, self.layout, fitting)
            self._lay_out(module)
        assert self._checkpoints is not None
        self._checkpoints.load_weights(module)
        if fitting:
            self._reset_optimizers_and_schedulers()
            self._reshard()  # a run that was interrupted leaves parameters gathered, too
            self._build_optimizers(trainer)
            self._setup_gradients(module)
            self._checkpoints.check_optimizers(module, self.optimizers)
            refuse_stock_averaging(trainer.callbacks)  # type: ignore[attr-defined]
            if self.async_save:
                defer_links(trainer.callbacks, self._checkpoints.store.after_commit)  # type: ignore[attr-defined]
            self._sigterm = SigtermAgreement(trainer, self._stop_if_asked) if self.world_size > 1 else None
        hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        sources = [source for source in (module, getattr(trainer, "datamodule", None)) if source is not None]
        self._batch_stays = self.root_device.type == "cpu" and not any(is_overridden(h, s) for h in hooks for s in sources)
        self._quick = QuickSteps(module, trainer)
        self.setup_precision_plugin()
        self.barrier()

    def _lay_out(self, module: LightningModule) -> None:
        if module.__dict__.get("_layout") is not None:
            raise ValueError(
                f"this {type(module).__name__} was already laid out as {module.__dict__['_layout']} by another strategy: "
                "build a new one"
            )
        plan = self.plan or find_plan(module)
        if plan is not None:
            plan.validate(module)
            self.model_shape = shape_of(module, plan)
            layers = len(list(module.get_submodule(plan.layers).children()))
            check_model(self.layout, num_heads=plan.num_heads, num_kv_heads=plan.num_kv_heads, num_layers=layers)
        assert self._checkpoints is not None
        check_metrics(module)
        dtype = torch.bfloat16 if self.precision_plugin.precision == "bf16-true" else None
        compute_dtype = torch.bfloat16 if self.precision_plugin.precision == "bf16-mixed" else None
        materializer = Materializer(module, self.root_device, dtype)
        if dist.get_world_size() > 1:
            broadcast_from_rank_zero(module, self.root_device)
        if dtype is not None:
            module.to(dtype)
        self._checkpoints.take_names(module)
        self._tied = find_tied(module)
        mesh = self.mesh
        for part in module.modules():
            if getattr(getattr(part, "config", None), "use_cache", False):
                part.config.use_cache = False  # type: ignore[union-attr]  # a cache of keys and values a micro-batch, never read
        if self.kernels != "none":
            group = mesh.group("tp") if self.layout.tp > 1 else None
            use_kernels(module, self.kernels, vocab_group=group, verbose=self.is_global_zero)
        self._parts = parallelize(module, plan, self.layout, mesh, materializer, self.split, compute_dtype)
        host_pp = host_group(mesh, "pp", self.root_device.type)
        host_dp = host_group(mesh, "dp", self.root_device.type) if communicates_each(self.layout) else None
        hidden_dtype = dtype or compute_dtype or torch.float32
        self._runner = StepRunner(
            module,
            self._parts.stage,
            self.layout,
            mesh,
            plan,
            self.root_device,
            hidden_dtype,
            self.loss_weighting == "replica",
            host_pp,
            host_dp,
        )
        runner = self._runner
        if dist.get_world_size() > 1:
            connect_metrics(module, mesh.group("dp"), host_pp, self.layout.pp - 1, lambda: runner.in_step)
        module.__dict__["_layout"] = str(self.layout)

    def model_to_device(self) -> None:
        """Nothing: every leaf is put on the device when it is filled."""

    def _build_optimizers(self, trainer: Trainer) -> None:
        try:
            self.setup_optimizers(trainer)
        except ValueError as error:
            if self.layout.pp > 1 and "empty parameter list" in str(error):
                raise ValueError(
                    f"layout '{self.layout}': pipeline stage {self.mesh.pp_rank} has none of the parameters that an optimizer of "
                    f"configure_optimizers is given. One optimizer takes parameters of every stage; those that are frozen may be "
                    "given, too, or the layers shared out with split="
                ) from error
            raise

    def _setup_gradients(self, module: LightningModule) -> None:
        assert self._parts is not None
        tied = tied_across_stages(module, self._tied, self.mesh) if self.layout.pp > 1 and self._tied else []
        optimized = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        keeps = is_overridden("optimizer_zero_grad", module)
        self._gradients = Gradients([*module.parameters(), *optimized], self.mesh, self._parts.partial_parameters, tied, keeps)

    @property
    def _whole_gradients(self) -> Gradients:
        assert self._gradients is not None
        return self._gradients

    def _keep_norm(self, norm: Tensor) -> None:
        self.grad_norm = norm

    # ---- a step

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._runner is not None and self._runner.splits_batches:
            self._runner.look_on_host(batch)
        if self._batch_stays:
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Refuses a training batch size that does not split as the layout says. A ragged last batch splits as it can."""
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        size = getattr(dataloader, "batch_size", None) or getattr(getattr(dataloader, "batch_sampler", None), "batch_size", None)
        if trainer is not None and trainer.training and isinstance(size, int):
            check_model(self.layout, batch_size_per_replica=size)
        return resumable(dataloader) if trainer is not None and trainer.training else dataloader

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of a batch. The gradients are kept from a zero_grad until :meth:`backward`."""
        assert self._runner is not None and self._parts is not None and self.lightning_module is not None
        trainer, gradients, data_parallel = self.lightning_module.trainer, self._whole_gradients, self._parts.data_parallel
        args = (*args, *kwargs.values())
        accumulate = trainer.accumulate_grad_batches
        if trainer.fit_loop.batch_idx % accumulate == 0:  # a training_step need not take batch_idx
            gradients.clear()
        reduce_now = self._reduce_now
        if data_parallel is not None:
            data_parallel.before_first_backward()

        def before_last_backward() -> None:
            if data_parallel is not None and reduce_now:
                data_parallel.before_last_backward()

        out = self._runner.train(
            args,
            self.precision_plugin.train_step_context,
            loss_scale=1.0 / accumulate,
            stop=self._sigterm is not None and (self._sigterm.was_asked or self._save_has_failed),
            before_last_backward=before_last_backward,
        )
        if reduce_now:
            if data_parallel is not None:
                data_parallel.launch_rest()
                data_parallel.finish()
            gradients.make_whole()
        gradients.set_aside()
        return out

    def backward(self, closure_loss: Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Hands over the gradients that :meth:`training_step` computed, with Lightning's hooks around it."""
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self._whole_gradients.put_back()
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Entered by Lightning around every batch of an accumulation but the last: gradients stay unreduced."""
        self._reduce_now = False
        try:
            yield
        finally:
            self._reduce_now = True

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._runner is not None
        return self._runner.evaluate("validation_step", (*args, *kwargs.values()), self.precision_plugin.val_step_context)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._runner is not None
        return self._runner.evaluate("test_step", (*args, *kwargs.values()), self.precision_plugin.test_step_context)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._runner is not None
        return self._runner.predict((*args, *kwargs.values()), self.precision_plugin.predict_step_context)

    def _reshard(self) -> None:
        """Outside of steps parameters are what the optimizer holds: accumulation may have left them gathered."""
        if self._parts is not None and self._parts.data_parallel is not None:
            self._parts.data_parallel.reshard()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.world_size == 1 and self._save_has_failed:
            assert self._checkpoints is not None
            self._checkpoints.wait()

    def on_validation_end(self) -> None:
        self._reshard()

    def on_test_end(self) -> None:
        self._reshard()

    def on_predict_end(self) -> None:
        self._reshard()

    def on_train_end(self) -> None:
        self._reshard()

    def _stop_if_asked(self) -> None:
        """Stops all ranks at the same batch once one was sent SIGTERM, or its save failed; told by the last step's all-reduce."""
        assert self._runner is not None and self._sigterm is not None
        if self._runner.is_stop_requested():
            assert self._checkpoints is not None
            self._checkpoints.wait()  # raises what went wrong with a save
            self._sigterm.agree()
            raise SIGTERMException

    def teardown(self) -> None:
        """Leaves the module where it is: it may be evaluated, saved or trained again. Must survive a half-built strategy."""
        try:
            self._close_checkpoints()
        finally:
            if self._sigterm is not None:
                self._sigterm.end()
                self._sigterm = None
            if self._quick is not None:
                self._quick.end()
                self._quick = None
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
