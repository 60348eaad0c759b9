"""The results for people: a line for each part, and a sentence about the machine."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from ..settings import resolve
from ..versions import VERSION
from .apart import CUDA, EXTENSION, INDUCTOR, OWN_LOOP, STORE
from .checks import NOT_HERE, OFF, PartResult
from .running import NAMES

_LEFT_OUT = (CUDA,)
"""Parts whose absence needs no words at the end."""
_MISSING = {
    INDUCTOR: "There is no C++ compiler: the extension is off, and backend inductor runs the calls of a backward one "
    "by one, with the same gradients",
    EXTENSION: "The extension is off: backwards are walked by PyTorch's engine, with the same gradients",
    OWN_LOOP: "The own loop is off: bypasses run on PyTorch's engine, with the same gradients",
}
_OFF = {
    INDUCTOR: "the calls of a backward run one by one, with the same gradients",
    CUDA: "backwards on CUDA run on the eager engine, or their calls one by one, with the same gradients",
    STORE: "each process compiles anew",
    EXTENSION: "backwards are walked by PyTorch's engine, with the same gradients",
    OWN_LOOP: "bypasses run on PyTorch's engine, with the same gradients",
}
_WRONG = {
    INDUCTOR: 'use backend="eager"',
    CUDA: "leave backwards on CUDA to eager",
    STORE: "set cache_dir=False",
    EXTENSION: "set extension='off'",
    OWN_LOOP: "set extension='hits'",
}


def is_fine(found: Sequence[PartResult]) -> bool:
    """True: each part works, or is an optional one that is missing."""
    return all(each.is_fine for each in found)


def heading() -> str:
    """The versions that were tried, in one line."""
    return f"compiled_autograd {VERSION}, torch {torch.__version__}, Python {platform.python_version()}"


def line(result: PartResult) -> str:
    """One part."""
    text = f"{result.name:<28}{result.result:<10}{result.seconds:5.1f} s"
    return f"{text}  {result.reason}" if result.reason else text


def sentence(found: Sequence[PartResult]) -> str:
    """Say that the machine is fine, or name the parts that are off and their substitutes.

    Raises:
        UnknownSettingError, InvalidSettingError: an environment variable with this package's prefix.
    """
    bad = [each for each in found if not each.is_fine]
    if bad:
        return f"Not all is right here. {' '.join(map(_what_is_off, bad))} Please report this output."
    missing = [each.name for each in found if each.result == NOT_HERE and each.name not in _LEFT_OUT]
    if INDUCTOR in missing:
        missing = [INDUCTOR]
    elif EXTENSION in missing:
        missing = [EXTENSION]
    texts = ["This machine is fine" if len(found) == len(NAMES) else "What was run is fine"]
    texts += [_MISSING[name] for name in missing if name in _MISSING]
    settings = resolve({})
    if not settings.may_compile and not settings.turned_off:
        texts.append(f"torch {torch.__version__} was not tested: set untested_torch='try' to compile on it")
    return " ".join(f"{text}." for text in texts)


def _what_is_off(result: PartResult) -> str:
    if result.result == OFF:
        instead = _OFF.get(result.name, "such backwards run on the eager engine, with the same gradients")
        return f"{result.name} is off: {instead}."
    instead = _WRONG.get(result.name, "do not use this package with this PyTorch")
    return f"{result.name} is wrong: {instead}."


def as_json(found: Sequence[PartResult]) -> str:
    """All of it, as one JSON object."""
    about: dict[str, Any] = {"fine": is_fine(found), "sentence": sentence(found)}
    about |= {"compiled_autograd": VERSION, "torch": str(torch.__version__), "python": platform.python_version()}
    return msgspec.json.encode({**about, "results": found}).decode()
