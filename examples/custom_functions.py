"""`torch.autograd.Function` in a compiled backward: its `backward` runs as it is, what lies around it is compiled.

Shown are None as a gradient, which stands for zero and saves the work behind it; a function with `setup_context`, alone
and under `vmap`; one made of other functions, with a backward inside its backward and `once_differentiable`; and
`gradcheck`. `backend="eager"` compiles at once, and its gradients are eager's bit for bit.

    python examples/custom_functions.py
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.autograd.function import once_differentiable

import compiled_autograd as ca

STEPS = 4
# No limit on what compiling may cost: on a slow computer the default budget would leave some of it to eager.
SETTINGS: dict[str, Any] = {"backend": "eager", "on_miss": "compile", "compile_budget": float("inf")}
SETTINGS |= {"cache_dir": False}


class Gate(Function):
    """x where the gate is open, else zeros. Then its gradient is None: a zero that nobody has to compute with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_open: bool) -> Tensor:
        ctx.is_open = is_open
        return x.clone() if is_open else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return grad.clone() if ctx.is_open else None, None


class Softplus(Function):
    """log(1 + exp(x)), of any shape and dtype."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.log1p(torch.exp(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.sigmoid(ctx.saved_tensors[0])


class Recomputed(Function):
    """exp(Softplus(x)), of which only x is saved: its backward runs the forward again, and a backward of that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return Softplus.apply(x).exp()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(Softplus.apply(x).exp(), x, grad)[0]


def train(name: str, session: ca.Session, make_loss: Any, inputs: list[Tensor]) -> None:
    """Gradients of `make_loss(step)` with respect to `inputs`, beside eager's. Whatever is compiled is told."""
    for step in range(STEPS):
        loss = make_loss(step)
        wanted = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        with session:
            found = torch.autograd.grad(loss, inputs, allow_unused=True)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        if session.last.outcome != "hit":
            print(f"{name}, step {step}: {session.last.reasons[0]}")


def main() -> None:
    torch.manual_seed(0)
    session = ca.enable(**SETTINGS)
    expert, head, x = nn.Linear(32, 32), nn.Linear(32, 1), torch.randn(8, 32)
    inputs = [*expert.parameters(), *head.parameters()]
    # An expert behind a gate that is open at every second step. Both are one structure, and what comes after the gate
    # in the backward is compiled for each pattern of None: with a closed gate, no product is left to be computed there.
    train("gate", session, lambda step: head(x + Gate.apply(expert(x).tanh(), step % 2 == 0)).square().mean(), inputs)
    stats, aten = session.stats(), session.last.graph.aten
    assert (stats.captures, stats.compiles, stats.hits, stats.bypasses) == (1, 3, STEPS - 2, {})
    products = [len(each.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) for each in aten]
    assert products == [2, 1, 0]
    print(f"gate: {stats.hits} hits; products before it 2, after it 1 where it was open, 0 where it was closed")

    # A backward inside a backward is one like any other: captured, compiled, counted.
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    cases = {"setup_context": Softplus.apply, "vmap": torch.vmap(Softplus.apply), "backward inside": Recomputed.apply}
    for name, function in cases.items():
        session = ca.enable(**SETTINGS)
        train(name, session, lambda step, function=function: (function(x.tanh()) * x).sum(), [x])
        stats, structures = session.stats(), 2 if name == "backward inside" else 1
        assert (stats.captures, stats.hits, stats.bypasses) == (structures, structures * (STEPS - 1), {})
        print(f"{name}: {stats.backwards} backwards, {stats.hits} hits")

    # `gradcheck` in a session checks what is compiled; of second derivatives, that is the last backward.
    with ca.enable(**SETTINGS, tune=False) as session:
        assert gradcheck(Softplus.apply, x) and not session.stats().bypasses and gradgradcheck(Softplus.apply, x)
        assert session.stats().hits > 0 and set(session.stats().bypasses) == {"create_graph"}
        print(f"gradcheck, gradgradcheck: {session.stats().hits} hits, left to eager {session.stats().bypasses}")
        (first,) = torch.autograd.grad(Recomputed.apply(x).exp().sum(), x, create_graph=True)
        try:
            first.sum().backward()
            raise AssertionError("what is differentiable once was differentiated twice")
        except RuntimeError as error:  # in eager's words
            print(f"once_differentiable: {error}")


if __name__ == "__main__":
    main()
