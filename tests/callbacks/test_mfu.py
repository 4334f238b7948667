"""MFUMonitor on a fake clock: a second a sequence, so every figure is known exactly."""

import functools

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_5d.callbacks import MFUMonitor
from lightning_5d.callbacks import meter as meter_file
from lightning_5d.callbacks import mfu as mfu_file
from lightning_5d.callbacks import peak as peak_file
from lightning_5d.layout import Layout
from lightning_5d.plan import ModelShape
from tests.callbacks.models import (
    FLOPS_PER_TOKEN,
    HIDDEN,
    LAYERS,
    NUM_PARAMETERS,
    SEQ_LEN,
    VOCAB,
    CountLines,
    FakeClock,
    Timed,
    fit,
    loader,
    make_trainer,
)
from tests.ranks import run_ranks

PEAK = 1e-6  # TFLOP/s: what `fit` passes
MFU = FLOPS_PER_TOKEN * SEQ_LEN / (PEAK * 1e12)  # a sequence a second on one device


def run(**kwargs):
    return run_ranks(1, fit, **kwargs)[0]


def run_each(cases):
    """One fit a case, all in one forked rank."""
    return run_ranks(1, lambda: [fit(**case) for case in cases])[0]


# ---- what the figures are


def test_the_figures_of_a_single_device():
    metrics = run()["metrics"]
    memory_gib = metrics.pop("perf/peak_memory_gib")
    assert 0.05 < memory_gib < 50
    assert metrics == pytest.approx(
        {
            "perf/tokens_per_s": SEQ_LEN,
            "perf/tokens_per_s_per_gpu": SEQ_LEN,
            "perf/step_time_s": 4,
            "perf/tflops_per_gpu": FLOPS_PER_TOKEN * SEQ_LEN / 1e12,
            "perf/mfu": MFU,
            "perf/hfu": MFU,
            "perf/data_wait": 0,
        }
    )


def test_the_formula_is_chosen_by_name():
    nemo, causal = run_each([{"monitor": {"formula": formula}} for formula in ("nemo", "causal")])
    for result, attention in ((nemo, 12), (causal, 6)):
        flops = 6 * (NUM_PARAMETERS - VOCAB * HIDDEN) + attention * LAYERS * HIDDEN * SEQ_LEN
        assert result["metrics"]["perf/mfu"] == pytest.approx(flops * SEQ_LEN / (PEAK * 1e12))


def test_splitting_a_batch_by_accumulation_changes_nothing():
    splits = ((4, 1), (2, 2), (1, 4))
    trainers = [{"accumulate_grad_batches": n, "log_every_n_steps": 2} for _, n in splits]
    results = run_each([{"batches": {"batch_size": size}, "trainer": t} for (size, _), t in zip(splits, trainers, strict=True)])
    whole, *others = ({k: v for k, v in r["metrics"].items() if k != "perf/peak_memory_gib"} for r in results)
    assert whole["perf/mfu"] == pytest.approx(MFU) and whole["perf/step_time_s"] == 4
    assert all(other == pytest.approx(whole) for other in others)


def test_validation_is_no_training_time():
    result = run(validate=True, trainer={"val_check_interval": 1, "log_every_n_steps": 4, "num_sanity_val_steps": 1})
    assert result["metrics"]["perf/step_time_s"] == 4
    assert result["metrics"]["perf/mfu"] == pytest.approx(MFU)


@pytest.mark.parametrize(("weights_only", "validate"), [(False, False), (True, True)])
def test_saving_is_no_training_time(tmp_path, weights_only, validate):
    every = {"save_on_train_epoch_end": False} if validate else {"every_n_train_steps": 1}
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, filename="{step}", save_weights_only=weights_only, **every)
    result = run(
        callbacks=(checkpoint,),
        validate=validate,
        trainer={"enable_checkpointing": True, "log_every_n_steps": 4, "val_check_interval": 1},
    )
    assert len(list(tmp_path.glob("*.ckpt"))) >= 4
    assert result["metrics"]["perf/step_time_s"] == 4
    assert not result["wrapped"]


def test_waiting_for_data_is_training_time():
    assert run(batches={"batch_size": 2, "fetch_s": 3.0})["metrics"]["perf/step_time_s"] == 2 * (1 + 3)


