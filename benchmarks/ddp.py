"""What a backward of `DistributedDataParallel` takes, compiled, by eager's; and when it communicates.

    OMP_NUM_THREADS=1 python -m benchmarks.ddp [--ranks 2] [--models mlp gpt resnet] [--pairs 30]

Processes on gloo, each with two copies of a model. Eager's and the compiled backward alternate, all ranks wait for one
another before each, and a time is until `backward` returns, which is after the communication. A ratio is the median of
compiled by eager over pairs, and the worst of all ranks. `issued` says at which part of the backward each all-reduce
was issued, read from a profile of one backward: what is issued before the end overlaps with what is computed after it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import distributed, multiprocessing, nn
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel

import compiled_autograd as ca
from benchmarks.backward import build_extension
from benchmarks.measure import gradient_difference
from benchmarks.models import FACTORIES, MakeLoss, build

WARM_STEPS = 6
ISSUES = ("c10d::allreduce_", "c10d::allreduce_coalesced_")


def backward(model: nn.Module, make_loss: MakeLoss, session: ca.Session | None) -> float:
    """Seconds of one backward, which all ranks begin together."""
    model.zero_grad()
    loss = make_loss(model)
    distributed.barrier()
    started = time.perf_counter()
    if session is None:
        loss.backward()
    else:
        with session:
            loss.backward()
    return time.perf_counter() - started


def issued(model: nn.Module, make_loss: MakeLoss, session: ca.Session | None) -> list[float]:
    """Parts of a backward after which its all-reduces were issued."""
    model.zero_grad()
    loss = make_loss(model)
    distributed.barrier()
    with torch.profiler.profile() as profile, record_function("whole backward"):
        if session is None:
            loss.backward()
        else:
            with session:
                loss.backward()
    events = profile.events()
    whole = next(event.time_range for event in events if event.name == "whole backward")
    return sorted(
        (event.time_range.start - whole.start) / whole.elapsed_us() for event in events if event.name in ISSUES
    )


def measure(rank: int, ranks: int, folder: str, options: argparse.Namespace, name: str) -> None:
    """One rank's figures."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=ranks)
    eager, make_loss = build(name, 0, "cpu")
    ours, make_ours = build(name, 0, "cpu")
    eager, ours = DistributedDataParallel(eager), DistributedDataParallel(ours)
    session = ca.enable(backend=options.backend, native=True, tune=False, cache_dir=False)
    for _ in range(WARM_STEPS):
        backward(eager, make_loss, None)
        backward(ours, make_ours, session)
    difference = gradient_difference(eager, ours)
    ratios, eager_ms = [], []
    for pair in range(options.pairs):
        if pair % 2:
            compiled, plain = backward(ours, make_ours, session), backward(eager, make_loss, None)
        else:
            plain, compiled = backward(eager, make_loss, None), backward(ours, make_ours, session)
        ratios.append(compiled / plain)
        eager_ms.append(1000 * plain)
    stats = session.stats()
    figures = {
        "ratio": statistics.median(ratios),
        "eager_ms": statistics.median(eager_ms),
        "difference": difference,
        "hits": stats.hits,
        "bypasses": sum(stats.bypasses.values()),
        "eager_issued": issued(eager, make_loss, None),
        "issued": issued(ours, make_ours, session),
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(figures))
    distributed.barrier()
    distributed.destroy_process_group()


def run(options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """The figures of each rank; an error of one is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure, (options.ranks, folder, options, name), nprocs=options.ranks)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(options.ranks)]


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=FACTORIES, default=["mlp", "gpt", "resnet"])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--pairs", type=int, default=30)
    options = parser.parse_args()
    build_extension(Console())
    for name in options.models:
        ranks = run(options, name)
        worst = max(ranks, key=lambda figures: figures["ratio"])
        print(
            f"{name}: {worst['ratio']:.2f} of eager's {worst['eager_ms']:.1f} ms; {worst['hits']} hits, "
            f"{worst['bypasses']} bypasses; gradients {worst['difference']:.0e}; issued at "
            f"{', '.join(format(part, '.2f') for part in worst['issued'])} (eager: "
            f"{', '.join(format(part, '.2f') for part in worst['eager_issued'])})"
        )


if __name__ == "__main__":
    main()
