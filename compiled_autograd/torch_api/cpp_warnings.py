"""Warnings that PyTorch's C++ code issues inside the engine's functions, as Python's own.

A warning of C++ code becomes one of Python's at the end of the call of PyTorch that it was issued in
(``HANDLE_TH_ERRORS`` in ``torch/csrc/Exceptions.h``, 2.13). The engine's own calls are such calls; the functions that
it binds for a capture are not, and their warnings would only be printed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
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


class RaisingWarnings:
    """Within it, :meth:`call` raises what C++ code warns of. All other warnings are passed on at its end."""

    def __enter__(self) -> RaisingWarnings:
        self._passed_on: list[warnings.WarningMessage] = []
        self._catching = warnings.catch_warnings(record=True)
        caught = self._catching.__enter__()
        assert caught is not None  # it records
        self._caught = caught
        warnings.simplefilter("always")
        return self

    def __exit__(self, *exception: Any) -> None:
        self._noted()
        self._catching.__exit__(*exception)
        for each in self._passed_on:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno, source=each.source)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function``, and raise what C++ code warned of meanwhile, if it did."""
        result = issuing_warnings(function, *args)
        if self._caught and (warning := self._noted()) is not None:
            raise warning
        return result

    def _noted(self) -> Warning | None:
        noted = None
        for each in self._caught:
            if _BY_CPP in str(each.message):
                noted = each.message if isinstance(each.message, Warning) else UserWarning(each.message)
            else:
                self._passed_on.append(each)
        self._caught.clear()
        return noted
