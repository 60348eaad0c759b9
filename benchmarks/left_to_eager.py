"""What a backward costs that is left to the eager engine, by what it costs without this project.

    python -m benchmarks.left_to_eager [--rounds 40] [--tapes small packed]

Sides: PyTorch's own engine object in its place (eager); ours in its place, outside of every session; inside a session
that has timed the tape and found eager faster (`not_worth_it`), or that has spent its budget (`over_budget`). In
each round each side runs some backwards, one after the other, each on a tape made anew, and in each round another side
goes first. Times are of the thread's own CPU time, with one thread; a ratio is the median over rounds of a side's time
by eager's.

`small` has ten nodes. `packed` is a GRU over packed sequences of random lengths, where nearly every tape is another.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import compiled_autograd as ca
from compiled_autograd.policies import ledger

BLOCK, WARM_ROUNDS = 260, 4
"""Backwards of each side in a round, and rounds that are not counted."""
Tape = tuple[Tensor, list[nn.Parameter]]
Make = Callable[[int], Tape]


def small() -> Make:
    """Tapes of ten nodes."""
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    x, parameters = torch.randn(16, 2), list(model.parameters())
    return lambda number: (model(x**3).abs().mean(), parameters)


def packed() -> Make:
    """Tapes of some hundred nodes, nearly each of another structure; those of one number are alike."""
    embedding, gru, out = nn.Embedding(20, 8), nn.GRU(8, 24, batch_first=True), nn.Linear(24, 3)
    parameters = [*embedding.parameters(), *gru.parameters(), *out.parameters()]

    def make(number: int) -> Tape:
        lengths = torch.randint(3, 12, (6,), generator=torch.Generator().manual_seed(number))
        x = pad_sequence([torch.zeros(int(length), dtype=torch.long) for length in lengths], batch_first=True)
        sequences = pack_padded_sequence(embedding(x), lengths, batch_first=True, enforce_sorted=False)
        return nn.functional.cross_entropy(out(gru(sequences)[1][-1]), torch.zeros(6, dtype=torch.long)), parameters

    return make


TAPES: dict[str, Callable[[], Make]] = {"small": small, "packed": packed}


def not_worth_it(make: Make) -> ca.Session | None:
    """A session that leaves the tapes to eager since that is faster; None where it would time others at each step."""
    session = ca.enable(backend="eager", on_miss="compile", cache_dir=False, compile_budget=float("inf"))
    with session:
        for _ in range(40):
            torch.autograd.grad(*make(0))
    return session if "not_worth_it" in session.stats().bypasses else None


def over_budget(make: Make) -> ca.Session:
    """A session that leaves the tapes to eager since its budget is spent."""
    ca.reset()
    session = ca.enable(backend="eager", on_miss="compile", cache_dir=False, tune=False, compile_budget=0)
    ledger.FIRST_SECONDS = 1e6  # so that none is compiled because it ran on eager for as long
    with session:
        for number in range(100):
            torch.autograd.grad(*make(number))
    assert "over_budget" in session.stats().bypasses, session.stats()
    return session


def measure(make: Make, around: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Of each side, its time by that of the first; and under `seconds` those of the first for one backward."""
    times: dict[str, list[float]] = {side: [] for side in around}
    for number in range(-WARM_ROUNDS, rounds):
        sides = list(around)
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            times[side].append(_block(make, around[side], BLOCK * number))
    first, *_ = around
    ratios = {
        side: statistics.median(
            mine / eager for mine, eager in zip(taken[WARM_ROUNDS:], times[first][WARM_ROUNDS:], strict=True)
        )
        for side, taken in times.items()
    }
    return {**ratios, "seconds": statistics.median(times[first]) / BLOCK}


def _block(make: Make, around: Callable[[], Any], first: int) -> float:
    """Seconds of so many backwards, one after the other."""
    spent = 0.0
    with around():
        for number in range(first, first + BLOCK):
            tape = make(abs(number))
            started = time.thread_time()
            torch.autograd.grad(*tape)
            spent += time.thread_time() - started
    return spent


def main() -> None:
    """Print a line for each kind of tape and each side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tapes", nargs="+", choices=TAPES, default=[*TAPES])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ours: Any = None
    plain = Variable._execution_engine

    @contextlib.contextmanager
    def inside(engine: Any, session: Any = None) -> Any:
        Variable._execution_engine = engine  # on each side: Python's next look at it takes longer
        try:
            with session or contextlib.nullcontext():
                yield
        finally:
            Variable._execution_engine = ours

    for name in options.tapes:
        make = TAPES[name]()
        for reach in (not_worth_it, over_budget) if name == "small" else (over_budget,):
            ca.reset()
            session = reach(make)
            ours = Variable._execution_engine
            if session is None:
                continue
            sides = {
                "eager": functools.partial(inside, plain),
                "no session": functools.partial(inside, ours),
                reach.__name__: functools.partial(inside, ours, session),
            }
            found = measure(make, sides, options.rounds)
            shown = ", ".join(f"{side} {found[side]:.3f}" for side in sides if side != "eager")
            print(f"{name}: eager {1e6 * found['seconds']:.0f} us; by that, {shown}; {session.stats().bypasses}")


if __name__ == "__main__":
    main()
