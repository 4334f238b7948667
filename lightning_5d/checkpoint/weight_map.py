"""Which of Hugging Face's tensors each of a model's tensors is, for weights that come from there or go there.

Taken from the whole model like its names, and written into each checkpoint, so that exporting needs no code of the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_5d.checkpoint.names import Names


@dataclass(frozen=True)
class Source:
    """Rows of one of their tensors that are rows of one of ours. A fused tensor, on either side, takes several."""

    name: str
    """Theirs, as in the safetensors files."""
    num_rows: int | None = None
    """None: the whole tensor, which has our shape."""
    start: int = 0
    """First row in theirs."""
    our_start: int = 0
    """First row in ours."""


@dataclass(frozen=True)
class WeightMap:
    """How one model class stores its weights at Hugging Face."""

    sources: Callable[[str], list[Source]]
    """The sources of the tensor of this name, relative to the model; none for one that is not stored there."""
    config: dict[str, Any] | None = None
    """Their config.json."""


@dataclass(frozen=True)
class HuggingFaceNames:
    """A model's weight map written out: plain data."""

    sources: dict[str, list[Source]]
    """Of each canonical name that has any."""
    config: dict[str, Any] | None

    def to_plain(self) -> dict[str, Any]:
        sources = {fqn: [[s.name, s.num_rows, s.start, s.our_start] for s in found] for fqn, found in self.sources.items()}
        return {"sources": sources, "config": self.config}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> HuggingFaceNames:
        sources = {fqn: [Source(*fields) for fields in found] for fqn, found in plain["sources"].items()}
        return cls(sources, plain["config"])


MakeWeightMap = Callable[[Any], WeightMap]
_MAPS: dict[type[nn.Module], MakeWeightMap] = {}


def register_weight_map(model_class: type[nn.Module], make_map: MakeWeightMap) -> None:
    """Use ``make_map(model)`` for instances of ``model_class``, wherever they sit in a LightningModule."""
    _MAPS[model_class] = make_map


def find_huggingface_names(module: nn.Module, names: Names) -> HuggingFaceNames | None:
    """Of the first model in ``module`` (whole) that a map is known for: a registered one, our Llama, any of transformers'."""
    for prefix, part in module.named_modules():
        make_map = _map_maker_for(part)
        if make_map is not None:
            weight_map = make_map(part)
            below = f"{prefix}." if prefix else ""
            own = {fqn: fqn.removeprefix(below) for fqn in names.specs if fqn.startswith(below)}
            sources = {fqn: found for fqn, name in own.items() if (found := weight_map.sources(name))}
            return HuggingFaceNames(sources, weight_map.config)
    return None


def llama_weight_map(model: Any) -> WeightMap:
    """Of :class:`lightning_5d.models.Llama`: their names, but that they keep all but the head below ``model.``."""
    return WeightMap(
        lambda name: [Source(name if name.startswith("lm_head.") else f"model.{name}")], llama_config_json(model.config)
    )


def llama_config_json(config: Any) -> dict[str, Any]:
    """A Hugging Face ``config.json`` that transformers 4 and 5 read, from a :class:`lightning_5d.models.LlamaConfig`."""
    fields = config.to_dict()
    scaling = fields.pop("rope_scaling")
    rope = {"rope_type": "default"} if scaling is None else {"rope_type": "llama3", **scaling}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **fields,
        "rope_scaling": None if scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": fields["rope_theta"]},
    }


def transformers_weight_map(model: Any) -> WeightMap:
    """Of a transformers model: its own names. One whose files hold other tensors than the model does has no map here."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    if get_model_conversion_mapping(model, add_legacy=False):
        return WeightMap(lambda name: [], config)
    return WeightMap(lambda name: [Source(name)], config)


def _map_maker_for(part: nn.Module) -> MakeWeightMap | None:
    for cls in type(part).__mro__:
        if cls in _MAPS:
            return _MAPS[cls]
    # A model of theirs or ours can only be here if its module was imported.
    ours, theirs = sys.modules.get("lightning_5d.models.llama"), sys.modules.get("transformers.modeling_utils")
    if ours is not None and isinstance(part, ours.Llama):
        return llama_weight_map
    if theirs is not None and isinstance(part, theirs.PreTrainedModel):
        return transformers_weight_map
    return None
