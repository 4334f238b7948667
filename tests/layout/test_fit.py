"""Layouts against a number of ranks and against a model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_5d.layout import Layout, LayoutError, check_model, model_problems, suggest
from tests.layout.strategies import layouts

_settings = settings(deadline=None, max_examples=25)


@pytest.mark.parametrize(
    ("text", "world_size", "dp"),
    [
        ("tp4_pp2_zero1", 8, 1),
        ("tp4_pp2_zero1", 64, 8),
        ("zero3", 1, 1),
        ("dp2_tp2", 4, 2),
        ("cp2_ep4", 4, 2),
        ("zero2_rep3", 6, 6),
    ],
)
def test_resolve_fills_the_world_with_data_parallelism(text: str, world_size: int, dp: int) -> None:
    layout = Layout.parse(text)
    resolved = layout.resolve(world_size)
    assert resolved.dp == dp and resolved.world_size == world_size
    assert resolved == layout.replace(dp=dp)
    assert resolved.resolve(world_size) == resolved


@_settings
@given(layouts(resolved=True))
def test_a_layout_with_dp_resolves_at_its_own_world_size_only(layout: Layout) -> None:
    assert layout.resolve(layout.world_size) == layout
    assert layout.replace(dp=None).resolve(layout.world_size) == layout
    with pytest.raises(LayoutError):
        layout.resolve(layout.world_size + 1)


@pytest.mark.parametrize(
    ("text", "world_size", "parts"),
    [
        ("tp4", 6, ["tp4 = 4 does not divide the world size 6", "multiples of 4 ranks", "'tp3', 'tp2', 'tp6'"]),
        ("tp4_pp2_zero1", 12, ["tp4·pp2 = 8", "world size 12", "'tp3_pp2_zero1'"]),
        ("tp3_pp5", 64, ["tp3·pp5 = 15", "world size 64", "'tp2_pp4'"]),
        ("cp2_tp2_pp2", 4, ["tp2·pp2·cp2 = 8", "world size 4", "'tp2_pp2'"]),
        ("dp4", 2, ["dp4 = 4 ranks, but the world size is 2", "allowed is dp2", "'dp2'"]),
        (
            "dp2_tp2_zero3",
            8,
            ["dp2·tp2 = 4 ranks, but the world size is 8", "allowed is dp4", "'dp4_tp2_zero3', 'dp8_zero3', 'dp2_tp4_zero3'"],
        ),
        ("tp2_zero1_rep4", 12, ["'rep4' does not divide dp6", "divisors of 6", "'tp2_zero1_rep3'"]),
        ("ep8", 4, ["'ep8' does not divide dp·cp = 4·1 = 4", "divisors of 4", "'ep4', 'ep2'"]),
        ("tp2", 0, ["world size 0"]),
        ("tp2", "4", ["world size '4'"]),
    ],
)
def test_a_world_that_does_not_fit_names_both_numbers_and_what_fits(text: str, world_size: object, parts: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text).resolve(world_size)  # type: ignore[arg-type]
    for part in parts:
        assert part in str(caught.value)
    for name in caught.value.nearest:
        assert Layout.parse(name).resolve(world_size).world_size == world_size


@_settings
@given(layouts(), st.integers(1, 256))
def test_resolve_always_fits_or_says_what_would(layout: Layout, world_size: int) -> None:
    try:
        assert layout.resolve(world_size).world_size == world_size
    except LayoutError as error:
        assert error.nearest
        assert all(Layout.parse(name).resolve(world_size) for name in error.nearest)


def test_suggest_gives_the_nearest_first_and_no_more_than_asked() -> None:
    layout = Layout.parse("tp8_pp4_zero3")
    assert suggest(layout, lambda other: other.tp <= 4 and other.tp & 1 == 0) == ["tp4_pp4_zero3", "tp2_pp4_zero3"]
    assert suggest(layout, lambda other: other.zero < 2 and other.tp == 8, limit=1) == ["tp8_pp4_zero1"]
    assert suggest(layout, lambda _: False) == []


def test_suggest_changes_two_tokens_only_when_one_does_not_help() -> None:
    assert suggest(Layout.parse("tp3_pp3"), lambda other: other.tp % 3 and other.pp % 3, limit=2) == ["tp2_pp2", "tp2_pp4"]
    one = suggest(Layout.parse("tp3_pp3"), lambda other: bool(other.tp % 3))
    assert all("pp3" in name for name in one)


def test_suggest_keeps_the_number_of_ranks_of_a_resolved_layout() -> None:
    layout = Layout.parse("tp4_pp2").resolve(16)
    seen: list[Layout] = []
    names = suggest(layout, lambda other: seen.append(other) or other.tp != 4)
    assert names and all(other.world_size == 16 for other in seen)
    assert names[0] == "dp4_tp2_pp2"


def test_suggest_offers_to_leave_out_sequence_parallelism_and_to_fill_the_pipeline_at_once() -> None:
    assert "tp4_nosp" in suggest(Layout.parse("tp4"), lambda other: not other.sp and other.tp == 4)
    assert "pp4_gpipe" in suggest(Layout.parse("pp4"), lambda other: other.schedule == "gpipe")


@_settings
@given(layouts(), st.integers(1, 8))
def test_suggestions_are_canonical_and_satisfy_the_predicate(layout: Layout, modulus: int) -> None:
    def wanted(other: Layout) -> bool:
        return (other.tp * other.pp) % modulus == 0

    for name in suggest(layout, wanted):
        assert str(Layout.parse(name)) == name
        assert wanted(Layout.parse(name))


LLAMA_8B = {"num_heads": 32, "num_kv_heads": 8, "num_layers": 32, "seq_len": 8192, "batch_size_per_replica": 16}


@pytest.mark.parametrize(
    "text", ["zero3", "tp8_pp4_v2", "tp4_cp8", "cp4_tp8_ulysses", "pp16_zbv", "pp8_dualpipev", "mbs4_pp4", "ac32", "acsel"]
)
def test_a_model_that_fits_passes(text: str) -> None:
    check_model(Layout.parse(text), **LLAMA_8B)
    check_model(Layout.parse(text).resolve(1024 if "rep" in text else 512), **LLAMA_8B)
    assert model_problems(Layout.parse(text)) == []


@pytest.mark.parametrize(
    ("text", "sizes", "parts"),
    [
        ("tp3", {"num_heads": 32}, ["tp3 does not divide num_heads = 32", "'tp2', 'tp4'"]),
        ("tp8", {"num_kv_heads": 4}, ["tp8 does not divide num_kv_heads = 4", "'tp4', 'tp2'"]),
        ("pp8", {"num_layers": 6}, ["pp8 needs at least 8 layers, but num_layers = 6", "'pp6'"]),
        ("pp4_v2", {"num_layers": 6}, ["pp4·v2 = 8 stages need at least 8 layers, but num_layers = 6", "'pp3_v2'"]),
        ("tp4", {"seq_len": 126}, ["tp4 (sp) does not divide seq_len = 126", "'tp4_nosp'"]),
        ("tp4_cp2", {"seq_len": 8196}, ["tp4 (sp) does not divide seq_len / cp2 = 4098", "'tp4_nosp_cp2'"]),
        ("cp4", {"seq_len": 36}, ["2·cp4 = 8 does not divide seq_len = 36", "'cp3'"]),
        ("cp4_allgather", {"seq_len": 36}, ["2·cp4 = 8 does not divide seq_len = 36"]),
        ("cp8_ulysses", {"seq_len": 36}, ["cp8 does not divide seq_len = 36", "'cp4_ulysses'"]),
        ("tp2_cp8_ulysses", {"num_heads": 8}, ["cp8 does not divide num_heads / tp2 = 4", "'tp2_cp4_ulysses'"]),
        ("mbs4", {"batch_size_per_replica": 6}, ["mbs4 does not divide the batch size per data-parallel replica = 6", "'mbs3'"]),
        ("pp4", {"batch_size_per_replica": 2}, ["1f1b needs at least 4 micro-batches", "gives 2", "'pp4_gpipe', 'pp2'"]),
        ("pp4_mbs2", {"batch_size_per_replica": 4}, ["micro-batches of 2 gives 2", "'pp4_mbs1'"]),
        ("pp2_dualpipev", {"batch_size_per_replica": 2}, ["dualpipev needs at least 4 micro-batches for 4 stages", "gives 2"]),
        ("pp2_v2", {"batch_size_per_replica": 5}, ["interleaved needs micro-batches in equal rounds of at least pp2", "gives 5"]),
        ("ac8", {"num_layers": 4}, ["ac8 recomputes every 8th layer, but num_layers = 4", "'ac4'"]),
    ],
)
def test_what_does_not_divide_names_both_numbers_the_token_and_what_would(text: str, sizes: dict, parts: list[str]) -> None:
    layout = Layout.parse(text)
    with pytest.raises(LayoutError) as caught:
        check_model(layout, **sizes)
    for part in [f"layout '{layout}'", *parts]:
        assert part in str(caught.value)
    assert caught.value.nearest
    for name in caught.value.nearest:
        check_model(Layout.parse(name), **sizes)


def test_all_that_does_not_fit_is_said_at_once_with_layouts_of_the_same_world() -> None:
    layout = Layout.parse("tp3_pp2").resolve(12)
    with pytest.raises(LayoutError) as caught:
        check_model(layout, num_heads=32, num_kv_heads=8, num_layers=4, seq_len=128)
    assert all(
        f"tp3 {text}" in str(caught.value)
        for text in ("does not divide num_heads", "does not divide num_kv_heads", "(sp) does not divide seq_len")
    )
    assert caught.value.nearest[0] == "dp3_tp2_pp2"
    assert all(Layout.parse(name).world_size == 12 for name in caught.value.nearest)


@pytest.mark.parametrize(("schedule", "count"), [("gpipe", 2), ("zbv", 3), ("interleaved", 6), ("interleaved", 3), ("zb", 4)])
def test_schedules_that_take_fewer_micro_batches_are_not_refused(schedule: str, count: int) -> None:
    check_model(Layout.parse(f"pp4_{schedule}"), batch_size_per_replica=count)


def test_interleaved_rounds_are_those_of_torch() -> None:
    """``model_problems`` repeats a rule of torch's schedules; this notices when torch changes it."""
    import torch
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    from tests.ranks import run_ranks

    def accepted() -> list[int]:
        stages = [PipelineStage(torch.nn.Identity(), index, 4, torch.device("cpu")) for index in (0, 2)]
        counts = []
        for count in range(1, 9):
            try:
                ScheduleInterleaved1F1B(stages, count)
            except ValueError:
                continue
            counts.append(count)
        return counts

    layout = Layout.parse("pp2_v2")
    expected = [count for count in range(1, 9) if not model_problems(layout, batch_size_per_replica=count)]
    assert run_ranks(2, accepted, init=True)[0] == expected
