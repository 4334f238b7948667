"""The mathematics, against transformers; and what lets others cut, shard and materialise it."""

import importlib.util
import pickle

import pytest
import torch
from torch import nn

from lightning_5d.models import Llama, LlamaConfig
from lightning_5d.models.llama import rotary_frequencies, rotary_tables
from lightning_5d.seeding import keyed_rng
from tests.models.forked import forked

ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
SMALL = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6}


def small(**changes):
    return LlamaConfig.from_dict({**SMALL, **changes})


def to_hugging_face(model):
    import transformers

    config = model.config
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **config.to_dict()["rope_scaling"]}
    fields = {name: value for name, value in config.to_dict().items() if not name.startswith("rope_")}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields, rope_parameters=rope)).eval()
    weights = {name if name.startswith("lm_head") else f"model.{name}": weight for name, weight in model.state_dict().items()}
    theirs.load_state_dict(weights)
    return theirs


@needs_transformers
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1, "head_dim": 10},
        {"tie_word_embeddings": True},
        {"rope_scaling": ROPE, "rope_theta": 500.0, "num_key_value_heads": 3},
    ],
    ids=["mha", "gqa", "mqa-wide-heads", "tied", "llama3-rope"],
)
@forked
def test_logits_and_gradients_equal_transformers(changes):
    ours = Llama(small(**changes), seed=3)
    for parameter in ours.parameters():  # larger than the initial ones, so that an error would show
        with torch.no_grad():
            parameter.mul_(3.0).add_(0.01)
    theirs = to_hugging_face(ours)
    input_ids = torch.randint(0, 97, (2, 64), generator=torch.Generator().manual_seed(0))
    mine, other = ours(input_ids), theirs(input_ids).logits
    assert other.std() > 0.1
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
    mine.square().mean().backward()
    other.square().mean().backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        expected = gradients[name if name.startswith("lm_head") else f"model.{name}"].grad
        rounding = 1e-5 * expected.abs().max().item()  # of the largest terms that were summed; another CPU sums in another order
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=rounding, msg=lambda m, name=name: f"{name}: {m}")


@needs_transformers
@forked
def test_position_ids_equal_transformers():
    ours = Llama(small(num_key_value_heads=2), seed=3)
    theirs = to_hugging_face(ours)
    input_ids = torch.arange(32).reshape(2, 16)
    offset = torch.arange(16) + torch.tensor([[0], [1000]])
    logits = ours(input_ids, offset)
    causal = torch.ones(16, 16, dtype=torch.bool).tril().expand(2, 1, 16, 16)
    torch.testing.assert_close(logits, theirs(input_ids, attention_mask=causal, position_ids=offset).logits, rtol=0, atol=2e-5)
    torch.testing.assert_close(logits[0], ours(input_ids)[0])


def test_llama3_frequencies_stretch_long_wavelengths_only():
    plain, scaled = small(head_dim=64), small(head_dim=64, rope_scaling=ROPE)
    ratio = rotary_frequencies(plain, torch.device("cpu")) / rotary_frequencies(scaled, torch.device("cpu"))
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(8.0)
    assert torch.all(ratio.diff() >= -1e-5)


@forked
def test_later_tokens_do_not_change_earlier_logits():
    model = Llama(small(), seed=0)
    first = torch.arange(20)[None]
    second = first.clone()
    second[0, 12:] = 50
    a, b = model(first), model(second)
    torch.testing.assert_close(a[:, :12], b[:, :12])
    assert not torch.allclose(a[:, 12:], b[:, 12:])


