"""What other frameworks call the things that a layout says: used only to tell a user which token was meant."""

from __future__ import annotations

import re

_PARALLEL = r"(_model)?(_parallel(ism)?)?((_world)?_size|_degree)?"

# What is written, as words joined by "_", and the tokens that say it; N is the number that follows, or 2.
# From the options of Megatron-LM, DeepSpeed, torchtitan and transformers, FSDP's ShardingStrategy, Lightning's strategy
# names and the schedules of torch.distributed.pipelining.
_SPELLINGS = (
    (rf"tensor{_PARALLEL}|model_parallel(_size)?", "tpN"),
    (rf"virtual_pipeline{_PARALLEL}|vpp", "vN"),
    (rf"pipeline{_PARALLEL}", "ppN"),
    (rf"context{_PARALLEL}", "cpN"),
    (rf"expert{_PARALLEL}", "epN"),
    (rf"data{_PARALLEL}", "dpN"),
    (r"micro_?batch(_size)?", "mbsN"),
    (r"(deepspeed_|zero_?)?stage", "zeroN"),
    (rf"sequence{_PARALLEL}", "sp"),
    (r"ring_attention", "ring"),
    (r"fsdp2?|full_shard|fully_shard", "zero3"),
    (r"hsdp|hybrid_shard", "zero3_rep2"),
    (r"shard_grad_op", "zero2"),
    (r"deepspeed|distributed_optimizer|zero_redundancy_optimizer", "zero1"),
    (r"ddp|no_shard|none|single(_device)?", "zero0"),
    (r"megatron|3d(_parallel(ism)?)?", "tp2_pp2_zero1"),
    (r"(activation|gradient)_checkpoint(ing|s)?|recompute", "ac"),
    (r"zero_bubble|zb1p|zbh1", "zb"),
    (r"dual_pipe(_v)?|dualpipe", "dualpipev"),
)
_COMPILED = tuple(
    (re.compile(rf"(?<![^_])(?:{pattern}){'(?:_?(?P<number>[0-9]{1,6}))?' if 'N' in tokens else ''}(?![^_])"), tokens)
    for pattern, tokens in _SPELLINGS
)


def spellings(text: str) -> list[tuple[int, int, str]]:
    """Foreign names in lower-case ``text``, in order: ``(start, end, tokens that say it)``.

    Where two patterns meet, the first of the table counts.
    """
    found: list[tuple[int, int, str]] = []
    for pattern, tokens in _COMPILED:
        for match in pattern.finditer(text):
            start, end = match.span()
            if all(end <= other_start or other_end <= start for other_start, other_end, _ in found):
                number = match.groupdict().get("number") or "2"
                number = str(min(int(number), 3)) if tokens == "zeroN" else str(max(int(number), 1))
                found.append((start, end, tokens.replace("N", number)))
    return sorted(found)


def translate(text: str) -> str:
    """``text`` with each foreign name replaced by the tokens that say the same."""
    parts, at = [], 0
    for start, end, tokens in spellings(text):
        parts += [text[at:start], tokens]
        at = end
    return "".join([*parts, text[at:]])
