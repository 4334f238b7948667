"""``use_kernels``: what it finds, what it leaves and why, and that a model with kernels is the same model."""

import copy
import functools
import re
import sys
import types

import pytest
import torch
from lightning_5d.kernels import probe, use_kernels
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.models import (
    MODELS,
    VOCAB,
    Plain,
    assert_kernels_change_nothing,
    batch,
    llama,
    loss_and_gradients,
    transformers_model,
)

quiet = functools.partial(use_kernels, verbose=False)
EVERYWHERE = {"rms_norm", "swiglu", "rotary", "linear_cross_entropy"}
FOUND = {
    "Llama of this project": {"rms_norm": 5, "swiglu": 2, "rotary": 2, "linear_cross_entropy": 0},
    "plain modules": {"rms_norm": 1, "swiglu": 1, "rotary": 0, "linear_cross_entropy": 0},
    "Llama": {"rms_norm": 5, "swiglu": 2, "rotary": 2, "linear_cross_entropy": 1},
    "Qwen3": {"rms_norm": 9, "swiglu": 2, "rotary": 2, "linear_cross_entropy": 1},
    "Gemma3": {"rms_norm, zero-centred": 13, "swiglu, by gelu_tanh": 2, "rotary": 2, "linear_cross_entropy": 1},
    "Phi3": {"rms_norm": 5, "swiglu": 2, "rotary": 2, "linear_cross_entropy": 1},
    "Mistral": {"rms_norm": 5, "swiglu": 2, "rotary": 2, "linear_cross_entropy": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_themselves(name):
    report, _ = assert_kernels_change_nothing(name, quiet)
    found = {what: list(report.replaced.values()).count(what) for what in FOUND[name]}
    assert found == FOUND[name] and not report.left


def test_our_llama_and_plain_modules():
    report, model = assert_kernels_change_nothing("Llama of this project", quiet)
    assert report.count("rms_norm") == 5 and report.count("swiglu") == 2 and report.count("rotary") == 2
    assert type(model.norm) is nn.RMSNorm and "forward" not in vars(nn.RMSNorm(4)), "a class was patched"
    assert_kernels_change_nothing("plain modules", quiet)


def test_undo_gives_the_model_back():
    model = llama()
    before = {name: vars(module).copy() for name, module in model.named_modules()}
    report = quiet(model)
    assert "forward" in vars(model.norm)
    report.undo()
    assert {name: vars(module) for name, module in model.named_modules()} == before


def test_names_and_hooks_stay():
    """Hooks run, and a weight is read when forward runs: tensor parallelism puts a local tensor in its place."""
    model, ids = llama(), batch()[0]
    want = model(ids)
    keys = list(model.state_dict())
    quiet(model)
    assert list(model.state_dict()) == keys
    calls = []
    attention, mlp = "layers.1.self_attn", "layers.0.mlp"
    for name in ("layers.0.input_layernorm", mlp, f"{mlp}.gate_proj", attention, f"{attention}.q_proj"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
    assert torch.allclose(model(ids), want, atol=1e-5)
    assert len(calls) == 5

    def shadow(module, args):
        vars(module)["weight"] = torch.zeros(32)

    def unshadow(module, args, out):
        del vars(module)["weight"]

    model.norm.register_forward_pre_hook(shadow)
    model.norm.register_forward_hook(unshadow)
    assert model(ids).abs().sum() == 0


def test_a_copy_has_kernels_of_its_own():
    model = llama()
    quiet(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.norm.weight.zero_()
    assert twin(batch()[0]).abs().sum() == 0 and model(batch()[0]).abs().sum() > 0


def test_on_the_meta_device_and_inside_a_fake_mode():
    with torch.device("meta"):
        report = quiet(llama())
    assert report.count("rms_norm") == 5 and report.count("rotary") == 2
    with FakeTensorMode():
        model = Plain()
        assert quiet(model).count("swiglu") == 1
        assert model(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, VOCAB)


def test_the_random_state_is_left_alone():
    model, state = llama(), torch.random.get_rng_state()
    quiet(model)
    assert torch.equal(torch.random.get_rng_state(), state)


class OddRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, x):
        return x / x.abs().mean(-1, keepdim=True) * self.weight


class BiasedRMSNorm(nn.RMSNorm):
    def __init__(self):
        super().__init__(32)
        self.bias = nn.Parameter(torch.zeros(32))


class OddMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (OddRMSNorm(), "computes something else"),
        (BiasedRMSNorm(), r"holds \['weight', 'bias'\]"),
        (nn.RMSNorm(32, elementwise_affine=False), "holds no parameters"),
        (nn.RMSNorm((4, 8)), "its weight has shape"),
        (OddMLP(), "no down"),
    ],
)
def test_what_differs_is_left_with_the_reason(module, why):
    report = quiet(nn.Sequential(module))
    assert not report.replaced
    assert re.search(why, report.left["0"]), report.left


def test_a_forward_that_someone_replaced_is_left():
    model = nn.Sequential(nn.RMSNorm(8))
    model[0].forward = mine = lambda x: x
    report = quiet(model)
    assert model[0].forward is mine and "already replaced" in report.left["0"]
    again = llama()
    quiet(again)
    assert not quiet(again).replaced


def test_names():
    assert quiet(llama(), "none").replaced == {}
    only = quiet(llama(), ["rms_norm"])
    assert set(only.replaced.values()) == {"rms_norm"}
    with pytest.raises(ValueError, match="names 'rmsnorm', allowed are 'auto', 'all', 'none', 'rms_norm'"):
        quiet(llama(), ["rmsnorm"])
    with pytest.raises(ValueError, match="linear_cross_entropy fits nowhere in Llama"):
        quiet(llama(), "all")
    model = nn.Sequential(nn.RMSNorm(8), OddMLP())
    with pytest.raises(ValueError, match="swiglu fits nowhere in Sequential; 1: swiglu: it is no down"):
        quiet(model, ["rms_norm", "swiglu"])
    assert "forward" not in vars(model[0]), "half of a refused request was done"


def test_the_report_is_printed(capsys):
    report = use_kernels(nn.Sequential(nn.RMSNorm(8), nn.RMSNorm(8), OddRMSNorm()))
    printed = capsys.readouterr().out
    assert printed == f"{report}\n"
    assert (
        "2 modules replaced, 1 left" in printed
        and "0 and 1 more: rms_norm" in printed
        and "2: left, rms_norm: it is called" in printed
    )


def test_without_triton_the_report_says_so(monkeypatch):
    from lightning_5d.kernels import swap

    monkeypatch.setattr(swap, "triton_is_installed", lambda: False)
    assert "Triton is not installed" in str(quiet(llama()))


@pytest.mark.slow
def test_torch_compile_sees_the_kernels():
    """A forward with names of its own would be compiled with its module's names, were they found by the module's name."""
    from torch._dynamo.testing import EagerAndRecordGraphs

    model, ids = llama(), batch()[0]
    quiet(model)
    recorder = EagerAndRecordGraphs()
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    torch.testing.assert_close(compiled(ids), model(ids))
    code = "".join(graph.print_readable(print_output=False) for graph in recorder.graphs)
    assert all(f"lightning_5d.{name}" in code for name in ("rms_norm", "glu", "rotary"))


@pytest.mark.slow
def test_the_fused_loss_is_the_models_own():
    """In training with labels: no logits. Otherwise, and with what it cannot do, the model's own code."""
    model, (ids, labels) = transformers_model("Llama"), batch()
    plain = copy.deepcopy(model)
    quiet(model, ["linear_cross_entropy"])
    assert model(input_ids=ids, labels=labels).logits is None
    shifted = {"shift_labels": labels}
    for options in ({"num_items_in_batch": torch.tensor(17)}, {"num_items_in_batch": 9}, shifted, {"return_dict": False}):
        got, want = (m(input_ids=ids, labels=labels, **options)[0] for m in (model, plain))
        torch.testing.assert_close(got, want)
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, labels=labels).logits, plain(input_ids=ids, labels=labels).logits)
    model.eval(), plain.eval()
    assert torch.equal(model(input_ids=ids, labels=labels).loss, plain(input_ids=ids, labels=labels).loss)
    ignored = torch.full_like(labels, -100)
    model.train()
    loss, gradients = loss_and_gradients(model, ids, ignored)
    assert loss == 0 and all(g.abs().sum() == 0 for g in gradients.values())


