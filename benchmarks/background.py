"""What a training feels while its backward is compiled beside it: `on_miss="background"`, step by step against eager.

    python -m benchmarks.background
    python -m benchmarks.background --models mlp gpt --json results.json

Two models with the same weights take turns, one on eager and one in the session, until the session's backwards are
hits. A step is forward and backward. Printed are, of the phase in which something was being compiled, the median step
over eager's median, the longest step, and how long the phase took. Nothing is kept on disk.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import compiled_autograd as ca
from benchmarks.models import FACTORIES, MakeLoss, build

AFTER = 30
_LONGEST = 600.0


def measure(name: str, backend: str, seed: int = 0) -> dict[str, Any]:
    """One model; seconds of each step, both ways, while compiling and after."""
    ca.reset()
    plain, plain_loss = build(name, seed, "cpu")
    model, loss = build(name, seed, "cpu")
    settings = {"on_miss": "background", "compile_budget": math.inf, "cache_dir": False, "tune": False}
    session = ca.enable(backend=backend, **settings)
    phases: dict[str, list[tuple[float, float]]] = {"first": [], "compiling": [], "after": []}
    largest = 0.0
    started = time.perf_counter()
    while len(phases["after"]) < AFTER and time.perf_counter() - started < _LONGEST:
        eager = _step(plain, plain_loss, ca.disable())
        ours = _step(model, loss, session)
        largest = max(largest, _difference(model, plain))
        assert session.last is not None
        phase = "after" if session.last.outcome == "hit" else "compiling" if phases["first"] else "first"
        phases[phase].append((eager, ours))
        if phase != "after":
            switched = time.perf_counter() - started
    stats = session.stats()
    return {
        "model": name,
        "steps": len(phases["compiling"]),
        "seconds": switched,
        "first_ms": 1e3 * phases["first"][0][1],
        "ratio": _ratio(phases["compiling"]),
        "longest_ms": 1e3 * max((ours for _, ours in phases["compiling"]), default=0.0),
        "eager_longest_ms": 1e3 * max((eager for eager, _ in phases["compiling"]), default=0.0),
        "after": _ratio(phases["after"]),
        "largest_difference": largest,
        "stats": {"hits": stats.hits, "compiles": stats.compiles, "bypasses": stats.bypasses},
    }


def _step(model: nn.Module, make_loss: MakeLoss, around: Any) -> float:
    model.zero_grad()
    started = time.perf_counter()
    loss = make_loss(model)
    with around:
        loss.backward()
    return time.perf_counter() - started


def _difference(model: nn.Module, plain: nn.Module) -> float:
    pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
    grads = [(a, b) for a, b in pairs if a is not None and b is not None]
    scale = max(float(b.abs().max()) for _, b in grads)
    return max(float((a - b).abs().max()) for a, b in grads) / scale


def _ratio(pairs: list[tuple[float, float]]) -> float | None:
    if not pairs:
        return None
    eager, ours = (statistics.median(times) for times in zip(*pairs, strict=True))
    return ours / eager


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "gpt"], choices=sorted(FACTORIES))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [measure(name, options.backend) for name in options.models]
    table = Table(title=f"{torch.__version__}, {torch.get_num_threads()} threads, backend {options.backend}")
    for title in (
        "model",
        "compiling, s",
        "steps",
        "median / eager",
        "longest, ms",
        "eager's, ms",
        "first, ms",
        "after",
    ):
        table.add_column(title, justify="left" if title == "model" else "right")
    for each in results:
        ratio = "" if each["ratio"] is None else f"{each['ratio']:.2f}"
        cells = [f"{each['seconds']:.0f}", str(each["steps"]), ratio, f"{each['longest_ms']:.0f}"]
        cells += [f"{each['eager_longest_ms']:.0f}", f"{each['first_ms']:.0f}", f"{each['after']:.2f}"]
        table.add_row(each["model"], *cells)
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