class SlowFirstSteps(Timed):
    def training_step(self, batch, batch_idx):
        self.clock.now_s += 100 if self.global_step < 2 else 0
        return super().training_step(batch, batch_idx)


def test_warmup_steps_are_left_out():
    results = run_each(
        [{"make_module": SlowFirstSteps, "monitor": {"warmup_steps": n}, "trainer": {"log_every_n_steps": 4}} for n in range(3)]
    )
    assert [r["metrics"]["perf/step_time_s"] for r in results] == pytest.approx([4 + 200 / 4, 4 + 100 / 3, 4])


def test_sequences_of_different_length_count_by_their_own_attention():
    def collate(samples):
        batch = torch.utils.data.default_collate(samples)
        return batch if samples[0]["input_ids"][0] % 8 else {k: v[:, : SEQ_LEN // 2] for k, v in batch.items()}

    metrics = run(
        batches={"collate_fn": collate, "size": 32}, trainer={"log_every_n_steps": 2, "max_steps": 2}, monitor={"warmup_steps": 0}
    )
    long, short = SEQ_LEN * FLOPS_PER_TOKEN, SEQ_LEN // 2 * (FLOPS_PER_TOKEN - 6 * LAYERS * HIDDEN * SEQ_LEN)
    assert metrics["metrics"]["perf/mfu"] == pytest.approx((long + short) / 2 / (PEAK * 1e12))
    assert metrics["metrics"]["perf/tokens_per_s"] == pytest.approx(0.75 * SEQ_LEN)


# ---- several ranks


class FakeLayoutStrategy(SingleDeviceStrategy):
    """What MFUMonitor reads of a strategy with a layout, on one process."""

    def __init__(self, layout: str, world_size: int, num_microbatches: int | None = 4, shape: ModelShape | None = None) -> None:
        super().__init__("cpu", accelerator="cpu")
        self.layout = Layout.parse(layout).resolve(world_size)
        self.dp_size, self.num_microbatches, self.model_shape = self.layout.dp, num_microbatches, shape


SHAPE = ModelShape(NUM_PARAMETERS, VOCAB * HIDDEN, LAYERS, HIDDEN, VOCAB, tied=False)


def run_layouts(*layouts, world_size, num_microbatches=4, shape=SHAPE, make_module=Timed):
    """One fit a layout on one process that stands for ``world_size`` equal ones."""

    def fit_each():
        meter_file.gather = lambda values, device: [values] * world_size
        strategies = [FakeLayoutStrategy(layout, world_size, num_microbatches, shape) for layout in layouts]
        return [fit(make_module=make_module, trainer={"strategy": strategy, "accelerator": "auto"}) for strategy in strategies]

    return run_ranks(1, fit_each)[0]


def test_tokens_count_once_a_data_parallel_rank():
    dp_sizes = {"tp2_pp2_cp2": 1, "dp2_tp2_pp2": 2, "dp4_cp2": 4, "dp8_zero3": 8}
    for dp, result in zip(dp_sizes.values(), run_layouts(*dp_sizes, world_size=8), strict=True):
        assert result["metrics"]["perf/tokens_per_s"] == pytest.approx(dp * SEQ_LEN)
        assert result["metrics"]["perf/tokens_per_s_per_gpu"] == pytest.approx(dp * SEQ_LEN / 8)
        assert result["metrics"]["perf/mfu"] == pytest.approx(MFU * dp / 8)


def test_the_bubble_is_logged_under_pipeline_parallelism_only():
    pipeline, tensor = run_layouts("pp4", "tp4", world_size=4, num_microbatches=6)
    assert pipeline["metrics"]["perf/bubble"] == pytest.approx(3 / 6)
    assert "perf/bubble" not in tensor["metrics"]


class EverySecondBatchIsShort(Timed):
    def training_step(self, batch, batch_idx):
        self.trainer.strategy.num_microbatches = 2 if batch_idx % 2 else 6
        return super().training_step(batch, batch_idx)


def test_the_bubble_is_the_mean_of_its_batches():
    def fit_one():
        meter_file.gather = lambda values, device: [values] * 4
        trainer = {"strategy": FakeLayoutStrategy("pp4", 4, 6, SHAPE), "accelerator": "auto", "log_every_n_steps": 2}
        return fit(make_module=EverySecondBatchIsShort, trainer=trainer, monitor={"warmup_steps": 0})["metrics"]["perf/bubble"]

    assert run_ranks(1, fit_one) == [pytest.approx(2 * 3 / (2 + 6))]  # idle as long in each, over the work of both


def test_hfu_counts_what_the_layout_recomputes():
    recomputed_layers = {"tp2": 0, "tp2_ac": 2, "tp2_ac2": 1, "tp2_acsel": 0}
    layer = (
        2 * (NUM_PARAMETERS - 2 * VOCAB * HIDDEN) // LAYERS + 4 * HIDDEN * SEQ_LEN
    )  # forward: products, and attention by the formula
    for num_layers, result in zip(recomputed_layers.values(), run_layouts(*recomputed_layers, world_size=2), strict=True):
        ratio = result["metrics"]["perf/hfu"] / result["metrics"]["perf/mfu"]
        assert ratio == pytest.approx(1 + num_layers * layer / FLOPS_PER_TOKEN)


def test_a_strategy_without_a_shape_has_no_mfu_and_says_why():
    result = run_layouts("tp2", world_size=2, shape=None)[0]
    assert "perf/mfu" not in result["metrics"] and result["metrics"]["perf/tokens_per_s"] == pytest.approx(SEQ_LEN)
    assert any("no perf/mfu" in text and "no plan" in text for _, text in result["said"])


class Slower(Timed):
    """Rank 1 takes twice as long."""

    def training_step(self, batch, batch_idx):
        self.clock.now_s += len(batch["input_ids"]) * self.trainer.global_rank
        return super().training_step(batch, batch_idx)


def fit_ddp(folder):
    checkpoint = ModelCheckpoint(dirpath=folder, monitor="perf/mfu", mode="max", every_n_train_steps=2)
    ragged = {"batch_size": 4, "size": 10}  # 5 samples a rank: a batch of 4 and one of 1
    result = fit(
        make_module=Slower,
        callbacks=(checkpoint,),
        batches=ragged,
        monitor={"warmup_steps": 0},
        trainer={
            "strategy": DDPStrategy(process_group_backend="gloo"),
            "devices": 2,
            "log_every_n_steps": 2,
            "enable_checkpointing": True,
        },
    )
    return result["metrics"], checkpoint.best_model_path, float(checkpoint.best_model_score)


def test_ddp_logs_one_value_on_every_rank_and_a_checkpoint_may_monitor_it(tmp_path):
    (first, path, score), (second, *_) = run_ranks(2, fit_ddp, tmp_path)
    assert first == second
    assert first["perf/step_time_s"] == 5  # the slower rank: (4 + 1) sequences, 2 s each, in 2 steps
    assert first["perf/tokens_per_s"] == pytest.approx(2 * 5 * SEQ_LEN / 10)
    assert first["perf/mfu"] == pytest.approx(2 * 5 * SEQ_LEN * FLOPS_PER_TOKEN / 10 / (2 * PEAK * 1e12))
    assert path and score == pytest.approx(first["perf/mfu"])


class Configured(Timed):
    def configure_model(self):
        """Lightning's model-parallel strategy asks for one."""


def fit_tensor_parallel():
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, process_group_backend="gloo")
    return fit(make_module=Configured, trainer={"strategy": strategy, "devices": 2})["metrics"]


def test_lightnings_own_tensor_parallelism_does_not_multiply_tokens():
    for metrics in run_ranks(2, fit_tensor_parallel):
        assert metrics["perf/tokens_per_s"] == pytest.approx(SEQ_LEN)
        assert metrics["perf/mfu"] == pytest.approx(MFU / 2)


def fit_counting(every, steps):
    """Fits on ranks and counts waits for the device and gathers, and reads of the clock that are not the stopwatch's."""
    waits, gathers = [], []
    meter_file.synchronize = waits.append
    real_gather = meter_file.gather
    meter_file.gather = lambda values, device: gathers.append(1) or real_gather(values, device)
    strategy = DDPStrategy(process_group_backend="gloo")
    result = fit(
        trainer={"strategy": strategy, "devices": 2, "log_every_n_steps": every, "max_steps": steps}, batches={"batch_size": 2}
    )
    return len(waits), len(gathers), result["num_clock_reads"] - 2 * steps  # around each fetch, on the host


def test_between_log_steps_nothing_waits_and_nothing_is_communicated():
    for waits, gathers, reads in run_ranks(2, fit_counting, every=5, steps=15):
        assert gathers == 3
        assert waits == reads == 1 + 3 + 1  # the end of the warm-up, the log steps, and the comparison at one of them


# ---- the peak


DEVICES = [
    ("NVIDIA H200", "bf16-true", 989),
    ("NVIDIA H100 NVL", "bf16-mixed", 835),
    ("NVIDIA H100 80GB HBM3", "32-true", 66.9),
    ("NVIDIA B200", "bf16-true", 2250),
]


def test_a_known_device_is_compared_with_its_dense_peak():
    def fit_on_each():
        results = []
        for name, precision, _ in DEVICES:
            mfu_file.device_name = lambda device, name=name: name
            results.append(fit(monitor={"peak_tflops": None}, trainer={"precision": precision}))
        return results

    for (_, _, tflops), result in zip(DEVICES, run_ranks(1, fit_on_each)[0], strict=True):
        assert result["metrics"]["perf/mfu"] == pytest.approx(FLOPS_PER_TOKEN * SEQ_LEN / (tflops * 1e12))
        assert not any(kind == "warning" for kind, _ in result["said"])


def test_an_unknown_device_has_no_mfu_and_one_warning(monkeypatch):
    monkeypatch.setattr(mfu_file, "device_name", lambda device: "Foo")
    result = run(monitor={"peak_tflops": None}, trainer={"precision": "bf16-true"})
    assert "perf/mfu" not in result["metrics"] and "perf/hfu" not in result["metrics"]
    assert result["metrics"]["perf/tokens_per_s"] == pytest.approx(SEQ_LEN)
    assert result["metrics"]["perf/tflops_per_gpu"] == pytest.approx(FLOPS_PER_TOKEN * SEQ_LEN / 1e12)
    warnings = [text for kind, text in result["said"] if kind == "warning"]
    assert len(warnings) == 1 and "'Foo'" in warnings[0] and "peak_tflops=" in warnings[0]


def test_peak_tflops_overrides_an_unknown_device(monkeypatch):
    monkeypatch.setattr(mfu_file, "device_name", lambda device: "Foo")
    result = run()
    assert result["metrics"]["perf/mfu"] == pytest.approx(MFU)
    assert not any(kind == "warning" for kind, _ in result["said"])


def test_the_peak_of_a_cpu_is_measured_once_and_labelled(monkeypatch):
    measured = []
    monkeypatch.setattr(peak_file, "measure_matmul_tflops", lambda dtype: measured.append(dtype) or 2e-6)

    def fit_and_count():
        return fit(monitor={"peak_tflops": None}), measured

    result, dtypes = run_ranks(1, fit_and_count)[0]
    assert result["metrics"]["perf/mfu"] == pytest.approx(MFU / 2)
    assert dtypes == [torch.float32]
    assert any("MEASURED" in text and "a share of that" in text for _, text in result["said"])


def test_measuring_a_matrix_product():
    def measure():
        torch.set_num_threads(1)
        state = torch.random.get_rng_state()
        rate = peak_file.measure_matmul_tflops(torch.float32, size=256, budget_s=0.02)
        return rate, torch.equal(state, torch.random.get_rng_state())

    rate, left_the_seed_alone = run_ranks(1, measure)[0]
    assert 1e-4 < rate < 10 and left_the_seed_alone


def test_the_dtype_of_matrix_products_follows_precision_and_parameters(monkeypatch):
    dtype = functools.partial(peak_file.matmul_dtype, module=nn.Linear(2, 2))
    assert [dtype(p) for p in ("bf16-mixed", "16-true", "transformer-engine", "64-true", "nf4")] == [
        "bf16",
        "fp16",
        "fp8",
        None,
        None,
    ]
    assert dtype("32-true") == "fp32"
    assert peak_file.matmul_dtype("32-true", nn.Linear(2, 2, dtype=torch.bfloat16)) == "bf16"  # as a loaded checkpoint may be
    assert peak_file.matmul_dtype("32-true", nn.Linear(2, 2, dtype=torch.float64)) is None
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert dtype("32-true") == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)
    peak = peak_file.find_peak("NVIDIA H200", None)
    assert peak.tflops is None and "dtype=" in peak.note