@pytest.mark.slow
def test_the_fused_loss_of_a_training_step():
    """Our LlamaModule: fused in training, logits as ever in validation; a loss that means something else is left."""
    from lightning_5d.models import LlamaModule
    from lightning_5d.models import module as home

    def made():
        torch.manual_seed(0)
        module = LlamaModule("tiny")
        module.configure_model()
        module.log = lambda *args, **kwargs: None
        return module

    module, plain = made(), made()
    plain.load_state_dict(module.state_dict())
    report = quiet(module, "all")
    assert report.replaced[""] == "linear_cross_entropy"
    ids, labels = batch()
    for rows in (labels, torch.full_like(labels, -100)):
        given = {"input_ids": ids, "labels": rows}
        got, want = module.training_step(given, 0), plain.training_step(given, 0)
        torch.testing.assert_close(got, want)
        got.backward(), want.backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert module(ids).dim() == 3
    report.undo()
    assert "training_step" not in vars(module) and "forward" not in vars(module.model.lm_head)
    original = home.next_token_loss
    try:
        home.next_token_loss = lambda logits, labels: original(logits, labels) * 2
        assert "is not the mean over" in quiet(module).left[""]
    finally:
        home.next_token_loss = original


@pytest.mark.slow
def test_a_capped_model_keeps_its_own_loss():
    model = transformers_model("Gemma3")
    model.config.final_logit_softcapping = 30.0
    report = quiet(model)
    assert report.count("linear_cross_entropy") == 0 and "final_logit_softcapping" in report.left[""]


