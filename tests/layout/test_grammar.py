import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_5d.layout import CP_METHODS, SCHEDULES, Layout, LayoutError
from lightning_5d.layout_foreign import _SPELLINGS
from lightning_5d.layout_rules import DEFAULTS
from lightning_5d.layout_tokens import SIZES, WORDS
from tests.layout.strategies import layouts

_settings = settings(deadline=None, max_examples=60)


@_settings
@given(layouts())
def test_canonical_text_gives_the_same_layout_back(layout: Layout) -> None:
    text = str(layout)
    assert Layout.parse(text) == layout
    assert str(Layout.parse(text)) == text


@_settings
@given(layouts(), st.randoms(use_true_random=False))
def test_order_and_case_do_not_matter(layout: Layout, shuffler: random.Random) -> None:
    tokens = str(layout).split("_")
    shuffler.shuffle(tokens)
    assert Layout.parse("_".join(token.upper() if shuffler.random() < 0.5 else token for token in tokens)) == layout


@_settings
@given(layouts())
def test_replace_without_changes_and_dataclass_replace_keep_the_layout(layout: Layout) -> None:
    assert layout.replace() == layout
    assert dataclasses.replace(layout) == layout


_token = st.sampled_from([*WORDS, *(f"{name}{n}" for name in SIZES for n in (0, 1, 2, 3, 4))])


@_settings
@given(st.lists(_token, min_size=1, max_size=5).map("_".join))
def test_any_tokens_give_a_layout_or_an_error_with_strings_that_work(text: str) -> None:
    try:
        layout = Layout.parse(text)
    except LayoutError as error:
        assert error.nearest
        for name in error.nearest:
            assert str(Layout.parse(name)) == name
            assert repr(name) in str(error)
    else:
        assert Layout.parse(str(layout)) == layout


