"""Prediction beside measurement, on a fake clock and a made-up device: both columns are known exactly."""

import contextlib
import functools

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn

from lightning_5d.advisor import estimate
from lightning_5d.advisor.flops import flops_per_token, recomputed_flops_per_token
from lightning_5d.callbacks import MFUMonitor, comparison, data_wait
from lightning_5d.callbacks import mfu as mfu_file
from lightning_5d.callbacks import prediction as prediction_file
from lightning_5d.callbacks.figures import RankFigures, Totals
from lightning_5d.callbacks.model_spec import spec_of
from lightning_5d.layout import Layout
from lightning_5d.models import Llama, LlamaConfig
from lightning_5d.plan import model_shape
from lightning_5d.strategy import LayoutStrategy
from tests.callbacks.models import DECODER, SEQ_LEN, CountLines, FakeClock, Timed, TimedLlama, fit, loader, make_trainer
from tests.parity.models import HandWritten
from tests.ranks import run_ranks

DEVICE = """
name: pretend
bf16_tflops: 0.000002
hbm_gib: 4
hbm_tb_s: 0.001
scaleup_uni_gb_s: 0.1
scaleup_domain_gpus: 4
internode_uni_gb_s: 0.1
"""
PEAK = 2e-6


@pytest.fixture
def hardware(tmp_path):
    path = tmp_path / "pretend.yaml"
    path.write_text(DEVICE)
    return str(path)


def compare(hardware, monitor=None, trainer=None, make_module=TimedLlama, callbacks=(), **kwargs):
    """A fit with its ``tables``; eleven steps, of which the first warms up, so that table and metrics are of one log step."""
    lines = CountLines()
    result = fit(
        monitor={"hardware": hardware, "dtype": "bf16", "peak_tflops": None, **(monitor or {})},
        trainer={"max_steps": 11, **(trainer or {})},
        make_module=make_module,
        callbacks=(lines, *callbacks),
        **kwargs,
    )
    return {
        **result,
        "tables": [text for text in lines.lines if text.startswith("Prediction beside")],
        "num_lines": len(lines.lines),
    }


def compare_each(*cases):
    """The same for several fits, all in one forked rank."""
    return run_ranks(1, lambda: [compare(**case) for case in cases])[0]


def read(table):
    """``{name: (predicted, measured)}``, of the rows and the text around them."""
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines() if "|" in line]
    return {name: tuple(values) for name, *values in rows}


def predicted_for(hardware, layout, num_gpus=1, global_batch=4, model=DECODER):
    return estimate(model, layout, gpu=hardware, num_gpus=num_gpus, seq_len=SEQ_LEN, global_batch=global_batch)


NUM_PARAMETERS = sum(p.numel() for p in Llama(DECODER).parameters())
FLOPS = 6 * NUM_PARAMETERS + 12 * DECODER.num_hidden_layers * DECODER.hidden_size * SEQ_LEN


def test_both_columns_on_a_single_device(hardware):
    (result,) = compare_each({"hardware": hardware, "batches": {"fetch_s": 0.25}})
    (table,) = result["tables"]
    rows, e = read(table), predicted_for(hardware, "mbs4")
    mfu = SEQ_LEN * 4 / 5 * FLOPS / (PEAK * 1e12)  # a step of 4 sequences takes 4 s, and 1 s of waiting
    assert rows["time of a step"] == (f"{e.step_time_s:.4g} s", "5 s")
    assert rows["tokens/s per device"] == (f"{e.tokens_per_s_per_gpu:,.0f}", f"{SEQ_LEN * 4 / 5:.0f}")
    assert rows["MFU"] == (f"{e.mfu:.1%}", f"{mfu:.1%}")
    memory_gib = result["metrics"]["perf/peak_memory_gib"]
    assert rows["peak memory of the worst rank, whole process"] == (
        f"stage 0: {e.memory_gib:.2f} GiB",
        f"rank 0: {memory_gib:.2f} GiB",
    )
    assert rows["peak memory of the worst rank, allocated by torch"][1] == "-"  # not measured on a CPU
    assert rows["data wait (host's time in the loader)"] == ("-", "20.0%")
    assert rows["rest: slower than peak, launches, optimizer"][1] == f"{1 - mfu - 0.2:.1%}"
    assert "bubble" not in rows and "exposed communication" not in rows  # one device
    assert "mean of 10 steps" in table and "dp1_mbs4 on 1 x pretend, 4 sequences of 8 tokens a step" in table
    assert "this run: 32-true, SGD" in table
    logged = {k: v for k, v in result["metrics"].items() if k.startswith("prediction/") or k == "perf/data_wait"}
    assert logged == pytest.approx(
        {
            "perf/data_wait": 0.2,
            "prediction/step_time_s": e.step_time_s,
            "prediction/tokens_per_s_per_gpu": e.tokens_per_s_per_gpu,
            "prediction/mfu": e.mfu,
            "prediction/peak_memory_gib": e.memory_gib,
        }
    )


