"""Layout strings as strategy names. The strategy itself is a stand-in that keeps its arguments: only the name is tested here."""

import pickle
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import yaml
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry

from lightning_5d.layout import Layout, LayoutError
from lightning_5d.layout_tokens import looks_like_layout
from lightning_5d.registry import _AfterImport, _LayoutNames, _mix_in, register


class StandIn(SingleDeviceStrategy):
    def __init__(self, layout: str) -> None:
        super().__init__(device="cpu")  # type: ignore[arg-type]
        self.layout_text = layout


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    module = types.ModuleType("lightning_5d.strategy")
    module.LayoutStrategy = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning_5d.strategy", module)


def _trainer(strategy: object) -> Trainer:
    return Trainer(
        strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tp4_pp2_zero1", "TP4_PP2_ZERO1", "zero1_pp2_tp4", "zero0", "pp2_1F1B", "cp3_ulysses_ep7_dp7"])
def test_a_layout_string_is_a_strategy_name(name: str) -> None:
    strategy = _trainer(name).strategy
    assert isinstance(strategy, StandIn)
    assert Layout.parse(strategy.layout_text) == Layout.parse(name)


@pytest.mark.parametrize("name", ["LayoutStrategy", "lightning_5d.LayoutStrategy", "lightning_5d.strategy.LayoutStrategy"])
def test_a_class_path_given_as_a_string_is_the_default_layout(name: str) -> None:
    strategy = _trainer(name).strategy
    assert isinstance(strategy, StandIn) and strategy.layout_text == "zero0"


def test_the_environment_variable_names_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_STRATEGY", "tp2_pp2")
    strategy = Trainer(accelerator="cpu", devices=1, logger=False).strategy
    assert isinstance(strategy, StandIn) and strategy.layout_text == "tp2_pp2"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("tp4_pp3_zer01", ["'zer01'", "'tp4_pp3_zero1'"]),
        ("ttp2", ["'tp2'"]),
        ("zero4", ["zero0, zero1, zero2 and zero3", "'zero3'"]),
        ("pp2_v2_1f1b", ["1f1b has one stage per rank", "'pp2_v2'"]),
        ("ring_tp2", ["'ring' does nothing"]),
        ("tp2-pp2", ["'tp2_pp2'"]),
        ("tp2_foo_pp2", ["'foo'", "'tp2_pp2'"]),
        (["tp2", "pp2"], ["a layout is one string, 'tp2_pp2'"]),
        (Layout.parse("tp2"), ["'tp2'", "LayoutStrategy('tp2')"]),
    ],
)
def test_a_near_miss_says_what_was_meant(name: object, parts: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        _trainer(name)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("2tp", "tp2"),
        ("tensor_parallel", "tp2"),
        ("tp 4", "tp4"),
        ("tp", "tp2"),
        ("tp_2_pp_2", "tp2_pp2"),
        ("zero_3", "zero3"),
        ("fsdp2", "zero3"),
        ("hsdp", "zero3_rep2"),
        ("megatron", "tp2_pp2_zero1"),
        ("tensor_parallel_4-pipeline_parallel_2", "tp4_pp2"),
    ],
)
def test_another_spelling_is_no_strategy_but_says_which_is(name: str, meant: str) -> None:
    with pytest.raises(LayoutError) as caught:
        _trainer(name)
    assert caught.value.nearest == (meant,)


FOREIGN = [
    "ddp_foo",
    "ddp2",
    "tpu_spawn",
    "horovod",
    "bagua",
    "colossalai",
    "hpu_parallel",
    "mesh8",
    "sp_a_b",
    "",
]


@pytest.mark.parametrize("name", [*FOREIGN, ["foo"], 3])
def test_a_foreign_name_gets_the_stock_error(name: object) -> None:
    with pytest.raises(ValueError, match="You selected an invalid strategy name") as caught:
        _trainer(name)
    assert not isinstance(caught.value, LayoutError)


def test_stock_names_mean_what_they_meant() -> None:
    names = StrategyRegistry.available_strategies()
    assert {"ddp", "fsdp", "single_device"} <= set(names)
    for name in list(names):
        assert not looks_like_layout(name), name
    with pytest.raises(LayoutError):
        Layout.parse("ddp")
    assert type(_trainer("ddp").strategy).__name__ == "DDPStrategy"
    assert type(_trainer("auto").strategy).__name__ == "SingleDeviceStrategy"


def test_the_registry_answers_as_a_dict_too() -> None:
    assert "tp2_pp2" in StrategyRegistry and "tp2_foo" not in StrategyRegistry
    assert StrategyRegistry["tp2"]["init_params"] == {"layout": "tp2"}
    with pytest.raises(KeyError):
        StrategyRegistry["tp2_foo"]
    with pytest.raises(KeyError, match="not found in registry"):
        StrategyRegistry.get("foo")
    assert "tp2_pp2" not in StrategyRegistry.keys()  # noqa: SIM118  (listing stays what was registered)


def test_the_list_of_names_can_be_pickled_for_spawned_processes() -> None:
    names = pickle.loads(pickle.dumps(StrategyRegistry.available_strategies()))
    assert "tp2" in names and "ddp" in names and "foo" not in names


def test_registering_twice_changes_nothing() -> None:
    before, finders = type(StrategyRegistry), list(sys.meta_path)
    register()
    assert type(StrategyRegistry) is before
    assert sys.meta_path == finders
    assert sum(isinstance(finder, _AfterImport) for finder in finders) <= 2


class _OtherNames(list):
    def __contains__(self, name: object) -> bool:
        return name == "other" or super().__contains__(name)