# ---- what cannot be counted


class NoTokens(LightningModule):
    def __init__(self, clock):
        super().__init__()
        self.clock, self.linear = clock, nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        self.clock.now_s += 2
        return self.linear(batch["x"]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_module_without_plan_and_tokens_has_its_step_time_and_says_what_is_missing():
    result = run(make_module=NoTokens, batches={"collate_fn": lambda samples: {"x": torch.ones(len(samples), 3)}})
    assert set(result["metrics"]) == {"perf/step_time_s", "perf/peak_memory_gib", "perf/data_wait"}
    assert result["metrics"]["perf/step_time_s"] == 2
    texts = [text for _, text in result["said"]]
    assert sum("tokens cannot be counted" in text for text in texts) == 1
    assert sum("no plan is known for NoTokens" in text for text in texts) == 1


class Checkpointed(Timed):
    def __init__(self, clock):
        super().__init__(clock)
        self.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in self.layers)


class FlaggedLikeTransformers(Timed):
    def __init__(self, clock):
        super().__init__(clock)
        self.layers[1].gradient_checkpointing = True


@pytest.mark.parametrize("make_module", [Checkpointed, FlaggedLikeTransformers])
def test_recomputation_of_unknown_extent_has_no_hfu_until_it_is_said(make_module):
    unknown, told = run_each([{"make_module": make_module, "monitor": {"recompute": recompute}} for recompute in (None, 1)])
    no_ac, with_ac = run_layouts("tp2", "tp2_ac", world_size=2, make_module=make_module)
    assert "perf/hfu" not in no_ac["metrics"] and "perf/hfu" in with_ac["metrics"]
    assert "perf/hfu" not in unknown["metrics"] and unknown["metrics"]["perf/mfu"] == pytest.approx(MFU)
    assert any("no perf/hfu" in text and "recompute=" in text for _, text in unknown["said"])
    assert told["metrics"]["perf/hfu"] > told["metrics"]["perf/mfu"]


