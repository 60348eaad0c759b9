"""Tapes on a CUDA device that are walked in C++: found, run and written as by the engine's walk, and counted.

Every test runs on the CPU too. ``python -m tests.fuzz --walk both --device cuda`` has both walks at random tapes.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from compiled_autograd.engine.native_hits import NativeHits
from compiled_autograd.native.interface import Found

from .both_walks import native_plans, walked  # noqa: F401 (a fixture)
from .helpers import assert_same, expect

STEPS = 10


def _model(device: str) -> nn.Module:
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 8, bias=False), nn.GELU(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).to(device)


def _train(model: nn.Module, session: Any, device: str, sizes: list[int], keep: bool = False) -> list[torch.Tensor]:
    """Gradients of all steps."""
    torch.manual_seed(1)
    found = []
    for size in sizes:
        model.zero_grad(set_to_none=not keep)
        loss = model(torch.randn(size, 8, device=device)).square().mean()
        with session:
            loss.backward()
        found += [each.grad.clone() for each in model.parameters()]  # type: ignore[union-attr]
    return found


def _alike(found: list[torch.Tensor], wanted: list[torch.Tensor], backend: str = "eager") -> None:
    if backend == "eager":
        assert_same(found, wanted)
    else:
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("backend", ["eager", "inductor", "inductor:reduce-overhead"])
def test_hits_are_walked_in_cpp(device: str, native: NativeHits, backend: str, keep: bool) -> None:
    model, session = _model(device), walked(backend=backend)
    wanted = _train(model, ca.disable(), device, [4] * STEPS, keep)
    model.zero_grad()
    _alike(_train(model, session, device, [4] * STEPS, keep), wanted, backend)
    assert native.hits >= STEPS - 4
    expect(session.stats(), structure_misses=1 + keep, hits=STEPS - 1 - keep, captures=1 + keep)


def test_sizes_that_change(device: str, native: NativeHits) -> None:
    sizes = [4, 4, 4, 4, 6, 4, 9, 6, 6, 5, 1, 4, 1, 0, 4]
    model, session = _model(device), walked()
    wanted = _train(model, ca.disable(), device, sizes)
    torch.testing.assert_close(_train(model, session, device, sizes), wanted, equal_nan=True)
    stats = session.stats()
    assert native.hits and stats.captures == 1 and stats.hits + stats.shape_misses == len(sizes) - 1


def test_nobodys_gradient_is_lent(device: str, native: NativeHits) -> None:
    """What a leaf keeps is its own: neither the user's ``gradient=``, nor another leaf's."""
    leaves = [torch.ones(4, device=device, requires_grad=True) for _ in range(3)]
    session, given = walked(), torch.full((4,), 2.0, device=device)
    for _ in range(STEPS):
        for leaf in leaves:
            leaf.grad = None
        with session:
            (leaves[0] + leaves[1] + leaves[2].view(2, 2).view(4)).backward(given)
        grads = [leaf.grad for leaf in leaves]
        places = {each.untyped_storage().data_ptr() for each in [*grads, given]}  # type: ignore[union-attr]
        assert len(places) == 4 and all(each.tolist() == [2.0] * 4 for each in grads)  # type: ignore[union-attr]
    assert native.hits


def test_a_gradient_that_users_hold_is_not_written_to(device: str, native: NativeHits) -> None:
    leaf, session, held = torch.ones(4, device=device, requires_grad=True), walked(), []
    for step in range(STEPS):
        leaf.grad = None
        with session:
            (leaf * float(step)).exp().log().sum().backward()
        held.append(leaf.grad)
    torch.testing.assert_close([each.mean().item() for each in held], [float(step) for step in range(STEPS)])


def test_another_dtype_and_another_device_are_other_tapes(device: str, native: NativeHits) -> None:
    session, places = walked(), [(device, torch.float32), (device, torch.float64), ("cpu", torch.float32)]
    for step in range(3 * STEPS):
        where, dtype = places[step % len(places)]
        leaf = torch.ones(4, device=where, dtype=dtype, requires_grad=True)
        with session:
            (leaf * 2).exp().sum().backward()
        assert leaf.grad is not None and (leaf.grad.device, leaf.grad.dtype) == (leaf.device, dtype)
    assert native.hits and session.stats().captures == (3 if device == "cuda" else 2)


def test_two_threads(device: str, native: NativeHits) -> None:
    sessions, found, models = [walked(), walked()], {}, [_model(device), _model(device)]  # type: ignore[var-annotated]

    def run(index: int) -> None:
        model, steps = models[index], []
        inputs = torch.Generator(device=device).manual_seed(index)
        for _ in range(3 * STEPS):
            x = torch.randn(4, 8, device=device, generator=inputs)
            both = []
            for session in (ca.disable(), sessions[index]):
                model.zero_grad()
                loss = model(x).square().mean()
                with session:
                    loss.backward()
                both.append([each.grad.clone() for each in model.parameters()])  # type: ignore[union-attr]
            steps.append(both)
        found[index] = steps

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1]
    for steps in found.values():
        for eager, ours in steps:
            assert_same(ours, eager)


@pytest.mark.gpu
def test_a_side_stream_is_left_to_the_engine(cuda: str, native: NativeHits) -> None:
    """A tape that was recorded on another stream than it is run on is not looked at in C++ either."""
    model, session = _model(cuda), walked()
    _train(model, session, cuda, [4] * STEPS)
    side = torch.cuda.Stream()
    x = torch.randn(4, 8, device=cuda)
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        loss = model(x).square().mean()
    torch.cuda.current_stream().wait_stream(side)
    served = native.hits
    with session:
        loss.backward()
    assert native.hits == served and sum(session.stats().bypasses.values()) == 1
    for _ in range(2):
        _train(model, session, cuda, [4])
    assert native.hits == served + 2


@pytest.mark.gpu
def test_what_python_is_given_lies_on_the_device(cuda: str, native: NativeHits) -> None:
    leaf = torch.ones(4, device=cuda, requires_grad=True)
    module = native.module(walked().settings)
    assert module is not None
    loss = (leaf * 2).exp().sum()
    plan = module.learn((loss,), (torch.ones_like(loss),), True, (), False)
    assert not isinstance(plan, str), plan
    found: Found | str = plan.compare((loss,), (torch.ones_like(loss),), (), False)
    assert not isinstance(found, str)
    assert [each.device.type for each in found[1]] == ["cuda", "cuda", "cpu", "cuda"]  # the factor is a number
