"""Forwards that torch.compile compiled, and the backward around them compiled as one graph.

torch.compile makes one function of each forward that it compiles, with a compiled backward. Between these functions
the eager engine runs what is left: other layers, hooks, sums of gradients, the loss. Inside `enable` the graphs of
their backwards are inlined into the tape graph around them, and all of it is compiled together.

    python examples/with_torch_compile.py
"""

import copy
import statistics
import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

import compiled_autograd as ca

BLOCKS, WIDTH, ROUNDS = 4, 64, 50


class Block(nn.Module):
    """A small MLP behind a norm, and a residual: much pointwise work, small products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] -> the same."""
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Model(nn.Module):
    """Blocks, with something between them that stays plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] -> the same."""
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def gradients(model: nn.Module, x: Tensor, around: AbstractContextManager[Any]) -> tuple[float, list[Tensor]]:
    """Seconds of the backward alone, and the gradients of all parameters."""
    model.zero_grad()
    loss = model(x).square().mean()
    started = time.perf_counter()
    with around:
        loss.backward()
    seconds = time.perf_counter() - started
    return seconds, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def main() -> None:
    """The same backward four ways."""
    torch.manual_seed(0)
    plain, x = Model(), torch.randn(64, WIDTH)
    compiled = copy.deepcopy(plain)
    for block in compiled.blocks:
        block.compile()  # torch.compile, in place; all blocks have one code, so it is compiled once
    # For exact counts: each new structure is compiled at once, and nothing is left to eager to be timed.
    settings = {"on_miss": "compile", "compile_budget": float("inf"), "cache_dir": False, "tune": False}
    both, ours = (ca.enable(**settings) for _ in range(2))
    ways = {
        "eager": (plain, ca.disable()),
        "torch.compile": (compiled, ca.disable()),
        "enable": (plain, ours),
        "both": (compiled, both),
    }
    expected = gradients(plain, x, ca.disable())[1]
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        for name, (model, around) in ways.items():
            seconds, found = gradients(model, x, around)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
            if number >= 3:  # the first backwards compile, and compare what was compiled
                times[name].append(seconds)
    for session in (both, ours):
        stats = session.stats()
        assert (stats.structure_misses, stats.hits, stats.compiles) == (1, ROUNDS - 1, 1) and not stats.bypasses

    assert both.last is not None and both.last.graph is not None
    names = [call.name for call in both.last.graph.tape.calls]
    functions = sum(name.startswith("CompiledFunction") for name in names)
    print(f"tape: {len(names)} nodes, {functions} of them backwards of compiled forwards")
    print(f"compiled together: {len(both.last.graph.regions)} region")
    assert functions == BLOCKS and len(both.last.graph.regions) == 1
    eager = statistics.median(times["eager"])
    print("backward:", ", ".join(f"{name} {statistics.median(each) / eager:.2f}" for name, each in times.items()))


if __name__ == "__main__":
    main()