def test_recomputation_by_the_operations_that_were_counted_and_by_the_time_that_was_predicted(hardware):
    (result,) = compare_each({"hardware": hardware, "monitor": {"recompute": 1, "formula": "causal"}})
    rows, e = read(result["tables"][0]), predicted_for(hardware, "mbs4_ac")
    shape = model_shape(Llama(DECODER))
    again = recomputed_flops_per_token(shape, SEQ_LEN, 1, "causal") * SEQ_LEN / (PEAK * 1e12)
    share = e.time_parts_s["recompute"] / e.step_time_s
    assert rows["recomputation"] == (f"{share:.1%}", f">= {again:.1%}") and share > 0.1 and again > 0
    # The predicted MFU is by the monitor's formula too.
    mfu = e.tokens_per_s_per_gpu * flops_per_token(shape, SEQ_LEN, "causal") / (PEAK * 1e12)
    assert rows["MFU"][0] == f"{mfu:.1%}" != f"{e.mfu:.1%}"
    assert rows["rest: slower than peak, launches, optimizer"][0] == f"{1 - mfu - share:.1%}"


class LateRank(TimedLlama):
    """The last rank's data takes a second a batch longer."""

    def on_train_start(self):
        is_last = self.trainer.global_rank == self.trainer.world_size - 1
        self.trainer.train_dataloader.dataset.fetch_s = 0.25 if is_last else 0.0


class TimedHandWritten(HandWritten):
    """No config, learned positions, biases: described by the sizes of its matrices."""

    def __init__(self, clock):
        super().__init__(vocab=16)
        self.clock = clock

    def training_step(self, batch, batch_idx):
        self.clock.now_s += len(batch["input_ids"])
        return self.loss(batch)


def compare_layout(hardware, layout, make_module):
    strategy = LayoutStrategy(layout, process_group_backend="gloo")
    result = compare(hardware, make_module=make_module, trainer={"strategy": strategy, "devices": 4})
    return {**result, "layout": str(strategy.layout)}


@pytest.mark.parametrize(
    ("layout", "make_module"),
    [("tp2_pp2", LateRank), pytest.param("dp2_pp2_zero3_gpipe", TimedHandWritten, marks=pytest.mark.slow)],
)
def test_both_columns_under_a_layout(hardware, layout, make_module):
    results = run_ranks(4, compare_layout, hardware, layout, make_module)
    (table,) = results[0]["tables"]
    assert not any(result["num_lines"] for result in results[1:])
    dp = Layout.parse(layout).resolve(4).dp
    model = DECODER
    if make_module is TimedHandWritten:
        model = dict(
            num_hidden_layers=4, hidden_size=32, num_attention_heads=4, intermediate_size=96, vocab_size=16, gated_mlp=False
        )
        assert "Predicted for a plain decoder of" in table
    rows, e = read(table), predicted_for(hardware, layout, 4, 4 * dp, model)
    wait_s = 1 if make_module is LateRank else 0
    assert rows["time of a step"] == (f"{e.step_time_s:.4g} s", f"{4 + wait_s} s")
    assert rows["tokens/s per device"] == (f"{e.tokens_per_s_per_gpu:,.0f}", f"{dp * 4 * SEQ_LEN / (4 + wait_s) / 4:,.0f}")
    memory_gib = results[0]["metrics"]["perf/peak_memory_gib"]
    assert rows["peak memory of the worst rank, whole process"][0] == f"stage {e.worst_stage}: {e.memory_gib:.2f} GiB"
    assert rows["peak memory of the worst rank, whole process"][1].endswith(f": {memory_gib:.2f} GiB")
    assert rows["bubble"] == (f"{e.time_parts_s['bubble'] / e.step_time_s:.1%}", "-") and e.bubble > 0.1
    assert rows["exposed communication"] == (f"{e.exposed_communication:.1%}", "-") and e.exposed_communication > 0
    assert rows["data wait (host's time in the loader)"] == ("-", f"{wait_s / (4 + wait_s):.1%}")
    assert rows["rest: slower than peak, launches, optimizer"][1].endswith("with all not measured")
    assert e.layout in table and results[0]["layout"] == str(Layout.parse(layout).resolve(4))
    predictions = [{k: v for k, v in r["metrics"].items() if k.startswith("prediction/")} for r in results]
    assert predictions[0]["prediction/step_time_s"] == pytest.approx(e.step_time_s)
    assert all(p == predictions[0] for p in predictions)


