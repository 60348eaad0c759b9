"""Symbols for changing sizes during the trace of a region, and the conditions on them.

The final conditions of PyTorch's ``ShapeEnv`` become a guard. This module is imported only if a size changes, since the
import takes a second.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter

from .shapes import SPECIAL, Condition, Guard, History, Origin, Spec, outwards, size_in, strides_in


@dataclass
class Symbols:
    """The symbols of one region's trace."""

    env: ShapeEnv = field(default_factory=ShapeEnv)
    _by_history: dict[tuple[History, int], sympy.Symbol] = field(default_factory=dict)
    _bindings: list[tuple[Origin, Any]] = field(default_factory=list)

    def tensor(
        self, mode: FakeTensorMode, tensor: torch.Tensor, spec: Spec, plain: bool, position: int | None
    ) -> torch.Tensor:
        """Make a fake tensor for an argument. ``position`` is the argument's number; None for a leaf, which is not an
        argument.

        Args:
            plain: without conjugate and negative bit.
        """
        sizes = [self._size(size_in(each), size) for each, size in zip(spec, tensor.shape, strict=True)]
        own: list[Any] = list(tensor.stride())
        if position is not None:
            own = [self._size(strides_in(part) or stride, stride) for part, stride in zip(spec, own, strict=True)]
        strides = _strides(tensor, sizes, own)
        if position is not None:
            for what, numbers in (("size", sizes), ("stride", strides)):
                self._bindings.extend((Origin(position, what, dim), number) for dim, number in enumerate(numbers))
        with mode:
            fake = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
            if tensor.is_conj() and not plain:
                fake = torch._conj(fake)
            if tensor.is_neg() and not plain:
                fake = torch._neg_view(fake)
        return fake.requires_grad_(tensor.requires_grad)

    def size(self, value: int, spec: Spec, position: int) -> Any:
        """Make a symbol for a size that is argument number ``position``."""
        size = self._size(spec[0], value)
        self._bindings.append((Origin(position), size))
        return size

    def _size(self, spec: int | History, value: int) -> Any:
        if isinstance(spec, int) or value in SPECIAL or value < 0:
            return value
        symbol = self._by_history.get((spec, value))
        source = ConstantSource(f"s{len(self._by_history)}")
        if symbol is None:
            symbol = self.env.create_symbol(value, source, DimDynamic.DYNAMIC)
            self._by_history[spec, value] = symbol
        return self.env.create_symintnode(symbol, hint=value, source=source)

    def guard(self) -> Guard:
        """A function of the region's arguments: whether what was compiled holds for them."""
        origins: dict[sympy.Symbol, Origin] = {}
        checks = []
        for origin, value in self._bindings:
            expression = _expression(value)
            if expression in self._by_history.values() and expression not in origins:
                origins[expression] = origin
            else:
                checks.append((origin, expression))
        names = {symbol: str(symbol) for symbol in origins}
        found = [guard.expr for guard in self.env.guards]
        for symbol in origins:
            bounds = self.env.var_to_range[symbol]
            found.append(sympy.Ge(symbol, bounds.lower))
            if bounds.upper != int_oo:
                found.append(sympy.Le(symbol, bounds.upper))
            replaced = self.env.replace(symbol)
            if replaced != symbol:
                found.append(sympy.Eq(symbol, replaced))
        conditions = [_condition(expression, names, origin) for origin, expression in checks]
        conditions += [_condition(each, names) for each in dict.fromkeys(found) if each != sympy.true]
        return Guard([(names[symbol], origin) for symbol, origin in origins.items()], conditions)


_OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    **{function.__name__: function for function in (operator.mul, operator.add, operator.and_, operator.or_)},
    "sym_sum": operator.add,
    "_nary_sym_max": torch.sym_max,
    "_nary_sym_min": torch.sym_min,
}
"""By its name, a function that a trace may call with any number of sizes, and what does the same to two of them."""


def made_binary(graph: fx.Graph) -> None:
    """Make each sum, product and so on of several sizes one of two, and another one, and so on.

    A size that a trace cannot find among those it knows is put together from its expression, and sympy's product has
    any number of factors: ``operator.mul(a, b, c)``, which nothing can run and of which FX's code prints ``a * b``
    (``_build_proxy_for_sym_expr`` in ``torch/fx/experimental/proxy_tensor.py``, before 2.15).
    """
    for node in graph.nodes:
        function = _OF_TWO.get(getattr(node.target, "__name__", "")) if node.op == "call_function" else None
        if function is None or isinstance(node.target, torch._ops.OperatorBase):
            continue
        sizes = list(node.args[0]) if len(node.args) == 1 and isinstance(node.args[0], (list, tuple)) else [*node.args]
        if len(sizes) == 2 and node.target is function:
            continue
        total = sizes[0]
        with graph.inserting_before(node):
            for size in sizes[1:]:
                known = [each.meta["val"] if isinstance(each, fx.Node) else each for each in (total, size)]
                total = graph.call_function(function, (total, size))
                total.meta["val"] = function(*known)
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def _expression(value: Any) -> Any:
    return value.node._expr if isinstance(value, torch.SymInt) else sympy.Integer(value)


class _InBraces(PythonPrinter):
    """Prints Python in which each symbol stands in braces."""

    def _print_Symbol(self, symbol: sympy.Symbol) -> str:
        return f"{{{symbol.name}}}"


def _condition(expression: Any, names: Mapping[sympy.Symbol, str], origin: Origin | None = None) -> Condition:
    used = sympy.sympify(expression).free_symbols
    symbols = tuple(name for symbol, name in names.items() if symbol in used)
    return Condition(_InBraces().doprint(expression), symbols, origin)


def _strides(tensor: torch.Tensor, sizes: Sequence[Any], own: Sequence[Any]) -> list[Any]:
    """The tensor's strides, as products of ``sizes`` where they are such.

    Where there is a gap, as in a piece of a fused projection, that stride is the one in ``own``, and those further out
    may be products of it: of the strides ``(96 * T, 8, 96, 1)`` of sizes ``(B, 4, T, 8)`` that is the first one.
    """
    strides: list[Any] = list(own)
    expected: Any = 1
    value = 1
    for dim in outwards(tensor):
        if tensor.stride(dim) != value:
            expected, value = own[dim], tensor.stride(dim)
        strides[dim] = expected
        expected, value = expected * sizes[dim], value * tensor.shape[dim]
    return strides
