"""Gradients compressed before a communication hook: two processes train on data of their own, and send 16 bits each.

A pass rounds each parameter's gradient to what bfloat16 can hold, inside the compiled code that makes it. The hook that
averages over the processes then sends bfloat16, half the bytes, and loses nothing by the cast: what is sent is what was
computed. The pass can do whatever the operators of the graph can, fused with the rest: rounding is one line of it.

    python examples/compressed_gradients.py
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, distributed, fx, multiprocessing, nn

import compiled_autograd as ca

RANKS, STEPS = 2, 4


def round_gradients(graph_module: fx.GraphModule) -> None:
    """Rounds what the ATen graph of a region gives as gradients of parameters, float32 [...], to bfloat16's values.

    In integers: a cast there and back is one that compilers take away, as if it did nothing.
    """
    graph, aten = graph_module.graph, torch.ops.aten
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    with graph.inserting_before(output):
        for index, node in enumerate(results):
            if node is not None and "gradient_of" in node.meta:
                bits = graph.call_function(aten.view.dtype, (node, torch.int32))
                up = graph.call_function(aten.add.Tensor, (bits, 0x8000))
                cut = graph.call_function(aten.bitwise_and.Scalar, (up, ~0xFFFF))
                rounded = graph.call_function(aten.view.dtype, (cut, torch.float32))
                is_nan = graph.call_function(aten.isnan.default, (node,))  # of which adding may make a number
                results[index] = graph.call_function(aten.where.self, (is_nan, node, rounded))
    output.args = (results,)
    graph_module.recompile()


class Averaging:
    """A hook that averages a gradient over all processes, sent as bfloat16.

    Attributes:
        sent: bytes so far.
    """

    def __init__(self) -> None:
        self.sent = 0

    def __call__(self, grad: Tensor) -> Tensor:
        message = grad.to(torch.bfloat16)
        assert torch.allclose(message.to(grad.dtype), grad, rtol=0, atol=0, equal_nan=True), (
            "the cast has lost something"
        )
        self.sent += message.nbytes
        parts = [torch.empty_like(message) for _ in range(RANKS)]
        distributed.all_gather(parts, message)  # added up in float32, so that no sum is rounded once more
        return torch.stack(parts).to(grad.dtype).mean(0)


def train(rank: int, rendezvous: str) -> None:
    """One process."""
    distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    # A backward that is left to eager runs no pass, and processes must decide alike: nothing is to send one there.
    settings = {"on_miss": "compile", "on_unsupported": "raise", "tune": False}
    session = ca.enable(passes=[round_gradients], **settings)
    average = Averaging()
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(RANKS * step + rank))
        own = torch.autograd.grad(model(x).square().mean(), parameters)
        hooks = [parameter.register_hook(average) for parameter in parameters]
        loss = model(x).square().mean()
        with session:
            loss.backward()
        for hook in hooks:
            hook.remove()
        for parameter, grad in zip(parameters, own, strict=True):
            distributed.all_reduce(grad)
            torch.testing.assert_close(parameter.grad, grad / RANKS, rtol=2**-7, atol=2**-8 * grad.abs().max().item())
        optimizer.step()
    weights = torch.nn.utils.parameters_to_vector(parameters).detach()
    others = [torch.empty_like(weights) for _ in range(RANKS)]
    distributed.all_gather(others, weights)
    assert all(torch.equal(other, weights) for other in others)
    stats, full = session.stats(), STEPS * sum(parameter.nbytes for parameter in parameters)
    assert (stats.captures, stats.hits, stats.bypasses, stats.failures) == (1, STEPS - 1, {}, 0)
    assert 2 * average.sent == full
    if rank == 0:
        print(f"{STEPS} backwards, {stats.hits} of them hits: {average.sent} bytes sent, {full} without the pass")
        print(f"after {STEPS} steps {RANKS} processes have the same {len(weights)} weights")
    distributed.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        multiprocessing.start_processes(train, (rendezvous,), nprocs=RANKS, start_method="spawn")


if __name__ == "__main__":
    main()
