"""Products whose sum is one gradient, made as one product.

A weight that is used at many steps (of a recurrent network, a solver, layers that share it) gets the sum of as many
products, each over few rows: ``x1.T @ y1 + x2.T @ y2 + ...``. That is ``cat(x).T @ cat(y)``: one product in place of
many, and no additions. A bias gets the sum of the same rows. Sums are rounded in another order then; those of 16 bits
stay as they are, since one that overflows on eager might not here.

The price is memory for what is concatenated. So it is done in groups whose operands are no larger than a few of the
products, which follow one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

_FEWEST = 4
"""Minimum number of products in a sum."""
_OPERANDS = 2
"""How large the operands of a group may be, by the size of the product: they are held for longer than eager would."""
_ROUNDED = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten
_ADD, _MM, _SUM, _VIEW = _aten.add.Tensor, _aten.mm.default, _aten.sum.dim_IntList, _aten.view.default
_PERMUTE, _CAT = _aten.permute.default, _aten.cat.default


def sum_shared_products(graph_module: fx.GraphModule) -> int:
    """Rewrite an ATen graph whose nodes have fake tensors in ``meta["val"]``, with numbers for sizes.

    Results keep their strides.

    Returns:
        How many products there are fewer.
    """
    graph = graph_module.graph
    sums = [_Sum(node, [*_terms(node)]) for node in graph.nodes if _is_whole_sum(node)]
    sums = [each for each in sums if len(each.terms) >= _FEWEST]
    joined, before = _Joined(graph), len(graph.find_nodes(op="call_function", target=_MM))
    for each in sorted(sums, key=_Sum.size, reverse=True):
        joined.products(each)
    if not joined.wholes:
        return 0
    for each in sums:
        joined.rows(each)
    replaced: dict[fx.Node, fx.Node] = {}
    for each in sums:  # in the graph's order: a sum may be a term of a later one
        each.rebuild(graph, replaced)
    graph.eliminate_dead_code()
    graph_module.recompile()
    return before - len(graph.find_nodes(op="call_function", target=_MM))


# ---- sums --------------------------------------------------------------------------------------------------------


@dataclass
class _Sum:
    """A tree of additions that nothing else looks into.

    Attributes:
        terms: from left to right.
        instead: of terms that are part of something joined: that, at the first of them, and None at the others.
    """

    root: fx.Node
    terms: list[fx.Node]
    instead: dict[fx.Node, fx.Node | None] = field(default_factory=dict)

    def size(self) -> int:
        return self.root.meta["val"].numel()

    def replace(self, group: Iterable[fx.Node], joined: fx.Node) -> None:
        first, *others = group
        self.instead.update({first: joined, **dict.fromkeys(others)})

    def rebuild(self, graph: fx.Graph, replaced: dict[fx.Node, fx.Node]) -> None:
        """Add up what there is now, each as soon as it is there, if the result keeps its strides."""
        if not self.instead:
            return
        found = [self.instead.get(each, each) for each in self.terms]
        result, *others = (replaced.get(each, each) for each in found if each is not None)
        for each in others:
            with _after(graph, result, each):
                result = _call(graph, _ADD, result, each)
        if result.meta["val"].stride() == self.root.meta["val"].stride():
            self.root.replace_all_uses_with(result)
            replaced[self.root] = result


def _value(node: object) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _is_sum(node: fx.Node) -> bool:
    """Return whether a node adds two tensors of the size, dtype and device of the result."""
    if node.op != "call_function" or node.target is not _ADD or node.kwargs or len(node.args) != 2:
        return False
    values = [*map(_value, (node, *node.args))]
    if not all(isinstance(each, torch.Tensor) and each.dtype not in _ROUNDED for each in values):
        return False
    return len({(each.shape, each.dtype, each.device) for each in values}) == 1


def _is_whole_sum(node: fx.Node) -> bool:
    return _is_sum(node) and not (len(node.users) == 1 and _is_sum(*node.users))


def _terms(root: fx.Node) -> Iterator[fx.Node]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is root or (_is_sum(node) and len(node.users) == 1 and node.args[0] is not node.args[1]):
            waiting += reversed(node.args)  # type: ignore[arg-type]
        else:
            yield node


def _is_for_one(node: object, target: object) -> bool:
    """Return whether a node is a call of ``target`` with a single user."""
    return isinstance(node, fx.Node) and node.target is target and len(node.users) == 1 and not node.kwargs


def _rows_of(term: fx.Node) -> fx.Node | None:
    """Return the matrix ``x`` of ``x.sum(0)``, or of ``x.sum(0, keepdim=True).view(-1)``."""
    total: Any = term.args[0] if _is_for_one(term, _VIEW) else term
    if not _is_for_one(total, _SUM) or _value(term).dim() != 1 or not isinstance(total.args[1], Sequence):
        return None
    rows, dims = total.args[:2]
    value = _value(rows)
    same = isinstance(value, torch.Tensor) and value.dim() == 2 and value.dtype is _value(term).dtype
    return rows if same and [*dims] == [0] else None


# ---- replacement ----------------------------------------------------------------------------------------


@dataclass
class _Joined:
    """The concatenation so far: matrices, one above the other."""

    graph: fx.Graph
    wholes: dict[tuple[fx.Node, ...], fx.Node] = field(default_factory=dict)

    def products(self, total: _Sum) -> None:
        """Join those terms of a sum that are products."""
        found = [each for each in total.terms if _is_for_one(each, _MM)]
        if len(found) < _FEWEST or len({*found}) < len(found):
            return
        for group in [*self._groups(found, total.root)]:
            left, right = ([each.args[index] for each in group] for index in (0, 1))
            of = [_transposed(each) for each in left]
            known = [whole for parts in (of, right) if (whole := self._known(parts, total.root)) is not None]
            with _after(self.graph, *left, *right, *known):
                above = self._above(right, total.root)
                if None in of:
                    beside = _call(self.graph, _CAT, left, 1)
                else:
                    beside = _call(self.graph, _PERMUTE, self._above(of, total.root), [1, 0])
                total.replace(group, _call(self.graph, _MM, beside, above))

    def rows(self, total: _Sum) -> None:
        """Join those terms of a sum that are sums of rows which were concatenated for products."""
        found = {rows: each for each in total.terms if (rows := _rows_of(each)) is not None}
        places = {each: place for place, each in enumerate(total.terms)}
        for parts, whole in self.wholes.items():
            if not (whole < total.root and found.keys() >= {*parts}) or _repeats(parts):
                continue
            with _after(self.graph, whole):
                rows = _call(self.graph, _SUM, whole, [0])
            total.replace(sorted((found.pop(each) for each in parts), key=places.__getitem__), rows)

    def _groups(self, products: Sequence[fx.Node], root: fx.Node) -> Iterator[list[fx.Node]]:
        """Products that become one: those whose left operands are concatenated already; others as memory allows."""
        left = {_transposed(each.args[0]) or each.args[0]: each for each in products}
        if len(left) < len(products):
            return
        for parts, whole in [*self.wholes.items()]:
            if whole < root and left.keys() >= {*parts} and not _repeats(parts):
                yield [left.pop(each) for each in parts]
        group: list[fx.Node] = []
        size = 0
        for each in left.values():
            more = sum(_value(argument).numel() for argument in each.args)
            if size + more > _OPERANDS * _value(each).numel():
                yield from [group] if len(group) > 1 else []
                group, size = [], 0
            group.append(each)
            size += more
        yield from [group] if len(group) > 1 else []

    def _above(self, parts: Sequence[Any], root: fx.Node) -> fx.Node:
        """Matrices above one another."""
        whole = self._known(parts, root)
        if whole is None:
            whole = self.wholes[tuple(parts)] = _call(self.graph, _CAT, [*parts], 0)
        return whole

    def _known(self, parts: Sequence[Any], root: fx.Node) -> fx.Node | None:
        """Return the concatenation of some matrices, if it exists before the sum."""
        whole = self.wholes.get(tuple(parts))
        return whole if whole is not None and whole < root else None


def _repeats(parts: Sequence[fx.Node]) -> bool:
    return len({*parts}) < len(parts)


def _after(graph: fx.Graph, *nodes: Any) -> Any:
    """Return a context that inserts after all of some nodes."""
    last = max(nodes)
    return graph.inserting_before(last.next if last.op != "placeholder" else _first_call(graph))


def _first_call(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op != "placeholder")


def _call(graph: fx.Graph, target: Any, *arguments: Any) -> fx.Node:
    node = graph.call_function(target, arguments)
    values = cast(tuple[Any, ...], fx.node.map_arg(node.args, lambda each: each.meta["val"]))
    node.meta["val"] = target(*values)
    return node


def _transposed(node: Any) -> fx.Node | None:
    """Return the matrix of which a node is the transpose."""
    is_one = isinstance(node, fx.Node) and node.target is _PERMUTE and node.args[1] == [1, 0]
    return node.args[0] if is_one else None