class Padding(SingleDeviceStrategy):
    """Changes the number of parameters while it sets the model up, as FSDP does when it flattens, pads and shards them."""

    def model_to_device(self):
        super().model_to_device()
        self.lightning_module.register_parameter("padding", nn.Parameter(torch.zeros(1000)))


def test_the_model_is_counted_before_a_strategy_changes_it():
    result = run(trainer={"strategy": Padding("cpu", accelerator="cpu"), "accelerator": "auto"})
    assert result["metrics"]["perf/mfu"] == pytest.approx(MFU)


# ---- when and where it is logged


def test_a_logger_has_every_figure_of_every_log_step(tmp_path):
    logger = CSVLogger(tmp_path)
    run(trainer={"logger": logger, "log_every_n_steps": 2, "max_steps": 6}, monitor={"warmup_steps": 0})
    lines = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    assert [row["step"] for row in rows] == ["1", "3", "5"]  # Lightning counts from 0
    assert all(float(row["perf/mfu"]) == pytest.approx(MFU, rel=1e-5) for row in rows)


def test_a_run_too_short_for_a_log_step_still_has_its_figures():
    epochs = {"log_every_n_steps": 50, "max_steps": -1, "max_epochs": 2}
    by_steps, by_epochs = run_each([{"trainer": {"log_every_n_steps": 50}}, {"trainer": epochs, "batches": {"size": 12}}])
    assert by_steps["metrics"]["perf/mfu"] == by_epochs["metrics"]["perf/mfu"] == pytest.approx(MFU)


