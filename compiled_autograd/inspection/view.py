"""``ca.inspect``: the tape as a graph, without running it."""

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
    """A tape as it was when it was read: plain values, which keep nothing of it alive.

    ``print`` shows it by module, equal layers told once; in a notebook it unfolds.

    Attributes:
        nodes: in the order in which the engine would walk them.
        models: the classes of the outermost modules whose parameters the tape leads to.
    """

    nodes: tuple[TapeNode, ...]
    models: tuple[str, ...] = ()

    def readable(self) -> str:
        """One line for each node."""
        return "\n".join(harmless(f"#{index} {_line(node)}") for index, node in enumerate(self.nodes)) + "\n"

    def memory(self) -> TapeMemory:
        """What the forward keeps alive, by module and by node."""
        return memory_of(self.nodes)

    def to_networkx(self) -> nx.DiGraph:
        """Nodes are indices into ``nodes``, with what is known of each as attributes; edges go where gradients go."""
        return pictures.network(self.nodes)

    def to_dot(self, by: By = "module") -> str:
        """A picture for Graphviz, in which edges go where gradients go. Colours say what a box computes: attention,
        convolutions, products of matrices, norms, embeddings, leaves, others. Bytes are those of :meth:`memory`.

        Args:
            by: ``"module"`` draws modules, equal layers as one; ``"node"`` draws each node, in its module.

        Raises:
            ValueError: ``by`` is something else.
        """
        return pictures.dot(self._picture(by))

    def to_mermaid(self, by: By = "module") -> str:
        """A picture for Mermaid, which GitHub draws in Markdown; otherwise as :meth:`to_dot`."""
        return pictures.mermaid(self._picture(by))

    def _picture(self, by: By) -> pictures.Picture:
        if by not in ("node", "module"):
            raise ValueError(f"by={by!r}: a picture is drawn by 'node' or by 'module'")
        kept = self.memory().by_node
        if by == "node":
            return pictures.of_nodes(self.nodes, kept)
        return pictures.of_modules(self.nodes, ", ".join(self.models) or "tape", kept)

    def _listing(self) -> Listing:
        return Listing(self.nodes, self.models, self.memory())

    def __str__(self) -> str:
        return str(self._listing())

    def __repr__(self) -> str:
        return harmless(f"<{self._listing().title}>") + "\nprint() shows it by module, .readable() each node"

    def _repr_html_(self) -> str:
        return page.html_of(self._listing())


def _line(node: TapeNode) -> str:
    text = f"{node.name} -> {edges_of(node)}" if node.edges else node.name
    if node.parameter:
        text += f" parameter={node.parameter}"
    return f"{text} at {node.source}" if node.source else text


@not_compiled
def inspect(*outputs: torch.Tensor | GradientEdge) -> TapeView:
    """The tape below ``outputs``: what ``backward`` on them would run. Nothing is run, and nothing is kept of it.

    Raises:
        TypeError: an output is neither a tensor nor a ``GradientEdge``.
        ValueError: an output without a tape (it does not require grad), or none at all.
    """
    if not outputs:
        raise ValueError("nothing is given; inspect takes what backward would be called on, such as the loss")
    for index, output in enumerate(outputs):
        if isinstance(output, GradientEdge):
            continue
        if not isinstance(output, torch.Tensor):
            raise TypeError(
                f"output {index} is of type {type(output).__name__}; inspect takes tensors and GradientEdges, "
                "such as the loss, one by one"
            )
        with torch._C.DisableTorchFunction():
            if not output.requires_grad:
                raise ValueError(
                    f"output {index} does not require grad, so no tape leads to it; was it made under no_grad?"
                )
    found = read(outputs)
    return TapeView(found.nodes, found.models)
