"""What the strategy calls, and what it refuses; on one rank or two, without a Trainer."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import MeanMetric

from lightning_5d.checkpoint import CheckpointError, CheckpointSession, Names
from lightning_5d.checkpoint.commit import read_complete
from lightning_5d.checkpoint.convert import _optimizer_state
from lightning_5d.checkpoint.optimizers import merge_groups
from tests.checkpoint.arranged import Arranged, Model
from tests.ranks import run_ranks


def session_for(module: nn.Module, layout: str = "single") -> CheckpointSession:
    session = CheckpointSession(layout)
    session.take_names(module)
    return session


def save_model(path: Path, module: nn.Module, optimizers: list | None = None, **entries: object) -> None:
    if optimizers is not None:
        entries["optimizer_states"] = [{}] * len(optimizers)
    session_for(module).save(entries, path, module, optimizers or [])


def test_what_lightning_gets_back(tmp_path: Path) -> None:
    model = Model()
    optimizers = [torch.optim.AdamW(model.parameters())]
    entries = {"epoch": 3, "global_step": 17, "lr_schedulers": [{"last_epoch": 4}], "loops": {"fit_loop": {}}}
    save_model(tmp_path / "a.ckpt", model, optimizers, **entries)
    found = session_for(model).open(tmp_path / "a.ckpt")
    assert found == {**entries, "state_dict": {}, "optimizer_states": []}
    assert read_complete(tmp_path / "a.ckpt")["global_step"] == 17


def test_weights_alone(tmp_path: Path) -> None:
    model = Model()
    save_model(tmp_path / "a.ckpt", model)
    session, other = session_for(model), Model()
    assert "optimizer_states" not in session.open(tmp_path / "a.ckpt")
    session.load_weights(other)
    assert torch.equal(other.head.weight, model.head.weight) and other.head.weight is other.embed.weight
    with pytest.raises(CheckpointError, match="weights alone"):
        session.load_optimizers(other, [torch.optim.AdamW(other.parameters())])


def test_loading_without_an_open_checkpoint_does_nothing() -> None:
    session_for(Model()).load_weights(Model())


def test_a_state_dict_that_a_hook_has_edited_is_what_is_saved(tmp_path: Path) -> None:
    """A user drops a frozen backbone in ``on_save_checkpoint`` and loads with strict_loading=False."""
    model, session = Model(), session_for(Model())
    state_dict = {name: value for name, value in session.state_dict(model).items() if not name.startswith("layers.1.")}
    session.save({"state_dict": state_dict}, tmp_path / "a.ckpt", model)
    other = Model()
    kept = other.layers[1].up.weight.clone()
    session.open(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"Missing in it: layers\.1\.norm\.bias.*strict_loading=False"):
        session.load_weights(other)
    session.set_strict(False)
    with pytest.warns(UserWarning, match=r"left as they are: layers\.1"):
        session.load_weights(other)
    assert torch.equal(other.layers[1].up.weight, kept) and torch.equal(other.layers[0].up.weight, model.layers[0].up.weight)


class Bigger(Model):
    def __init__(self) -> None:
        super().__init__(tied=False)
        self.extra = nn.Linear(2, 2)


def test_another_models_checkpoint(tmp_path: Path) -> None:
    save_model(tmp_path / "a.ckpt", Model())
    session = session_for(Bigger())
    session.open(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError) as info:
        session.load_weights(Bigger())
    assert "Missing in it: extra.bias, extra.weight, head.weight" in str(info.value)
    assert "embed.weight and head.weight were tied; now they are not" in str(info.value)


def test_bf16_into_fp32_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    save_model(tmp_path / "a.ckpt", Model().bfloat16())
    model = Model()
    before = model.embed.weight.clone()
    session = session_for(model)
    session.open(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"model\.embed\.weight is bfloat16 in the checkpoint and float32 in the model"):
        session.load_weights(model)
    assert torch.equal(model.embed.weight, before)


class WithMore(nn.Module):
    """State that is neither a parameter nor a buffer: an extra state and a metric's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.metric = MeanMetric()
        self.metric.persistent(True)
        self.counter = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"counter": self.counter}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.counter = state["counter"]


