"""Runs a region operator by operator: the reference that every other backend is compared with."""

from __future__ import annotations

import ast
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

# Private in torch 2.13: modules whose code is made when it is asked for, and the boxed calling convention of that code.
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen

from .artifacts import (
    CannotStoreError,
    Stored,
    dotted_names,
    from_bytes,
    link,
    reference,
    tensors_from_bytes,
    tensors_to_bytes,
    to_bytes,
)
from .protocol import Backend, Compiled


class EagerBackend(Backend):
    """Bitwise equal to the eager engine on CPU: the same operators, in the same order, on the same values."""

    name = "eager"
    bitwise = True
    allocates = True

    def decompositions(self) -> None:
        """None: every operator stays as the engine's functions call it."""

    def compile(self, graph_module: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Compiled:
        """The graph's own generated code, which frees each value after its last use."""
        graph_module.graph.set_codegen(_BoxedCodeGen())
        graph_module.recompile()
        _LazyGraphModule.force_recompile(graph_module)
        for node in graph_module.graph.nodes:
            node.meta = {}  # fake tensors, and much else that nobody needs any more
        return graph_module.forward

    def save(self, compiled: Compiled) -> bytes | None:
        """The generated code and the graph's constants."""
        try:
            return to_bytes(store_graph(compiled), self.name)
        except CannotStoreError:
            return None

    def why_not_saved(self, compiled: Compiled) -> str | None:
        """Why :meth:`save` gives None."""
        try:
            store_graph(compiled)
        except CannotStoreError as error:
            return str(error)
        return None

    def load(self, data: bytes) -> Compiled:
        """Run the code; nothing is traced, and there is no graph."""
        return run_graph(from_bytes(data, self.name))

    def environment(self) -> dict[str, str]:
        """Nothing: calls of operators are the same on every machine."""
        return {}


def run_graph(stored: Stored) -> Compiled:
    """Undo :func:`store_graph`."""
    forward = link(stored, {})["forward"]
    return types.MethodType(forward, types.SimpleNamespace(**tensors_from_bytes(stored.constants)))


def store_graph(compiled: Any) -> Stored:
    """What is stored of a graph's own code.

    Raises:
        CannotStoreError: it is not such code, or has something in it that no other process has.
    """
    graph_module = getattr(compiled, "__self__", None)
    if not isinstance(graph_module, fx.GraphModule):
        raise CannotStoreError(f"it is a {type(compiled).__name__} of no graph (or was loaded itself)")
    graph = graph_module.graph
    for node in graph.find_nodes(op="call_module"):
        raise CannotStoreError(f"its graph calls a module, {node.target}")
    constants: dict[str, Any] = {}
    for node in graph.find_nodes(op="get_attr"):
        constants[str(node.target)] = getattr(graph_module, str(node.target), None)
    code = graph.python_code("self")
    tree = _Unannotated().visit(ast.parse(code.src))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & code.globals.keys()
    return Stored(
        source=ast.unparse(tree),
        names={name: reference(name, code.globals[name]) for name in sorted(used)},
        needs=dotted_names([tree], used),
        constants=tensors_to_bytes(constants),
    )


class _Unannotated(ast.NodeTransformer):
    """Code without annotations, which name types that only the process that traced the graph may know."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        assert node.value is not None  # fx annotates nothing that it does not assign
        return ast.copy_location(ast.Assign([node.target], node.value), node)
