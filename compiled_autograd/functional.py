"""In-place operators of an ATen graph -> operators that give a new tensor, where nothing else sees the memory.

Most of those in a backward write into what the operator before them made (``masked_fill_``, ``div_``). To put these in
place takes a fifth of the time that ``torch.func.functionalize`` takes, which traces the graph once more; what is
left over is left to it.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx


def mutates(node: fx.Node) -> bool:
    """Whether a node of an ATen graph writes into one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def made_functional(graph: fx.Graph) -> bool:
    """Replace every in-place operator; False, and nothing changed, where one of them cannot be.

    Args:
        graph: as it was traced, with a fake tensor in each node's ``meta["val"]``.
    """
    position = {node: place for place, node in enumerate(graph.nodes)}
    sharing: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for value in _tensors(node.meta.get("val")):
            sharing.setdefault(value.untyped_storage()._cdata, []).append(node)
    found = []
    for node in graph.nodes:
        if not mutates(node):
            continue
        operator, value = _functional(node.target), node.meta.get("val")
        if operator is None or not isinstance(value, torch.Tensor):
            return False
        if not _is_chain(sharing[value.untyped_storage()._cdata], position):
            return False
        new = _called(operator, node, value)
        if new is None:
            return False
        found.append((node, operator, new))
    for node, operator, new in found:
        with graph.inserting_before(node):
            replacement = graph.call_function(operator, node.args, node.kwargs)
        replacement.meta = {**node.meta, "val": new}
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)
    return True


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in values if isinstance(each, torch.Tensor) and each.layout is torch.strided]


def _functional(target: Any) -> Any:
    """The overload that takes what an in-place one takes and gives a new tensor; None where there is none."""
    schema = target._schema
    name = target.overloadpacket.__name__
    writes = [argument for argument in schema.arguments if argument.is_write]
    if target.namespace != "aten" or not name.endswith("_") or writes != schema.arguments[:1]:
        return None
    if len(schema.returns) != 1 or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    for overload in () if packet is None else packet.overloads():
        candidate = getattr(packet, overload)
        if _takes(candidate._schema) == _takes(schema) and not _aliases(candidate._schema):
            return candidate
    return None


def _takes(schema: Any) -> list[tuple[str, str, bool, Any]]:
    return [(each.name, str(each.type), each.kwarg_only, each.default_value) for each in schema.arguments]


def _aliases(schema: Any) -> bool:
    return any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))


def _is_chain(nodes: list[fx.Node], position: dict[fx.Node, int]) -> bool:
    """Whether memory was made by one operator and then written by one after the other, each used before the next."""
    if nodes[0].op != "call_function" or mutates(nodes[0]):
        return False
    for before, node in itertools.pairwise(nodes):
        if not mutates(node) or node.args[0] is not before:
            return False
        if any(position[user] > position[node] for user in before.users):
            return False
    return True


def _called(operator: Any, node: fx.Node, value: torch.Tensor) -> torch.Tensor | None:
    """What the operator gives in place of ``value``; None where that has another dtype or another layout."""
    if any("val" not in each.meta for each in node.all_input_nodes):
        return None
    arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    new = operator(*arguments, **keywords)
    same = (new.dtype, new.shape, new.device, new.stride()) == (value.dtype, value.shape, value.device, value.stride())
    return new if same else None
