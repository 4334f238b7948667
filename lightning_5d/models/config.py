"""The shape of a Llama, under Hugging Face's names, so that a ``config.json`` loads as it is."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The published runs train with V = 128,000, untied, as many key-value heads as heads (Hagemann et al. 2023,
# "Efficient Parallelization Layouts for Large-Scale Distributed Model Training").
_PAPER = {"vocab_size": 128_000, "max_position_embeddings": 8192}
_LLAMA3 = {
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}
_LLAMA31_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {**_sizes(128, 352, 4, 8), "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 1024},
    "llama-13b": {**_sizes(5120, 13_824, 40, 40), **_PAPER},
    "llama-30b": {**_sizes(6656, 17_888, 60, 52), **_PAPER},
    "llama-65b": {**_sizes(8192, 22_016, 80, 64), **_PAPER},
    "llama3-8b": {**_sizes(4096, 14_336, 32, 32), **_LLAMA3},
    "llama3-70b": {**_sizes(8192, 28_672, 80, 64), **_LLAMA3},
    # There is no Llama 3 of this size but 3.1, whose rotary frequencies are scaled for long contexts.
    "llama3-405b": {
        **_sizes(16_384, 53_248, 126, 128),
        **_LLAMA3,
        "max_position_embeddings": 131_072,
        "rope_scaling": _LLAMA31_ROPE,
    },
}

_SUPPORTED_MODEL_TYPES = ("llama", "mistral")  # Mistral without a sliding window is the same mathematics
# Keys of a config.json that would change the mathematics, and the values under which they do not.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", "swish", None),
    "attention_dropout": (0, 0.0, None),
    "sliding_window": (None,),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
}


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's change of the rotary frequencies ("llama3" in Hugging Face's configurations)."""

    factor: float
    """Long wavelengths are stretched by this factor."""
    low_freq_factor: float
    """Wavelengths above original_max_position_embeddings / low_freq_factor are stretched fully."""
    high_freq_factor: float
    """Wavelengths below original_max_position_embeddings / high_freq_factor are left alone; between the two, a blend."""
    original_max_position_embeddings: int
    """The context length of the model before it was stretched, in tokens."""


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama. The defaults are Hugging Face's, so a key that a ``config.json`` omits means the same here.

    Raises:
        ValueError: a size is not positive, heads are not a multiple of key-value heads, or the head size is odd.
    """

    vocab_size: int = 32_000
    """Rows of the embedding and of the output head."""
    hidden_size: int = 4096
    """Width of the residual stream."""
    intermediate_size: int = 11_008
    """Width of the gated MLP."""
    num_hidden_layers: int = 32
    """Number of decoder layers."""
    num_attention_heads: int = 32
    """Number of query heads."""
    num_key_value_heads: int | None = None
    """Number of key and value heads; None: as many as query heads (no grouping)."""
    head_dim: int | None = None
    """Width of one head; None: hidden_size / num_attention_heads."""
    max_position_embeddings: int = 2048
    """The longest sequence the model is meant for, in tokens. Rotary positions set no hard limit: nothing is refused."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square before the root."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1's frequency scaling; None: plain rotary positions. A mapping is converted."""
    tie_word_embeddings: bool = False
    """Whether the output head is the embedding."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights; the two projections into the residual stream get 1/sqrt(2 layers) of it."""

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"LlamaConfig: {field} must be a positive integer, got {value!r}.")
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"LlamaConfig: hidden_size {self.hidden_size} does not divide by num_attention_heads "
                    f"{self.num_attention_heads}. Give head_dim, or sizes that divide."
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.head_size % 2:
            raise ValueError(f"LlamaConfig: head_dim must be even for rotary positions, got {self.head_dim}.")
        if self.num_attention_heads % self.kv_heads:
            raise ValueError(
                f"LlamaConfig: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.kv_heads}."
            )
        if isinstance(self.rope_scaling, Mapping):
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))

    @property
    def kv_heads(self) -> int:
        """num_key_value_heads with its default filled in."""
        assert self.num_key_value_heads is not None
        return self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """head_dim with its default filled in."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def num_parameters(self) -> int:
        """Of the whole model: L (2 h a d + 2 h kv d + 3 h ffn + 2 h) + h + V h (twice when untied), d the head size."""
        h, d = self.hidden_size, self.head_size
        attention = 2 * h * self.num_attention_heads * d + 2 * h * self.kv_heads * d
        layer = attention + 3 * h * self.intermediate_size + 2 * h
        embeddings = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + h + embeddings

    def to_dict(self) -> dict[str, Any]:
        """Plain types only; ``LlamaConfig(**config.to_dict()) == config``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> LlamaConfig:
        """A named shape, with some fields changed: ``from_preset("llama3-8b", num_hidden_layers=2)``."""
        if name not in PRESETS:
            near = difflib.get_close_matches(name, PRESETS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown model preset {name!r}.{hint} Presets: {', '.join(PRESETS)}.")
        return cls.from_dict({**PRESETS[name], **changes})

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> LlamaConfig:
        """From a mapping of this class's field names; an unknown name is an error, as it is most likely misspelt."""
        names = [f.name for f in dataclasses.fields(cls)]
        for key in fields:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"LlamaConfig has no field {key!r}.{hint} Fields: {', '.join(names)}.")
        return cls(**fields)

    @classmethod
    def from_json(cls, path: str | Path) -> LlamaConfig:
        """From a Hugging Face ``config.json`` (or the folder that holds one), of transformers 4 or 5.

        Keys that do not concern the mathematics are ignored.

        Raises:
            ValueError: the file is not JSON, or asks for mathematics that this Llama does not have.
        """
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{file}: no such file. Give a Hugging Face config.json or the folder that holds one.") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}: not a JSON file: {error}") from error
        if not isinstance(raw, dict):
            raise ValueError(f"{file}: expected a JSON object, got {type(raw).__name__}.")
        _refuse_other_mathematics(file, raw)
        fields = {f.name: raw[f.name] for f in dataclasses.fields(cls) if f.name in raw}
        theta, scaling = _read_rope(file, raw)
        fields["rope_scaling"] = scaling
        if theta is not None:
            fields["rope_theta"] = theta
        try:
            return cls(**fields)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error


def _refuse_other_mathematics(file: Path, raw: dict[str, Any]) -> None:
    model_type = raw.get("model_type", "llama")
    if model_type not in _SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"{file}: model_type {model_type!r} is not a Llama. Supported: {', '.join(_SUPPORTED_MODEL_TYPES)}. "
            "Other families train as they are, with their own transformers class in a LightningModule."
        )
    for key, allowed in _UNSUPPORTED.items():
        if key in raw and raw[key] not in allowed:
            raise ValueError(
                f"{file}: {key}={raw[key]!r} changes the mathematics and is not supported here; supported: {allowed[0]!r}."
            )


def _read_rope(file: Path, raw: dict[str, Any]) -> tuple[float | None, RopeScaling | None]:
    """(rope_theta, scaling) from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(key) or {}
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"{file}: {key}.partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported; supported: 1.0."
        )
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{file}: {key} of type {kind!r} is not supported; supported: 'default', 'llama3'.")
    names = [f.name for f in dataclasses.fields(RopeScaling)]
    missing = [name for name in names if name not in rope]
    if missing:
        raise ValueError(f"{file}: {key} of type 'llama3' lacks {', '.join(missing)}.")
    return theta, RopeScaling(**{name: rope[name] for name in names})