def test_weights_depend_on_seed_and_name_alone():
    torch.manual_seed(11)
    first = Llama(small())
    assert first.init_seed == 11
    state = torch.random.get_rng_state()
    deeper = Llama(small(num_hidden_layers=4), seed=11)
    assert torch.equal(state, torch.random.get_rng_state())  # building draws nothing from the global generator
    weights = deeper.state_dict()
    for name, weight in first.state_dict().items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # their spread depends on the depth
            weight, weights[name] = weight * 3**0.5, weights[name] * 4**0.5
        torch.testing.assert_close(weight, weights[name])
    assert not torch.equal(Llama(small(), seed=12).lm_head.weight, first.lm_head.weight)
    assert not torch.equal(first.layers[0].mlp.up_proj.weight, first.layers[1].mlp.up_proj.weight)


@forked
@torch.no_grad()
def test_initial_spread():
    config = LlamaConfig.from_preset("tiny", initializer_range=0.05)
    model = Llama(config, seed=0)
    assert model.embed_tokens.weight.std().item() == pytest.approx(0.05, rel=0.02)
    assert model.layers[2].self_attn.q_proj.weight.std().item() == pytest.approx(0.05, rel=0.02)
    assert model.layers[2].mlp.down_proj.weight.std().item() == pytest.approx(0.05 / 8**0.5, rel=0.02)
    assert model.layers[2].self_attn.o_proj.weight.std().item() == pytest.approx(0.05 / 8**0.5, rel=0.02)
    assert torch.all(model.norm.weight == 1)


@pytest.mark.parametrize("tied", [False, True])
def test_built_on_meta_and_materialised_leaf_by_leaf(tied):
    config = small(tie_word_embeddings=tied)
    expected = Llama(config, seed=5)
    with torch.device("meta"):
        model = Llama(config, seed=5)
    assert all(p.is_meta for p in model.parameters())
    assert not list(model.buffers())
    assert (model.lm_head.weight is model.embed_tokens.weight) == tied
    for path, leaf in model.named_modules():
        if not list(leaf.children()) and not (tied and leaf is model.lm_head):
            leaf.to_empty(device="cpu")
            with keyed_rng(model.init_seed, path):
                model._init_weights(leaf)
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    for (name, weight), other in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(weight, other), name
    input_ids = torch.arange(10)[None]
    assert torch.equal(model(input_ids), expected(input_ids))


def test_tied_head_is_one_parameter():
    model = Llama(small(tie_word_embeddings=True), seed=0)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert sum(p.numel() for p in model.parameters()) == model.config.num_parameters


@forked
def test_layers_take_and_return_one_tensor_and_heads_follow_the_weights():
    """What cutting and sharding rely on: half the heads in the projections is half the heads in the attention."""
    model = Llama(small(num_key_value_heads=2), seed=0)
    attention, hidden = model.layers[0].self_attn, torch.randn(2, 12, 48)
    cos, sin = rotary_tables(model.config, torch.arange(12), torch.float32)
    assert isinstance(model.layers, nn.ModuleList)
    assert model.layers[1](hidden, cos, sin).shape == hidden.shape
    whole = attention(hidden, cos, sin)
    parts = []
    for rank in range(2):
        part = pickle.loads(pickle.dumps(attention))
        for projection in (part.q_proj, part.k_proj, part.v_proj):
            projection.weight = nn.Parameter(projection.weight.chunk(2, 0)[rank])
        part.o_proj.weight = nn.Parameter(part.o_proj.weight.chunk(2, 1)[rank])
        parts.append(part(hidden, cos, sin))
    torch.testing.assert_close(parts[0] + parts[1], whole)


@forked
def test_rotary_tables_survive_inference_mode_and_low_precision():
    model = Llama(small(), seed=0)
    with torch.inference_mode():
        model(torch.arange(8)[None])
    model(torch.arange(8)[None]).sum().backward()  # tables made in inference mode could not be saved for backward
    assert model.bfloat16()(torch.arange(8)[None]).dtype == torch.bfloat16
    cos, _ = rotary_tables(small(), torch.tensor([1, 2001]), torch.bfloat16)
    exact = torch.cos(torch.tensor(2001.0, dtype=torch.float64))
    assert cos[1, 0].item() == pytest.approx(exact.item(), abs=4e-3)  # computed in float32, rounded after
