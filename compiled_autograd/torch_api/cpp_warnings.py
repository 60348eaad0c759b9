"""Warnings that PyTorch's C++ code issues inside the engine's functions, as Python's own.

A warning of C++ code becomes one of Python's at the end of the call of PyTorch that it was issued in
(``HANDLE_TH_ERRORS`` in ``torch/csrc/Exceptions.h``, 2.13). The engine's own calls are such calls; the functions that
it binds for a capture are not, and their warnings would only be printed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def raising_warnings() -> Iterator[Callable[..., Any]]:
    """Gives what calls a function, and raises what C++ code warned of meanwhile, if it did. All other warnings are
    passed on at the end."""
    caught: list[warnings.WarningMessage] = []

    def call(function: Callable[..., Any], *args: Any) -> Any:
        before = len(caught)
        result = issuing_warnings(function, *args)
        by_cpp = [each.message for each in caught[before:] if _BY_CPP in str(each.message)]
        if by_cpp:
            raise by_cpp[-1] if isinstance(by_cpp[-1], Warning) else UserWarning(by_cpp[-1])
        return result

    try:
        with warnings.catch_warnings(record=True) as recorded:
            assert recorded is not None
            caught = recorded
            warnings.simplefilter("always")
            yield call
    finally:
        for each in caught:
            if _BY_CPP not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno, source=each.source)
