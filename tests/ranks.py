"""Runs a function on several ranks, forked from this warm parent: 0.1 to 0.5 s a case instead of 9 to 25 s by a launcher.

The parent must not have run a backward pass or a multi-threaded operation before it forks; so reference values
are computed in a forked rank too: ``run_ranks(1, fn)``.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import multiprocessing
import os
import pickle
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import lightning  # noqa: F401  (imported before the fork, so that the ranks need not)
import torch
import torch.distributed as dist

with contextlib.suppress(ImportError):
    import transformers.models.llama.modeling_llama  # noqa: F401

_CONTEXT = multiprocessing.get_context("fork")


class RankFailed(AssertionError):
    """A rank raised, died or did not answer; carries its traceback."""


_PORTS = itertools.count()


def free_port() -> int:
    """A port that nobody listens at, from below the range out of which the system serves others until ours is bound.

    Another one each time and in each process that runs tests, so that two of these may run side by side.
    """
    for turn in _PORTS:
        port = 10_000 + (1009 * os.getpid() + turn) % 20_000
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise AssertionError


def set_rank_environment(rank: int, world_size: int, port: int) -> None:
    """What torchrun sets: Lightning takes it for an outside launcher and starts no processes."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="tests",
        OMP_NUM_THREADS="1",
    )


def _rank_main(
    rank: int, world_size: int, port: int, fn: Callable, args: tuple, kwargs: dict, init: bool, timeout_s: int, results: Any
) -> None:
    set_rank_environment(rank, world_size, port)
    for left_by_the_parent in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(left_by_the_parent, None)
    torch.set_num_threads(1)
    try:
        if init:
            dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=timeout_s))
        value = pickle.dumps(fn(*args, **kwargs))  # by value: the queue would share tensors by a handle that dies with this rank
        results.put((rank, None, value))
        results.close()
        results.join_thread()
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        results.close()
        results.join_thread()
        os._exit(1)
    os._exit(0)


def run_ranks(world_size: int, fn: Callable, *args: Any, init: bool = False, timeout_s: int = 120, **kwargs: Any) -> list[Any]:
    """``fn(*args, **kwargs)`` on ``world_size`` forked ranks; returns what each returned, by rank.

    With ``init`` a gloo process group exists before ``fn``; without it ``fn`` (a Trainer) makes its own.
    Raises :class:`RankFailed` with the first traceback when a rank raises, dies or does not answer in ``timeout_s``.
    """
    port, results = free_port(), _CONTEXT.Queue()
    processes = [
        _CONTEXT.Process(target=_rank_main, args=(r, world_size, port, fn, args, kwargs, init, timeout_s, results))
        for r in range(world_size)
    ]
    for process in processes:
        process.start()
    values: dict[int, Any] = {}
    errors: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(values) + len(errors) < world_size and time.monotonic() < deadline:
            try:
                rank, error, value = results.get(timeout=0.2)
            except queue.Empty:
                dead = [r for r, p in enumerate(processes) if not p.is_alive() and r not in values and r not in errors]
                if dead and results.empty():
                    errors.update({r: f"died with exit code {processes[r].exitcode}" for r in dead})
                    break
                continue
            if error is None:
                values[rank] = pickle.loads(value)
            else:
                errors[rank] = error
                deadline = min(
                    deadline, time.monotonic() + 2
                )  # the others' errors are echoes; wait for the first one's peers only briefly
    finally:
        for process in processes:
            process.join(0 if errors or len(values) < world_size else 20)
            if process.is_alive():
                process.kill()
                process.join()
    if errors or len(values) < world_size:
        missing = sorted(set(range(world_size)) - set(values) - set(errors))
        text = "\n".join(f"--- rank {r}:\n{errors[r]}" for r in sorted(errors))
        raise RankFailed(f"{text}\n--- ranks without an answer after {timeout_s} s: {missing}" if missing else text)
    return [values[r] for r in range(world_size)]
