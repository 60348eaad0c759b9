"""The user's passes over the ATen graph of a region, with the outputs that become gradients of leaves.

A pass may compute other values for the graph's outputs, and append outputs, which nothing uses. So an operator with a
side effect, such as a user's operator that notes a value, is not removed as unused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from .. import ir
from .steps import RegionStep, Wiring

Pass = Callable[[fx.GraphModule], fx.GraphModule | None]
GRADIENT_OF = "gradient_of"
"""Key in the ``meta`` of a node of the graph: the names of the leaves whose gradient it is, before hooks."""
_HOOKS = (ir.tensor_hook, ir.pre_hook, ir.post_accumulate_hook)


def run_passes(
    passes: Sequence[Pass],
    graph_module: fx.GraphModule,
    examples: Sequence[Any],
    step: RegionStep,
    wiring: Wiring,
    leaf_name: Callable[[int], str],
) -> fx.GraphModule:
    """Run passes one after the other; gives what they have made of the ATen graph of a region.

    Args:
        examples: fake values for the graph's placeholders.
        wiring: of its outputs.
        leaf_name: the name of the leaf that a node of the tape writes.
    """
    (output,) = graph_module.graph.find_nodes(op="output")
    for index, call in _gradients(step, wiring):
        node = output.args[0][index]
        if isinstance(node, fx.Node):
            node.meta[GRADIENT_OF] = tuple(dict.fromkeys((*node.meta.get(GRADIENT_OF, ()), leaf_name(call))))
    count = len(output.args[0])
    for each in passes:
        graph_module = each(graph_module) or graph_module
    _fill_in(graph_module, examples)
    (output,) = graph_module.graph.find_nodes(op="output")
    results: list[Any] = list(output.args[0])
    if wiring.flags and len(results) > count:  # what says where NaNs are is the last result
        results.append(results.pop(count - 1))
        output.args = (results,)
        graph_module.recompile()
    return graph_module


def _fill_in(graph_module: fx.GraphModule, examples: Sequence[Any]) -> None:
    """Give each node that a pass has made the fake value that a trace would have given it: compilers ask for it."""
    mode = next((each.fake_mode for each in examples if isinstance(each, FakeTensor)), None)
    if mode is None:
        return
    given = iter(examples)
    with torch.no_grad(), mode:
        for node in graph_module.graph.nodes:
            _fill_in_one(node, given)


def _fill_in_one(node: fx.Node, given: Iterator[Any]) -> None:
    if node.op == "placeholder":
        node.meta.setdefault("val", next(given, None))
    elif node.op == "call_function" and "val" not in node.meta:
        arguments, named = fx.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
        node.meta["val"] = node.target(*arguments, **named)  # type: ignore[operator]


def _gradients(step: RegionStep, wiring: Wiring) -> Iterator[tuple[int, int]]:
    """Yield pairs: an output of the graph that becomes a leaf's gradient, and the tape's node that writes the leaf."""
    for position, index in wiring.fresh:
        yield index, step.fresh[position].call.meta["call"]
    for position, index in wiring.values:
        for call in leaves_of(step.outputs[position][0]):
            yield index, call


def leaves_of(value: fx.Node) -> list[int]:
    """The leaves that a value goes to, through hooks alone; none where anything else is computed of it."""
    found: list[int] = []
    for user in value.users:
        if user.target is ir.accumulate_grad and user.args[2] is value:
            found.append(user.meta["call"])
        elif ir.hook_kind(user.target) in _HOOKS or user.target is operator.getitem:
            found += leaves_of(user)
        else:
            return []
    return found