def test_the_line_has_the_loss_of_the_module_also_when_batches_are_accumulated():
    class Seven(Timed):
        def training_step(self, batch, batch_idx):
            return 0 * super().training_step(batch, batch_idx) + 7

    def lines_of_each():
        counter, lines = CountLines(), []
        for accumulated in (1, 4):
            trainer = {"max_steps": 3, "accumulate_grad_batches": accumulated}
            fit(make_module=Seven, callbacks=(counter,), trainer=trainer, monitor={"predict": False})
            lines.append([line.split(" | ")[1] for line in counter.lines])
        return lines

    assert run_ranks(1, lines_of_each)[0] == [["loss 7.000"] * 2] * 2


def test_its_own_interval_and_lightnings_switch():
    def lines_of_each():
        counter, lines = CountLines(), []
        for monitor, trainer in (
            ({"log_every_n_steps": 3, "warmup_steps": 3}, {"max_steps": 10}),
            ({}, {"log_every_n_steps": 0}),
            ({"print_line": False}, {}),
        ):
            fit(callbacks=(counter,), monitor=monitor, trainer=trainer)
            lines.append([line.split(" | ")[0] for line in counter.lines if line.startswith("step ")])
        return lines

    assert run_ranks(1, lines_of_each)[0] == [["step 6", "step 9"], [], []]


