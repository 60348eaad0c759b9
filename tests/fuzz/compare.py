"""How two runs of one program differ; how far compiled code may round differently."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .execute import Record, Seen, same_values
from .program import Program

Outcomes = list[tuple[str, tuple[Any, ...]]]
_COARSEST = 5e-2
_CANCELLED_SHARE = 1e-3
"""Where the largest gradient is smaller, it is what terms of about 1 have left that cancel."""
_ROUNDING = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-3, torch.complex64: 1e-3}


@dataclass(frozen=True)
class Finding:
    """One thing that is not as under eager.

    Attributes:
        kind: what sort of thing; the shrinker keeps to it.
        what: in words.
        step: at which step, counted over all phases.
    """

    kind: str
    what: str
    step: int

    def __str__(self) -> str:
        return f"{self.kind} at step {self.step}: {self.what}"


def _records(seen: Seen) -> Iterable[Record]:
    for record in [*seen.grads.values(), *(each for _, records in seen.events for each in records)]:
        if record is not None and record.values.numel():
            yield record


def largest(seen: Seen) -> float:
    """The largest value among all gradients that eager gave or showed; infinite where one is not finite."""
    found = 0.0
    for record in _records(seen):
        most = float(record.values.abs().max())
        if not math.isfinite(most):
            return math.inf
        found = max(found, most)
    return found


def _differ(
    found: Record | None, wanted: Record | None, scale: float, rounding: float | None
) -> tuple[str, str] | None:
    if found is None or wanted is None:
        return None if found is wanted else ("definedness", f"{_brief(found)}, eager {_brief(wanted)}")
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return "kind", f"{found.dtype} {found.shape}, eager {wanted.dtype} {wanted.shape}"
    if not (same_values(found, wanted) if rounding == 0 else _close(found, wanted, scale, rounding)):
        return "values", f"{_brief(found)}, eager {_brief(wanted)}"
    if _strides_that_matter(found) != _strides_that_matter(wanted):
        return "strides", f"{found.stride}, eager {wanted.stride} for {found.shape}"
    return None


def _strides_that_matter(record: Record) -> list[int]:
    """A dimension of one element has no stride, nor has a tensor of none."""
    if not record.values.numel():
        return []
    return [stride for size, stride in zip(record.shape, record.stride, strict=True) if size > 1]


def _close(found: Record, wanted: Record, scale: float, rounding: float | None) -> bool:
    if not math.isfinite(scale):
        return True  # what cancels or overflows on the way has no rounding that could be told
    tolerance = (rounding or _ROUNDING.get(wanted.dtype, _COARSEST)) * max(scale, _CANCELLED_SHARE)
    return bool((found.values - wanted.values).abs().le(tolerance).all())


def _brief(record: Record | None) -> str:
    if record is None:
        return "None"
    return f"{record.shape} {[f'{value:.4g}' for value in record.values.flatten()[:4].tolist()]}"


def rounding_of(program: Program, bitwise: bool) -> float | None:
    """How much rounding is allowed: none, that of the narrowest dtype, or (None) that of each result's own."""
    if bitwise:
        return 0.0
    return _COARSEST if any(each.name == "narrowed" for each in program.operators) else None


def differences(found: Seen, wanted: Seen, step: int, rounding: float | None) -> list[Finding]:
    """What a program could tell two steps apart by."""
    made: list[Finding] = []
    scale = largest(wanted)

    def add(kind: str, what: str) -> None:
        made.append(Finding(kind, what, step))

    if _first_words(found.error) != _first_words(wanted.error):
        add("error", f"{found.error[:300] or 'nothing'}, eager {wanted.error[:300] or 'nothing'}")
        return made
    names, others = [name for name, _ in found.events], [name for name, _ in wanted.events]
    if names != others:
        add("hooks", f"{names}, eager {others}")
    else:
        for (name, records), (_, expected) in zip(found.events, wanted.events, strict=True):
            for one, other in zip(records, expected, strict=True):
                if difference := _differ(one, other, scale, rounding):
                    add(f"hook {difference[0]}", f"{name}: {difference[1]}")
    for name, record in wanted.grads.items():
        if wanted.error and found.grads.get(name) is None:
            continue  # eager had written it before the error
        if difference := _differ(found.grads.get(name), record, scale, rounding):
            add(difference[0], f"{name}.grad: {difference[1]}")
        elif record is not None and found.grads[name].view != record.view:  # type: ignore[union-attr]
            add("view", f"{name}.grad is {'a' if not record.view else 'no'} view")
    for damage in found.damage:
        if damage not in wanted.damage:
            add("damage", damage)
    return made


def _first_words(error: str) -> str:
    return error.split(". ")[0].split("\n")[0][:60]


_EXPECTED_BYPASSES = (
    "create_graph",
    "batched_grads",
    "view_fn not supported",
    "view_fn",
    "nothing to compile",
    "intermediate_input",
    "a hook of C++, such as retain_grad's, on one of several outputs",  # the engine's key does not say of which
)


def judged(outcomes: Outcomes, known: bool, step: int, allowed: tuple[str, ...]) -> list[Finding]:
    """What is wrong with how backwards were accounted.

    Args:
        known: the same tape in the same shapes ran before, so that all are hits.
        allowed: kinds of bypasses that are no finding here.
    """
    made = []
    for outcome, reasons in outcomes:
        for reason in reasons:
            kind = type(reason).__name__
            if kind in ("Failure", "Mismatch"):
                made.append(Finding(f"failure {reason.kind}", str(reason)[:400], step))
            elif kind == "Bypass" and not any(word in reason.label for word in (*_EXPECTED_BYPASSES, *allowed)):
                made.append(Finding(f"bypass {reason.kind}", str(reason)[:400], step))
        if known and outcome not in ("hit", "bypass"):
            made.append(Finding("no hit", f"{outcome}: {'; '.join(map(str, reasons))[:300]}", step))
    return made
