"""The monitor's parts alone: bubbles, tokens of a batch, the line, the stopwatch."""

from collections import UserDict

import pytest
import torch

from lightning_5d.callbacks.bubble import bubble_share
from lightning_5d.callbacks.console import console_line, short_number
from lightning_5d.callbacks.stopwatch import Stopwatch
from lightning_5d.callbacks.tokens import find_token_ids
from lightning_5d.layout import Layout
from tests.callbacks.models import FakeClock


@pytest.mark.parametrize(
    ("layout", "num_microbatches", "share"),
    [
        ("pp4", 8, 3 / 8),
        ("pp4_gpipe", 8, 3 / 8),
        ("pp4_v2", 8, 3 / 16),
        ("pp8_v4_interleaved", 8, 7 / 32),
        # With F = 1, gradient of inputs 1 and of weights 1, simulated action by action:
        ("pp4_v2_zb", 8, 25.5 / 24 - 1),
        ("pp4_zbv", 8, 25.5 / 24 - 1),
        ("pp4_dualpipev", 8, 27 / 24 - 1),
        ("tp4", 8, 0),
    ],
)
def test_bubbles_by_closed_form(layout, num_microbatches, share):
    assert bubble_share(Layout.parse(layout), num_microbatches) == pytest.approx(share)


def test_a_step_without_micro_batches_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        bubble_share(Layout.parse("pp2"), 0)


IDS = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": IDS, "labels": torch.zeros(9, 9, dtype=torch.long)},
        {"labels": torch.zeros(9, 9, dtype=torch.long), "input_ids": IDS},
        UserDict(input_ids=IDS),  # as transformers' BatchEncoding
        (IDS, torch.zeros(9, 9, dtype=torch.long)),
        [torch.zeros(2, 3), {"mask": torch.ones(9, 9, dtype=torch.bool)}, {"deep": [torch.zeros(9, dtype=torch.long), IDS]}],
        IDS,
    ],
)
def test_token_ids_of_a_batch(batch):
    assert find_token_ids(batch) is IDS


def test_token_ids_under_another_name_or_none():
    assert find_token_ids({"input_ids": torch.zeros(9, 9, dtype=torch.long), "tokens": IDS}, key="tokens") is IDS
    assert find_token_ids({"x": torch.zeros(2, 3), "y": torch.zeros(2, dtype=torch.long), "name": "ab"}) is None
    assert find_token_ids(None) is None


def test_the_line():
    metrics = {"perf/tokens_per_s_per_gpu": 1234.0, "perf/mfu": 0.4134, "perf/peak_memory_gib": 2.06, "perf/step_time_s": 0.5}
    assert console_line(120, 3.21, metrics) == "step 120 | loss 3.210 | 1.23K tok/s/device | MFU 41.3% | mem 2.1 GiB"
    assert console_line(120, 3.21, metrics, measured_peak=True).split(" | ")[3] == "MFU 41.3% of measured peak"
    assert console_line(7, None, {"perf/step_time_s": 0.5}) == "step 7 | 0.5 s/step"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (12.34, "12.3"), (999.4, "999"), (999.9, "1K"), (1234, "1.23K"), (5.6e7, "56M"), (7e9, "7G"), (2e12, "2T")],
)
def test_short_numbers(value, text):
    assert short_number(value) == text


def test_a_stopwatch_leaves_pauses_out_and_waits_for_the_device_at_every_edge():
    clock, waits = FakeClock(), []

    def device_finishes():
        waits.append(clock.now_s)
        clock.now_s += 1  # work still queued, charged to the span that queued it

    watch = Stopwatch(clock, device_finishes)
    watch.start()
    clock.now_s += 10
    with watch.paused():
        clock.now_s += 100
        with watch.paused():
            clock.now_s += 100
        clock.now_s += 100
    clock.now_s += 10
    assert watch.lap() == 10 + 1 + 10 + 1
    assert watch.lap() == 1
    watch.pause()
    clock.now_s += 100
    assert watch.lap() == 1
    assert len(waits) == 1 + 2 + 1 + 1 + 1 + 1
    with pytest.raises(AssertionError):
        watch.resume()
        watch.resume()