@_settings
@given(st.text(max_size=30) | st.text("0123456789_dtpcvszroingbfaue-= ", max_size=30))
def test_any_text_gives_a_layout_or_a_layout_error(text: str) -> None:
    try:
        layout = Layout.parse(text)
    except LayoutError as error:
        assert repr(text) in str(error)
    else:
        assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("zero0", {}),
        ("dp4_zero1", {"dp": 4, "zero": 1}),
        ("dp8_zero3_rep2", {"dp": 8, "zero": 3, "rep": 2}),
        ("tp2", {"tp": 2, "sp": True}),
        ("tp2_nosp", {"tp": 2, "sp": False}),
        ("cp2", {"cp": 2, "cp_method": "ring"}),
        ("cp4_ulysses", {"cp": 4, "cp_method": "ulysses"}),
        ("cp4_allgather", {"cp": 4, "cp_method": "allgather"}),
        ("pp2", {"pp": 2, "v": 1, "schedule": "1f1b"}),
        ("pp2_gpipe", {"pp": 2, "v": 1, "schedule": "gpipe"}),
        ("pp2_v3", {"pp": 2, "v": 3, "schedule": "interleaved"}),
        ("pp2_zb", {"pp": 2, "v": 1, "schedule": "zb"}),
        ("pp2_v2_zb", {"pp": 2, "v": 2, "schedule": "zb"}),
        ("pp2_zbv", {"pp": 2, "v": 2, "schedule": "zbv"}),
        ("pp2_dualpipev", {"pp": 2, "v": 2, "schedule": "dualpipev"}),
        ("mbs4", {"mbs": 4}),
        ("ep4", {"ep": 4}),
        ("ac", {"ac": 1}),
        ("ac3", {"ac": 3}),
        ("acsel", {"ac": "sel"}),
        ("tp4_pp2_zero1", {"tp": 4, "pp": 2, "zero": 1}),
    ],
)
def test_each_token_is_canonical_and_sets_its_fields(text: str, fields: dict) -> None:
    layout = Layout.parse(text)
    assert {name: getattr(layout, name) for name in fields} == fields
    assert layout == Layout(**fields)
    assert str(layout) == text
    plain = Layout()
    others = {"sp", "v", "schedule"} | set(fields)
    assert all(getattr(layout, f.name) == getattr(plain, f.name) for f in dataclasses.fields(Layout) if f.name not in others)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("ZERO1_PP2_TP4", "tp4_pp2_zero1"),
        ("tp2_sp", "tp2"),
        ("tp1_nosp_pp1_cp1_v1_rep1_ep1_zero0", "zero0"),
        ("pp2_1F1B", "pp2"),
        ("pp2_interleaved", "pp2_v2"),
        ("pp2_interleaved_v4", "pp2_v4"),
        ("pp2_zbv_v2", "pp2_zbv"),
        ("cp2_ring", "cp2"),
        ("ac1", "ac"),
        ("dp1", "dp1"),
    ],
)
def test_defaults_are_left_out(text: str, canonical: str) -> None:
    assert str(Layout.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        # what is wrong, what is allowed, what was meant
        ("tp4_pp3_zer01", ["unknown token 'zer01'", "zero0 to zero3", "Nearest that work: 'tp4_pp3_zero1'."]),
        ("ttp2", ["unknown token 'ttp2'", "tpN", "'tp2'."]),
        ("tp4_interleave_pp2", ["unknown token 'interleave'", "interleaved", "'tp4_pp2_v2'."]),
        ("pp2_1fb1", ["unknown token '1fb1'", "1f1b", "'pp2'."]),
        ("cp2_ulyses", ["unknown token 'ulyses'", "ulysses", "'cp2_ulysses'."]),
        ("tp2-pp2", ["unknown token 'tp2-pp2'", "'tp2_pp2'."]),
        ("tp2pp2", ["unknown token 'tp2pp2'", "'tp2_pp2'."]),
        ("tp=2", ["unknown token 'tp=2'", "'tp2'."]),
        (" tp2", ["unknown token ' tp2'", "'tp2'."]),
        ("tp\u0662", ["unknown token 'tp\u0662'", "tpN"]),
        ("qqq", ["unknown token 'qqq'", "dpN, tpN"]),
        ("zero4", ["'zero4'", "zero0, zero1, zero2 and zero3", "'zero3'"]),
        ("tp0", ["'tp0'", "whole number from 1", "'zero0'"]),
        ("pp0_tp2", ["'pp0'", "'tp2'"]),
        ("ac0", ["'ac0'", "from 1", "'ac'"]),
        ("tp", ["'tp'", "needs a whole number"]),
        ("tp04", ["'tp04'", "without leading zeros", "'tp4'"]),
        ("tp1000000", ["'tp1000000'", "to 999999"]),
        ("tp-2", ["'tp-2'"]),
        ("zbv2_pp2", ["'zbv2'", "takes no number", "'pp2_zbv'"]),
        ("", ["empty token", "'tp2_pp2_zero1'"]),
        ("tp2__pp2", ["empty token", "'tp2_pp2'"]),
        ("tp2_", ["empty token", "'tp2'"]),
        ("tp2_tp2", ["'tp2' is there twice", "one of a kind", "'tp2'"]),
        ("tp2_tp4", ["'tp2' and 'tp4' contradict", "'tp4'", "'tp2'"]),
        ("tp2_sp_nosp", ["'sp' and 'nosp' contradict", "'tp2_nosp'", "'tp2'"]),
        ("cp2_ring_ulysses", ["'ring' and 'ulysses' contradict", "'cp2_ulysses'", "'cp2'"]),
        ("pp2_gpipe_zb", ["'gpipe' and 'zb' contradict", "'pp2_gpipe'", "'pp2_zb'"]),
        ("ac_acsel", ["'ac' and 'acsel' contradict", "'acsel'"]),
        ("sp_ring_mbs0_mbs2", ["'mbs0'", "'mbs1'"]),
        ("ring_tp2", ["'ring' does nothing without context parallelism", "cpN with N > 1", "'tp2'", "'tp2_cp2'"]),
        ("cp1_ulysses", ["'ulysses' does nothing", "cpN with N > 1", "'cp2_ulysses'"]),
        ("sp_pp2", ["'sp' does nothing with tp1", "tpN with N > 1", "'pp2'", "'tp2_pp2'"]),
        ("gpipe", ["'gpipe' does nothing", "ppN with N > 1", "'pp2_gpipe'"]),
        ("1f1b_tp2", ["'1f1b' does nothing", "ppN with N > 1", "'tp2'"]),
        ("v2", ["'v2' needs a pipeline", "ppN with N > 1", "'pp2_v2'"]),
        ("pp2_v2_1f1b", ["'v2'", "1f1b has one stage per rank", "interleaved, zb, zbv and dualpipev", "'pp2_v2'"]),
        ("pp2_v3_gpipe", ["'v3'", "gpipe has one stage per rank", "interleaved and zb", "'pp2_gpipe'", "'pp2_v3'"]),
        ("pp2_v1_interleaved", ["'v1'", "v2 or more", "'pp2_v2'"]),
        ("pp2_v3_zbv", ["'v3'", "exactly two", "v2", "'pp2_zbv'"]),
        ("pp2_v1_dualpipev", ["'v1'", "exactly two", "'pp2_dualpipev'"]),
        ("rep2", ["'rep2' does nothing without sharding", "zero1, zero2 or zero3", "'zero1_rep2'"]),
        ("dp4_rep3_zero2", ["'rep3' does not divide dp4", "divisors of 4", "'dp4_zero2_rep2'"]),
        ("dp2_cp2_ep8", ["'ep8' does not divide dp·cp = 2·2 = 4", "divisors of 4", "'dp2_cp2_ep4'"]),
    ],
)
def test_a_wrong_string_names_the_token_what_is_allowed_and_what_is_near(text: str, parts: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    assert isinstance(caught.value, ValueError)
    for part in [repr(text), *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said", "nearest"),
    [
        ("2tp", "did you mean 'tp2'?", "tp2"),
        ("4x_pp2", None, "pp2"),
        ("tp=4", "did you mean 'tp4'?", "tp4"),
        ("tp 4", "did you mean 'tp4'?", "tp4"),
        ("tp4-pp2", "did you mean 'tp4_pp2'?", "tp4_pp2"),
        ("tp_4_zero_3", "tp needs a whole number", "tp4_zero3"),
        ("zero_3", "zero0, zero1, zero2 and zero3", "zero3"),
        ("tensor_parallel", "'tensor_parallel' is written 'tp2' here", "tp2"),
        ("tensor_model_parallel_size=8", "'tensor_model_parallel_size_8' is written 'tp8' here", "tp8"),
        ("pp2_TensorParallel", None, "pp2"),
        ("fsdp", "'fsdp' is written 'zero3' here", "zero3"),
        ("hybrid_shard", "'hybrid_shard' is written 'zero3_rep2' here", "zero3_rep2"),
        ("deepspeed_stage_2", "'deepspeed_stage_2' is written 'zero2' here", "zero2"),
        ("zero_stage_7", "'zero_stage_7' is written 'zero3' here", "zero3"),
        ("ddp", "'ddp' is written 'zero0' here", "zero0"),
        ("megatron", "'megatron' is written 'tp2_pp2_zero1' here", "tp2_pp2_zero1"),
        ("pp4_vpp_2", "'vpp_2' is written 'v2' here", "pp4_v2"),
        ("pp2_zb1p_recompute", "'zb1p' is written 'zb' here; 'recompute' is written 'ac' here", "pp2_zb_ac"),
    ],
)
def test_another_frameworks_spelling_says_how_it_is_written_here(text: str, said: str | None, nearest: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    assert caught.value.nearest == (nearest,)
    assert said is None or said in str(caught.value)


def test_every_foreign_name_leads_to_a_layout() -> None:
    """No pattern hides another, and what each stands for can be written."""
    for _, tokens in _SPELLINGS:
        said = tokens.replace("N", "2")
        beside = {"sp": "tp2_sp", "ring": "cp2_ring", "v2": "pp2_v2", "zb": "pp2_zb", "dualpipev": "pp2_dualpipev"}
        assert Layout.parse(beside.get(said, said))


def test_auto_is_no_layout_and_says_who_chooses() -> None:
    with pytest.raises(LayoutError, match="'auto' is no layout: sizes are named, not guessed; `lightning-5d advise` ranks"):
        Layout.parse("auto")


@pytest.mark.parametrize("value", [["tp2", "pp2"], None, 4, {"tp": 2}])
def test_parse_takes_one_string_only(value: object) -> None:
    with pytest.raises(LayoutError, match="a layout is one string such as 'tp2_pp2_zero1', not"):
        Layout.parse(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"tp": 0}, "tp=0"),
        ({"tp": -2}, "tp=-2"),
        ({"tp": 2.0}, "tp=2.0"),
        ({"pp": True}, "pp=True"),
        ({"dp": 0}, "dp=0"),
        ({"tp": 1_000_000}, "tp=1000000"),
        ({"zero": 4}, "zero=4; allowed is a whole number from 0 to 3. Nearest that work: 'zero3'"),
        ({"mbs": 0}, "mbs=0"),
        ({"ac": -1}, "ac=-1"),
        ({"ac": "all"}, "ac='all'; allowed are 0 (none), 1 (all layers), N (every Nth layer) and 'sel'"),
        ({"ac": True}, "ac=True"),
        ({"sp": "yes"}, "sp='yes'; allowed are True, False"),
        ({"tp": 2, "sp": 1}, "sp=1; allowed are True, False"),
        ({"sp": True}, "'sp' does nothing with tp1"),
        ({"schedule": "1F1B"}, "schedule='1F1B'; allowed are gpipe, 1f1b"),
        ({"cp": 2, "cp_method": "star"}, "cp_method='star'; allowed are ring, ulysses, allgather"),
        ({"cp_method": "ulysses"}, "'ulysses' does nothing with cp1"),
        ({"schedule": "gpipe"}, "'gpipe' does nothing with pp1"),
        ({"v": 2}, "'v2' needs a pipeline"),
        ({"pp": 2, "v": 3, "schedule": "zbv"}, "'v3': zbv has exactly two"),
        ({"rep": 2}, "'rep2' does nothing without sharding"),
        ({"dp": 4, "rep": 3, "zero": 1}, "'rep3' does not divide dp4"),
        ({"dp": 2, "ep": 4}, "'ep4' does not divide dp·cp = 2·1 = 2"),
    ],
)
def test_the_constructor_is_as_strict_as_the_parser(fields: dict, part: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout(**fields)
    assert part in str(caught.value)


def test_replace_lets_derived_fields_follow() -> None:
    assert Layout.parse("tp4").replace(tp=1) == Layout()
    assert Layout.parse("tp4_nosp").replace(tp=2) == Layout.parse("tp2_nosp")
    assert Layout.parse("pp2_v2").replace(v=1) == Layout.parse("pp2")
    assert Layout.parse("pp2").replace(schedule="zbv") == Layout.parse("pp2_zbv")
    with pytest.raises(LayoutError, match="'gpipe' does nothing"):
        Layout.parse("pp2_gpipe").replace(pp=1)


def test_sizes_derived_from_a_layout() -> None:
    layout = Layout.parse("dp3_tp4_cp2_pp5_v2")
    assert (layout.model_parallel_size, layout.world_size, layout.num_stages) == (40, 120, 10)
    with pytest.raises(LayoutError, match=r"'tp2' has no world size yet: call resolve\(world_size\)"):
        _ = Layout.parse("tp2").world_size


def test_a_layout_is_frozen_and_hashable() -> None:
    layout = Layout.parse("tp2")
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.tp = 4  # type: ignore[misc]
    assert {layout: 1}[Layout(tp=2)] == 1


def test_tables_of_the_grammar_agree_with_the_class() -> None:
    assert {field.name: field.default for field in dataclasses.fields(Layout)} == DEFAULTS
    assert {field for field, _ in WORDS.values()} | set(SIZES) == set(DEFAULTS)
    assert set(CP_METHODS) | set(SCHEDULES) < set(WORDS)
    # Lightning refuses names that contain these on Apple's GPUs.
    assert not any("ddp" in token or "deepspeed" in token for token in (*WORDS, *SIZES))
