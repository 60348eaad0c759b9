"""One decorator around a plain training step: the first backward, the next ones, and the first after a restart.

Model, loss and optimizer are eager PyTorch. The first `backward()` inside the decorated step is captured and compiled
with Inductor, which takes some seconds; the later ones run the compiled graph. `on_miss="compile"` makes that step
wait. By default no step waits, and the first seconds of a training run on eager. Some later backwards run on the eager
engine too, in a trial which of the two is faster (`tune`). Each gradient is compared with eager's on the same weights,
and both backwards are timed side by side. Then the process forgets what it has compiled, as if it were a new one, and
finds it on disk.

    python examples/quickstart.py
"""

import statistics
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compiled_autograd as ca

STEPS, WARM_UP, BATCH, WIDTH, DEPTH = 16, 3, 2048, 16, 4


class Block(nn.Module):
    """A gated layer behind a norm. Its products are small; most of its time goes into operations on single elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, WIDTH] float32 -> the same."""
        normed = self.scale * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        gate, value = self.up(normed).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    eager, hits = [], []  # seconds of backwards

    def step(x: Tensor, y: Tensor) -> tuple[float, list[Tensor]]:
        """Forward and backward of x [BATCH, WIDTH] and y [BATCH, 1]: seconds of the backward, and the gradients."""
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        started = time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - started
        return seconds, [parameter.grad for parameter in model.parameters()]

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Mostly written as "@ca.compile_step" above the function. Here it is needed without the decorator, too.
        # `cache_dir` is given so that this example starts from nothing; by default it is the user's cache folder.
        compiled_step = ca.compile_step(on_miss="compile", cache_dir=folder)(step)
        session = compiled_step.session
        for index in range(STEPS):
            x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, 1)
            seconds, wanted = step(x, y)
            eager.append(seconds)
            seconds, found = compiled_step(x, y)
            torch.testing.assert_close(found, wanted)
            optimizer.step()
            if index == 0:
                print(f"first backward: {session.last.outcome}, because: {session.last.reasons[0]}")
            elif session.last.outcome == "hit":
                hits.append(seconds)
                graph = session.last.graph
        stats = session.stats()
        assert (stats.structure_misses, stats.compiles, stats.failures) == (1, 1, 0)
        # Timed: it ran on eager in the trial; "not_worth_it": eager was found to be faster on this machine.
        assert stats.bypasses.keys() <= {"not_worth_it"}
        assert stats.hits + stats.tuning + sum(stats.bypasses.values()) == STEPS - 1
        left = {"timed": stats.tuning, **stats.bypasses}
        on_eager = ", ".join(f"{count} {reason}" for reason, count in left.items() if count) or "none"
        print(f"{STEPS} backwards: {stats.structure_misses} miss, {stats.hits} hits, on eager: {on_eager}")
        # New code is compared with the real calls in its first runs, so the first hits do not count here.
        ratio = statistics.median(hits[WARM_UP:]) / statistics.median(eager[WARM_UP:])
        print(f"time of a backward, compiled / eager: {ratio:.2f} (medians)")

        # What ran is there to be read: the tape, node by node, and the ATen operators that were compiled.
        operators = [node for region in graph.aten for node in region.graph.nodes if node.op == "call_function"]
        print(
            f"the graph: {len(graph.tape.calls)} nodes of the tape, {len(operators)} ATen operators. Its tape begins:"
        )
        print("  " + "\n  ".join(ca.inspect(F.mse_loss(model(x), y)).readable().splitlines()[:4]))

        # A new process has nothing in memory, which `reset` plays here. It finds the compiled code on disk.
        ca.reset()
        optimizer.zero_grad()
        with ca.enable(on_miss="compile", cache_dir=folder) as session:  # the other way to say it: around any backward
            F.mse_loss(model(x), y).backward()
        stats, took = session.stats(), session.last.seconds
        assert (session.last.outcome, stats.loads, stats.compiles) == ("hit", 1, 0)
        print(f"after a restart: {session.last.outcome}, {stats.loads} region loaded from disk, {took['load']:.2f} s")
        ca.reset()  # closes the cache, whose folder goes now


if __name__ == "__main__":
    main()