def fake_liger(monkeypatch):
    """Liger by its published symbols, computing with plain torch: what is tested is whom we call, with what."""
    seen = []

    class Function:
        @staticmethod
        def apply(*args):
            seen.append(args)
            if len(args) == 2:
                return nn.functional.silu(args[0]) * args[1]
            x, weight, eps, offset, casting, in_place = args
            assert casting == "gemma" and in_place is False
            return nn.functional.rms_norm(x, (x.shape[-1],), weight + offset, eps)

    def loss(hidden, weight, target, ignore_index, reduction):
        return nn.functional.cross_entropy(hidden @ weight.t(), target, ignore_index=ignore_index, reduction=reduction)

    modules = {
        "liger_kernel.ops.rms_norm": {"LigerRMSNormFunction": Function},
        "liger_kernel.ops.swiglu": {"LigerSiLUMulFunction": Function},
        "liger_kernel.ops.geglu": {"LigerGELUMulFunction": Function},
        "liger_kernel.ops.rope": {"LigerRopeFunction": Function},
        "liger_kernel.transformers.functional": {"liger_fused_linear_cross_entropy": loss},
    }
    for name, symbols in modules.items():
        module = types.ModuleType(name)
        vars(module).update(symbols)
        monkeypatch.setitem(sys.modules, name, module)
    for parent in ("liger_kernel", "liger_kernel.ops", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    return seen


def test_other_backends(monkeypatch):
    with pytest.raises(ValueError, match=r"backend 'quack' needs quack.rmsnorm.rmsnorm, and importing it failed"):
        quiet(llama(), backend="quack")
    with pytest.raises(ValueError, match="backend='megatron', allowed are 'lightning_5d', 'liger', 'quack'"):
        quiet(llama(), backend="megatron")
    seen = fake_liger(monkeypatch)
    model, plain = llama(), llama()
    report = quiet(model, ["rms_norm", "swiglu"], backend="liger")
    assert report.backend == "liger"
    ids, labels = batch()
    torch.testing.assert_close(loss_and_gradients(model, ids, labels), loss_and_gradients(plain, ids, labels))
    assert len(seen) == 7


def test_the_private_way_out_of_modes_is_there():
    """probe.py leaves fake-tensor modes by a private function of torch."""
    with FakeTensorMode(), probe._plain_torch():
        assert type(torch.zeros(2)) is torch.Tensor
