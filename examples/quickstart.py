"""One decorator around a plain training step: the first backward, the next ones, and the first after a restart.

Model, loss and optimizer are eager PyTorch. The first `backward()` inside the decorated step is captured and compiled
with Inductor, which takes some seconds; the later ones run the compiled graph. Each gradient is compared with eager's
on the same weights, and both backwards are timed side by side. Then the process forgets what it has compiled, as if it
were a new one, and finds it on disk.

    python examples/quickstart.py
"""

import statistics
import tempfile
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compiled_autograd as ca

STEPS, WARM_UP, BATCH, WIDTH, DEPTH = 16, 3, 32, 64, 6


class Block(nn.Module):
    """A small residual block: many cheap operations, whose cost in eager is mostly that of starting each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, WIDTH] float32 -> the same."""
        return x + F.gelu(self.linear(self.norm(x)))


def main() -> None:
    """Train, compare, time, and start again from the disk."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 1))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.02)
    seconds: dict[str, list[float]] = {"eager": [], "compiled": []}

    def step(x: Tensor, y: Tensor, label: str) -> list[Any]:
        """One forward and backward of a batch x [batch, WIDTH], y [batch, 1]; gives the gradients."""
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        started = time.perf_counter()
        loss.backward()
        seconds[label].append(time.perf_counter() - started)
        return [parameter.grad for parameter in parameters]

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Mostly written as "@ca.compile_step" above the step. Here the same function is needed without it, too.
        # `cache_dir` is given so that this example starts from nothing; by default it is the user's cache folder.
        compiled_step = ca.compile_step(cache_dir=folder)(step)
        session = compiled_step.session
        for index in range(STEPS):
            x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, 1)
            wanted = step(x, y, "eager")
            found = compiled_step(x, y, "compiled")
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other)
            optimizer.step()
            if index == 0:
                print(f"first backward: {session.last.outcome}, {seconds['compiled'][0]:.1f} s")
                print(f"  because: {session.last.reasons[0]}")

        stats = session.stats()
        print(f"{STEPS} backwards: {stats.hits} hits, {stats.structure_misses} miss, {stats.compiles} region compiled")
        assert (stats.hits, stats.structure_misses, stats.compiles) == (STEPS - 1, 1, 1)
        assert not stats.bypasses and not stats.failures

        # Of one backward there are its outcome, the reasons for it, and the graph that ran.
        graph = session.last.graph
        print(f"last backward: {session.last.outcome}; its tape has {len(graph.tape.calls)} nodes, which begin with")
        print(ca.inspect(F.mse_loss(model(x), y)).readable().split("\n#3")[0])

        # In its first runs, compiled code is compared with the calls that it was made of. Those are not timed.
        eager, compiled = (statistics.median(seconds[label][WARM_UP:]) for label in ("eager", "compiled"))
        print(f"time of a backward, compiled / eager: {compiled / eager:.2f} (medians of {STEPS - WARM_UP})")

        # A new process has nothing in memory, which `reset` plays here. It finds the compiled code on disk.
        ca.reset()
        again = ca.enable(cache_dir=folder)
        optimizer.zero_grad()
        with again:  # `enable` is the other way to say it: around any backward
            F.mse_loss(model(x), y).backward()
        stats = again.stats()
        print(
            f"after a restart: {again.last.outcome}, {stats.loads} region loaded, {stats.compiles} compiled, ", end=""
        )
        print(f"{1000 * sum(again.last.seconds[stage] for stage in ('capture', 'run')):.0f} ms")
        assert (again.last.outcome, stats.loads, stats.compiles) == ("hit", 1, 0)
        ca.reset()  # closes the cache, whose folder goes now


if __name__ == "__main__":
    main()
