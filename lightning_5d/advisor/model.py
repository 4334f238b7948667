"""What the advisor must know of a model: the numbers that set its size, its memory and its operations."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any


class ModelError(ValueError):
    """The model's description is missing something, or contradicts itself."""


_BOUNDS = {
    "num_layers": (1, 10_000),
    "hidden_size": (1, 1_000_000),
    "num_heads": (1, 100_000),
    "num_kv_heads": (1, 100_000),
    "intermediate_size": (1, 10_000_000),
    "vocab_size": (1, 100_000_000),
    "head_dim": (1, 1_000_000),
    "num_experts": (0, 100_000),
    "experts_per_token": (0, 100_000),
    "expert_intermediate_size": (0, 10_000_000),
    "shared_intermediate_size": (0, 10_000_000),
    "num_dense_layers": (0, 10_000),
}
"""Smallest and largest value of each size of a `ModelSpec`: far above any model, and small enough to compute with."""


def _whole(model: str, key: str, value: Any, field: str) -> int:
    """`value` as a whole number within the bounds of `field`; `key` is what it is called where it comes from."""
    low, high = _BOUNDS[field]
    is_whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole or not low <= value <= high:
        raise ModelError(f"{model}: {key} must be a whole number from {low} to {high:,}, not {reprlib.repr(value)}")
    return int(value)


