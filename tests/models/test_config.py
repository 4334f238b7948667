"""The shapes: presets, Hugging Face's config.json, parameter counts, and what is refused."""

import json

import pytest
import torch

from lightning_5d.models import Llama, LlamaConfig, RopeScaling
from lightning_5d.models.config import PRESETS

ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def write(path, **keys):
    path.write_text(json.dumps(keys))
    return path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-13b", 13_998_904_320),  # these three: "Efficient Parallelization Layouts", V = 128,000, untied
        ("llama-30b", 33_768_557_056),
        ("llama-65b", 66_858_524_672),
        ("llama3-8b", 8_030_261_248),  # Hugging Face's model cards
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_presets_have_the_published_size(name, expected):
    assert LlamaConfig.from_preset(name).num_parameters == expected


CHANGES = [{"tie_word_embeddings": True}, {"head_dim": 24, "num_key_value_heads": 2}, {"num_hidden_layers": 1}]


@pytest.mark.parametrize(("name", "changes"), [(name, {}) for name in PRESETS] + [("tiny", changes) for changes in CHANGES])
def test_num_parameters_is_what_the_model_holds(name, changes):
    config = LlamaConfig.from_preset(name, **changes)
    with torch.device("meta"):
        model = Llama(config)
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters


def test_num_parameters_is_the_formula():
    c = LlamaConfig.from_preset("llama3-8b")
    h, layers, kv_share = c.hidden_size, c.num_hidden_layers, c.num_key_value_heads / c.num_attention_heads
    layer = 2 * h**2 + 2 * h**2 * kv_share + 3 * h * c.intermediate_size + 2 * h
    assert c.num_parameters == layers * layer + h + 2 * c.vocab_size * h


def test_dict_round_trip():
    config = LlamaConfig.from_preset("llama3-405b")
    assert config.rope_scaling == RopeScaling(**ROPE)
    assert LlamaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_config_json_of_llama_3_1_in_the_old_and_the_new_spelling(tmp_path):
    shape = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "bos_token_id": 128000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "attention_bias": False,
        "mlp_bias": False, "hidden_act": "silu", "attention_dropout": 0.0, "torch_dtype": "bfloat16",
    }  # fmt: skip
    old = write(tmp_path / "old.json", **shape, rope_theta=500000.0, rope_scaling={**ROPE, "rope_type": "llama3"})
    new = write(tmp_path / "new.json", **shape, rope_parameters={**ROPE, "rope_type": "llama3", "rope_theta": 500000.0})
    expected = LlamaConfig.from_preset("llama3-8b", max_position_embeddings=131072, rope_scaling=ROPE)
    assert LlamaConfig.from_json(old) == LlamaConfig.from_json(new) == expected


def test_config_json_defaults_are_hugging_faces(tmp_path):
    transformers = pytest.importorskip("transformers")
    ours, theirs = (
        LlamaConfig.from_json(write(tmp_path / "config.json", hidden_size=256)),
        transformers.LlamaConfig(hidden_size=256),
    )
    for name in set(ours.to_dict()) - {"rope_theta", "rope_scaling"}:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


def test_config_json_that_transformers_saves(tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
                                      rope_parameters={**ROPE, "rope_type": "llama3", "rope_theta": 1234.0})  # fmt: skip
    theirs.save_pretrained(tmp_path)
    ours = LlamaConfig.from_json(tmp_path)
    assert (ours.hidden_size, ours.num_key_value_heads, ours.tie_word_embeddings, ours.rope_theta) == (64, 2, True, 1234.0)
    assert ours.rope_scaling == RopeScaling(**ROPE)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window"),
        ({"model_type": "qwen2"}, "qwen2"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_attention_heads": 5, "hidden_size": 20, "num_key_value_heads": 2}, "num_key_value_heads"),
        ({"hidden_size": 100}, "num_attention_heads"),
        ({"hidden_size": 96}, "head_dim must be even"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_other_mathematics_is_refused_by_name(tmp_path, keys, named):
    file = write(tmp_path / "config.json", **keys)
    with pytest.raises(ValueError, match=named) as error:
        LlamaConfig.from_json(file)
    assert str(file) in str(error.value)


def test_unreadable_config_json(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        LlamaConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not a JSON file"):
        LlamaConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object"):
        LlamaConfig.from_json(tmp_path)


def test_misspelt_names_are_told():
    with pytest.raises(ValueError, match="Did you mean 'llama3-8b'"):
        LlamaConfig.from_preset("llama-3-8b")
    with pytest.raises(ValueError, match="Did you mean 'hidden_size'"):
        LlamaConfig.from_preset("tiny", hiden_size=3)
