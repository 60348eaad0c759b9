"""Whatever is compiled anew has a reason, in words of the model: which layer, which value, what it was and what it is.

One small model is taken through what most often makes a training compile again, and the reason that each backward
gives is printed. Then the same reasons as an error and as a test. `backend="eager"` compiles at once; the reasons are
the same with Inductor. docs/misses.md has all kinds of misses, and what to do about each.

    python examples/explain_misses.py
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import compiled_autograd as ca
from compiled_autograd import shadow_cache


class Model(nn.Module):
    """[batch, 4] float32 -> [batch, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 3)
        self.fc2 = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


def mean(y: Tensor) -> Tensor:
    return y.exp().mean()


def main() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, 4)
    parameters = list(model.parameters())
    # Without a limit on what compiling may cost: on a slow computer the default budget would leave some of it to eager.
    session = ca.enable(backend="eager", on_miss="compile", compile_budget=float("inf"), cache_dir=False)

    def run(loss: Callable[[Tensor], Tensor], x: Tensor, keep: bool = False) -> str:
        """One step on x [batch, 4], compared with eager; gives the kind of its miss, or "hit"."""
        if not keep:
            model.zero_grad()
        before = [0 if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        wanted = torch.autograd.grad(loss(model(x)), parameters)
        with session:
            loss(model(x)).backward()
        assert all(torch.equal(p.grad, old + new) for p, old, new in zip(parameters, before, wanted, strict=True))
        return session.last.reasons[0].kind if session.last.reasons else session.last.outcome

    def explain(what: str, kind: str, found: str) -> None:
        """Print the reason of the last backward, and see that it is of the kind that is told here."""
        assert found == kind, (found, kind)
        print(f"{what}:\n  {session.last.reasons[0]}")

    explain("the first backward", "first_seen", run(mean, x))
    assert run(mean, x) == "hit"

    # The structure of the tape is new: another operation, another constant, a `.grad` that is there already, a hook.
    explain("another loss", "new_node", run(lambda y: y.sin().mean(), x))
    run(lambda y: (y**2).mean(), x)
    explain("another exponent, a number", "node_attribute", run(lambda y: (y**3).mean(), x))
    explain("no zero_grad() before", "grad_state", run(mean, x, keep=True))
    handle = model.fc1.weight.register_hook(lambda grad: None)
    explain("a hook was added", "hooks_changed", run(mean, x))
    handle.remove()

    # The structure is known, but what is compiled serves other shapes, another layout, another state of the process.
    explain("a transposed batch", "layout", run(mean, torch.randn(4, 5).t()))
    explain("a batch of 6 instead of 5", "shape", run(mean, torch.randn(6, 4)))
    assert run(mean, torch.randn(7, 4)) == "hit"
    explain("a batch of 1", "guard", run(mean, torch.randn(1, 4)))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    explain("another number of threads", "ambient_state", run(mean, x))
    torch.set_num_threads(threads)

    # Each of these is compiled once. Everything that was met so far is a hit now.
    before = session.stats()
    for loss, batch in ((mean, x), (lambda y: y.sin().mean(), x), (lambda y: (y**3).mean(), x), (mean, x[:1])):
        assert run(loss, batch) == "hit"
    assert session.stats().compiles == before.compiles
    print(f"all of them once more: {session.stats().hits - before.hits} hits, nothing compiled")

    # What cannot be captured runs on the eager engine, and says so too.
    with session:
        torch.autograd.grad(mean(model(x)), parameters, create_graph=True)
    print(f"create_graph=True:\n  {session.last.outcome}: {session.last.reasons[0]}")

    # Where nothing may be compiled any more, a miss can be an error. No gradient is written then.
    model.zero_grad()
    try:
        with ca.enable(backend="eager", cache_dir=False, on_miss="raise"):
            model(x).cos().mean().backward()
    except ca.CacheMissError as error:
        print(f"on_miss='raise':\n  {type(error).__name__}: {error}")
    else:
        raise AssertionError("no miss was raised")
    assert all(parameter.grad is None for parameter in parameters)

    # And a test can say how much may be compiled. It fails with the reasons where it was more.
    with shadow_cache.assert_max_compiles(0):
        assert run(mean, x) == "hit"


if __name__ == "__main__":
    main()
