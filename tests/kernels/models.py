"""Tiny models of the families that kernels are put into, and their losses and gradients with and without."""

import copy
import inspect

import torch
from torch import nn

VOCAB = 61


def llama():
    from lightning_5d.models import Llama, LlamaConfig

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, intermediate_size=48, vocab_size=VOCAB)
    return Llama(config, seed=0)


def transformers_model(name):
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    more = {"Qwen3": {"head_dim": 8}, "Gemma3": {"head_dim": 8, "sliding_window": 4}}.get(name, {})
    config_class = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(**sizes, **more))
    for parameter in model.parameters():  # norms and biases too: a weight of one or zero hides what it does
        nn.init.normal_(parameter, std=0.3)
    return model.train()


class Plain(nn.Module):
    """A model of nobody's: torch's own modules, and Meta's names for the gated projection."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 32)
        self.norm = nn.RMSNorm(32)
        self.feed_forward = MetaFeedForward()
        self.head = nn.Linear(32, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.feed_forward(self.norm(x)))


class MetaFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(32, 40), nn.Linear(32, 40), nn.Linear(40, 32)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


MODELS = {"Llama of this project": llama, "plain modules": Plain} | {
    name: (lambda name=name: transformers_model(name)) for name in ("Llama", "Qwen3", "Gemma3", "Phi3", "Mistral")
}


def batch(seed=0, rows=2, seq=7):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (rows, seq), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, -100, ids)
    return ids, labels


def loss_of(model, ids, labels):
    if "labels" in inspect.signature(type(model).forward).parameters:
        return model(input_ids=ids, labels=labels).loss
    logits = model(ids)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def loss_and_gradients(model, ids, labels):
    model.zero_grad()
    loss = loss_of(model, ids, labels)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_kernels_change_nothing(name, use_kernels, rtol=2e-5, atol=2e-6):
    """Loss and every gradient of the model with kernels equal those of a copy without; returns (report, model)."""
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    report = use_kernels(model)
    ids, labels = batch()
    loss, gradients = loss_and_gradients(model, ids, labels)
    want_loss, want = loss_and_gradients(plain, ids, labels)
    torch.testing.assert_close(loss, want_loss, rtol=rtol, atol=atol)
    assert gradients.keys() == want.keys()
    for key, gradient in want.items():
        limit = {"rtol": 1e-4, "atol": 1e-5 * max(1.0, gradient.abs().max().item())}
        torch.testing.assert_close(gradients[key], gradient, **limit, msg=lambda text, key=key: f"{key}: {text}")
    return report, model
