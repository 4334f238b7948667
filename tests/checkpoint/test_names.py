import pytest
import torch
from torch import nn

from lightning_5d.checkpoint import Names
from tests.checkpoint.arranged import HIDDEN, VOCAB, Arranged, Model


def test_a_shared_parameter_has_its_first_name() -> None:
    names = Names.of(Model())
    assert names.canonical("head.weight") == names.canonical("embed.weight") == "embed.weight"
    assert names.tied == [["embed.weight", "head.weight"]]
    assert "head.weight" not in names.specs
    assert names.specs["embed.weight"].shape == (VOCAB, HIDDEN)


def test_persistent_buffers_have_names_and_others_have_not() -> None:
    names = Names.of(Model())
    assert "scale" in names and not names.specs["scale"].is_parameter
    assert "scratch" not in names
    with pytest.raises(KeyError):
        names.canonical("scratch")


def test_a_model_on_the_meta_device_has_the_same_names() -> None:
    with torch.device("meta"):
        model = Model()
    assert Names.of(model) == Names.of(Model())


def test_wrappers_do_not_show() -> None:
    model = Model()
    plain = Names.of(model)
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend="eager")
    assert any("_orig_mod" in name for name, _ in model.named_parameters())
    assert Names.of(model) == plain
    assert plain.canonical("layers.2._orig_mod.up.weight") == "layers.2.up.weight"


def test_sharding_changes_no_name() -> None:
    class Tall(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Model(tied=False)

    names = Names.of(Tall())
    assert names.tied == [] and "body.head.weight" in names.specs
    assert Names.of(Arranged("single").module) == Names.of(Model())
