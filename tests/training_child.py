"""One of many processes that train the same model with one store: ``python -m tests.training_child STORE STEPS``.

What it found is printed as JSON. With ``TESTS_KILLED_AT`` in the environment it kills itself at that call of ``fsync``,
all of which are the store's: in the middle of writing an entry.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import compiled_autograd as ca
from compiled_autograd.engine.native_hits import NATIVE_HITS
from compiled_autograd.native.library import BEING_BUILT

from .helpers import close, mlp

_SECONDS_TO_BUILD = 300.0
_reasons: list[str] = []


def killed_at(number: int) -> None:
    """Have this process killed at so many calls of ``fsync`` from now."""
    real, left = os.fsync, [number]

    def fsync(handle: int) -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        real(handle)

    os.fsync = fsync


def train(session: ca.Session, model: nn.Module, reference: nn.Module, steps: int, rank: int = 0) -> list[str]:
    """Both models, the one compiled; gives each backward's outcome. The gradients are eager's within rounding."""
    outcomes = []
    for step in range(steps):
        batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        for each in (model, reference):
            each.zero_grad()
        reference(batch).square().mean().backward()
        loss = model(batch).square().mean()
        with session:
            loss.backward()
        assert session.last is not None
        outcomes.append(session.last.outcome)
        _reasons.extend(map(str, session.last.reasons))
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            assert close(found.grad, wanted.grad), step
    return outcomes


def account(session: ca.Session, outcomes: list[str]) -> dict[str, Any]:
    """What became of the backwards."""
    stats = session.stats()
    assert not stats.bypasses and not stats.failures, stats
    inductor = "torch._inductor" in sys.modules
    return {
        "outcomes": outcomes,
        "compiles": stats.compiles,
        "loads": stats.loads,
        "inductor": inductor,
        "reasons": _reasons,
    }


def _wait_for_extension() -> str:
    """Why there is none; empty where it is there."""
    library, until = NATIVE_HITS.library, time.monotonic() + _SECONDS_TO_BUILD
    assert library is not None
    while library.module() is None and library.reason == BEING_BUILT and time.monotonic() < until:
        time.sleep(0.1)
    return library.reason


def main(store: Path, steps: int) -> None:
    if at := os.environ.get("TESTS_KILLED_AT"):
        killed_at(int(at))
    torch.set_num_threads(1)
    backend, native = os.environ["TESTS_BACKEND"], bool(os.environ.get("TESTS_NATIVE_TOO"))
    session = ca.enable(backend=backend, cache_dir=store, tune=False, extension="auto" if native else "off")
    torch.manual_seed(0)
    model, reference = mlp(), mlp()
    reference.load_state_dict(model.state_dict())
    found = account(session, train(session, model, reference, steps))
    if native:
        found["no extension"] = _wait_for_extension()
        train(session, model, reference, steps)
        found["native"] = NATIVE_HITS.hits
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
