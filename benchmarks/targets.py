"""What the results say of the project's targets: each model and runner beside the floor, eager, and PyTorch's own.

Only arithmetic on the results that `benchmarks.backward` measured or wrote; torch is not imported.
"""

import math
from collections.abc import Iterable
from typing import Any

Result = dict[str, Any]

# Named here again because whoever only wants --help should not wait for torch to load.
MODELS = ("mlp", "gpt", "resnet", "lstm", "pinn")

# What a first backward and a hit are compared with: PyTorch's own compiled autograd, at its better.
REFERENCE = "torch-ca-static"
# Runners whose hits say nothing: they capture no tape, or one of a node. Of what they compile, the first backward is
# only a part.
WITHOUT_HITS = ("eager", "aot", "aot-ours", "aot-cuda-graphs")
# What a geometric mean over models is taken of.
RATIOS = ("ratio", "floor", "first_to_reference", "hit_to_reference", "hit_to_eager", "allocated_ratio")


def rows(results: list[Result]) -> list[Result]:
    """One row for each result; a value is None where one of its parts was not measured.

    model, runner: what was measured.
    ratio: the runner's backward by eager's. floor: the part of eager's that no fusion shortens.
    first_backward_seconds, and first_to_reference: the same by the reference's, where all compiling is in it.
    hit_ms, hit_to_reference, and hit_to_eager: by eager's whole backward.
    allocated_ratio: the most that is allocated at once during the backward, by eager's.
    """
    reference = {result["model"]: result for result in results if result["runner"] == REFERENCE}
    found = []
    for result in results:
        other = reference.get(result["model"], {})
        row = {name: result.get(name) for name in ("model", "runner", "ratio", "floor", "first_backward_seconds")}
        captures = result["runner"] not in WITHOUT_HITS
        row["first_to_reference"] = _by(result, other, "first_backward_seconds") if captures else None
        row["hit_ms"] = result.get("hit_ms")
        row["hit_to_reference"] = _by(result, other, "hit_ms")
        row["hit_to_eager"] = result.get("hit_ratio")
        row["allocated_ratio"] = _quotient(result.get("runner_allocated_bytes"), result.get("eager_allocated_bytes"))
        found.append(row)
    return found


def geometric_means(rows: list[Result], runner: str) -> Result:
    """Of each of RATIOS, over the models for which `runner` has it; None where it has none."""
    own = [row for row in rows if row["runner"] == runner]
    return {name: geometric_mean(row[name] for row in own) for name in RATIOS}


def geometric_mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    # A model without any product has a floor of zero, and so has the mean.
    if not known or min(known) <= 0:
        return 0.0 if known else None
    return math.exp(sum(map(math.log, known)) / len(known))


def _by(result: Result, other: Result, name: str) -> float | None:
    return _quotient(result.get(name), other.get(name))


def _quotient(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else value / by
