"""torchmetrics objects of a module that is spread over ranks.

Only the last stage updates a metric, and tensor-parallel ranks update it alike: states are therefore summed over ``dp``
alone, and given to the other stages when they are computed, not at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric


def check_metrics(module: nn.Module) -> None:
    """Raises ``ValueError`` for a metric on the meta device: nothing says what its state begins with."""
    for name, metric in module.named_modules():
        if isinstance(metric, Metric) and any(isinstance(d, Tensor) and d.is_meta for d in metric._defaults.values()):
            raise ValueError(
                f"the metric {name!r} ({type(metric).__name__}) was built in configure_model, where everything is built on the "
                "meta device, without values: build metrics in __init__"
            )


def connect_metrics(
    module: nn.Module,
    dp_group: dist.ProcessGroup,
    host_pp_group: dist.ProcessGroup | None,
    last_stage_rank: int,
    in_step: Callable[[], bool],
) -> None:
    """Makes ``compute()`` of every metric in ``module`` right on every rank. Idempotent.

    ``in_step`` tells whether a user's step runs: then only one stage may be calling, and nothing is exchanged between stages.
    """
    for metric in module.modules():
        if not isinstance(metric, Metric) or metric.__dict__.get("_connected_to_layout"):
            continue
        metric.__dict__["_connected_to_layout"] = True
        if metric.process_group is None:
            metric.process_group = dp_group
        if host_pp_group is not None:
            metric.compute = _with_states_of_last_stage(metric, host_pp_group, last_stage_rank, in_step)  # type: ignore[method-assign]


def _with_states_of_last_stage(
    metric: Metric, group: dist.ProcessGroup, last_stage_rank: int, in_step: Callable[[], bool]
) -> Callable[..., Any]:
    compute = metric.compute

    def compute_on_every_stage(*args: Any, **kwargs: Any) -> Any:
        if not in_step():
            states = {name: getattr(metric, name) for name in metric._defaults}
            box = [(states, metric._update_count)]
            dist.broadcast_object_list(box, group=group, group_src=last_stage_rank)
            if dist.get_rank(group) != last_stage_rank:
                for name, state in box[0][0].items():
                    setattr(metric, name, _to(state, metric.device))
                metric._update_count = box[0][1]
                metric._computed = None
        return compute(*args, **kwargs)

    return compute_on_every_stage


def _to(state: Any, device: Any) -> Any:
    return [s.to(device) for s in state] if isinstance(state, list) else state.to(device)
