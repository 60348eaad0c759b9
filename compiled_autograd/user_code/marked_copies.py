"""Copies of marked code for a trace, so that other code does not see its changes; and a mode that refuses operators
with side effects."""

from __future__ import annotations

import itertools
import types
from collections.abc import Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from .marked_code import NotPlainError, named_by, of_torch


class Copies:
    """Functions with copies of the lists and dictionaries that they can reach. A trace runs with those: it may come
    while other threads use the real ones, and a call for each step comes after it."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._originals: list[Any] = []  # what has an `id` here must live
        self._before: list[tuple[Any, Any]] = []

    def of(self, value: Any) -> Any:
        """Copy a list or dictionary, also in a tuple, or a function with such values around it. Other plain values, and
        functions of PyTorch, are unchanged. One object has one copy."""
        if id(value) in self._made:
            return self._made[id(value)]
        if type(value) is types.FunctionType:
            return value if of_torch(value) else self.of_function(value)
        if type(value) is tuple:
            return tuple(map(self.of, value))
        if type(value) not in (list, dict):
            return value
        copy: Any = type(value)()
        self._keep(value, copy)
        if type(value) is list:
            copy.extend(map(self.of, value))
        else:
            copy.update((name, self.of(each)) for name, each in value.items())
        self._before.append((copy, _items(copy)))
        return copy

    def of_function(self, function: Any) -> Any:
        """A function, also one of PyTorch's around the user's own."""
        wraps = of_torch(function)
        cells = tuple([types.CellType() for _ in function.__closure__ or ()])
        known = function.__globals__ if wraps else self._variables(function)
        copy = types.FunctionType(function.__code__, known, function.__name__, None, cells or None)
        self._keep(function, copy)
        copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
        copy.__defaults__ = self.of(function.__defaults__)
        copy.__kwdefaults__ = self.of(function.__kwdefaults__)
        copy.__dict__.update({name: self.of(value) for name, value in vars(function).items()})
        for cell, real in zip(cells, function.__closure__ or (), strict=True):
            try:
                value = real.cell_contents
            except ValueError:  # nothing was put into it yet
                continue
            inside = wraps and type(value) is types.FunctionType
            cell.cell_contents = self._made.get(id(value)) or self.of_function(value) if inside else self.of(value)
        if not wraps:
            for name in named_by(function.__code__, function.__globals__):
                known[name] = self.of(function.__globals__[name])
        return copy

    def _variables(self, function: types.FunctionType) -> dict[str, Any]:
        """Return a copy of the variables of a function's module; functions of one module share the copy."""
        known = function.__globals__
        if id(known) not in self._made:
            self._keep(known, dict(known))
        found: dict[str, Any] = self._made[id(known)]
        return found

    def _keep(self, value: Any, copy: Any) -> None:
        self._made[id(value)] = copy
        self._originals.append(value)

    def refuse_changes(self) -> None:
        """Check for changes after the trace.

        Raises:
            NotPlainError: one of the lists and dictionaries was changed.
        """
        for copy, before in self._before:
            after = _items(copy)
            if len(after) != len(before) or any(map(_differ, after, before)):
                raise NotPlainError("traceable: it changes its own dependencies, for example a counter")


def _items(container: Any) -> list[Any]:
    return list(container) if type(container) is list else list(itertools.chain.from_iterable(container.items()))


def _differ(one: Any, other: Any) -> bool:
    return one is not other


class RefuseSideEffects(TorchDispatchMode):
    """Inside, an operator that gives nothing and writes into nothing raises: it is there for what else it does, which
    compilers that see no use for it leave out."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        schema = getattr(func, "_schema", None)
        if schema is not None and not schema.returns and not schema.is_mutable:
            raise NotPlainError(f"traceable: it calls {func}, which returns nothing")
        return func(*args, **(kwargs or {}))
