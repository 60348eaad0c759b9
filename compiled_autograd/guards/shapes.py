"""Which sizes a program is made for, and which it takes as they come.

A *spec* says of one value what a program was made for: of a tensor its dimensions, of a size the one number. Each is a
number, or a *history*: the two values that were seen when it was found to change, or one value twice where it was said
to change from the beginning. Dimensions with one history share a symbol (:mod:`symbolic`). What holds
of the symbols is a guard, one generated function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch

History = tuple[int, int]
Spec = tuple[int | History, ...]
SPECIAL = (0, 1)
"""Sizes for which operators do other things; they are never symbols."""


def spec_of(value: Any) -> Spec | None:
    """What a program that takes ``value`` as it is now is made for; None for what has no size."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if type(value) is tuple:
        return value
    return (value,) if type(value) is int else None


def widened(spec: Spec | None, value: Any) -> Spec | None:
    """``spec`` with a history where ``value`` differs from it."""
    found = spec_of(value)
    if spec is None or found is None or len(spec) != len(found):
        return found
    pairs = zip(spec, found, strict=True)
    return tuple((old, int(new)) if isinstance(old, int) and old != new else old for old, new in pairs)  # type: ignore[arg-type]


def marked(tensors: Sequence[torch.Tensor], everything: bool) -> set[int]:
    """Sizes that are to be symbols from the beginning: those of the dimensions that ``torch._dynamo.mark_dynamic``
    marked, or ``everything`` that is no parameter's."""
    sizes: set[int] = set()
    for tensor in tensors:
        if everything and not _is_parameter(tensor):
            sizes.update(tensor.shape)
        sizes.update(tensor.shape[dim] for dim in getattr(tensor, "_dynamo_dynamic_indices", ()))
    return sizes.difference(SPECIAL)


def promoted(tensor: torch.Tensor, changing: Container[int]) -> Spec:
    """A spec in which dimensions of the sizes ``changing`` change, but a parameter's do not."""
    if _is_parameter(tensor):
        return tuple(tensor.shape)
    return tuple((size, size) if size in changing else size for size in tensor.shape)


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


def is_static(spec: Spec | None) -> bool:
    """Whether nothing in it changes."""
    return spec is None or all(isinstance(each, int) for each in spec)


def static_parts(spec: Spec) -> list[int | None]:
    """Its numbers; None where it has a history."""
    return [each if isinstance(each, int) else None for each in spec]


@dataclass(frozen=True)
class Guard:
    """Whether something compiled holds for its arguments.

    Attributes:
        names: assignments of the symbols, such as ``s0 = a[3].size(1)``.
        conditions: what must hold, as expressions of Python.
        function: says so of the arguments, in microseconds.
        values: gives the values of the symbols.
    """

    names: tuple[str, ...]
    conditions: tuple[str, ...]
    function: Callable[[Sequence[Any]], bool]
    values: Callable[[Sequence[Any]], tuple[int, ...]]

    def broken(self, arguments: Sequence[Any]) -> str:
        """The first condition that does not hold; empty where all do."""
        values: dict[str, Any] = {"a": arguments, "math": math}
        for line in self.names:
            name, _, text = line.partition(" = ")
            values[name] = eval(text, values)
        return next((text for text in self.conditions if not eval(text, values)), "")


def guard_of(names: Sequence[str], conditions: Sequence[str]) -> Guard:
    """A guard, from its text."""
    all_hold = " and ".join(f"({condition})" for condition in conditions)  # one may be an "or"
    symbols = "".join(f"{line.partition(' = ')[0]}, " for line in names)
    namespace: dict[str, Any] = {"math": math}
    for name, result in (("guard", all_hold or True), ("values", f"({symbols})")):
        body = "\n    ".join([*names, f"return {result}"])
        exec(compile(f"def {name}(a):\n    {body}\n", "<guards of a region>", "exec"), namespace)
    return Guard(tuple(names), tuple(conditions), namespace["guard"], namespace["values"])
