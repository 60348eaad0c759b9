"""What a backward that is left to eager takes without the engine's queue, by what the engine takes.

    python -m benchmarks.own_loop [--rounds 300] [--tapes small packed solver mlp lstm gpt] [--folder FOLDER]

Sides: no session (eager), a session that has spent its budget with `extension="hits"` (left), the same with `"all"`. In
each round each side runs one backward of a tape that was just made, with the same random numbers, and in each round
another side goes first. Times are of the thread's own CPU time, with one thread; a ratio is of a side's time by eager's
of that round.
`solver` is torchdiffeq's dopri5, which chooses its steps (`pip install torchdiffeq`). The extension is built first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import compiled_autograd as ca
from benchmarks.left_to_eager import TAPES, over_budget
from benchmarks.models import build
from benchmarks.native_walk import loaded
from compiled_autograd.engine.native_hits import NATIVE_HITS
from compiled_autograd.engine.own_loop.running import LEAST_NODES
from compiled_autograd.native.library import Library
from compiled_autograd.shadow_cache import default_dir

Make = Callable[[int], tuple[Tensor, list[nn.Parameter]]]
SIDES = ("eager", "left", "own loop")


def solver() -> Make:
    """Some hundred nodes for each step of the solver, which takes more or less of them."""
    from torchdiffeq import odeint

    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    parameters, times = list(net.parameters()), torch.linspace(0, 1, 5)

    def make(number: int) -> tuple[Tensor, list[nn.Parameter]]:
        start = 2 * torch.randn(16, 2, generator=torch.Generator().manual_seed(number))
        return odeint(lambda _, y: net(y**3), start, times, method="dopri5")[-1].abs().mean(), parameters

    return make


def model(name: str) -> Make:
    """One of the models of the other benchmarks."""
    module, make_loss = build(name, 0, "cpu")
    return lambda number: (make_loss(module), list(module.parameters()))


def measure(make: Make, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """How many nodes the last tape has, and of each side the seconds of each round."""
    over_budget(lambda number: make(number))
    left, looped = (
        ca.enable(backend="eager", cache_dir=False, tune=False, compile_budget=0, extension=extension)
        for extension in ("hits", "all")
    )
    around = {"eager": ca.disable(), "left": left, "own loop": looped}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(-20, rounds):
        for side in SIDES[number % 3 :] + SIDES[: number % 3]:
            torch.manual_seed(abs(number))
            loss, parameters = make(abs(number))
            for parameter in parameters:
                parameter.grad = None
            with around[side]:
                began = time.thread_time()
                loss.backward()
                taken = time.thread_time() - began
            if number >= 0:
                seconds[side].append(taken)
    assert isinstance(loss.grad_fn, torch.autograd.graph.Node)
    nodes = nodes_of(loss.grad_fn)
    served = looped.stats().own_loop
    assert served > 0.9 * rounds if nodes >= LEAST_NODES else served == 0, looped.stats()
    return nodes, seconds


def nodes_of(root: torch.autograd.graph.Node) -> int:
    """How many nodes a tape has."""
    seen, found = {root}, [root]
    for node in found:
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                found.append(following)
    return len(found)


def main() -> None:
    """Print a line for each kind of tape and each side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--tapes", nargs="+", default=["small", "packed", "mlp", "lstm", "gpt"])
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    loaded(given.folder)
    NATIVE_HITS.library = Library(given.folder or default_dir() / "native")
    print("tape    nodes  side       median us   least us   median ratio   ratio of sums")
    for name in given.tapes:
        make = solver() if name == "solver" else TAPES[name]() if name in TAPES else model(name)
        nodes, seconds = measure(make, given.rounds)
        eager = seconds["eager"]
        for side, taken in seconds.items():
            ratio = statistics.median(mine / other for mine, other in zip(taken, eager, strict=True))
            shown = f"{1e6 * statistics.median(taken):9.0f}{1e6 * min(taken):11.0f}{ratio:15.3f}"
            print(f"{name:8}{nodes:5}  {side:9}{shown}{sum(taken) / sum(eager):16.3f}", flush=True)


if __name__ == "__main__":
    main()