def test_extra_states_and_metrics_travel(tmp_path: Path) -> None:
    module = WithMore()
    module.counter = 5
    module.metric.update(3.0)
    save_model(tmp_path / "a.ckpt", module)
    other = WithMore()
    session = session_for(other)
    session.open(tmp_path / "a.ckpt")
    session.load_weights(other)
    assert other.counter == 5 and other.metric.compute() == 3.0
    assert torch.equal(other.linear.weight, module.linear.weight)


def resume(path: Path, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    session = session_for(module)
    session.open(path)
    session.load_weights(module)
    session.load_optimizers(module, optimizers)


def test_optimizers_that_are_not_those_saved(tmp_path: Path) -> None:
    model = Model()
    save_model(
        tmp_path / "a.ckpt", model, [torch.optim.AdamW([{"params": model.layers.parameters()}, {"params": [model.head.bias]}])]
    )
    path, layers = tmp_path / "a.ckpt", list(model.layers.parameters())
    with pytest.raises(CheckpointError, match="was AdamW in the checkpoint, and is SGD"):
        resume(path, model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    with pytest.raises(CheckpointError, match="had 2 parameter groups in the checkpoint, and has 1"):
        resume(path, model, [torch.optim.AdamW(model.parameters())])
    with pytest.raises(CheckpointError, match=r"group 0 .* new in it: norm\.weight\. no longer in it: layers\.0\.norm\.weight"):
        resume(path, model, [torch.optim.AdamW([{"params": [*layers[1:], model.norm.weight]}, {"params": [model.head.bias]}])])
    with pytest.raises(CheckpointError, match="has 1 optimizers, configure_optimizers gives 2"):
        resume(path, model, [torch.optim.AdamW(layers), torch.optim.AdamW([model.head.bias])])


def test_saving_before_the_first_step_counts_no_step(tmp_path: Path) -> None:
    model = Model()
    save_model(tmp_path / "a.ckpt", model, [torch.optim.AdamW(model.parameters())])
    used = [torch.optim.AdamW(model.parameters())]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    used[0].step()
    resume(tmp_path / "a.ckpt", model, used)
    assert all(not state for state in used[0].state.values())


def check_refusals() -> list[str]:
    arranged = Arranged("tp2")
    session = CheckpointSession("tp2")
    session.names = arranged.names
    module, found = arranged.module, []
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    for optimizer in (torch.optim.Adafactor(module.parameters()), foreign):
        with pytest.raises(CheckpointError) as info:
            session.check_optimizers(module, [optimizer])
        found.append(str(info.value))
    session.check_optimizers(module, arranged.optimizers)
    return found


def test_optimizers_that_no_checkpoint_can_hold_are_refused_before_the_first_step() -> None:
    results = run_ranks(2, check_refusals, init=True)
    assert results[0] == results[1]
    assert "Adafactor keeps a state 'row_var' for every parameter that has shape" in results[0][0]
    assert "configure_optimizers" in results[0][1]


def check_tied_groups(by_name: bool) -> str:
    arranged = Arranged("pp2")
    named = list(arranged.module.named_parameters())
    first = [p for name, p in named if (name.startswith("head") if by_name else p.ndim > 1)]
    rest = [p for _, p in named if all(p is not q for q in first)]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": first}])
    session = CheckpointSession("pp2")
    session.names = arranged.names
    try:
        session.check_optimizers(arranged.module, [optimizer])
    except CheckpointError as error:
        return str(error)
    return ""


def test_tied_copies_in_different_groups_are_refused_on_every_stage() -> None:
    texts = run_ranks(2, check_tied_groups, True, init=True)
    assert texts[0] == texts[1] and "embed.weight and head.weight are one tied parameter" in texts[0]
    assert run_ranks(2, check_tied_groups, False, init=True) == ["", ""]


def test_the_order_of_a_group_is_known_or_said_to_be_unknown() -> None:
    """A stock optimizer's state goes by position; the parts of two stages show it only as far as they keep the model's order."""
    names = Names.of(Model())

    def merged(*parts: list[str]) -> dict:
        return merge_groups(
            [[{"optimizer": "SGD", "groups": [{"lr": 1, "params": part}], "scalars": {}}] for part in parts], names
        )[0]

    first, second = ["embed.weight", "layers.0.up.weight"], ["layers.2.up.weight", "embed.weight"]
    (group,) = merged(first, second)["groups"]
    assert group["params"] == ["embed.weight", "layers.0.up.weight", "layers.2.up.weight"] and group["ordered"]
    (group,) = merged(first[::-1], first[::-1])["groups"]
    assert group["params"] == first[::-1] and group["ordered"], "a rank that has the whole group shows its order"
    unknown = merged(["layers.1.up.weight", "layers.0.up.weight"], ["layers.2.up.weight"])
    assert not unknown["groups"][0]["ordered"]
    with pytest.raises(ValueError, match="a file for a stock Trainer would mix the moments up"):
        _optimizer_state(0, unknown, {})


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]


def save_with_rng(path: Path) -> list[float]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    draw()
    model = Model()
    session_for(model, "dp2").save({}, path, model)
    return draw()


def load_with_rng(path: Path, layout: str) -> tuple[bool, list[float]]:
    model = Model()
    session = session_for(model, layout)
    session.open(path)
    return session.load_rng(), draw()


def test_random_numbers_go_on_under_the_same_layout_alone(tmp_path: Path) -> None:
    expected = run_ranks(2, save_with_rng, tmp_path / "a.ckpt", init=True)
    assert expected[0] != expected[1]
    assert run_ranks(2, load_with_rng, tmp_path / "a.ckpt", "dp2", init=True) == [(True, values) for values in expected]
    assert not any(did for did, _ in run_ranks(2, load_with_rng, tmp_path / "a.ckpt", "tp2", init=True))
    assert run_ranks(1, load_with_rng, tmp_path / "a.ckpt", "dp2", init=True)[0][0] is False


def save_under_different_names(folder: Path) -> None:
    """A monitored value that differs in its last digit on two ranks makes different file names."""
    model = Model()
    session_for(model, "dp2").save({}, folder / f"loss=0.{5 + dist.get_rank()}.ckpt", model)


def test_the_path_is_rank_0s(tmp_path: Path) -> None:
    run_ranks(2, save_under_different_names, tmp_path, init=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["loss=0.5.ckpt"]


def test_compiled_blocks_have_plain_names(tmp_path: Path) -> None:
    model = Model()
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend="eager")
    save_model(tmp_path / "a.ckpt", model, [torch.optim.AdamW(model.parameters())])
    plain = Model()
    resume(tmp_path / "a.ckpt", plain, [torch.optim.AdamW(plain.parameters())])
    assert torch.equal(plain.layers[2].up.weight, model.layers[2]._orig_mod.up.weight)
    for i, layer in enumerate(plain.layers):
        plain.layers[i] = torch.compile(layer, backend="eager")
    session = session_for(plain)
    assert not any("_orig_mod" in name for name in session.state_dict(plain))
    session.open(tmp_path / "a.ckpt")
    session.load_weights(plain)


def save_average(path: Path) -> str:
    """An average is stored like the weights, each rank its part; a shard anywhere else would be lost and is refused."""
    arranged = Arranged("tp2_pp2")
    session = CheckpointSession("tp2_pp2")
    session.names = arranged.names
    average = {name: parameter.detach() * 2 for name, parameter in arranged.module.named_parameters()}
    session.save({"average": average}, path, arranged.module)
    with pytest.raises(CheckpointError) as info:
        session.save({"mine": {"list": [next(iter(average.values()))]}}, path, arranged.module)
    return str(info.value)


def test_further_entries_of_the_weights_shapes_are_sharded(tmp_path: Path) -> None:
    for text in run_ranks(4, save_average, tmp_path / "a.ckpt", init=True):
        assert "the checkpoint entry 'mine' holds a sharded tensor" in text
    model, expected = Model(), Arranged("single").module
    session = session_for(model)
    assert session.open(tmp_path / "a.ckpt")["average"] == {}
    session.load_weights(model)
    assert torch.equal(model.embed.weight, expected.embed.weight)
    session.load_entry("average", model)
    assert torch.equal(model.embed.weight, expected.embed.weight * 2) and torch.equal(model.scale, expected.scale)
