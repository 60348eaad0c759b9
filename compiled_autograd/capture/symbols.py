"""Stand-ins for sizes and scalars while the engine reports a capture.

The engine only returns symbols, and multiplies some (to get the number of elements of a view). So a symbol here is an
object that knows its origin, instead of a ``ShapeEnv`` with its symbolic algebra. PyTorch takes any Python object with
these methods as the node of a ``torch.SymInt`` (``torch/csrc/utils/python_symnode.h``, 2.13).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ..ir.legality import ARITHMETIC


class Symbol:
    """A size or scalar of the tape: ``origin`` says which, ``value`` is what it was in the backward being captured.

    ``origin`` is ``("size", i)``, ``("scalar", i)``, ``("constant", v)`` or ``(operator.mul, Symbol, Symbol)``.
    ``asked`` collects every comparison whose outcome the engine wanted to know, since what it did next holds only where
    the outcome is the same.
    """

    __slots__ = ("asked", "origin", "value")

    def __init__(self, origin: tuple[Any, ...], value: Any, asked: list[str]) -> None:
        self.origin = origin
        self.value = value
        self.asked = asked

    # What the engine asks about a symbol's kind.
    def is_int(self) -> bool:
        return isinstance(self.value, int) and not isinstance(self.value, bool)

    def is_float(self) -> bool:
        return isinstance(self.value, float)

    def is_bool(self) -> bool:
        return isinstance(self.value, bool)

    def is_nested_int(self) -> bool:
        return False

    is_constant = is_nested_int

    def is_symbolic(self) -> bool:
        return True

    has_hint = is_symbolic

    def maybe_as_int(self) -> None:
        """Never a plain integer: then the engine would take it for a constant."""
        return None

    def wrap_int(self, value: int) -> Symbol:
        return Symbol(("constant", value), value, self.asked)

    wrap_float = wrap_bool = wrap_int

    # What the engine asks about its value.
    def guard_int(self, file: str, line: int) -> int:
        self.asked.append(f"the value of {self}")
        return self.value

    guard_float = guard_bool = guard_int

    def expect_true(self, file: str, line: int) -> bool:
        return bool(self.value)

    expect_size = expect_true

    def guard_size_oblivious(self, file: str, line: int) -> bool:
        return bool(self.guard_int(file, line))

    guard_or_false = guard_or_true = guard_size_oblivious

    def __str__(self) -> str:
        first, *rest = self.origin
        return f"{first.__name__}({', '.join(map(str, rest))})" if len(rest) > 1 else f"{first}_{rest[0]}"

    _graph_repr = __repr__ = str = __str__


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[[Symbol, Symbol], Symbol]:
    def method(self: Symbol, other: Symbol) -> Symbol:
        return Symbol((function, self, other), function(self.value, other.value), self.asked)

    return method


def _comparison(function: Callable[[Any, Any], bool]) -> Callable[[Symbol, Symbol], Symbol]:
    def method(self: Symbol, other: Symbol) -> Symbol:
        outcome = function(self.value, other.value)
        if not (function is operator.ge and other.origin == ("constant", 0)):  # every size is at least 0
            self.asked.append(f"{self} {function.__name__} {other}")
        return Symbol(("constant", outcome), outcome, [])

    return method


for _function in ARITHMETIC:
    setattr(Symbol, _function.__name__, _arithmetic(_function))
for _function in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
    setattr(Symbol, _function.__name__, _comparison(_function))


def sym_ints(kind: str, values: Any, asked: list[str]) -> list[Any]:
    """Return a ``torch.SymInt`` (or ``SymFloat``) for each of ``values``, recognisable by :func:`symbol_of`."""
    return [
        (torch.SymFloat if isinstance(value, float) else torch.SymInt)(Symbol((kind, index), value, asked))
        for index, value in enumerate(values)
    ]


def symbol_of(value: Any) -> Symbol | None:
    """The :class:`Symbol` inside a ``SymInt`` or ``SymFloat``, or None for anything else."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and isinstance(value.node, Symbol):
        return value.node
    return None
