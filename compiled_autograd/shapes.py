"""Dimensions that change: which of them a program takes as they come, the symbols that stand for them while a region is
traced, and the guards that say for which shapes the result holds.

A *spec* says of one value what a program was made for: of a tensor its dimensions, of a size the one number. Each is a
number, or a *history*: the two values that were seen when it was found to change. Dimensions with one history share a
symbol. What holds of the symbols is found out while a region is traced and compiled (equal, divisible, at least two);
PyTorch's ``ShapeEnv`` keeps the account, and what it has in the end becomes one generated function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter

History = tuple[int, int]
Spec = tuple[int | History, ...]
_SPECIAL = (0, 1)
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
    return sizes.difference(_SPECIAL)


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


@dataclass
class Symbols:
    """The symbols of one region's trace."""

    env: ShapeEnv = field(default_factory=ShapeEnv)
    _by_history: dict[tuple[History, int], sympy.Symbol] = field(default_factory=dict)
    _bindings: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def used(self) -> bool:
        """Whether anything changes."""
        return bool(self._by_history)

    def mode(self) -> FakeTensorMode:
        """A mode whose fake tensors may have these symbols."""
        return FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.env)

    def tensor(self, mode: FakeTensorMode, tensor: torch.Tensor, spec: Spec, position: int | None) -> torch.Tensor:
        """A fake tensor for argument number ``position``; None for a leaf, which is none of the arguments."""
        sizes = [self._size(each, size) for each, size in zip(spec, tensor.shape, strict=True)]
        strides = _strides(tensor, sizes)
        if position is not None:
            self._bindings.extend((f"a[{position}].size({dim})", size) for dim, size in enumerate(sizes))
            self._bindings.extend((f"a[{position}].stride({dim})", stride) for dim, stride in enumerate(strides))
        with mode:
            fake = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
        return fake.requires_grad_(tensor.requires_grad)

    def size(self, value: int, spec: Spec, position: int) -> Any:
        """A size that is argument number ``position``."""
        size = self._size(spec[0], value)
        self._bindings.append((f"a[{position}]", size))
        return size

    def _size(self, spec: int | History, value: int) -> Any:
        if isinstance(spec, int) or value in _SPECIAL:
            return value
        symbol = self._by_history.get((spec, value))
        source = ConstantSource(f"s{len(self._by_history)}")
        if symbol is None:
            symbol = self.env.create_symbol(value, source, DimDynamic.DYNAMIC)
            self._by_history[spec, value] = symbol
        return self.env.create_symintnode(symbol, hint=value, source=source)

    def guard(self) -> Callable[[Sequence[Any]], bool]:
        """A function of the region's arguments: whether what was compiled holds for them.

        Its text is in its ``__doc__``.
        """
        names: dict[sympy.Symbol, str] = {}
        lines, checks = [], []
        for text, value in self._bindings:
            expression = _expression(value)
            if expression in self._by_history.values() and expression not in names:
                names[expression] = str(expression)
                lines.append(f"{expression} = {text}")
            else:
                checks.append((text, expression))
        conditions = [f"{text} == {_printed(expression)}" for text, expression in checks]
        conditions += [_printed(condition) for condition in self.conditions(names)]
        body = "\n    ".join([*lines, f"return {' and '.join(conditions) or True}"])
        source = f"def guard(a):\n    {body}\n"
        namespace: dict[str, Any] = {"math": math}
        exec(compile(source, "<guards of a region>", "exec"), namespace)
        guard = namespace["guard"]
        guard.__doc__ = source
        return guard

    def conditions(self, symbols: Iterable[sympy.Symbol]) -> list[Any]:
        """What must hold of the symbols, beside where they come from."""
        conditions = [guard.expr for guard in self.env.guards]
        for symbol in symbols:
            bounds = self.env.var_to_range[symbol]
            conditions.append(sympy.Ge(symbol, bounds.lower))
            if bounds.upper != int_oo:
                conditions.append(sympy.Le(symbol, bounds.upper))
            replaced = self.env.replace(symbol)
            if replaced != symbol:
                conditions.append(sympy.Eq(symbol, replaced))
        return list(dict.fromkeys(condition for condition in conditions if condition != sympy.true))


def _expression(value: Any) -> Any:
    return value.node._expr if isinstance(value, torch.SymInt) else sympy.Integer(value)


def _printed(expression: Any) -> str:
    return PythonPrinter().doprint(expression)


def _strides(tensor: torch.Tensor, sizes: Sequence[Any]) -> list[Any]:
    """The tensor's strides, as products of ``sizes`` where they are such."""
    strides: list[Any] = list(tensor.stride())
    expected, value = 1, 1
    for dim in sorted(range(tensor.dim()), key=lambda dim: (strides[dim], tensor.shape[dim])):
        if tensor.stride(dim) == value:
            strides[dim] = expected
            expected, value = expected * sizes[dim], value * tensor.shape[dim]
    return strides
