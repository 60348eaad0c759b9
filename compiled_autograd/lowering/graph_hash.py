"""When two ATen graphs are one: a region that says the same of inputs of the same kinds is compiled once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

InputKind = tuple[list[int], list[int], str, str]
"""Of a tensor: sizes, strides, dtype and device."""


def kinds_of_inputs(graph_module: fx.GraphModule, examples: Sequence[Any]) -> list[InputKind] | None:
    """What a graph's code does not say and a compiler asks: its inputs' kinds.

    None where the two are not all there is to it: there are constants in the graph, sizes or strides that are symbols,
    or tensors that are not strided. Where a tensor's memory begins is nothing to the code: it is given an address.
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
    """Equal for graphs that a backend makes the same of, in one state of the process; None where it is not known."""
    kinds = kinds_of_inputs(graph_module, examples)
    if kinds is None:
        return None
    code = graph_module.graph.python_code("self")
    functions = tuple((name, id(value)) for name, value in sorted(code.globals.items()))
    bits = tuple((example.is_conj(), example.is_neg(), example._is_zerotensor()) for example in examples)
    return code.src, repr(kinds), bits, functions
