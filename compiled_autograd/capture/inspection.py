"""The tape as a graph, without running it."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx
import torch
from torch.autograd.graph import GradientEdge

from . import tape
from .parameter_names import all_parameter_names


@dataclass(frozen=True, slots=True)
class TapeNode:
    """One node of the tape.

    Attributes:
        name: the engine's, such as ``MulBackward0``.
        sequence: of the nodes whose gradients are there, the engine runs the one with the highest first.
        parameter: for a leaf, the name of the parameter that it writes to, where a living module has it.
        source: ``file:line in function`` of the forward, where anomaly mode recorded it.
        edges: for each of its outputs the index of the next node and that node's input; None where there is none.
    """

    name: str
    sequence: int
    parameter: str | None
    source: str | None
    edges: tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class TapeView:
    """The nodes of a tape, in the order in which the engine would walk them."""

    nodes: tuple[TapeNode, ...]

    def readable(self) -> str:
        """One line for each node."""
        return "\n".join(f"#{index} {_line(node)}" for index, node in enumerate(self.nodes)) + "\n"

    def to_networkx(self) -> nx.DiGraph:
        """Nodes are indices into ``nodes``, with what is known of each as attributes; edges go where gradients go."""
        graph = nx.DiGraph()
        for index, node in enumerate(self.nodes):
            graph.add_node(index, name=node.name, sequence=node.sequence, parameter=node.parameter, source=node.source)
            graph.add_edges_from((index, edge[0]) for edge in node.edges if edge is not None)
        return graph


def _line(node: TapeNode) -> str:
    edges = ", ".join("-" if edge is None else f"#{edge[0]}[{edge[1]}]" for edge in node.edges)
    text = f"{node.name} -> {edges}" if node.edges else node.name
    if node.parameter:
        text += f" parameter={node.parameter}"
    return f"{text} at {node.source}" if node.source else text


def inspect(*outputs: torch.Tensor | GradientEdge) -> TapeView:
    """The tape below ``outputs``: what ``backward`` on them would run. Nothing is run, and nothing is kept of it.

    Raises:
        ValueError: an output without a tape (it does not require grad), or one with more than 10,000 nodes.
    """
    for index, output in enumerate(outputs):
        if isinstance(output, torch.Tensor) and not output.requires_grad:
            raise ValueError(
                f"output {index} does not require grad, so no tape leads to it; was it made under no_grad?"
            )
    if len(tape.first_nodes(outputs)) > tape.MAX_NODES_READ:
        raise ValueError(
            f"the tape has more than {tape.MAX_NODES_READ:,} nodes; PyTorch may end the process when so long a tape "
            "is freed after it was looked at from Python. Inspect a part of the model"
        )
    visited = tape.walk(outputs)
    index_of = {each.node: index for index, each in enumerate(visited)}
    names = all_parameter_names()
    nodes = []
    for each in visited:
        edges = tuple(
            None if following is None else (index_of[following], int(number))
            for following, number in each.node.next_functions
        )
        found = names.get(id(each.node.variable)) if each.name == tape.LEAF else None
        parameter = None if found is None else found.name
        nodes.append(TapeNode(each.name, each.sequence, parameter, tape.source_line(each.node), edges))
    return TapeView(tuple(nodes))