class _OtherPlugin(_StrategyRegistry):
    def available_strategies(self) -> list:
        return _OtherNames(super().available_strategies())

    def __contains__(self, name: object) -> bool:
        return name == "other" or super().__contains__(name)

    def __missing__(self, name: str) -> dict:
        return {"strategy": lambda: "theirs", "init_params": {}}


def test_another_plugin_with_a_class_of_its_own_keeps_working() -> None:
    registry = _StrategyRegistry()
    registry.__class__ = _OtherPlugin
    _mix_in(registry, _LayoutNames)
    assert {"other", "tp2"} <= {name for name in ("other", "tp2", "foo") if name in registry.available_strategies()}
    assert "foo" not in registry.available_strategies()
    assert registry.get("other") == "theirs"
    assert registry.get("tp2").layout_text == "tp2"


def test_another_plugin_with_methods_on_the_object_keeps_working() -> None:
    registry = _StrategyRegistry()
    stock_get = registry.get
    registry.get = lambda name, default=None: "theirs" if name == "other" else stock_get(name, default)  # type: ignore[method-assign]
    registry.available_strategies = lambda: ["other"]  # type: ignore[method-assign]
    _mix_in(registry, _LayoutNames)
    _mix_in(registry, _LayoutNames)
    assert "other" in registry.available_strategies() and "tp2" in registry.available_strategies()
    assert registry.get("other") == "theirs"
    assert registry.get("tp2").layout_text == "tp2"


def test_lightning_still_asks_the_registry_as_we_expect() -> None:
    """Private contract: one dict object, asked by ``available_strategies``, ``in`` and ``get``."""
    import inspect

    from lightning.pytorch.trainer.connectors import accelerator_connector

    source = inspect.getsource(accelerator_connector)
    assert "self._registered_strategies = StrategyRegistry.available_strategies()" in source
    assert "strategy not in self._registered_strategies" in source
    assert "self.strategy = StrategyRegistry.get(self._strategy_flag)" in source
    assert accelerator_connector.StrategyRegistry is StrategyRegistry


class _Module(LightningModule):
    pass


@pytest.fixture
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])


def _cli(*args: str) -> Trainer:
    quiet = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    return LightningCLI(_Module, args=[*args, *quiet], run=False, save_config_callback=None).trainer


@pytest.mark.usefixtures("no_arguments")
def test_a_layout_on_the_command_line() -> None:
    assert _cli("--trainer.strategy", "tp2_pp2").strategy.layout_text == "tp2_pp2"  # type: ignore[attr-defined]
    assert _cli("--trainer.strategy=TP2_ZERO1").strategy.layout_text == "tp2_zero1"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("no_arguments")
@pytest.mark.parametrize(
    "strategy",
    ["tp2_pp2", {"class_path": "tests.layout.test_registry.StandIn", "init_args": {"layout": "tp2_pp2"}}],
)
def test_a_layout_in_yaml(strategy: object, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    assert _cli(f"--config={config}").strategy.layout_text == "tp2_pp2"  # type: ignore[attr-defined]
    assert _cli(f"--config={config}", "--trainer.strategy=pp4").strategy.layout_text == "pp4"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("no_arguments")
def test_a_misspelt_layout_on_the_command_line_says_what_was_meant() -> None:
    with pytest.raises(LayoutError, match="Nearest that work: 'tp4_pp3_zero1'"):
        _cli("--trainer.strategy", "tp4_pp3_zer01")


def _run_fresh(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_layout_and_its_registration_import_neither_torch_nor_lightning() -> None:
    out = _run_fresh(
        """
        import sys
        import lightning_5d.layout
        from lightning_5d.registry import register
        register()
        print(sorted({"torch", "lightning", "numpy"} & set(sys.modules)))
        """
    )
    assert out.strip() == "[]"


@pytest.mark.slow
def test_registration_reaches_a_lightning_that_is_imported_later() -> None:
    out = _run_fresh(
        """
        from lightning_5d.registry import register
        register()
        from lightning.pytorch.strategies import StrategyRegistry
        print("tp2" in StrategyRegistry.available_strategies(), "foo" in StrategyRegistry.available_strategies())
        """
    )
    assert out.strip() == "True False"


@pytest.mark.slow
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_a_trainer_of_the_twin_package_names_the_right_import(first: str) -> None:
    imports = ["from lightning_5d.registry import register; register()", "import pytorch_lightning"]
    out = _run_fresh(
        "\n".join(imports if first == "ours" else reversed(imports))
        + textwrap.dedent(
            """
            from lightning.pytorch.strategies import SingleDeviceStrategy
            Ours = type("LayoutStrategy", (SingleDeviceStrategy,), {"__module__": "lightning_5d.strategy"})
            for strategy in ("tp2_pp2", "tp2_pp3_zer01", Ours(), "foo"):
                try:
                    pytorch_lightning.Trainer(strategy=strategy, accelerator="cpu", logger=False)
                except ValueError as error:
                    print(type(error).__name__, error)
            pytorch_lightning.Trainer(strategy="ddp", accelerator="cpu", devices=1, logger=False)
            print("ddp works")
            """
        )
    )
    *errors, foreign, last = [line for line in out.splitlines() if line.startswith(("ValueError", "ddp works"))]
    assert len(errors) == 3 and last == "ddp works"
    assert "invalid strategy name" in foreign
    for line in errors:
        assert "this Trainer comes from `pytorch_lightning`" in line
        assert "Import Trainer, LightningModule and callbacks from `lightning.pytorch` instead" in line
