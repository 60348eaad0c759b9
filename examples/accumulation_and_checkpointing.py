"""Two ways to train with less memory: gradients added up over small batches, and activations computed again.

Accumulation needs two graphs, with and without a `.grad` to add to. Checkpointed blocks are computed again in the
compiled backward as in eager's, one at a time, so that the memory stays saved; with `use_reentrant=True`, the backwards
inside the backward are captured too. `backend="eager"` compiles at once, and its gradients are eager's bit for bit.

    python examples/accumulation_and_checkpointing.py
"""

import os
from collections.abc import Callable
from itertools import accumulate
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else PyTorch's profiler prints a line whenever it starts and stops

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import compiled_autograd as ca

WIDTH, DEPTH, STEPS, PARTS = 64, 6, 3, 4
# For exact counts. With `tune`, a structure that was hit 4 times is timed against eager, and some of its backwards run
# there; with a `compile_budget`, a slow computer might leave to eager what is new.
SETTINGS: dict[str, Any] = {"backend": "eager", "on_miss": "compile", "compile_budget": float("inf")}
SETTINGS |= {"cache_dir": False, "tune": False}


class Block(nn.Sequential):
    """A residual block that saves some ten times the size of its input. It counts how often it runs."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        """[batch, WIDTH] float32 -> the same."""
        self.runs += 1
        return x + super().forward(x)


class Model(nn.Sequential):
    """Blocks one after the other, each checkpointed where settings for `checkpoint` are given."""

    def __init__(self, **checkpointing: Any) -> None:
        torch.manual_seed(0)
        super().__init__(*(Block() for _ in range(DEPTH)))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        """[batch, WIDTH] float32 -> a loss, the mean over the batch."""
        for block in self:
            x = checkpoint(block, x, **self.checkpointing) if self.checkpointing else block(x)
        return x.square().mean()


def gradients(model: nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(parameter.grad for parameter in model.parameters())


def accumulation() -> None:
    """The first small batch of a step finds no `.grad`, the others add to one: two structures, each compiled once."""
    reference, model, session = Model(), Model(), ca.enable(**SETTINGS)
    for _ in range(STEPS):
        x = torch.randn(PARTS * 32, WIDTH)
        reference.zero_grad()
        model.zero_grad()
        for part in x.chunk(PARTS):
            (reference(part) / PARTS).backward()
            with session:
                (model(part) / PARTS).backward()
            if session.last.outcome != "hit":
                print(f"accumulation: {session.last.reasons[0]}")
        assert torch.equal(gradients(model), gradients(reference))
    reference.zero_grad()
    reference(x).backward()
    torch.testing.assert_close(gradients(model), gradients(reference))  # the sum is that of the whole batch
    stats = session.stats()
    assert (stats.captures, stats.hits, stats.bypasses) == (2, STEPS * PARTS - 2, {})
    print(f"accumulation: {stats.backwards} backwards, {stats.captures} captures, {stats.hits} hits")


def peak_bytes(step: Callable[[], None]) -> int:
    """The most bytes that torch's allocator held at once during `step`, beyond what it held before."""
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=False) as profiler:
        step()
    events = sorted(profiler.function_events, key=lambda event: event.time_range.end)
    return max(accumulate(event.self_cpu_memory_usage for event in events))


def checkpointing(label: str, **settings: Any) -> int:
    """Train with these settings for `checkpoint`; gives the compiled step's highest memory in bytes."""
    reference, model = Model(**settings), Model(**settings)
    session = ca.enable(**SETTINGS)
    ways, peaks = {"eager": (reference, ca.disable()), "compiled": (model, session)}, {}
    for _ in range(STEPS):
        x = torch.randn(256, WIDTH, requires_grad=True)  # reentrant checkpoints want an input that requires grad
        for way, (each, context) in ways.items():
            each.zero_grad()
            with context:
                peaks[way] = peak_bytes(lambda each=each, x=x: each(x).backward())
        assert torch.equal(gradients(model), gradients(reference))
    stats = session.stats()
    backwards, structures = (STEPS * (1 + DEPTH), 2) if settings.get("use_reentrant") else (STEPS, 1)
    assert (stats.backwards, stats.captures, stats.hits) == (backwards, structures, backwards - structures)
    # In each backward of a checkpointed model each block runs once more, and no more than that.
    assert {block.runs for block in (*reference, *model)} == {STEPS * (2 if settings else 1)}
    eager, compiled = peaks.values()
    assert compiled < 1.1 * eager
    print(f"{label}: {compiled / 2**20:.1f} MiB at most, {compiled / eager:.2f} of eager's; {stats.hits} hits")
    return compiled


def main() -> None:
    accumulation()
    most = checkpointing("no checkpoints")
    assert checkpointing("checkpoints", use_reentrant=False) < 0.6 * most
    assert checkpointing("reentrant", use_reentrant=True) < 0.6 * most


if __name__ == "__main__":
    main()
