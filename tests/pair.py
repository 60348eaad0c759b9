"""Processes joined by gloo, two or more, which run functions for a test. None of them outlives it, whatever hangs."""

from __future__ import annotations

import faulthandler
import multiprocessing
import pickle
import time
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import compiled_autograd as ca

_START_SECONDS = 180.0
_TIMEOUT_SECONDS = 60.0
_END_SECONDS = 5.0
_OTHER_RANK_SECONDS = 1.0
"""After one rank failed, the others mostly wait for it in vain."""


class RankFailedError(AssertionError):
    """A rank raised, hung or died; the message has each one's traceback or stacks."""


class Pair:
    """Starts the processes when they are first needed, and anew after a failure.

    Args:
        folder: for the rendezvous, and the stacks of what hangs.
        ranks: how many processes.
        timeout: of the process group, in seconds.
        patience: for how many seconds the others may go on after a rank failed.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int = 2,
        timeout: float = _TIMEOUT_SECONDS,
        patience: float = _OTHER_RANK_SECONDS,
    ) -> None:
        self.folder, self.ranks, self.timeout, self.patience = folder, ranks, timeout, patience
        self.starts = 0
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = 60.0) -> list[Any]:
        """Call ``function(rank, *args)`` in all processes at once; gives what each returned.

        Args:
            function: one that can be found by its name; it starts with all graphs forgotten and the same seed.
            seconds: after which what still runs is killed.

        Raises:
            RankFailedError: one of them raised, died, or was killed.
        """
        if not self._workers:
            self._start()
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        for _, pipe in self._workers:
            pipe.send_bytes(pickle.dumps((function, args, seconds)))
        ends = time.monotonic() + seconds
        while len(answers) + len(failures) < self.ranks:
            if not self._receive(answers, failures, ends - time.monotonic()):
                break
            if failures:
                ends = min(ends, time.monotonic() + self.patience)
        missing = [rank for rank in range(self.ranks) if rank not in answers and rank not in failures]
        if not missing and not failures:
            return [answers[rank] for rank in range(self.ranks)]
        self._kill()
        failures.update({rank: f"did not answer\n{self._stacks(rank)}" for rank in missing})
        raise RankFailedError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))

    def close(self) -> None:
        """Let all end; kill what does not."""
        for _, pipe in self._workers:
            pipe.close()
        ends = time.monotonic() + _END_SECONDS
        for process, _ in self._workers:
            process.join(max(0.0, ends - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.starts += 1
        # A name of its own: PyTorch 2.15 may leave the file of an earlier group, with addresses that no one listens to.
        rendezvous = (self.folder / f"rendezvous{uuid.uuid4().hex}").as_uri()
        for rank in range(self.ranks):
            pipe, theirs = context.Pipe()
            arguments = (rank, self.ranks, rendezvous, self.timeout, self._stacks_file(rank), theirs)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self._workers.append((process, pipe))
        self.run(_ready, seconds=_START_SECONDS)

    def _receive(self, answers: dict[int, Any], failures: dict[int, str], seconds: float) -> bool:
        """Take what has come within some seconds; whether there was anything."""
        waited_for = {
            pipe: rank for rank, (_, pipe) in enumerate(self._workers) if rank not in answers and rank not in failures
        }
        ready = wait(list(waited_for), max(0.0, seconds))
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waited_for[pipe]
            try:
                returned, answer = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):  # reset: it died before it read what it was sent
                process, _ = self._workers[rank]
                process.join(_END_SECONDS)
                failures[rank] = f"died with exit code {process.exitcode}\n{self._stacks(rank)}"
                continue
            (answers if returned else failures)[rank] = answer
        return bool(ready)

    def _kill(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers = []

    def _stacks_file(self, rank: int) -> Path:
        return self.folder / f"stacks{rank}"

    def _stacks(self, rank: int) -> str:
        file = self._stacks_file(rank)
        return file.read_text() if file.exists() else ""


def _ready(rank: int) -> int:
    return rank


def _work(rank: int, ranks: int, rendezvous: str, timeout: float, stacks: Path, pipe: Connection) -> None:
    """The life of a rank: run what comes until the pipe is closed."""
    torch.set_num_threads(1)
    with stacks.open("w") as file:
        faulthandler.enable(file)
        distributed.init_process_group(
            "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
        )
        while True:
            try:
                task = pipe.recv_bytes()
            except (EOFError, ConnectionResetError):  # reset: it died before it read what it was sent
                break
            function, args, seconds = pickle.loads(task)
            faulthandler.dump_traceback_later(0.8 * seconds, file=file)
            answer = _answer(function, rank, *args)
            faulthandler.cancel_dump_traceback_later()
            pipe.send_bytes(pickle.dumps(answer))
    distributed.destroy_process_group()


def _answer(function: Callable[..., Any], rank: int, *args: Any) -> tuple[bool, Any]:
    ca.reset()
    torch.manual_seed(0)
    try:
        return True, function(rank, *args)
    except Exception:  # noqa: BLE001  sent to the test, which raises it
        return False, traceback.format_exc()