def compare_ddp(hardware):
    return compare(hardware, trainer={"strategy": DDPStrategy(process_group_backend="gloo"), "devices": 2}, batches={"size": 128})


def test_ddp_is_predicted_as_the_layout_it_is(hardware):
    first, second = run_ranks(2, compare_ddp, hardware)
    rows, e = read(first["tables"][0]), predicted_for(hardware, "dp2_zero0_mbs4", 2, 8)
    assert rows["time of a step"] == (f"{e.step_time_s:.4g} s", "4 s")
    assert second["tables"] == []


# ---- batches


def test_accumulated_batches_are_micro_batches_of_a_step(hardware):
    (result,) = compare_each({"hardware": hardware, "trainer": {"accumulate_grad_batches": 2}, "batches": {"size": 96}})
    e = predicted_for(hardware, "mbs4", global_batch=8)
    assert read(result["tables"][0])["time of a step"] == (f"{e.step_time_s:.4g} s", "8 s")
    assert "dp1_mbs4 on 1 x pretend, 8 sequences of 8 tokens a step" in result["tables"][0] and e.num_microbatches == 2


def test_batches_of_several_sizes_are_predicted_by_the_most_common_and_said_so(hardware):
    def collate(samples):
        batch = torch.utils.data.default_collate(samples)
        return {k: v[:, : SEQ_LEN // 2] for k, v in batch.items()} if samples[0]["input_ids"][0] == 8 else batch

    (result,) = compare_each({"hardware": hardware, "batches": {"collate_fn": collate}})
    assert read(result["tables"][0])["time of a step"][0] == f"{predicted_for(hardware, 'mbs4').step_time_s:.4g} s"
    assert "the most common batch, 7 of 10 on rank 0" in result["tables"][0]


# ---- no prediction


class Mixture(Timed):
    def __init__(self, clock):
        super().__init__(clock)
        self.config = dict(
            num_hidden_layers=2,
            hidden_size=4,
            num_attention_heads=2,
            intermediate_size=8,
            vocab_size=16,
            num_experts=4,
            num_experts_per_tok=2,
        )


class TwoMlps(TimedHandWritten):
    """What the advisor has no words for."""

    def __init__(self, clock):
        super().__init__(clock)
        for block in self.blocks:
            block.other = nn.Linear(32, 352)


def no_tokens(samples):
    return [torch.stack([s["input_ids"] for s in samples]).float(), torch.ones(1)]


class Floats(TimedLlama):
    def training_step(self, batch, batch_idx):
        return super().training_step({"input_ids": batch[0].long(), "labels": batch[0].long()}, batch_idx)


NO_PREDICTION = [
    ({"hardware": None}, "a CPU is not in the advisor's table. MFUMonitor(hardware=...)"),
    ({"monitor": {"dtype": None}}, "this run's are fp32"),
    ({"make_module": Timed}, "the number of attention heads of Timed is not known"),
    ({"make_module": Mixture}, "mixture of experts"),
    ({"make_module": TwoMlps}, "TwoMlps is no decoder that the advisor can describe"),
    ({"make_module": Floats, "batches": {"collate_fn": no_tokens}}, "tokens cannot be counted"),
    ({"monitor": {"recompute": 8}}, "ac8 recomputes every 8th of 4 layers"),
]


def test_without_a_prediction_there_is_what_was_measured_and_one_sentence_why(hardware):
    results = compare_each(*({"hardware": hardware, **case} for case, _ in NO_PREDICTION))
    for result, (_, sentence) in zip(results, NO_PREDICTION, strict=True):
        (table,) = result["tables"]
        assert f"No prediction: {sentence}" in table or sentence in table.splitlines()[-1]
        assert "predicted |" not in table and "pretend" not in table
        assert read(table)["time of a step"] == ("4 s",)
        assert not any(key.startswith("prediction/") for key in result["metrics"])


def test_a_peak_that_was_measured_is_called_so(hardware):
    (result,) = compare_each({"hardware": None})
    assert read(result["tables"][0])["MFU"][0].endswith("% of measured peak")


def test_an_accelerator_is_found_by_its_name_and_an_unknown_one_is_not_guessed(monkeypatch):
    def compare_on_each():
        results = []
        for name in ("NVIDIA H200", "Foo"):
            mfu_file.device_name = lambda device, name=name: name
            results.append(compare(None))
        return results

    known, unknown = run_ranks(1, compare_on_each)[0]
    assert read(known["tables"][0])["time of a step"][0] == f"{predicted_for('h200', 'mbs4').step_time_s:.4g} s"
    assert "No prediction: 'Foo' is not in the advisor's table" in unknown["tables"][0]


def compare_tensor_parallel(hardware):
    class Configured(TimedLlama):
        def configure_model(self):
            """Lightning's model-parallel strategy asks for one."""

    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, process_group_backend="gloo")
    return compare(hardware, make_module=Configured, trainer={"strategy": strategy, "devices": 2})


def test_another_strategy_has_no_prediction(hardware):
    first, _ = run_ranks(2, compare_tensor_parallel, hardware)
    assert "No prediction: the advisor predicts layouts, DDP and a single device, not ModelParallelStrategy" in first["tables"][0]


def test_a_mistake_of_the_advisors_does_not_end_the_run(hardware, monkeypatch):
    monkeypatch.setattr(prediction_file, "_find_layout", lambda *args: {}["no such key"])
    (result,) = compare_each({"hardware": hardware})
    assert "the advisor failed, which it should not: KeyError" in result["tables"][0]


def test_wrong_hardware_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"unknown GPU 'h1000'.*did you mean h100"):
        MFUMonitor(hardware="h1000")
    (tmp_path / "a.yaml").write_text("name: a")
    with pytest.raises(ValueError, match="missing: bf16_tflops"):
        MFUMonitor(hardware=str(tmp_path / "a.yaml"))


