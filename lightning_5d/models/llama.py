"""Llama: grouped-query attention, RMSNorm, SwiGLU and rotary positions. Mathematics only; nothing here knows of other devices.

Names and the half-split rotary convention are Hugging Face's, so ``LlamaForCausalLM``'s weights load when the prefix
``model.`` is dropped. Three habits let others cut and shard it without changing it: each head count is read from
the tensor at hand (a tensor-parallel rank holds fewer heads), batch and sequence length come from the attention's own input
(outside it the sequence may be split), and the rotary tables are made once, from the whole sequence, and handed to each layer.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_5d.models.config import LlamaConfig
from lightning_5d.seeding import keyed_rng


class Llama(nn.Module):
    """A decoder-only language model.

    ``Llama(config)(input_ids)`` maps ``[batch, seq]`` token ids to ``[batch, seq, vocab]`` logits.

    Args:
        config: the shape.
        seed: of the initial weights, which depend only on it and on each module's name. None: torch's initial seed.
            It is kept as ``init_seed``.

    Built where torch's default device says. On the meta device nothing is initialised: whoever materialises a module calls
    ``_init_weights`` on each leaf inside ``keyed_rng(init_seed, path)``, where path is the leaf's name relative to this module;
    a tied head has no weights of its own (its weight is the embedding's, drawn under the embedding's name).
    """

    def __init__(self, config: LlamaConfig, seed: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.init_seed = torch.initial_seed() if seed is None else seed
        device = torch.get_default_device()
        with torch.device("meta"):  # skips torch's own initialisation, and leaves the global random state as it was
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(LlamaDecoderLayer(config) for _ in range(config.num_hidden_layers))
            self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._set_init_std()
        if device.type != "meta":
            self.to_empty(device=device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        if device.type != "meta":
            self.init_weights()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Logits ``[batch, seq, vocab]``, in the dtype of the weights.

        Args:
            input_ids: ``[batch, seq]`` integers.
            position_ids: ``[batch, seq]`` rotary positions; None: 0 to seq - 1 in each row. Attention is causal over the row
                either way.
        """
        hidden = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        cos, sin = rotary_tables(self.config, position_ids, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return self.lm_head(self.norm(hidden))

    def init_weights(self) -> None:
        """Initialises every leaf from ``init_seed`` and its name."""
        done: set[int] = set()
        for path, module in self.named_modules():
            weight = getattr(module, "weight", None)
            if weight is None or id(weight) in done:
                continue
            done.add(id(weight))
            with keyed_rng(self.init_seed, path, device=weight.device):
                self._init_weights(module)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialises one leaf's own parameters in place (Hugging Face's convention)."""
        if isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=float(module.init_std))  # type: ignore[arg-type]

    def _set_init_std(self) -> None:
        # Projections into the residual stream are smaller, so that its variance does not grow with depth (GPT-2).
        std, residual_std = (
            self.config.initializer_range,
            self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers),
        )
        for path, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.init_std = residual_std if path.endswith(("o_proj", "down_proj")) else std  # type: ignore[assignment]


class LlamaDecoderLayer(nn.Module):
    """``hidden [batch, seq, hidden_size]`` in, the same out: attention and MLP, each behind an RMSNorm and added to its input."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = LlamaAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class LlamaAttention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_size
        width, kv_width = config.num_attention_heads * self.head_dim, config.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = hidden.shape
        query = self.q_proj(hidden).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        key = self.k_proj(hidden).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        value = self.v_proj(hidden).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
        out = F.scaled_dot_product_attention(
            apply_rotary(query, cos, sin),
            apply_rotary(key, cos, sin),
            value,
            is_causal=True,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))


class LlamaMLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def rotary_tables(config: LlamaConfig, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin ``[seq, head_dim]`` (or ``[batch, seq, head_dim]`` for positions ``[batch, seq]``), the two halves alike.

    Computed in float32 from the configuration: a few small operations a forward pass, and no buffer to lose on the meta device.
    """
    angles = position_ids[..., None] * rotary_frequencies(config, position_ids.device)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotary_frequencies(config: LlamaConfig, device: torch.device) -> Tensor:
    """``[head_dim / 2]`` float32: theta ** (-2 i / head_dim), long wavelengths stretched under ``rope_scaling`` (Llama 3.1)."""
    exponent = torch.arange(0, config.head_size, 2, dtype=torch.float32, device=device) / config.head_size
    frequency = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)  # of this frequency within the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)  # 1: a short wavelength, left alone; 0: a long one, stretched fully
    return frequency * (keep + (1.0 - keep) / scaling.factor)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (x[i], x[i + head_dim / 2]) by its position's angle: Hugging Face's half-split convention.

    Shapes: x ``[batch, heads, seq, head_dim]``; cos and sin broadcast against it.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
