"""What the advisor reads of a model, from every form it takes, and what it says of a broken one."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from lightning_5d.advisor import ModelSpec
from lightning_5d.advisor.model import PRESETS, ModelError, describe_model, model_config
from lightning_5d.models import LlamaConfig

CONFIG = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-13b", 13_998_904_320),
        ("llama-30b", 33_768_557_056),
        ("llama-65b", 66_858_524_672),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert PRESETS[name].num_parameters == parameters


def test_flops_of_the_paper() -> None:
    assert PRESETS["llama-13b"].palm_flops_per_token(2048) == 8.9026590720e10


def test_a_mixture_counts_what_a_token_uses() -> None:
    mixtral = PRESETS["mixtral-8x7b"]
    assert mixtral.num_active_parameters == pytest.approx(12.9e9, rel=0.01)
    assert mixtral.palm_flops_per_token(4096) < 0.4 * 6 * mixtral.num_parameters


@pytest.mark.parametrize("preset", ["llama-13b", "llama-30b", "llama-65b", "llama3-8b", "llama3-70b", "llama3-405b", "tiny"])
def test_presets_agree_with_the_llama_that_trains(preset: str) -> None:
    described = describe_model(LlamaConfig.from_preset(preset))
    named = PRESETS[preset]
    assert {**described.__dict__, "name": ""} == {**named.__dict__, "name": ""}


def test_every_form_of_a_description_is_the_same(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"model": {"class_path": "lightning_5d.models.LlamaModule", "init_args": {"config": CONFIG}}}))
    preset = tmp_path / "preset.yaml"
    preset.write_text("model: {class_path: x, init_args: {config: llama3-8b}}")
    with_dict = SimpleNamespace(to_dict=lambda: CONFIG, model_type="llama", name_or_path="")

    @dataclass
    class Config:
        num_hidden_layers: int = 32
        hidden_size: int = 4096
        num_attention_heads: int = 32
        num_key_value_heads: int = 8
        intermediate_size: int = 14336
        vocab_size: int = 128256
        tie_word_embeddings: bool = False

    for form in ("llama3-8b", CONFIG, str(tmp_path), tmp_path / "config.json", str(recipe), str(preset), with_dict, Config()):
        assert describe_model(form).num_parameters == 8_030_261_248, form


def test_a_transformers_config_is_read() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig()
    found = describe_model(config)
    assert (found.num_experts, found.experts_per_token, found.expert_intermediate_size) == (8, 2, 14336)
    assert found.num_parameters == PRESETS["mixtral-8x7b"].num_parameters
    gpt2 = describe_model(transformers.GPT2Config())
    assert not gpt2.gated_mlp and gpt2.tied and gpt2.intermediate_size == 4 * 768


@pytest.mark.parametrize("name", ["llama3-70b", "mixtral-8x7b", "qwen3-235b-a22b"])
def test_a_description_survives_its_own_config(name: str) -> None:
    assert describe_model(model_config(PRESETS[name])).num_parameters == PRESETS[name].num_parameters


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({k: v for k, v in CONFIG.items() if k != "hidden_size"}, "hidden_size is missing"),
        ({**CONFIG, "hidden_size": "many"}, "hidden_size must be a whole number"),
        ({**CONFIG, "hidden_size": 4095}, "not a multiple of 32 heads"),
        ({**CONFIG, "num_key_value_heads": 7}, "do not share 7 key/value heads"),
        ({**CONFIG, "num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1"),
        ({**CONFIG, "num_experts": 8}, "experts need experts_per_token"),
        ("llama-14b", "no preset and no file is called 'llama-14b'"),
        (object(), "cannot describe a model from object"),
    ],
)
def test_what_is_wrong_is_named(wrong: object, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        describe_model(wrong)


@pytest.mark.parametrize(
    ("content", "said"), [("{not json", "cannot be read"), ("[1, 2]", "holds a list"), ("\x00\xff", "cannot be read")]
)
def test_a_broken_file_is_named(tmp_path, content: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=said):
        describe_model(path)


def test_a_spec_is_taken_as_it_is() -> None:
    spec = ModelSpec("x", 2, 64, 4, 4, 128, 100)
    assert describe_model(spec) is spec
