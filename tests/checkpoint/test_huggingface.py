"""Hugging Face's folders: their logits from our export, our weights from theirs, and no rank reads more than its own."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_5d.checkpoint import (
    CheckpointError,
    CheckpointSession,
    Names,
    Source,
    WeightMap,
    export_huggingface,
    import_huggingface,
    load_module,
    load_pretrained,
    register_weight_map,
)
from lightning_5d.checkpoint.huggingface_read import read_weights
from lightning_5d.checkpoint.weight_map import find_huggingface_names
from lightning_5d.models import LlamaConfig, LlamaModule
from tests.checkpoint.arranged import VOCAB, Arranged, Model, assemble, assert_same, pieces, world_size
from tests.ranks import run_ranks

SHAPE = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(tied: bool = False, **changes: object) -> LlamaModule:
    torch.manual_seed(0)
    module = LlamaModule({**SHAPE, "tie_word_embeddings": tied, **changes})
    module.configure_model()
    return module


def save(module: nn.Module, path: Path) -> Path:
    session = CheckpointSession("dp1")
    session.take_names(module)
    session.save({"hyper_parameters": dict(module.hparams)}, path, module)  # type: ignore[attr-defined]
    return path


LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize("case", [{"tied": True}, {"tied": False, "head_dim": 6}, {"rope_theta": 500.0, "rope_scaling": LLAMA31}])
def test_transformers_computes_our_logits_from_an_export(tmp_path: Path, case: dict) -> None:
    transformers = pytest.importorskip("transformers")
    module = llama(**case)
    files = export_huggingface(save(module, tmp_path / "a.ckpt"), tmp_path / "hf", max_file_gib=6000 / 2**30)
    assert len(files) > 2 and (tmp_path / "hf" / "model.safetensors.index.json").exists()
    assert all(file.stat().st_size < 8000 for file in files)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    input_ids = torch.randint(0, 67, (2, 24))
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids).logits, module(input_ids), rtol=1e-5, atol=1e-5)
    assert (
        "lm_head.weight" in json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    ) is not bool(case.get("tied"))


def test_a_round_trip_is_exact(tmp_path: Path) -> None:
    module = llama()
    export_huggingface(save(module, tmp_path / "a.ckpt"), tmp_path / "hf")
    assert [file.name for file in sorted((tmp_path / "hf").iterdir())] == ["config.json", "model.safetensors"]
    import_huggingface(tmp_path / "hf", tmp_path / "b.ckpt")
    again = load_module(LlamaModule, tmp_path / "b.ckpt")
    assert again.config == module.config
    assert_same(dict(again.state_dict()), dict(module.state_dict()))


def test_dtype_and_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    export_huggingface(
        save(llama(), tmp_path / "a.ckpt"), tmp_path / "hf", dtype=torch.bfloat16, tokenizer=tmp_path / "tokenizer.json"
    )
    assert {tensor.dtype for tensor in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"
    assert LlamaConfig.from_json(tmp_path / "hf") == LlamaConfig(**SHAPE)


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    session = CheckpointSession("dp1")
    session.take_names(Model())
    session.save({}, tmp_path / "a.ckpt", Model())
    with pytest.raises(ValueError, match="register_weight_map"):
        export_huggingface(tmp_path / "a.ckpt", tmp_path / "hf")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(ValueError, match="not empty"):
        export_huggingface(save(llama(), tmp_path / "b.ckpt"), tmp_path / "full")


class Fused(nn.Module):
    """Query, key and value in one matrix of ours; up and gate in one matrix of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 10, bias=False)
        self.up = nn.Linear(6, 5, bias=False)
        self.gate = nn.Linear(6, 3, bias=False)
        self.register_buffer("steps", torch.zeros(()))


def fused_map(model: Fused) -> WeightMap:
    table = {
        "qkv.weight": [Source("q", 4), Source("k", 3, our_start=4), Source("v", 3, our_start=7)],
        "up.weight": [Source("gate_up", 5, start=3)],
        "gate.weight": [Source("gate_up", 3)],
    }
    return WeightMap(lambda name: table.get(name, []), {"model_type": "fused"})


