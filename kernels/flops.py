"""Operations of the fused loss for torch's FlopCounterMode, which otherwise counts nothing for it: importing this registers them.

Apart from the operations because ``torch.utils.flop_counter`` imports Triton, which a CPU run is to be spared.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from . import linear_loss  # noqa: F401  (defines the operations)
from ._library import NAMESPACE

_OPS = getattr(torch.ops, NAMESPACE)


@register_flop_formula(_OPS.linear_cross_entropy_statistics)
def _statistics(hidden_shape, weight_shape, *_, **__) -> int:
    return 2 * hidden_shape[0] * hidden_shape[1] * weight_shape[0]


@register_flop_formula(_OPS.linear_cross_entropy_gradient)
def _gradient(hidden_shape, weight_shape, *rest, **__) -> int:
    """The logits again, and a product for each gradient that is wanted."""
    hidden_grad, weight_grad = rest[-2:]
    return 2 * (1 + hidden_grad + weight_grad) * hidden_shape[0] * hidden_shape[1] * weight_shape[0]
