"""Equality of ATen graphs: equal code on inputs of the same kinds is compiled once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

InputKind = tuple[list[int], list[int], str, str]
"""Sizes, strides, dtype and device of a tensor."""


def kinds_of_inputs(graph_module: fx.GraphModule, examples: Sequence[Any]) -> list[InputKind] | None:
    """Return the kinds of a graph's inputs, which a compiler asks for beside the graph's code.

    None if code and kinds do not say everything: the graph has constants, symbolic sizes or strides, or tensors that
    are not strided. The place of a tensor in its memory does not count, since code gets an address.
    """
    if graph_module.graph.find_nodes(op="get_attr"):
        return None
    kinds = []
    for example in examples:
        if not isinstance(example, torch.Tensor) or example.layout is not torch.strided:
            return None
        if any(isinstance(number, torch.SymInt) for number in (*example.shape, *example.stride())):
            return None
        kinds.append((list(example.shape), list(example.stride()), str(example.dtype), str(example.device)))
    return kinds


def graph_hash(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Hashable | None:
    """Return a hash that is equal if a backend makes the same code of two graphs, in one state of the process. None if
    unknown."""
    kinds = kinds_of_inputs(graph_module, examples)
    if kinds is None:
        return None
    code = graph_module.graph.python_code("self")
    functions = tuple((name, id(value)) for name, value in sorted(code.globals.items()))
    bits = tuple((example.is_conj(), example.is_neg(), example._is_zerotensor()) for example in examples)
    return code.src, repr(kinds), bits, functions
