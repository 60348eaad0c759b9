"""The sizes that a program serves, and those that may change.

A *spec* describes one value of a program: the dimensions of a tensor, or one number for a size. Each part is a number,
or a *history*: the two values seen when the size first changed, or one value twice if it was declared as changing from
the beginning. Dimensions with one history share a symbol (:mod:`symbolic`). A condition on the symbol is a guard.

Strides are products of sizes, or numbers. Some are neither, such as that of ``hidden[:, 0]``: it has the length that
the slice lacks. Then the history of the dimension ends with the two strides that were seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import msgspec
import torch

from ..torch_api import attributes

History = tuple[int, ...]
"""Two sizes; or a size and two strides; or two of both."""
Spec = tuple[int | History, ...]
SPECIAL = (0, 1)
"""Sizes for which operators do other things; they are never symbols."""


def spec_of(value: Any) -> Spec | None:
    """Return the spec of a program that takes ``value`` unchanged; None for a value without a size."""
    if isinstance(value, torch.Tensor):
        return tuple(attributes.shape(value))
    if type(value) is tuple:
        return value
    return (value,) if type(value) is int else None


def widened(spec: Spec | None, value: Any) -> Spec | None:
    """``spec`` with a history where ``value`` differs from it."""
    found = spec_of(value)
    if spec is None or found is None or len(spec) != len(found):
        return found
    return tuple(map(_widened, spec, found))


def _widened(old: int | History, new: Any) -> int | History:
    size = size_in(old)
    return old if not isinstance(size, int) or size == new else (size, int(new), *strides_in(old))


def with_strides(spec: Spec, tensor: torch.Tensor, before: Sequence[int] | None) -> Spec:
    """``spec`` with a history where a stride differs from that in ``before`` and is no product of sizes. Where the
    dimensions are in another order in memory, operators do other things, and nothing is made of it."""
    order = outwards(tensor)
    if before is None or order != sorted(order, key=before.__getitem__):
        return spec
    parts, product = list(spec), 1
    for dim in order:
        stride, part = attributes.stride(tensor, dim), parts[dim]
        if stride not in (product, before[dim]) and not strides_in(part):
            parts[dim] = (*((part,) if isinstance(part, int) else part), before[dim], stride)
        product = stride * attributes.shape(tensor)[dim]
    return tuple(parts)


def outwards(tensor: torch.Tensor) -> list[int]:
    """The dimensions of a tensor, from the one with the smallest stride on."""
    shape, stride = attributes.shape(tensor), attributes.stride(tensor)
    return sorted(range(len(shape)), key=lambda dim: (stride[dim], shape[dim]))


def size_in(part: int | History) -> int | History:
    """Return the size in a part of a spec, or the two that were seen."""
    return part if isinstance(part, int) else part[0] if len(part) == 3 else part[:2]


def strides_in(part: int | History) -> History:
    """Return the two strides that were seen; empty if they follow from sizes, or do not change."""
    return () if isinstance(part, int) or len(part) == 2 else part[-2:]


def marked(tensors: Sequence[torch.Tensor], everything: bool) -> set[int]:
    """Sizes that are to be symbols from the beginning: those of the dimensions that ``torch._dynamo.mark_dynamic``
    marked, or ``everything`` that is no parameter's."""
    sizes: set[int] = set()
    for tensor in tensors:
        if everything and not _is_parameter(tensor):
            sizes.update(attributes.shape(tensor))
        sizes.update(attributes.shape(tensor)[dim] for dim in getattr(tensor, "_dynamo_dynamic_indices", ()))
    return sizes.difference(SPECIAL)


def promoted(tensor: torch.Tensor, changing: Container[int]) -> Spec:
    """A spec in which dimensions of the sizes ``changing`` change, but a parameter's do not."""
    shape = attributes.shape(tensor)
    return tuple((size, size) if size in changing and not _is_parameter(tensor) else size for size in shape)


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or isinstance(attributes.base(tensor), torch.nn.Parameter)


def is_static(spec: Spec | None) -> bool:
    """Return whether no size changes."""
    return spec is None or all(isinstance(each, int) for each in spec)


def static_parts(spec: Spec) -> list[int | None]:
    """Return the sizes of a spec; None for each with a history."""
    return [size if isinstance(size, int) else None for size in map(size_in, spec)]


class Origin(msgspec.Struct, frozen=True):
    """The place of a number among arguments: a size that is an argument itself, or a size or a stride of a tensor."""

    argument: int
    what: str = ""
    dim: int = 0

    def __str__(self) -> str:
        return f"a[{self.argument}].{self.what}({self.dim})" if self.what else f"a[{self.argument}]"

    def among(self, arguments: Sequence[Any]) -> int:
        """The number."""
        value = arguments[self.argument]
        return getattr(value, self.what)(self.dim) if self.what else value


class Condition(msgspec.Struct, frozen=True):
    """A condition on symbols.

    Attributes:
        expression: Python, with each symbol in braces.
        symbols: those in the expression.
        origin: the number that the expression must equal; None if the expression must be true.
    """

    expression: str
    symbols: tuple[str, ...] = ()
    origin: Origin | None = None

    def text(self, names: Mapping[str, str], number: str) -> str:
        """The condition with other names for the symbols and for what stands in ``origin``."""
        text = self.expression.format_map(names)
        return text if self.origin is None else f"{number} == {text}"

    def __str__(self) -> str:
        return self.text({symbol: symbol for symbol in self.symbols}, str(self.origin))


class Guard:
    """A check whether compiled code serves its arguments.

    Attributes:
        origins: the symbols, and the place of each.
        conditions: the conditions on the symbols.
        function: checks the arguments, in microseconds. This function is generated, and so is the next.
        values: returns the values of the symbols.
    """

    __slots__ = ("conditions", "function", "origins", "values")

    def __init__(self, origins: Sequence[tuple[str, Origin]], conditions: Sequence[Condition]) -> None:
        self.origins, self.conditions = tuple(origins), tuple(conditions)
        all_hold = " and ".join(f"({condition})" for condition in conditions)  # one may be an "or"
        symbols = "".join(f"{symbol}, " for symbol, _ in origins)
        lines = [f"{symbol} = {origin}" for symbol, origin in origins]
        namespace: dict[str, Any] = {"math": math}
        for name, result in (("guard", all_hold or True), ("values", f"({symbols})")):
            body = "\n    ".join([*lines, f"return {result}"])
            exec(compile(f"def {name}(a):\n    {body}\n", "<guards of a region>", "exec"), namespace)
        self.function: Callable[[Sequence[Any]], bool] = namespace["guard"]
        self.values: Callable[[Sequence[Any]], tuple[int, ...]] = namespace["values"]

    def broken(self, arguments: Sequence[Any]) -> Condition | None:
        """The first condition that does not hold; None where all do."""
        values: dict[str, Any] = {"a": arguments, "math": math}
        values.update({symbol: origin.among(arguments) for symbol, origin in self.origins})
        return next((condition for condition in self.conditions if not eval(str(condition), values)), None)

    def with_strides(self, spec: Spec, tensor: torch.Tensor, argument: int) -> Spec:
        """``spec`` of an argument with a history where a stride was to be another number than that of ``tensor``."""
        before = list(tensor.stride())
        for condition in self.conditions:
            origin = condition.origin
            if origin is not None and (origin.argument, origin.what) == (argument, "stride") and not condition.symbols:
                before[origin.dim] = int(condition.expression)
        return with_strides(spec, tensor, before)
