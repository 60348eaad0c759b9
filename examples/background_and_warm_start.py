"""No step waits for the compiler: it works beside the training, or another process has done its work before.

With on_miss="background", the default on several cores, steps stay on the eager engine until the compiled graph is
ready. With a folder as `cache_dir`, what a process compiles outlives it: the next process compiles nothing. This file
starts itself again, twice: for a process that compiles and stores, and for one that finds what was stored.

    python examples/background_and_warm_start.py
"""

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import compiled_autograd as ca

HITS = 30


def make_model() -> tuple[nn.Module, Tensor]:
    """A network of many small layers, and its input [32, 64]; the same in each process."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(32, 64)


def gradients(model: nn.Module, x: Tensor, around: AbstractContextManager[Any]) -> tuple[float, list[Tensor]]:
    """Seconds of one backward, and the gradients of all parameters."""
    model.zero_grad()
    loss = model(x).square().mean()
    started = time.perf_counter()
    with around:
        loss.backward()
    seconds = time.perf_counter() - started
    return seconds, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def beside_the_training() -> None:
    """Go on training while the compiler works."""
    model, x = make_model()
    # Without a limit on compiling it begins at once: else a backward first has to have run on eager for long enough.
    # cache_dir=False: here it is to be compiled at each run. tune=False: exact counts.
    session = ca.enable(on_miss="background", compile_budget=float("inf"), cache_dir=False, tune=False)
    seconds: dict[str, list[float]] = {"eager": [], "structure_miss": [], "bypass": [], "hit": []}
    expected = gradients(model, x, ca.disable())[1]
    for number in itertools.count():
        for around in (session, ca.disable()) if number % 2 else (ca.disable(), session):
            taken, found = gradients(model, x, around)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
            seconds["eager" if around is not session else session.last.outcome].append(taken)
        if len(seconds["hit"]) == HITS:
            break
        time.sleep(0.05)  # a training has other work to do; without it, steps and compiler would fight for two cores
    assert session.wait(timeout=0)  # nothing is being compiled any more; a test or benchmark waits here without a limit
    stats = session.stats()
    assert (stats.structure_misses, stats.compiles, stats.hits) == (1, 1, HITS)
    assert stats.bypasses == {"compiling": len(seconds["bypass"])}
    # The first hits are compared with the real calls, and take longer.
    compiling, hits = (statistics.median(each) for each in (seconds["bypass"], seconds["hit"][5:]))
    eager = statistics.median(seconds["eager"])
    print('on_miss="background":')
    print(f"  first backward: captured, and run call by call, in {seconds['structure_miss'][0]:.2f} s")
    print(f"  then {stats.bypasses['compiling']} on the eager engine, {compiling / eager:.2f} of eager's time")
    print(f"  then {stats.hits} hits, {hits / eager:.2f} of eager's time")


def first_backward(cache: str, expected_outcome: str) -> None:
    """What the first backward of a process costs, with what is in `cache`."""
    model, x = make_model()
    expected = gradients(model, x, ca.disable())[1]
    session = ca.enable(on_miss="compile", cache_dir=cache)
    taken, found = gradients(model, x, session)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    stats = session.stats()
    assert session.last is not None and session.last.outcome == expected_outcome
    assert (stats.compiles, stats.loads) == ((0, 1) if expected_outcome == "hit" else (1, 0))
    if expected_outcome == "hit":
        assert "torch._inductor.compile_fx" not in sys.modules  # the compiler was not even imported
    print(f"  {session.last.outcome}: {stats.compiles} compiled, {stats.loads} loaded, first backward {taken:.2f} s")


def main() -> None:
    """Each part; the folder is empty at first, and is removed at the end."""
    if len(sys.argv) == 3:
        first_backward(*sys.argv[1:])
        return
    beside_the_training()
    print("two processes with one cache_dir:", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for outcome in ("structure_miss", "hit"):
            # Inductor has a cache of its own; each process gets an empty one, so that nothing comes from there.
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / outcome)}
            command = [sys.executable, __file__, str(Path(folder) / "cache"), outcome]
            subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