def test_the_line_is_printed_once_on_rank_0_beside_a_progress_bar(capfd):
    def fit_ddp_with_bar():
        strategy = DDPStrategy(process_group_backend="gloo")
        return fit(trainer={"strategy": strategy, "devices": 2, "log_every_n_steps": 2, "enable_progress_bar": True})["metrics"]

    run_ranks(2, fit_ddp_with_bar)
    lines = [line for line in capfd.readouterr().out.replace("\r", "\n").splitlines() if line.startswith("step ")]
    assert [line.split(" | ")[0] for line in lines] == ["step 2", "step 4"]
    assert " tok/s/device | MFU " in lines[0] and "loss " in lines[0] and lines[0].endswith("GiB")


def test_fit_twice_on_one_monitor_and_after_an_error():
    class Fails(Timed):
        def on_train_batch_end(self, *args):
            raise RuntimeError("on purpose")

    def fit_thrice():
        clock = FakeClock()
        monitor = MFUMonitor(clock=clock, peak_tflops=PEAK)
        failing = make_trainer([monitor])
        with pytest.raises(RuntimeError, match="on purpose"):
            failing.fit(Fails(clock), loader(clock))
        trainer = make_trainer([monitor])
        module = Timed(clock)
        trainer.fit(module, loader(clock))
        clock.now_s += 1e6
        trainer.fit_loop.epoch_loop.max_steps = 8
        trainer.fit(module, loader(clock))
        return "save_checkpoint" in vars(failing), trainer.global_step, trainer.callback_metrics["perf/step_time_s"].item()

    assert run_ranks(1, fit_thrice)[0] == (False, 8, 4)


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"formula": "megatron"}, "palm, nemo, causal"),
        ({"peak_tflops": 0}, "above 0"),
        ({"dtype": "int3"}, "allowed: fp32"),
        ({"log_every_n_steps": 0}, "at least 1"),
        ({"warmup_steps": -1}, "at least 0"),
        ({"recompute": "all"}, "every Nth layer"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MFUMonitor(**arguments)


def test_lightning_cli_builds_it_from_names_and_writes_it_back(monkeypatch, tmp_path):
    def monitor_of(*arguments):
        monkeypatch.setattr("sys.argv", ["run", *arguments])
        cli = LightningCLI(NoArguments, run=False, seed_everything_default=False, save_config_callback=None)
        return next(c for c in cli.trainer.callbacks if isinstance(c, MFUMonitor)), cli

    callback = "{class_path: lightning_5d.callbacks.MFUMonitor, init_args: {formula: causal, peak_tflops: 312, recompute: sel}}"
    monitor, cli = monitor_of("--trainer.accelerator=cpu", "--trainer.logger=false", f"--trainer.callbacks=[{callback}]")
    assert (monitor.formula, monitor.peak_tflops, monitor.recompute, monitor.dtype) == ("causal", 312, "sel", None)
    (tmp_path / "config.yaml").write_text(cli.parser.dump(cli.config))
    again, _ = monitor_of(f"--config={tmp_path / 'config.yaml'}")
    assert again.formula == "causal" and again.clock() > 0


class NoArguments(LightningModule):
    pass
