"""Hooks in a compiled backward: they run as they are, when eager would run them, between compiled regions.

Three uses: hooks that clip each gradient; optimizers that step inside the backward, so that the gradients of all
parameters never exist at once; and gradients that are asked for at an edge of the tape, also of a tensor that was
changed in place later. `backend="eager"` compiles at once, and its gradients are eager's bit for bit.

    python examples/hooks.py
"""

import copy
import os
from collections.abc import Callable
from itertools import accumulate

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else PyTorch's profiler prints a line whenever it starts and stops

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parameters_to_vector as flat

import compiled_autograd as ca

WIDTH, DEPTH, BATCH, STEPS = 256, 8, 8, 4
# Each new structure is compiled at once, also on a slow computer.
SETTINGS = {"backend": "eager", "on_miss": "compile", "compile_budget": float("inf"), "cache_dir": False}


def clip_in_a_hook(model: nn.Module) -> None:
    """The hooks are made anew at every step; the graph is compiled once, since hooks are handed in at each call."""
    session = ca.enable(**SETTINGS)
    for step in range(STEPS):
        bound = 1e-4 / (1 + step)
        handles = [p.register_hook(lambda grad, bound=bound: grad.clamp(-bound, bound)) for p in model.parameters()]
        loss = model(torch.randn(BATCH, WIDTH)).square().mean()
        wanted = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        with session:
            loss.backward()
        assert torch.equal(flat(p.grad for p in model.parameters()), flat(wanted))
        for handle in handles:
            handle.remove()
        model.zero_grad()
    stats = session.stats()
    assert (stats.captures, stats.hits, stats.bypasses) == (1, STEPS - 1, {})
    print(f"clipping: {len(handles)} new hooks at each of {STEPS} steps; {stats.captures} capture, {stats.hits} hits")


def peak_bytes(step: Callable[[], None]) -> int:
    """The most bytes that torch's allocator held at once during `step`, beyond what it held before."""
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=False) as profiler:
        step()
    events = sorted(profiler.function_events, key=lambda event: event.time_range.end)
    return max(accumulate(event.self_cpu_memory_usage for event in events))


def optimizer_in_backward(plain: nn.Module) -> None:
    """A parameter is updated and its gradient dropped as soon as it is there, before the next one is computed."""
    session, eager, peaks = ca.enable(**SETTINGS), ca.disable(), {}
    inside, compiled = copy.deepcopy(plain), copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    own = {p: torch.optim.SGD([p], lr=0.1) for model in (inside, compiled) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in own:
        parameter.register_post_accumulate_grad_hook(update)
    ways = {"after it": (plain, eager), "inside": (inside, eager), "inside a compiled one": (compiled, session)}
    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        for way, (model, context) in ways.items():
            with context:
                peaks[way] = peak_bytes(lambda model=model, x=x: model(x).square().mean().backward()) / 2**20
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(flat(inside.parameters()), flat(plain.parameters()))
        assert torch.equal(flat(compiled.parameters()), flat(plain.parameters()))
    assert (session.stats().captures, session.stats().hits, session.stats().bypasses) == (1, STEPS - 1, {})
    assert peaks["inside a compiled one"] < 0.4 * peaks["after it"] and all(p.grad is None for p in own)
    sizes = ", ".join(f"{peak:.2f} MiB {way}" for way, peak in peaks.items())
    print(f"optimizer: the same weights; the most memory of a backward with the optimizer: {sizes}")


def gradient_edges(model: nn.Module) -> None:
    """An edge names a place on the tape. It stays what it was when the tensor is changed in place later."""
    session, weight = ca.enable(**SETTINGS), model[0].weight

    def gradients(x: Tensor) -> list[Tensor]:
        """Of `hidden` before and after it is changed in place, and of the first weight alone."""
        hidden = model[:5](x)
        before = get_gradient_edge(hidden)
        hidden.mul_(3)  # from here on, `hidden` is another place on the tape
        loss = model[5:](hidden).square().mean()
        of_hidden = torch.autograd.grad(loss, [before, hidden], retain_graph=True)
        torch.autograd.backward(loss, inputs=[get_gradient_edge(weight)])
        assert all(p.grad is None for p in model.parameters() if p is not weight)
        found, weight.grad = weight.grad, None
        return [*of_hidden, found]

    for _ in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        wanted = gradients(x)
        with session:
            found = gradients(x)
        assert torch.equal(flat(found), flat(wanted))
        assert torch.equal(found[0], 3 * found[1])
    stats = session.stats()
    assert (stats.captures, stats.hits, stats.bypasses) == (2, 2 * STEPS - 2, {})
    print(f"edges: `hidden` before and after `hidden.mul_(3)`; {stats.captures} captures, {stats.hits} hits")


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    clip_in_a_hook(model)
    optimizer_in_backward(model)
    gradient_edges(model)


if __name__ == "__main__":
    main()
