"""How a backward's cost grows with its tape: one long chain of two small operators, captured once and hit after that.

    python -m benchmarks.scale                     # 401 to 100,000 nodes, two minutes
    python -m benchmarks.scale --nodes 1000 10000
    python -m benchmarks.scale --steps 64 640      # instead: an LSTM cell in a loop, with the `inductor` backend

Microseconds a node of the tape: of the first backward the capture (the engine's walk and report, the tape graph, the
key) and all of it, with `backend="eager"`, which compiles nothing long; of a hit the walk, by the engine and in C++,
and all of it, with the walk in C++; of eager's own backward. Hits and eager take turns. Linear is what is the same at
each length.

Of the loop: seconds of the first backward (Inductor's folder empty, tracing included), how many regions the tape was
cut into and how many of them were compiled, and a hit by eager, medians of interleaved pairs.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import compiled_autograd as ca

from .models import UnrolledLSTM
from .native_walk import loaded

HITS = 5
HITS_BEFORE_LEARNT = 3
PAIRS = 15


def chain(leaf: torch.Tensor, nodes: int) -> torch.Tensor:
    """A loss whose tape has about as many nodes."""
    x = leaf
    for _ in range(nodes // 2):
        x = (x * 0.999).sin()
    return x.sum()


def seconds(loss: torch.Tensor) -> float:
    started = time.perf_counter()
    loss.backward()
    return time.perf_counter() - started


def measure(nodes: int) -> list[float]:
    """Seconds: capture, first backward, a hit's two walks, a hit, eager; medians where there are several."""
    leaf = torch.randn(4, requires_grad=True)
    engine, native = (
        ca.enable(backend="eager", on_miss="compile", cache_dir=False, tune=False, extension=each)
        for each in ("off", "all")
    )
    with engine:
        first = seconds(chain(leaf, nodes))
    assert engine.last is not None
    capture = engine.last.seconds["capture"]
    for _ in range(HITS_BEFORE_LEARNT):
        leaf.grad = None
        with native:
            chain(leaf, nodes).backward()
    walks: dict[ca.Session, list[float]] = {engine: [], native: []}
    hits, eager = [], []
    for _ in range(HITS):
        for session, found in walks.items():
            leaf.grad = None
            with session:
                took = seconds(chain(leaf, nodes))
            assert session.last is not None and session.last.outcome == "hit", session.last
            found.append(session.last.seconds["capture"])
            if session is native:
                hits.append(took)
        leaf.grad = None
        eager.append(seconds(chain(leaf, nodes)))
    ca.reset()
    return [capture, first, *(statistics.median(each) for each in (*walks.values(), hits, eager))]


def measure_loop(steps: int) -> list[str]:
    """Nodes, regions, compiles, seconds of the first backward, and the ratio of a hit to eager."""
    torch.manual_seed(0)
    model, x, y = UnrolledLSTM(), torch.randn(steps, 16, 32), torch.randn(16, 1)
    session = ca.enable(on_miss="compile", cache_dir=False, tune=False, extension="all")

    def step(compiled: bool) -> float:
        model.zero_grad()
        loss = F.mse_loss(model(x), y)
        with session if compiled else ca.disable():
            return seconds(loss)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        first = step(True)
    assert session.last is not None and session.last.graph is not None
    graph = session.last.graph
    ratios = []
    for _ in range(PAIRS):
        step(False)
        eager = step(False)
        step(True)
        ratios.append(step(True) / eager)
    assert session.stats().hits == 2 * PAIRS, session.stats()
    regions, compiles = len(graph.variants[0].regions), session.stats().compiles
    ca.reset()
    counts = f"{len(graph.tape.calls):,}", str(regions), str(compiles)
    return [*counts, f"{first:.1f}", f"{statistics.median(ratios):.2f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[401, 1_000, 10_000, 100_000])
    parser.add_argument("--steps", nargs="+", type=int)
    args = parser.parse_args()
    if min(args.nodes) < 2:
        parser.error(f"--nodes {min(args.nodes)}: a tape has two at least")
    if args.steps and min(args.steps) < 1:
        parser.error(f"--steps {min(args.steps)}: a loop has one at least")
    loaded()
    if args.steps:
        table = Table("steps", "nodes", "regions", "compiled", "first backward s", "hit by eager")
        for steps in args.steps:
            table.add_row(f"{steps:,}", *measure_loop(steps))
        Console().print(table)
        return 0
    torch.set_num_threads(1)  # the operators are too small for more
    table = Table("nodes", *("capture", "first backward", "hit: engine's walk", "in C++", "hit", "eager"))
    table.title = "Microseconds a node"
    for nodes in args.nodes:
        table.add_row(f"{nodes:,}", *(f"{1e6 * each / nodes:.2f}" for each in measure(nodes)))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