def _flag(model: str, key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ModelError(f"{model}: {key} must be true or false, not {reprlib.repr(value)}")
    return value


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer, by Hugging Face's names. Sizes are counts, not bytes."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    tied: bool = False
    head_dim: int | None = None
    """Width of one head; `hidden_size / num_heads` when not given."""
    gated_mlp: bool = True
    """Three matrices with a gate (SwiGLU), or two (GELU)."""
    num_experts: int = 0
    """Routed experts of a mixture-of-experts layer; 0 for a dense model."""
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    """Width of all shared experts together."""
    num_dense_layers: int = 0
    """Leading layers that keep the dense MLP in a mixture-of-experts model."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ModelError(f"a model's name must be a string, not {reprlib.repr(self.name)}")
        for field in _BOUNDS:
            if field != "head_dim" or self.head_dim is not None:
                object.__setattr__(self, field, _whole(self.name, field, getattr(self, field), field))
        for field in ("tied", "gated_mlp"):
            _flag(self.name, field, getattr(self, field))
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                raise ModelError(f"{self.name}: hidden_size {self.hidden_size} is not a multiple of {self.num_heads} heads")
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.name}: {self.num_heads} heads do not share {self.num_kv_heads} key/value heads evenly")
        if self.num_experts and not (1 <= self.experts_per_token <= self.num_experts and self.expert_intermediate_size > 0):
            raise ModelError(
                f"{self.name}: {self.num_experts} experts need experts_per_token between 1 and that number and a width each"
            )

    @property
    def attention_width(self) -> int:
        """Width of all query heads together (`hidden_size` in Llama)."""
        assert self.head_dim is not None
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together."""
        assert self.head_dim is not None
        return self.num_kv_heads * self.head_dim

    @property
    def num_moe_layers(self) -> int:
        return max(self.num_layers - self.num_dense_layers, 0) if self.num_experts else 0

    @property
    def dense_layer_parameters(self) -> int:
        """Parameters of one layer with the dense MLP: `2h² + 2h²·kv/a + 3·h·ffn + 2h` for a Llama."""
        return self._attention_parameters + (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size

    @property
    def moe_layer_shared_parameters(self) -> int:
        """Parameters of one mixture-of-experts layer that every token uses: attention, norms, router, shared experts."""
        return (
            self._attention_parameters
            + self.hidden_size * self.num_experts
            + 3 * self.hidden_size * self.shared_intermediate_size
        )

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts of one layer."""
        return 3 * self.hidden_size * self.expert_intermediate_size * self.num_experts

    @property
    def _attention_parameters(self) -> int:
        h = self.hidden_size
        return 2 * h * self.attention_width + 2 * h * self.kv_width + 2 * h

    @property
    def num_parameters(self) -> int:
        """All parameters, `L·(2h² + 2h²·kv/a + 3·h·ffn + 2h) + h + 2Vh` for an untied Llama."""
        return self._parameters(self.expert_parameters)

    @property
    def num_active_parameters(self) -> int:
        """Parameters one token passes through; equals `num_parameters` in a dense model."""
        return self._parameters(3 * self.hidden_size * self.expert_intermediate_size * self.experts_per_token)

    def _parameters(self, experts: int) -> int:
        moe = self.num_moe_layers
        layers = (self.num_layers - moe) * self.dense_layer_parameters + moe * (self.moe_layer_shared_parameters + experts)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return layers + embeddings + self.hidden_size

    def palm_flops_per_token(self, seq_len: int) -> float:
        """`6N + 12·L·h·s` (PaLM, appendix B), full attention; N holds a tied matrix once, of a mixture what one token uses."""
        return 6.0 * self.num_active_parameters + 12.0 * self.num_layers * self.attention_width * seq_len


def _llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool = False) -> ModelSpec:
    return ModelSpec(name, layers, hidden, heads, kv_heads, ffn, vocab, tied)


PRESETS: dict[str, ModelSpec] = {
    m.name: m
    for m in (
        _llama("tiny", 4, 128, 8, 4, 352, 1024),
        # As the "Efficient Parallelization Layouts" paper ran them.
        _llama("llama-13b", 40, 5120, 40, 40, 13824, 128000),
        _llama("llama-30b", 60, 6656, 52, 52, 17888, 128000),
        _llama("llama-65b", 80, 8192, 64, 64, 22016, 128000),
        # As the Ultra-Scale Playbook ran them.
        _llama("playbook-1b", 16, 2048, 32, 32, 8192, 131072, True),
        _llama("playbook-3b", 28, 3072, 32, 32, 8192, 131072, True),
        _llama("playbook-80b", 80, 8192, 64, 64, 28672, 131072),
        _llama("llama2-7b", 32, 4096, 32, 32, 11008, 32000),
        _llama("llama2-13b", 40, 5120, 40, 40, 13824, 32000),
        _llama("llama2-70b", 80, 8192, 64, 8, 28672, 32000),
        _llama("llama3-8b", 32, 4096, 32, 8, 14336, 128256),
        _llama("llama3-70b", 80, 8192, 64, 8, 28672, 128256),
        _llama("llama3-405b", 126, 16384, 128, 8, 53248, 128256),
        ModelSpec(
            "mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, num_experts=8, experts_per_token=2, expert_intermediate_size=14336
        ),
        ModelSpec(
            "qwen3-30b-a3b",
            48,
            2048,
            32,
            4,
            6144,
            151936,
            head_dim=128,
            num_experts=128,
            experts_per_token=8,
            expert_intermediate_size=768,
        ),
        ModelSpec(
            "qwen3-235b-a22b",
            94,
            4096,
            64,
            4,
            12288,
            151936,
            head_dim=128,
            num_experts=128,
            experts_per_token=8,
            expert_intermediate_size=1536,
        ),
    )
}

_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
_GELU_TYPES = ("gpt2", "gpt_neox", "mpt", "opt", "bloom", "falcon", "phi")


def describe_model(model: Any) -> ModelSpec:
    """The `ModelSpec` of a preset's name, a config.json (path, directory, dict), or an object with Hugging Face's names.

    Raises:
        ModelError: unknown preset, unreadable or incomplete description; the message says what is missing.
    """
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, (str, Path)):
        return _from_name_or_path(str(model))
    if isinstance(model, Mapping):
        return _from_mapping(model, str(model.get("_name_or_path") or model.get("name") or model.get("model_type") or "model"))
    if hasattr(model, "to_dict"):  # a transformers config: nested and defaulted values are in the dict
        return _from_mapping(
            model.to_dict(), str(getattr(model, "name_or_path", "") or getattr(model, "model_type", "") or "model")
        )
    names = {k: getattr(model, k) for k in (*_REQUIRED, *_OPTIONAL) if hasattr(model, k)}
    if not names:
        raise ModelError(f"cannot describe a model from {type(model).__name__}: {_accepted()}")
    return _from_mapping(names, str(getattr(model, "name", None) or type(model).__name__))


def _accepted() -> str:
    needs = ", ".join(_REQUIRED)
    return f"give a preset ({', '.join(PRESETS)}), the path of a Hugging Face config.json, a dict or a config with {needs}"


def _from_name_or_path(text: str) -> ModelSpec:
    if text.lower() in PRESETS:
        return PRESETS[text.lower()]
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ModelError(f"no preset and no file is called {text!r}: {_accepted()}")
    try:
        if path.suffix in (".yaml", ".yml"):
            import yaml

            loaded = yaml.safe_load(path.read_text())
        else:
            loaded = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    except Exception as error:  # yaml's own error is no ValueError
        raise ModelError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(loaded, Mapping):
        raise ModelError(f"{path} holds a {type(loaded).__name__}, not the names and values of a model's configuration")
    name = path.parent.name if path.name == "config.json" else path.stem
    config = _config_of_recipe(loaded)
    try:
        return _from_mapping(config, name)
    except ModelError as error:
        raise ModelError(f"{path}: {str(error).removeprefix(f'{name}: ')}") from None


def _config_of_recipe(loaded: Mapping[str, Any]) -> Mapping[str, Any]:
    """A recipe's `model: {init_args: {config: ...}}` or `model: {config: ...}`; anything else is returned as it is."""
    model = loaded.get("model")
    if not isinstance(model, Mapping):
        return loaded
    args = model.get("init_args", model)
    config = args.get("config", args) if isinstance(args, Mapping) else args
    if isinstance(config, str):
        return model_config(_from_name_or_path(config))
    if isinstance(config, Mapping):
        return config.get("init_args", config)
    return loaded


def model_config(spec: ModelSpec) -> dict[str, Any]:
    """A description under Hugging Face's names, as `describe_model` reads it."""
    config: dict[str, Any] = {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied,
    }
    if spec.head_dim != spec.hidden_size // spec.num_heads:
        config["head_dim"] = spec.head_dim
    if not spec.gated_mlp:
        config["gated_mlp"] = False
    if spec.num_experts:
        config |= {
            "num_experts": spec.num_experts,
            "num_experts_per_tok": spec.experts_per_token,
            "moe_intermediate_size": spec.expert_intermediate_size,
            "shared_expert_intermediate_size": spec.shared_intermediate_size,
            "first_k_dense_replace": spec.num_dense_layers,
        }
    return config


_OPTIONAL = (
    "num_key_value_heads",
    "tie_word_embeddings",
    "head_dim",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "n_shared_experts",
    "first_k_dense_replace",
    "hidden_act",
    "model_type",
    "gated_mlp",
)
# Older families keep their own words for the same things.
_SYNONYMS = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "kv_n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
}


def _from_mapping(config: Mapping[str, Any], name: str) -> ModelSpec:
    if "text_config" in config and isinstance(config["text_config"], Mapping):
        config = config["text_config"]

    def whole(key: str, field: str, default: int | None = None) -> int:
        found = next((k for k in (key, *_SYNONYMS.get(key, ())) if config.get(k) is not None), None)
        if found is not None:
            return _whole(name, found, config[found], field)
        if default is None:
            raise ModelError(f"{name}: {key} is missing; the description needs {', '.join(_REQUIRED)}")
        return default

    def flag(key: str, default: bool) -> bool:
        return default if config.get(key) is None else _flag(name, key, config[key])

    hidden, heads = whole("hidden_size", "hidden_size"), whole("num_attention_heads", "num_heads")
    gelu = str(config.get("model_type")) in _GELU_TYPES
    width = whole("intermediate_size", "intermediate_size", 4 * hidden if gelu else None)
    experts = next((n for k in ("num_experts", "num_local_experts", "n_routed_experts") if (n := whole(k, "num_experts", 0))), 0)
    expert_width = whole("moe_intermediate_size", "expert_intermediate_size", 0) or width
    shared_width = whole("shared_expert_intermediate_size", "shared_intermediate_size", 0)
    shared = shared_width or whole("n_shared_experts", "num_experts", 0) * expert_width
    per_token = whole("num_experts_per_tok", "experts_per_token", 0)
    dense_layers = whole("first_k_dense_replace", "num_dense_layers", 0)
    return ModelSpec(
        name=name,
        num_layers=whole("num_hidden_layers", "num_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=whole("num_key_value_heads", "num_kv_heads", heads),
        intermediate_size=width,
        vocab_size=whole("vocab_size", "vocab_size"),
        tied=flag("tie_word_embeddings", gelu),
        head_dim=None if config.get("head_dim") is None else whole("head_dim", "head_dim"),
        gated_mlp=flag("gated_mlp", not gelu),
        num_experts=experts,
        experts_per_token=per_token if experts else 0,
        expert_intermediate_size=expert_width if experts else 0,
        shared_intermediate_size=shared if experts else 0,
        num_dense_layers=dense_layers if experts else 0,
    )
