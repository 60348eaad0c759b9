"""``ca.inspect``: show the tape as a graph, without running it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import networkx as nx
import torch
from torch.autograd.graph import GradientEdge

from ..shadow_cache.safe_text import harmless
from ..torch_api.dynamo import not_compiled
from . import page, pictures
from .listing import Listing, edges_of
from .memory import TapeMemory, memory_of
from .nodes import TapeNode
from .reading import read

By = Literal["node", "module"]


@dataclass(frozen=True, slots=True, repr=False)
class TapeView:
    """A snapshot of a tape as plain values, which keep nothing of the tape alive.

    ``print`` shows the tape by module, with equal layers shown once. In a notebook the modules unfold.

    Attributes:
        nodes: the nodes, in the order in which the engine would walk them.
        models: the classes of the outermost modules with parameters on the tape.
    """

    nodes: tuple[TapeNode, ...]
    models: tuple[str, ...] = ()

    def readable(self) -> str:
        """Return the tape as text, with one line for each node."""
        return "\n".join(harmless(f"#{index} {_line(node)}") for index, node in enumerate(self.nodes)) + "\n"

    def memory(self) -> TapeMemory:
        """Return the memory that the forward keeps alive, by module and by node."""
        return memory_of(self.nodes)

    def to_networkx(self) -> nx.DiGraph:
        """Return a networkx graph of the indices into ``nodes``, with the fields of each node as attributes. Edges
        follow the gradients."""
        return pictures.network(self.nodes)

    def to_dot(self, by: By = "module") -> str:
        """Return a drawing in DOT, for Graphviz. Edges follow the gradients. Colours show the kind of a box: attention,
        convolution, matrix product, norm, embedding, leaf, other. Bytes are those of :meth:`memory`.

        Args:
            by: ``"module"`` draws modules, with equal layers as one box; ``"node"`` draws each node, in its module.

        Raises:
            ValueError: ``by`` has another value.
        """
        return pictures.dot(self._picture(by))

    def to_mermaid(self, by: By = "module") -> str:
        """Return a drawing for Mermaid, which GitHub draws in Markdown; otherwise like :meth:`to_dot`."""
        return pictures.mermaid(self._picture(by))

    def _picture(self, by: By) -> pictures.Picture:
        if by not in ("node", "module"):
            raise ValueError(f"by={by!r} is not possible; by is 'node' or 'module'")
        kept = self.memory().by_node
        if by == "node":
            return pictures.of_nodes(self.nodes, kept)
        return pictures.of_modules(self.nodes, ", ".join(self.models) or "tape", kept)

    def _listing(self) -> Listing:
        return Listing(self.nodes, self.models, self.memory())

    def __str__(self) -> str:
        return str(self._listing())

    def __repr__(self) -> str:
        return harmless(f"<{self._listing().title}>") + "\nprint() shows it by module, .readable() lists all nodes"

    def _repr_html_(self) -> str:
        return page.html_of(self._listing())


def _line(node: TapeNode) -> str:
    text = f"{node.name} -> {edges_of(node)}" if node.edges else node.name
    if node.parameter:
        text += f" parameter={node.parameter}"
    return f"{text} at {node.source}" if node.source else text


@not_compiled
def inspect(*outputs: torch.Tensor | GradientEdge) -> TapeView:
    """Return the tape that ``backward`` on ``outputs`` would run. Nothing is run, and nothing of the tape is kept.

    Raises:
        TypeError: an output is neither a tensor nor a ``GradientEdge``.
        ValueError: an output has no tape (it does not require grad), or no output was given.
    """
    if not outputs:
        raise ValueError("inspect was called without outputs; pass the tensors to call backward on, such as the loss")
    for index, output in enumerate(outputs):
        if isinstance(output, GradientEdge):
            continue
        if not isinstance(output, torch.Tensor):
            raise TypeError(
                f"output {index} is of type {type(output).__name__}; inspect takes tensors and GradientEdges as "
                "separate arguments, such as the loss"
            )
        with torch._C.DisableTorchFunction():
            if not output.requires_grad:
                raise ValueError(
                    f"output {index} does not require grad, so it has no tape; was it computed under no_grad?"
                )
    found = read(outputs)
    return TapeView(found.nodes, found.models)