# ---- when


class StopAfter(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.global_step >= self.step


def test_once_a_fit(hardware):
    many, few, early, warming_up, off, silent = compare_each(
        {"hardware": hardware, "trainer": {"max_steps": 40}, "batches": {"size": 200}},
        {"hardware": hardware, "trainer": {"max_steps": 4}},
        {"hardware": hardware, "trainer": {"log_every_n_steps": 50, "max_steps": 100}, "callbacks": (StopAfter(5),)},
        {"hardware": hardware, "trainer": {"max_steps": 1}},
        {"hardware": hardware, "monitor": {"predict": False}},
        {"hardware": hardware, "trainer": {"log_every_n_steps": 0}},
    )
    assert [len(r["tables"]) for r in (many, few, early, warming_up, off, silent)] == [1, 1, 1, 0, 0, 0]
    assert "mean of 10 steps" in many["tables"][0] and "mean of 3 steps" in few["tables"][0]
    assert "mean of 4 steps" in early["tables"][0] and read(early["tables"][0])["time of a step"][1] == "4 s"
    assert early["num_lines"] == 1  # no log step, so no line
    said = [text for _, text in warming_up["said"]]
    assert sum("ended within its warm-up" in text for text in said) == 1
    assert not any("warm-up" in text for r in (many, few, early, off, silent) for _, text in r["said"])
    assert not any(key.startswith("prediction/") for key in off["metrics"])


def test_again_in_a_second_fit_and_not_after_an_error(hardware):
    class Fails(TimedLlama):
        def on_train_batch_end(self, *args):
            if self.global_step == 3:
                raise RuntimeError("on purpose")

    def fit_thrice():
        clock, lines, counts = FakeClock(), CountLines(), []
        monitor = MFUMonitor(clock=clock, hardware=hardware, dtype="bf16")
        for make_module in (Fails, TimedLlama, TimedLlama):
            trainer = make_trainer([monitor, lines], max_steps=12)
            with contextlib.suppress(RuntimeError):
                trainer.fit(make_module(clock), loader(clock))
            counts.append(sum(text.startswith("Prediction") for text in lines.lines))
            counts.append(any(name in vars(trainer.fit_loop.epoch_loop) for name in data_wait._EDGES))
        return counts

    assert run_ranks(1, fit_thrice)[0] == [0, False, 1, False, 1, False]


def test_the_comparison_takes_no_training_time(hardware):
    def fit_with_slow_advisor():
        clock = FakeClock()

        def slow(*args):
            clock.now_s += 1000
            return real(*args)

        real, prediction_file.predict = prediction_file.predict, slow
        trainer = make_trainer([MFUMonitor(clock=clock, hardware=hardware, dtype="bf16")], max_steps=12)
        trainer.fit(TimedLlama(clock), loader(clock))
        return trainer.callback_metrics["perf/step_time_s"].item()

    assert run_ranks(1, fit_with_slow_advisor)[0] == 4


# ---- parts


def test_lightning_has_the_hooks_around_a_fetch():
    assert all(hasattr(_TrainingEpochLoop, name) for name in data_wait._EDGES)


class Stream(torch.utils.data.IterableDataset):
    """Of unknown length, so Lightning fetches ahead."""

    def __init__(self, clock):
        self.clock = clock

    def __iter__(self):
        for _ in range(100):
            self.clock.now_s += 0.5
            yield {"input_ids": torch.arange(SEQ_LEN), "labels": torch.arange(SEQ_LEN)}


def test_the_wait_for_a_stream(hardware):
    def fit_stream():
        clock = FakeClock()
        trainer = make_trainer([MFUMonitor(clock=clock, peak_tflops=PEAK)], max_steps=6)
        trainer.fit(TimedLlama(clock), torch.utils.data.DataLoader(Stream(clock), batch_size=3))
        return trainer.callback_metrics["perf/data_wait"].item()

    assert run_ranks(1, fit_stream)[0] == pytest.approx(1.5 / 4.5)


def test_on_a_gpu_allocated_memory_is_measured_and_no_other():
    totals = Totals()
    for memory_gib in (1.0, 3.0):
        totals.add([RankFigures(1, 0, 1, 1, 0, 1, memory_gib), RankFigures(2, 0, 1, 1, 0, 1, memory_gib + 1)], 1)
    assert [row[1:] for row in comparison._memory(totals, None, is_cuda=True)] == [("-", "rank 1: 4.00 GiB"), ("-", "-")]
    assert [row[1:] for row in comparison._memory(totals, None, is_cuda=False)] == [("-", "-"), ("-", "rank 1: 4.00 GiB")]
    assert [r.elapsed_s for r in totals.ranks] == [2, 4] and totals.num_steps == 2


class Fused(HandWritten):
    """Gate and up in one matrix."""

    def __init__(self):
        super().__init__(width=64)
        for block in self.blocks:
            block.feed.enter, block.feed.leave = nn.Linear(64, 2 * 160, bias=False), nn.Linear(160, 64, bias=False)


def test_a_model_is_described_by_its_config_or_by_its_matrices():
    config = LlamaConfig(**{**vars(DECODER), "head_dim": 8, "tie_word_embeddings": True})
    for make, expected in (
        (functools.partial(Llama, config), (40, True, True, 2, 8)),
        (functools.partial(HandWritten, width=64), (192, False, False, 4, 16)),
        (
            functools.partial(HandWritten, width=32),
            (96, False, False, 4, 8),
        ),  # as many parameters as gated ones of width 64 = positions
        (functools.partial(HandWritten, width=64, tied=True), (192, False, True, 4, 16)),
        (Fused, (160, True, False, 4, 16)),
    ):
        module = make()
        spec = spec_of(model_shape(module), module)
        assert (spec.intermediate_size, spec.gated_mlp, spec.tied, spec.num_kv_heads, spec.head_dim) == expected


@pytest.mark.slow  # imports transformers
def test_models_of_transformers_are_described_by_their_config_and_by_their_matrices_alike():
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=640, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)
    configs = [
        (transformers.LlamaConfig(**sizes, intermediate_size=176, num_key_value_heads=2), (176, True, False)),
        (transformers.Phi3Config(**sizes, intermediate_size=176, pad_token_id=0), (176, True, False)),  # gate and up in one
        (transformers.GPT2Config(vocab_size=640, n_embd=64, n_layer=3, n_head=4, n_positions=64), (256, False, True)),  # Conv1D
        (transformers.GPTNeoXConfig(**sizes, intermediate_size=256), (256, False, False)),
    ]
    for config, expected in configs:
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(config)
        shape = model_shape(module)
        for part in module.modules():
            part.__dict__.pop("config", None)
        for spec in (spec_of(shape, ConfigOnly(config)), spec_of(shape, module)):
            assert (spec.intermediate_size, spec.gated_mlp, spec.tied) == expected


class ConfigOnly(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
