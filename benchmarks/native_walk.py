"""What the walk in C++ takes on a tape that was just made, beside the engine's handover, and eager's whole backward.

    python -m benchmarks.native_walk [--models mlp lstm] [--rounds 60] [--folder FOLDER]

Each round makes a tape anew for each of the three, in turn, so that none finds it in the processor's cache because of
another. Times are of the thread's own CPU time, with one thread. The extension is built in the folder first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compiled_autograd as ca
from benchmarks.models import build
from compiled_autograd.engine.call import Call
from compiled_autograd.engine.seam import hand_over
from compiled_autograd.native.interface import Module
from compiled_autograd.native.library import BEING_BUILT, Library
from compiled_autograd.shadow_cache import default_dir


def loaded(folder: Path | None = None) -> Module:
    """The extension, once it is built in a folder; where none is named, in the one where sessions look for it."""
    library = Library(folder or default_dir() / "native")
    while library.module() is None and library.reason == BEING_BUILT:
        time.sleep(0.1)
    module = library.module()
    if module is None:
        raise SystemExit(library.reason)
    return module


def measure(native: Module, name: str, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """How many nodes the tape has, and the seconds of each round."""
    module, make_loss = build(name, 0, "cpu")
    gradient = (torch.tensor(1.0),)
    session = ca.enable(on_miss="compile", cache_dir=False, tune=False)  # nothing is compiled
    plan = native.learn((make_loss(module),), gradient, True)
    assert not isinstance(plan, str), plan

    def walk(loss: Tensor) -> Any:
        return plan.compare((loss,), gradient)

    def ask(loss: Tensor) -> Any:
        return hand_over(Call((loss,), gradient, False, False, (), True, True), session.settings, None)

    def eager(loss: Tensor) -> None:
        with ca.disable():
            torch.autograd.backward(loss, gradient[0])

    acts: dict[str, Callable[[Tensor], Any]] = {"native walk": walk, "engine hands over": ask, "eager backward": eager}
    seconds: dict[str, list[float]] = {act: [] for act in acts}
    ask(make_loss(module))  # captures it
    for _ in range(rounds):
        for act, run in acts.items():
            loss = make_loss(module)
            began = time.thread_time()
            given = run(loss)
            seconds[act].append(time.thread_time() - began)
            assert not isinstance(given, str), given
        module.zero_grad()
    return plan.nodes, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["mlp", "lstm", "gpt"])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    native = loaded(given.folder)
    print("model  what               least us a node   median   least over eager's   median over eager's")
    for name in given.models:
        nodes, seconds = measure(native, name, given.rounds)
        least, median = min(seconds["eager backward"]), statistics.median(seconds["eager backward"])
        for act, each in seconds.items():
            shown = f"{1e6 * min(each) / nodes:17.2f}{1e6 * statistics.median(each) / nodes:9.2f}"
            print(f"{name:6} {act:17}{shown}{min(each) / least:21.3f}{statistics.median(each) / median:22.3f}")


if __name__ == "__main__":
    main()
