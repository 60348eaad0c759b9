"""FX graphs of which a node is made in less time."""

from __future__ import annotations

from typing import Any

from torch import fx


class Graph(fx.Graph):
    """FX searches the arguments of each call that it makes for symbols, to warn of them (``Graph.create_node`` in
    ``torch/fx/graph.py``, 2.13), which takes as long as all else. Here a node gets its arguments afterwards."""

    def create_node(
        self, op: str, target: Any, args: Any = None, kwargs: Any = None, name: str | None = None, type_expr: Any = None
    ) -> fx.Node:
        """A node at the insertion point; the arguments are those of :meth:`fx.Graph.create_node`."""
        node = super().create_node(op, target, None, None, name, type_expr)
        if args:
            node.args = args
        if kwargs:
            node.kwargs = kwargs
        return node
