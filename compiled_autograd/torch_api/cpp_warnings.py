"""Warnings that PyTorch's C++ code issues inside the engine's functions, as Python's own.

A warning of C++ code becomes one of Python's at the end of the call of PyTorch that it was issued in
(``HANDLE_TH_ERRORS`` in ``torch/csrc/Exceptions.h``, 2.13). The engine's own calls are such calls; the functions that
it binds for a capture are not, and their warnings would only be printed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

_BY_CPP = "Triggered internally at"
_one_element = torch.zeros(1, device="cpu")


def issuing_warnings(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function``; what C++ code warns of meanwhile becomes a Python warning. Costs a microsecond."""
    results = []

    def call(element: float) -> float:
        results.append(function(*args))
        return element

    _one_element.apply_(call)  # of PyTorch's calls, the one that calls back
    return results[0]


def raising(caught: Sequence[warnings.WarningMessage], function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function``, and raise the last of what C++ code warned of meanwhile, if it did.

    Args:
        caught: what ``warnings.catch_warnings(record=True)``, which the caller is inside of, has recorded so far.

    Raises:
        Warning: C++ code warned.
    """
    before = len(caught)
    result = issuing_warnings(function, *args)
    by_cpp = [each.message for each in caught[before:] if _BY_CPP in str(each.message)]
    if by_cpp:
        raise by_cpp[-1] if isinstance(by_cpp[-1], Warning) else UserWarning(by_cpp[-1])
    return result


def pass_on(caught: Sequence[warnings.WarningMessage]) -> None:
    """Issue those warnings again that are not C++ code's."""
    for each in caught:
        if _BY_CPP not in str(each.message):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno, source=each.source)
