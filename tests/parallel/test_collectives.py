"""Collectives and elements a step, by kind and group: exactly what the design's table says, and nothing beside.

Bookkeeping of a step: the targets of all replicas (one number over dp), loss and logs (one message over the world), the norm
(one number over the world, when clipping), the gradients that tp ranks see in part (one message over tp, with sp), and the
log names' signature (16 bytes over pp).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.parallel.counting import Call, count, number, tally
from tests.parity.models import ROWS, SEQ, VOCAB, HandWritten, own_llama

LAYERS, WIDTH, MESSAGE = 4, 32, 32
GROUPS = LAYERS + 1
LAYER_PARAMETERS = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
REST_PARAMETERS = 2 * VOCAB * WIDTH + WIDTH
PAIR = (0, 1)
TARGETS, LOGS, NORM = (("all_reduce", PAIR, 1), ("all_reduce", PAIR, MESSAGE), ("all_reduce", PAIR, 1))


def llama() -> Any:
    return own_llama()


def expected_zero(zero: int, microbatches: int) -> Counter[Any]:
    if zero == 0:  # layers this small share one message: test_replicas.py has larger and smaller ones
        return Counter([("all_reduce", PAIR, LAYERS * LAYER_PARAMETERS + REST_PARAMETERS), TARGETS, LOGS, NORM])
    n = microbatches
    times = {1: (1, 1), 2: (1, n), 3: (2 * n, n)}[zero]
    calls: Counter[Any] = Counter()
    for kind, repeats in zip(("all_gather", "reduce_scatter"), times, strict=True):
        calls[(kind, PAIR, LAYER_PARAMETERS)] = LAYERS * repeats
        calls[(kind, PAIR, REST_PARAMETERS)] = repeats
    return calls + Counter([TARGETS, LOGS, NORM])


def counted_microbatches(zero: int) -> Counter[Any]:
    """Where each micro-batch is communicated, replicas tell each other how many they have: the most and the fewest."""
    return Counter([("all_reduce", PAIR, 2)] if zero >= 2 else [])


@pytest.mark.parametrize(("zero", "mbs"), [(0, 2), (1, 1), (2, 2), (3, 2)])
def test_zero_stages(zero: int, mbs: int) -> None:
    for calls, _ in count(f"dp2_zero{zero}_mbs{mbs}", 2, llama):
        assert tally(calls) == expected_zero(zero, ROWS // 2 // mbs) + counted_microbatches(zero)


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "repeats"), [(0, 1), (1, 1), (2, 3), (3, 3)])
def test_accumulated_batches_reduce_once(zero: int, repeats: int) -> None:
    for calls, _ in count(f"dp2_zero{zero}", 2, llama, accumulate_grad_batches=3):
        assert tally(calls) == expected_zero(zero, repeats) + Counter([TARGETS, LOGS] * 2)


def hidden_elements() -> int:
    return ROWS * SEQ * WIDTH


def test_tensor_parallel_with_sequence_parallel() -> None:
    embedding_and_norms = 2 * LAYERS * WIDTH + WIDTH
    for calls, _ in count("tp2", 2, llama):
        big = [c for c in calls if c.numel > embedding_and_norms]
        assert number(big, "all_gather") + number(big, "reduce_scatter") == 8 * LAYERS + 4
        # Beside the layers: the embedding's rows are summed, the split is gathered backward, the head gathers and scatters.
        hidden = [c for c in big if c.numel == hidden_elements() and c.kind != "all_reduce"]
        assert number(hidden, "all_gather") == number(hidden, "reduce_scatter") + 1 == 4 * LAYERS + 2
        layers = sum(c.moved for c in hidden) - 3 * hidden_elements() / 2
        assert layers == LAYERS * 8 * SEQ * ROWS * WIDTH * (2 - 1) / 2
        logits = Call("all_gather", PAIR, ROWS * SEQ * VOCAB)
        assert [c for c in big if c not in hidden] == [Call("all_reduce", PAIR, hidden_elements()), logits]
        partial = ("all_reduce", PAIR, embedding_and_norms)
        assert tally([c for c in calls if c not in big]) == Counter([LOGS, NORM, partial])


def test_tensor_parallel_without_sequence_parallel() -> None:
    for calls, _ in count("tp2_nosp", 2, llama):
        hidden = [c for c in calls if c.numel == hidden_elements()]
        # Beside the layers' four: the embedding's rows forward, the head's input backward.
        assert tally(hidden) == Counter({("all_reduce", PAIR, hidden_elements()): 4 * LAYERS + 2})
        per_layer = hidden[0].moved * 4
        assert per_layer == 8 * SEQ * ROWS * WIDTH * (2 - 1) / 2
        assert tally([c for c in calls if c not in hidden]) == Counter([LOGS, NORM, ("all_gather", PAIR, ROWS * SEQ * VOCAB)])


@pytest.mark.parametrize("layout", ["pp2_mbs2", "pp2_gpipe_mbs2"])
def test_pipeline_sends_one_hidden_state_a_boundary_and_direction(layout: str) -> None:
    (first, _), (last, _) = count(layout, 2, llama)
    n, message = ROWS // 2, 2 * SEQ * WIDTH
    for calls in (first, last):
        messages = Counter({("send", PAIR, message): n, ("recv", PAIR, message): n})
        assert tally(calls) == messages + Counter([LOGS, NORM, ("broadcast", PAIR, 2)])


class LogsMuch(HandWritten):
    """Logs of all kinds, most with ``sync_dist``."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for index in range(6):
            self.log(f"more_{index}", loss * index, sync_dist=True, on_epoch=True)
        return loss


@pytest.mark.parametrize("layout", ["dp2_zero1", "tp2", "pp2"])
def test_logging_costs_no_collective(layout: str) -> None:
    few, many = (count(layout, 2, make)[0][0] for make in (HandWritten, LogsMuch))
    assert tally(few) == tally(many)


@pytest.mark.parametrize("layout", ["dp2_zero1", "dp2_zero3", "tp2", "zero0"])
def test_no_host_synchronisation(layout: str) -> None:
    world_size = 1 if layout == "zero0" else 2
    for _, num_host_syncs in count(layout, world_size, LogsMuch, blind=True, val_check_interval=1.0):
        assert num_host_syncs == 0


@pytest.mark.slow
def test_dimensions_do_not_disturb_each_other() -> None:
    """dp2·tp2·pp2 on eight ranks: each group sees its own collectives only, dp once a step."""
    for rank, (calls, _) in enumerate(count("dp2_tp2_pp2_zero1_mbs1", 8, llama)):
        dp, tp, n = tuple(sorted((rank, rank ^ 2))), tuple(sorted((rank, rank ^ 1))), ROWS // 2
        assert number(calls, "all_gather", dp) == number(calls, "reduce_scatter", dp) == LAYERS // 2 + 1
        assert number(calls, "all_reduce", dp) == 1
        edge = 1 if rank < 4 else 2  # the first stage's split backward; the last stage's head and its logits
        assert number(calls, "all_gather", tp) == n * (4 * LAYERS // 2 + edge)
        assert number(calls, "send") == number(calls, "recv") == n
        assert number(calls, "all_reduce", tuple(range(8))) == 2
