"""The shapes whose launches are compiled ahead of time: Llama 8B, 70B and 405B, query-key norms, odd widths."""

import torch
from lightning_5d.kernels import experts, glu, loss, norm, rope, vocabulary

BF16, F32 = torch.bfloat16, torch.float32


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def rms_norm(width, dtype=BF16, weight_dtype=BF16, residual=False, rows=4096):
    def launch():
        x, weight, res = meta(rows, width, dtype=dtype), meta(width, dtype=weight_dtype), meta(rows, width, dtype=dtype)
        norm._launch_forward(x, res if residual else None, weight, 1e-5, 0.0)
        norm._launch_backward(x, res if residual else None, x, weight, meta(rows, dtype=F32), 0.0, True)

    return launch


def gated(kind, width, dtype=BF16, packed=False):
    def launch():
        gate, up = (
            meta(4096, 2 * width, dtype=dtype).chunk(2, -1)
            if packed
            else (meta(4096, width, dtype=dtype), meta(4096, width, dtype=dtype))
        )
        dy = glu._launch_forward(gate, up, glu.ACTIVATIONS.index(kind))
        glu._launch_backward(dy, gate, up, gate, up, glu.ACTIVATIONS.index(kind))

    return launch


def rotary(q_heads, kv_heads, head_dim, rotary_dim=None, interleaved=False, dtype=BF16, table_dtype=BF16, positions=False):
    def launch():
        q, k = meta(2, 2048, q_heads, head_dim, dtype=dtype), meta(2, 2048, kv_heads, head_dim, dtype=dtype)
        table = meta(1, 2048, rotary_dim or head_dim, dtype=table_dtype)
        where = meta(2, 2048, dtype=torch.int64) if positions else None
        rope._launch(
            q, k, torch.empty_like(q), torch.empty_like(k), table, table, where, interleaved, rotary_dim or head_dim, False
        )
        if rotary_dim is None and not positions:
            rope._launch(q, k, q, k, table, table, where, interleaved, head_dim, True)

    return launch


def cross_entropy(vocab, dtype=BF16, softcap=0.0):
    def launch():
        logits, target, row = meta(4096, vocab, dtype=dtype), meta(4096, dtype=torch.int64), meta(4096, dtype=F32)
        for continued in (False, True):
            loss._launch_statistics(logits, target, meta(4, 4096, dtype=F32), 0, vocab, softcap, continued)
        loss._launch_gradient(logits, logits, target, row, row, 0, vocab, loss.LossOptions(vocab, -100, 0.1, 1e-4, softcap))

    return launch


def embedding(rows, width, dtype=BF16):
    return lambda: vocabulary._launch_backward(meta(4096, width, dtype=dtype), meta(4096, dtype=torch.int64), rows)


def tokens(width, copies, dtype=BF16, weight_dtype=F32):
    def launch():
        x, y, out = (
            meta(4096, width, dtype=dtype),
            meta(4096 * copies, width, dtype=dtype),
            meta(4096 * copies, width, dtype=dtype),
        )
        slot, weights = meta(4096, copies, dtype=torch.int32), meta(4096, copies, dtype=weight_dtype)
        experts._launch_spread(x, slot, None, x, out, x)
        experts._launch_spread(x, slot, weights, y, out, weights)
        experts._launch_gather(y, slot, None, x)
        experts._launch_gather(y, slot, weights, x)

    return launch


CASES = {
    **{f"rms_norm {h} bf16": rms_norm(h) for h in (128, 1024, 2048, 4096, 5120, 8192, 16384, 18432)},
    **{f"rms_norm {h} fp32": rms_norm(h, F32, F32) for h in (128, 4096, 8192, 16384)},
    **{f"rms_norm {h} bf16 residual": rms_norm(h, residual=True) for h in (4096, 8192, 16384, 18432)},
    "rms_norm 8192 bf16, fp32 weight": rms_norm(8192, weight_dtype=F32),
    **{f"{kind} 14336 bf16": gated(kind, 14336) for kind in glu.ACTIVATIONS},
    "silu 14336 bf16 packed": gated("silu", 14336, packed=True),
    "silu 28672 fp32": gated("silu", 28672, F32),
    "silu 100 bf16": gated("silu", 100),
    "cross_entropy 128256 bf16": cross_entropy(128_256),
    "cross_entropy 8192 bf16, a tile": cross_entropy(8192),
    "cross_entropy 32000 fp32": cross_entropy(32_000, F32),
    "cross_entropy 50257 bf16": cross_entropy(50_257),
    "cross_entropy 256000 bf16, capped": cross_entropy(256_000, softcap=30.0),
    "embedding 16032 x 8192 bf16": embedding(16_032, 8192),
    "embedding 32000 x 4096 fp32": embedding(32_000, 4096, F32),
    "tokens 4096 bf16, top 2": tokens(4096, 2),
    "tokens 7168 bf16, top 8": tokens(7168, 8, weight_dtype=BF16),
    "tokens 2880 fp32, top 4": tokens(2880, 4, F32),
    "rotary 32 and 8 heads of 128": rotary(32, 8, 128),
    "rotary 128 and 8 heads of 128, fp32 tables": rotary(128, 8, 128, table_dtype=F32),
    "rotary 16 and 16 heads of 256, interleaved": rotary(16, 16, 256, interleaved=True),
    "rotary 32 and 32 heads of 80, 32 rotated, positions": rotary(32, 32, 80, rotary_dim=32, positions=True),
    "rotary 32 and 8 heads of 128 fp32": rotary(32, 8, 128, dtype=F32, table_dtype=F32),
}