def test_fused_weights_both_ways(tmp_path: Path) -> None:
    register_weight_map(Fused, fused_map)
    module = nn.Sequential(Fused())
    session = CheckpointSession("dp1")
    session.take_names(module)
    session.save({}, tmp_path / "a.ckpt", module)
    export_huggingface(tmp_path / "a.ckpt", tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    fused = module[0]
    assert torch.equal(found["v"], fused.qkv.weight[7:])  # type: ignore[index]
    assert torch.equal(found["gate_up"], torch.cat([fused.gate.weight, fused.up.weight]))  # type: ignore[list-item]
    other = nn.Sequential(Fused())
    load_pretrained(other, tmp_path / "hf")
    assert_same(dict(other.state_dict()), dict(module.state_dict()))


def their_names(names: Names) -> dict[str, list[Source]]:
    return {fqn: [Source(f"theirs.{fqn}")] for fqn in names.specs}


def read_part(layout: str, folder: Path) -> tuple[dict, int, int]:
    """The pieces, the bytes of this rank's part, and the bytes that it asked safetensors for."""
    from lightning_5d.checkpoint import huggingface_read

    arranged = Arranged(layout, seed=1)
    tensors = [(fqn, parameter.detach()) for fqn, parameter in arranged.module.named_parameters()]
    tensors = [(arranged.names.canonical(fqn), tensor) for fqn, tensor in tensors]
    asked = []
    original = huggingface_read._open

    class Counted:
        def __init__(self, opened: object) -> None:
            self.opened = opened

        def __getitem__(self, index: object) -> torch.Tensor:
            content = self.opened[index]  # type: ignore[index]
            asked.append(content.numel() * content.itemsize)
            return content

        def get_shape(self) -> list[int]:
            return self.opened.get_shape()  # type: ignore[attr-defined]

    class Opened:
        def __init__(self, file: Path) -> None:
            self.file = original(file)

        def __enter__(self) -> "Opened":
            self.file.__enter__()
            return self

        def __exit__(self, *args: object) -> None:
            self.file.__exit__(*args)

        def keys(self) -> list[str]:
            return self.file.keys()

        def get_slice(self, name: str) -> Counted:
            return Counted(self.file.get_slice(name))

    huggingface_read._open = Opened  # this forked process alone
    read_weights(folder, tensors, their_names(arranged.names))
    found = pieces(dict(tensors))
    return found, sum(local.nbytes for _, (_, local) in found.values()), sum(asked)


@pytest.mark.parametrize("layout", ["single", "tp2", "dp2_zero3", "dp2_tp2_pp2_zero3"])
def test_each_rank_reads_its_own_bytes(tmp_path: Path, layout: str) -> None:
    model = Model()
    names = Names.of(model)
    whole = {names.canonical(fqn): parameter.detach() for fqn, parameter in model.named_parameters()}
    save_file({f"theirs.{fqn}": tensor.contiguous() for fqn, tensor in whole.items()}, tmp_path / "x.safetensors")
    results = run_ranks(world_size(layout), read_part, layout, tmp_path, init=layout != "single")
    assert_same(assemble(found for found, _, _ in results), whole)
    assert all(asked == own for _, own, asked in results)


def test_a_folder_that_does_not_fit(tmp_path: Path) -> None:
    def error(**tensors: torch.Tensor) -> str:
        if tensors:
            save_file(tensors, tmp_path / "x.safetensors")
        before = module.model.embed_tokens.weight.clone()
        with pytest.raises(CheckpointError) as info:
            load_pretrained(module, tmp_path)
        assert torch.equal(module.model.embed_tokens.weight, before)
        return str(info.value)

    module = llama(num_hidden_layers=1)
    assert "holds no *.safetensors" in error()
    weights = {source.name: torch.zeros(module.get_parameter(fqn).shape) for fqn, (source,) in found_sources(module).items()}
    assert "model.norm.weight is missing" in error(**{k: v for k, v in weights.items() if k != "model.norm.weight"})
    wrong = {**weights, "lm_head.weight": torch.zeros(66, 16)}
    assert "lm_head.weight has shape (66, 16) and model.lm_head.weight has (67, 16)" in error(**wrong)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert "lacks gone.safetensors" in error()


def found_sources(module: nn.Module) -> dict[str, list[Source]]:
    names = find_huggingface_names(module, Names.of(module))
    assert names is not None
    return names.sources


def test_a_transformers_model_inside_a_module_goes_by_its_own_names(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=VOCAB, n_positions=16)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.lm = transformers.GPT2LMHeadModel(config)

    torch.manual_seed(0)
    module = Wrapped()
    session = CheckpointSession("dp1")
    session.take_names(module)
    session.save({}, tmp_path / "a.ckpt", module)
    export_huggingface(tmp_path / "a.ckpt", tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert_same(dict(theirs.state_dict()), dict(module.lm.state_dict()))
