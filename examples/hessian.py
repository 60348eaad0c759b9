"""Second derivatives of a network of six Linear and ReLU layers, for each row of a batch of 10,000.

The energy of a row is half the square of the network's output, and its Hessian is by the row's own input: a backward
through the gradient for each column, all of one structure, so that one is compiled and the others are hits. Weights get
no gradient there, and no product is computed for one. Then the Hessians are trained on, with a backward to the weights.
Both are compared with torch.func, which does the same by transforms of functions, and timed against eager.

    python examples/hessian.py
"""

import functools
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, vmap

import compiled_autograd as ca

INPUTS, WIDTH, LAYERS, BATCH, ROUNDS = 2, 32, 6, 10_000, 5
Way = Callable[[], list[Tensor]]


def make_network() -> nn.Sequential:
    """[batch, inputs] -> [batch, width]; float64, since rounding in float32 may turn one of two million ReLUs off."""
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise([INPUTS] + [WIDTH] * LAYERS)]
    return nn.Sequential(*(each for layer in layers for each in layer)).double()


def hessians(network: nn.Module, x: Tensor, differentiable: bool = False) -> list[Tensor]:
    """The Hessian of each row of `x` [batch, inputs], in columns: a [batch, inputs] for each input."""
    energy = network(x).square().sum() / 2  # rows do not depend on each other: each gets the gradient of its own energy
    (slope,) = torch.autograd.grad(energy, x, create_graph=True)
    columns = []
    for unit in torch.eye(INPUTS, dtype=x.dtype):
        # slope[:, i].sum() would do too, but i is a number that the tape saves: a structure for each i.
        kept = {"retain_graph": True, "create_graph": differentiable}
        columns += torch.autograd.grad(slope, x, unit.expand_as(slope), **kept)
    return columns


def loss_of(columns: list[Tensor]) -> Tensor:
    """A loss [] of the Hessians that `hessians` gives: how far their traces are from 1."""
    trace = torch.stack([column[:, number] for number, column in enumerate(columns)]).sum(dim=0)
    return (trace - 1).square().mean()


def trained(network: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of that loss by all matrices; a bias is in no slope of a network that is linear in pieces."""
    matrices = [parameter for parameter in network.parameters() if parameter.dim() == 2]
    return list(torch.autograd.grad(loss_of(hessians(network, x, differentiable=True)), matrices))


def func_hessians(network: nn.Module, weights: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    """What `hessians` gives, from torch.func."""
    return list(vmap(hessian(lambda row: functional_call(network, weights, row).square().sum() / 2))(x).unbind(1))


def func_trained(network: nn.Module, weights: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    """What `trained` gives, from torch.func."""
    by_name = grad(lambda given: loss_of(func_hessians(network, given, x)))(weights)
    return [each for each in by_name.values() if each.dim() == 2]


def compare(title: str, eager: Way, func: Way, backwards: int, create_graph: int) -> int:
    """Compute it all three ways, time them in turn, and give the number of matrix products in the compiled backward.

    Of its backwards, `backwards` are captured, and `create_graph` left to eager, since they are differentiated again.
    """
    # For exact counts: each new structure is compiled at once, and nothing is left to eager to be timed.
    session = ca.enable(on_miss="compile", compile_budget=float("inf"), cache_dir=False, tune=False)

    def compiled() -> list[Tensor]:
        with session:
            return eager()

    found = compiled()
    torch.testing.assert_close(found, eager())
    torch.testing.assert_close(found, func())
    for _ in range(2):
        compiled()  # the first runs are compared with the real calls, which takes time; what is timed below is not
    stats = session.stats()
    assert (stats.structure_misses, stats.hits, stats.compiles) == (1, 3 * backwards - 1, 1)
    assert stats.bypasses == {"create_graph": 3 * create_graph}
    assert session.last is not None and session.last.graph is not None
    operators = [str(node.target) for graph in session.last.graph.aten for node in graph.graph.nodes]
    products = sum(name in ("aten.mm.default", "aten.addmm.default") for name in operators)
    times: dict[str, list[float]] = {"eager": [], "compiled": [], "torch.func": []}
    for _ in range(ROUNDS):
        for way, seconds in zip((eager, compiled, func), times.values(), strict=True):
            started = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - started)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratios = ", ".join(f"{name} {seconds / medians['eager']:.2f}" for name, seconds in medians.items())
    print(f"{title}: 1 backward compiled, with {products} matrix products, and {stats.hits} hits; time: {ratios}")
    return products


def main() -> None:
    """Without and with a backward to the weights."""
    torch.manual_seed(0)
    network, x = make_network(), torch.randn(BATCH, INPUTS, dtype=torch.float64, requires_grad=True)
    weights, given = {name: each.detach() for name, each in network.named_parameters()}, x.detach()

    jacobian = vmap(jacfwd(lambda row: functional_call(network, weights, row)))(given)
    torch.testing.assert_close(torch.stack(hessians(network, x), dim=1), jacobian.mT @ jacobian)  # exact, for such

    first = functools.partial(hessians, network, x), functools.partial(func_hessians, network, weights, given)
    assert compare("Hessians", *first, backwards=INPUTS, create_graph=1) == 2 * LAYERS  # gradients of weights: as many
    second = functools.partial(trained, network, x), functools.partial(func_trained, network, weights, given)
    compare("trained on", *second, backwards=1, create_graph=1 + INPUTS)


if __name__ == "__main__":
    main()
