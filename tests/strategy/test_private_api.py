"""Notices when the private parts of Lightning that lightning_private.py reaches into change."""

from __future__ import annotations

import inspect

import lightning as L
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from lightning_5d.lightning_private import (
    SigtermAgreement,
    SubprocessScriptLauncher,
    default_process_group_backend,
    init_dist_connection,
    sync_ddp_if_available,
)
from tests.ranks import run_ranks


def test_the_broadcast_that_is_replaced_is_made_before_every_batch() -> None:
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)
    assert list(inspect.signature(_TrainingEpochLoop._broadcast_sigterm_tensor).parameters) == ["self"]


def test_the_signal_connector_keeps_its_flag_in_one_attribute() -> None:
    source = inspect.getsource(_SignalConnector)
    assert "self.received_sigterm = True" in source and "self.received_sigterm" in inspect.getsource(
        _SignalConnector._sigterm_notifier_fn
    )
    assert "received_sigterm" in inspect.getsource(L.Trainer.received_sigterm.fget)


def test_helpers_of_lightning_take_what_we_give_them() -> None:
    parameters = {f: list(inspect.signature(f).parameters) for f in (init_dist_connection, sync_ddp_if_available)}
    assert parameters[init_dist_connection][0] == "cluster_environment" and "kwargs" in parameters[init_dist_connection]
    assert parameters[sync_ddp_if_available] == ["result", "group", "reduce_op"]
    assert default_process_group_backend(torch.device("cpu")) == "gloo"
    assert default_process_group_backend(torch.device("cuda")) == "nccl"
    assert list(inspect.signature(SubprocessScriptLauncher).parameters) == ["cluster_environment", "num_processes", "num_nodes"]


def _agreement() -> bool:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    own_class = type(connector)
    calls: list[int] = []
    agreement = SigtermAgreement(trainer, lambda: calls.append(1))
    loop._broadcast_sigterm_tensor()
    assert calls == [1] and not agreement.was_asked
    connector.received_sigterm = True
    assert agreement.was_asked and not trainer.received_sigterm
    agreement.agree()
    assert trainer.received_sigterm
    agreement.end()
    return type(connector) is own_class and "_broadcast_sigterm_tensor" not in loop.__dict__


def test_an_agreement_is_put_in_and_taken_out() -> None:
    assert run_ranks(1, _agreement) == [True]
