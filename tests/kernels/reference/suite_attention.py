"""Attention: the plain one against pairs in float64, torch's on the CPU, and who is chosen for what, with which words."""

import itertools
import logging
import sys
import types

import pytest
import torch
from lightning_5d.kernels import attend, attention, attention_backends
from lightning_5d.kernels.attend import _report_once, choose
from lightning_5d.kernels.attention_backends import Call


def pairs(q, k, v, causal=True, window=None, documents=None, scale=None):
    """One query at a time, over the keys it sees. Returns out and log-sum-exp, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    shape = q.shape
    if documents is not None:
        q, k, v = (t.reshape(1, -1, *t.shape[2:]) for t in (q, k, v))
    (b, sq, h, d), (sk, kv_heads) = q.shape, k.shape[1:3]
    scale = d**-0.5 if scale is None else scale
    out, lse = torch.zeros_like(q), q.new_zeros(b, h, sq)
    bounds = [] if documents is None else documents.tolist()
    for i, t, n in itertools.product(range(b), range(sq), range(h)):
        at = t + sk - sq
        seen = [j for j in range(sk) if (not causal or j <= at) and (window is None or j > at - window)]
        if bounds:
            mine = next(x for x in range(len(bounds)) if bounds[x + 1] > i * sq + t)
            seen = [j for j in seen if bounds[mine] <= i * sk + j < bounds[mine + 1]]
        scores = (k[i, seen, n // (h // kv_heads)] @ q[i, t, n]) * scale
        lse[i, n, t] = torch.logsumexp(scores, 0)
        out[i, t, n] = torch.softmax(scores, 0) @ v[i, seen, n // (h // kv_heads)]
    return out.view(shape), lse.view(shape[2], *shape[:2]).transpose(0, 1) if documents is not None else lse


def inputs(b=2, sq=6, sk=6, h=4, kv_heads=2, d=8, dtype=torch.float32):
    torch.manual_seed(0)
    return tuple(torch.randn(b, s, n, d).to(dtype).requires_grad_() for s, n in ((sq, h), (sk, kv_heads), (sk, kv_heads)))


CALLS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 3},
    "documents": {"documents": torch.tensor([0, 2, 3, 8, 12], dtype=torch.int32)},
    "documents, full": {"documents": torch.tensor([0, 5, 12], dtype=torch.int32), "causal": False},
    "documents, window": {"documents": torch.tensor([0, 5, 12], dtype=torch.int32), "window": 2},
    "scale": {"scale": 0.7},
}


@pytest.mark.parametrize("name", CALLS)
def test_plain(name):
    q, k, v = inputs()
    want, want_lse = pairs(q, k, v, **CALLS[name])
    out, lse = attention(q, k, v, return_lse=True, backend="plain", **CALLS[name])
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    assert not lse.requires_grad
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dout)
    for a, b in zip(got, torch.autograd.grad(want, (q, k, v), dout.double()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["causal", "full", "scale"])
def test_torch_on_the_cpu(name):
    q, k, v = inputs()
    torch.testing.assert_close(attention(q, k, v, **CALLS[name]).double(), pairs(q, k, v, **CALLS[name])[0], rtol=1e-5, atol=1e-5)


def test_the_last_query_sees_the_last_key():
    q, k, v = inputs(sq=2, sk=5)
    torch.testing.assert_close(attention(q, k, v).double(), pairs(q, k, v)[0], rtol=1e-5, atol=1e-5)


def test_parts_of_a_ring_merge_by_their_log_sum_exp():
    q, k, v = inputs(sq=4, sk=8)
    first, first_lse = attention(q, k[:, :4], v[:, :4], causal=False, return_lse=True)
    second, second_lse = attention(q, k[:, 4:], v[:, 4:], return_lse=True)
    share = torch.sigmoid(first_lse - second_lse).transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(share * first + (1 - share) * second, attention(q, k, v, backend="plain"))


def test_bfloat16_is_rounded_once():
    q, k, v = inputs(dtype=torch.bfloat16)
    want = pairs(q, k, v)[0]
    torch.testing.assert_close(attention(q, k, v, backend="plain").double(), want, rtol=2**-8, atol=1e-4)


@pytest.mark.slow
def test_gradcheck():
    q, k, v = (t.detach().double().requires_grad_() for t in inputs(b=1, sq=3, sk=3, h=2, kv_heads=1, d=2))
    for options in ({}, {"window": 2}, {"documents": torch.tensor([0, 1, 3], dtype=torch.int32)}):
        assert torch.autograd.gradcheck(lambda *t, o=options: attention(*t, backend="plain", **o), (q, k, v))


def call(**changes):
    usual = {
        "device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "head_dim": 128, "same_length": True,
        "causal": True, "window": None, "documents": False, "return_lse": False,
    }  # fmt: skip
    return Call(**(usual | changes))


def install(monkeypatch, module, **symbols):
    """A package with exactly these symbols, and what Python makes of its parents."""
    attention_backends.find_symbol.cache_clear()
    made = types.ModuleType(module)
    vars(made).update(symbols)
    monkeypatch.setitem(sys.modules, module, made)
    parent = module.partition(".")[0]
    if parent != module:
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))


@pytest.fixture(autouse=True)
def forget():
    attention_backends.find_symbol.cache_clear()
    yield
    attention_backends.find_symbol.cache_clear()


BOTH = {"flash_attn_func": print, "flash_attn_varlen_func": print}


def test_choice_by_what_is_installed(monkeypatch):
    assert choose(call()) == "cudnn"  # torch alone, Hopper
    assert choose(call(capability=(8, 0))) == "flash"
    assert choose(call(capability=None)) == "flash"  # AMD
    assert choose(call(return_lse=True)) == choose(call(window=5)) == choose(call(documents=True)) == "flash"
    install(monkeypatch, "flash_attn.cute", **BOTH)
    assert choose(call()) == choose(call(capability=(10, 0))) == "flash4"
    assert choose(call(capability=(8, 0))) == "flash", "FlashAttention-4 alone made FlashAttention-2 look installed"
    assert choose(call(head_dim=256)) == "flash"
    install(monkeypatch, "flash_attn_interface", **BOTH)
    assert choose(call()) == "flash3" and choose(call(capability=(10, 0))) == "flash4"
    install(monkeypatch, "flash_attn", **BOTH)
    assert choose(call(capability=(8, 0))) == "flash2"


def test_choice_by_what_the_call_needs():
    assert choose(call(dtype=torch.float32)) == "sdpa"
    assert choose(call(dtype=torch.float32, return_lse=True)) == "flex"
    assert choose(call(device="cpu", capability=None)) == "sdpa"
    for need in ({"return_lse": True}, {"window": 4}, {"documents": True}, {"same_length": False}):
        assert choose(call(device="cpu", capability=None, **need)) == "plain"


def test_never_a_silent_slow_path(monkeypatch):
    monkeypatch.setattr(attention_backends, "find_symbol", lambda module, name: None)
    with pytest.raises(ValueError, match=r"no fast backend can compute .*flash3: it takes float16.*backend=.plain. holds"):
        choose(call(dtype=torch.float32, window=7))
    assert choose(call(dtype=torch.float32, window=7), "plain") == "plain"


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("flash3", {}, "flash_attn_interface.flash_attn_func cannot be imported"),
        ("flash3", {"capability": (8, 0)}, "not for compute capability 8.0"),
        ("flash2", {"device": "cpu"}, "needs an NVIDIA GPU"),
        ("flash4", {"head_dim": 192}, "at most 128 wide, not 192"),
        ("cudnn", {"return_lse": True}, "returns no log-sum-exp"),
        ("sdpa", {"same_length": False}, "aligns a causal mask to the first key"),
        ("flex", {"device": "cpu"}, "for GPUs"),
        ("flash9", {}, "allowed are None and 'flash4', 'flash3'"),
    ],
)
def test_a_forced_backend_that_cannot_says_why(name, changes, why):
    with pytest.raises(ValueError, match=why):
        choose(call(**changes), name)


@pytest.mark.parametrize("name", ["flash2", "flash3", "flash4"])
@pytest.mark.parametrize("options", CALLS)
def test_words_of_the_flash_packages(name, options, monkeypatch):
    """Stand-ins with the packages' own arguments, computing pair by pair: our window, documents and results are theirs."""
    no_window, lse_option = (None, "return_lse") if name == "flash4" else (-1, "return_attn_probs")

    def stand_in(q, k, v, documents, softmax_scale, causal, window_size, **rest):
        wants_lse = rest.pop(lse_option)
        assert not rest
        window = None if window_size[0] == no_window else window_size[0] + 1
        assert window_size[1] == (no_window if window is None else 0)
        out, lse = pairs(q, k, v, causal=causal, window=window, documents=documents, scale=softmax_scale)
        return (out, lse, "and more") if wants_lse else out

    def flash_attn_func(q, k, v, **rest):
        return stand_in(q, k, v, None, **rest)

    def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **rest):
        assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
        result = stand_in(*(t.unsqueeze(0) for t in (q, k, v)), cu_seqlens_q, **rest)
        return (result[0][0], result[1][0]) if isinstance(result, tuple) else result[0]

    module = {"flash2": "flash_attn", "flash3": "flash_attn_interface", "flash4": "flash_attn.cute"}[name]
    install(monkeypatch, module, flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    q, k, v = inputs()
    given = CALLS[options]
    documents = given.get("documents")
    window = given.get("window")
    described = call(causal=given.get("causal", True), window=window, documents=documents is not None, return_lse=True)
    monkeypatch.setattr(attend, "_describe", lambda *args: described)
    out, lse = attention(q, k, v, **given, return_lse=True, backend=name)
    want = pairs(q, k, v, **given)
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(lse, want[1])


def test_reported_once(caplog):
    _report_once.cache_clear()
    q, k, v = inputs()
    with caplog.at_level(logging.INFO, logger="lightning_5d.kernels"):
        for _ in range(3):
            attention(q, k, v, window=2)
    assert [r.getMessage() for r in caplog.records] == ["attention by plain (float32, head_dim 8, causal, window 2, on cpu)"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"window": 0}, "window is at least 1 and causal"),
        ({"window": 3, "causal": False}, "window is at least 1 and causal"),
        ({"documents": torch.tensor([0, 12])}, "int32 cumulative lengths"),
    ],
)
def test_errors(options, why):
    with pytest.raises(ValueError, match=why):
        attention(*inputs(), **options)
    q, k, v = inputs(h=3)
    with pytest.raises(ValueError, match="2 heads of keys do not divide 3"):
        attention(q, k, v)
    with pytest.raises(ValueError, match=r"are not \[batch, seq, heads, d\]"):
        attention(q, k, v[:, :3])
