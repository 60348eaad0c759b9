"""One tape beside eager: the same gradients, hooks in the same order, and no fallback where a hit is expected."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..engine.engine import install
from ..engine.session import HIT, Session
from ..settings import resolve
from ..shadow_cache import Failure, Mismatch
from .tapes import STEPS, TapeCase, TapeStep

OK, WRONG, OFF, NOT_HERE = "ok", "wrong", "off", "not here"
_SETTINGS: dict[str, Any] = {
    "backend": "eager",
    "mode": "default",
    "dynamic": None,
    "on_miss": "compile",
    "on_unsupported": "eager",
    "check": "new",
    "cache_dir": False,
    "passes": (),
    "tune": False,
    "compile_budget": float("inf"),
    "extension": "off",
    "progress": False,
    "untested_torch": "try",
}
"""Each setting is named: the user's environment variables change nothing here."""
_TOLERANCE = 1e-4
_LONGEST = 400

Verdict = tuple[str, str]
"""A result, and the reason where it is not :data:`OK`."""


class PartResult(msgspec.Struct, frozen=True):
    """The outcome of one part of the selftest.

    Attributes:
        name: the name of the part.
        result: ``"ok"``; ``"wrong"``: a gradient or a call of a hook is not eager's, or there was an error; ``"off"``:
            eager served what a compiled backward should have; ``"not here"``: this machine lacks an optional part.
        seconds: the time that it took.
        reason: why the result is not ``"ok"``.
    """

    name: str
    result: str
    seconds: float
    reason: str = ""

    @property
    def is_fine(self) -> bool:
        """True: the part works, or is an optional one that is missing."""
        return self.result in (OK, NOT_HERE)


def measured(name: str, check: Callable[[], Verdict]) -> PartResult:
    """Run one check; an error in it is its result."""
    began = time.perf_counter()
    try:
        result, reason = check()
    except Exception as error:  # noqa: BLE001  an error of one part ends no other
        result, reason = WRONG, f"{type(error).__name__}: {error}"
    return PartResult(name, result, time.perf_counter() - began, " ".join(reason.split())[:_LONGEST])


def session_with(**settings: Any) -> Session:
    """A session as ``enable`` makes one, with none of the environment's settings."""
    install()
    return Session(resolve({**_SETTINGS, **settings}, {}))


def check_tape(tape: TapeCase, exact: bool = True, device: str = "cpu", **settings: Any) -> Verdict:
    """Run a tape on eager and in a session with these settings, step by step."""
    session = session_with(**settings)
    for number in range(STEPS):
        verdict = check_step(tape, number, session, exact, device)
        if verdict[0] != OK:
            return verdict
    return OK, ""


def check_step(tape: TapeCase, number: int, session: Session, exact: bool = True, device: str = "cpu") -> Verdict:
    """Run one step of a tape on eager and in a session."""
    wanted, found = TapeStep(number, None, device), TapeStep(number, session, device)
    expected_grads = tape.run(wanted)
    grads = tape.run(found)
    at = f"step {number + 1}"
    if len(grads) != len(expected_grads):
        return WRONG, f"{at}: {len(grads)} gradients, and eager gives {len(expected_grads)}"
    for index, (one, other) in enumerate(zip(grads, expected_grads, strict=True)):
        if not same(one, other, exact):
            return WRONG, f"{at}: gradient {index + 1} is {_brief(one)}, and eager gives {_brief(other)}"
    if not same(found.log, wanted.log, exact):
        return WRONG, f"{at}: hooks and functions saw {_brief(found.log)}, and under eager {_brief(wanted.log)}"
    return _expected_outcomes(tape, number, found)


def _expected_outcomes(tape: TapeCase, number: int, step: TapeStep) -> Verdict:
    """Compare the outcomes of a step with those that the tape expects, and look for failures."""
    for index, outcome in enumerate(step.outcomes):
        failures = [each for each in outcome.reasons if isinstance(each, Failure)]
        if failures:
            mismatch = any(isinstance(each, Mismatch) for each in failures)
            return WRONG if mismatch else OFF, f"step {number + 1}: {'; '.join(map(str, failures))}"
        wanted = tape.expected(number)[index]
        if outcome.outcome != wanted:
            because = "; ".join(map(str, outcome.reasons)) or "without a reason"
            is_hit = f"a {outcome.outcome} instead of a {wanted}"
            return OFF if wanted == HIT else WRONG, f"step {number + 1}: backward {index + 1} is {is_hit}: {because}"
    if len(step.outcomes) != len(tape.expected(number)):
        return WRONG, f"step {number + 1}: {len(step.outcomes)} backwards were counted"
    return OK, ""


def same(one: Any, other: Any, exact: bool) -> bool:
    """Compare two values: tensors in kind, layout, strides and each bit, or within rounding."""
    if isinstance(other, Tensor):
        return isinstance(one, Tensor) and _same_tensors(one, other, exact)
    if isinstance(other, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other, [exact] * len(one)))
    return type(one) is type(other) and bool(one == other)


def _same_tensors(one: Tensor, other: Tensor, exact: bool) -> bool:
    kinds = [(each.dtype, each.device, each.shape, each.layout, each.requires_grad) for each in (one, other)]
    if kinds[0] != kinds[1]:
        return False
    if other.layout is not torch.strided:
        return _same_tensors(one.to_dense(), other.to_dense(), exact)
    if one.stride() != other.stride():
        return False
    if exact:
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE)


def _brief(value: Any) -> str:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        text = f"{value.dtype} {tuple(value.shape)} {value.detach().flatten()[:4].tolist()}"
    else:
        text = " ".join(str(value).split())
    return text if len(text) <= 120 else f"{text[:117]}..."
