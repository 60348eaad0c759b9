"""The norm of each parameter's gradient, from inside the compiled backward: a pass adds them to the graph.

What is usually asked after a backward, parameter by parameter, is computed here where the gradient is made: no second
backward, no hook on any parameter, and one small tensor of norms for each region. A pass gets the ATen graph of a
region, in operators that the backend takes (so not ``aten.linalg_vector_norm``, which Inductor has decomposed before);
which of its outputs are gradients of which parameters stands in their ``meta["gradient_of"]``. An operator of our own
takes the norms out, and what it gives is appended to the outputs, so that no compiler leaves it out as unused.

    python examples/gradient_norms.py
"""

import torch
from torch import Tensor, fx, nn

import compiled_autograd as ca

STEPS = 4
NAMES: list[list[str]] = []  # of each graph that the pass has seen
NORMS: dict[int, Tensor] = {}  # of each graph, those of the last backward


@torch.library.custom_op("examples::note_norms", mutates_args=())
def note_norms(norms: Tensor, graph: int) -> Tensor:
    """Keeps the norms, [parameters], and gives a tensor of nothing, since an operator must give something."""
    NORMS[graph] = norms.clone()
    return norms.new_empty(0)


@note_norms.register_fake
def _(norms: Tensor, graph: int) -> Tensor:
    return norms.new_empty(0)


def add_norms(graph_module: fx.GraphModule) -> None:
    """Adds to the ATen graph of a region the norms of the gradients that it gives."""
    graph, aten = graph_module.graph, torch.ops.aten
    (output,) = graph.find_nodes(op="output")
    gradients = {name: node for node in output.args[0] if node is not None for name in node.meta.get("gradient_of", ())}
    if not gradients:
        return
    with graph.inserting_before(output):
        squares = [graph.call_function(aten.mul.Tensor, (node, node)) for node in gradients.values()]
        sums = [graph.call_function(aten.sum.default, (square,)) for square in squares]
        each = [graph.call_function(aten.unsqueeze.default, (total, 0)) for total in sums]
        together = graph.call_function(aten.sqrt.default, (graph.call_function(aten.cat.default, (each,)),))
        noted = graph.call_function(torch.ops.examples.note_norms.default, (together, len(NAMES)))
    output.args = ([*output.args[0], noted],)
    NAMES.append(list(gradients))
    graph_module.recompile()


def norms_of_last_backward() -> dict[str, float]:
    """By the parameter's name."""
    return {
        name: norm for graph, norms in NORMS.items() for name, norm in zip(NAMES[graph], norms.tolist(), strict=True)
    }


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # A backward that is left to eager runs no pass: nothing is to send one there.
    settings = {"on_miss": "compile", "on_unsupported": "raise", "tune": False}
    session = ca.enable(passes=[add_norms], **settings)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 32)).square().mean()
        NORMS.clear()
        with session:
            loss.backward()
        norms = norms_of_last_backward()
        wanted = {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}
        assert norms.keys() == wanted.keys()
        assert all(abs(norms[name] - wanted[name]) <= 1e-5 * wanted[name] for name in wanted)
        optimizer.step()
        print(f"step {step}: " + ", ".join(f"{name} {norms[name]:.4f}" for name in wanted if name.endswith("weight")))
    stats = session.stats()
    assert (stats.captures, stats.compiles, stats.hits, stats.bypasses) == (1, 1, STEPS - 1, {})
    print(f"{len(norms)} norms a step, equal to those of .grad; {stats.backwards} backwards, {stats.hits} of them hits")


if __name__ == "__main__":
    main()
