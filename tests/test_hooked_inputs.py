"""Gradients that are asked for of tensors with hooks: what eager gives, and hooks run as often, on the same values.

Eager takes such a gradient before the tensor's hooks where the tensor's node has to run for the sake of another input,
and after them where it has not; ``retain_grad`` is a hook, and the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import compiled_autograd as ca

Hooked = Callable[[torch.Tensor, list[Any]], None]


def _changes(y: torch.Tensor, seen: list[Any]) -> None:
    y.register_hook(lambda grad: seen.append(grad.tolist()) or grad * 2)


def _sees(y: torch.Tensor, seen: list[Any]) -> None:
    y.register_hook(lambda grad: seen.append(grad.tolist()))


def _two(y: torch.Tensor, seen: list[Any]) -> None:
    _changes(y, seen)
    y.register_hook(lambda grad: seen.append(grad.tolist()) or grad + 1)


def _writes(y: torch.Tensor, seen: list[Any]) -> None:
    y.register_hook(lambda grad: seen.append(grad.mul_(3).tolist()))


def _retains(y: torch.Tensor, seen: list[Any]) -> None:
    _changes(y, seen)
    y.retain_grad()


def _retains_first(y: torch.Tensor, seen: list[Any]) -> None:
    y.retain_grad()
    _changes(y, seen)


def _before_node(y: torch.Tensor, seen: list[Any]) -> None:
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda grads: seen.append(grads[0].tolist()) or (grads[0] * 5,))
    _changes(y, seen)


def _after_node(y: torch.Tensor, seen: list[Any]) -> None:
    if y.grad_fn is not None:
        y.grad_fn.register_hook(lambda into, grads: seen.append(grads[0].tolist()))
    _changes(y, seen)


HOOKS = (_changes, _sees, _two, _writes, _retains, _retains_first, _before_node, _after_node)
ASKED = ("y", "xy", "yx", "x", "yy", "yxy", "w", "wy", "wxy", "z", "zxy")


def _run(hooked: Hooked, output: str, asked: str, by: str = "grad", on: str = "y", keeps: bool = False) -> Any:
    torch.manual_seed(0)
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    y = x.sin()
    z = y * w + y.exp()
    tensors = {"x": x, "w": w, "y": y, "z": z}
    seen: list[Any] = []
    for name in on:
        hooked(tensors[name], seen)
    gradient = torch.linspace(1, 2, 3, dtype=torch.float64)
    wanted = [tensors[name] for name in asked]
    if by == "grad":
        given = torch.autograd.grad(tensors[output], wanted, gradient, allow_unused=True, retain_graph=keeps)
    else:
        torch.autograd.backward(tensors[output], gradient, inputs=wanted, retain_graph=keeps)
        given = [each.grad if each.is_leaf or each.retains_grad else None for each in tensors.values()]
    kept = [each.grad for each in tensors.values() if each.is_leaf or each.retains_grad]
    return [[None if each is None else each.tolist() for each in values] for values in (given, kept)], seen


def _compare(hooked: Hooked, output: str, asked: str, by: str = "grad", on: str = "y") -> None:
    """Where the gradient of ``y`` is asked for and none below, what made ``y`` must stay: only ``retain_graph`` keeps
    it."""
    stops = by == "grad" and "y" in asked and "x" not in asked
    for keeps in (False, True):
        wanted = _run(hooked, output, asked, by, on, keeps)
        with ca.enable(backend="eager", tune=False) as session:
            for _ in range(3):
                assert _run(hooked, output, asked, by, on, keeps) == wanted
        stats = session.stats()
        assert not stats.failures
        if stops and not keeps:
            assert stats.bypasses == {"intermediate_input": 3}
        else:
            reached = asked != "w" or output == "z"
            assert (stats.hits >= 2 and not stats.bypasses) or (not reached and stats.bypasses)


@pytest.mark.parametrize("hooked", HOOKS)
@pytest.mark.parametrize("asked", ASKED)
def test_a_gradient_is_taken_before_or_after_hooks(hooked: Hooked, asked: str) -> None:
    _compare(hooked, "z", asked)


@pytest.mark.parametrize("hooked", HOOKS)
@pytest.mark.parametrize("asked", ["y", "yx", "x"])
def test_of_an_output(hooked: Hooked, asked: str) -> None:
    """What is asked for is what the backward starts from."""
    _compare(hooked, "y", asked)


@pytest.mark.parametrize("hooked", [_changes, _sees, _two, _writes])
@pytest.mark.parametrize("asked", ASKED)
def test_of_all_tensors_at_once(hooked: Hooked, asked: str) -> None:
    _compare(hooked, "z", asked, "grad", "xwyz")


@pytest.mark.parametrize("hooked", HOOKS)
@pytest.mark.parametrize("asked", ["x", "xw", "w", "y", "xy"])
def test_of_backward(hooked: Hooked, asked: str) -> None:
    _compare(hooked, "z", asked, "backward")


@pytest.mark.parametrize("by", ["grad", "backward"])
def test_an_output_that_leads_to_no_input(by: str) -> None:
    """Eager calls the hooks of the only output there is, although nothing is computed; it is left to it."""
    wanted = _run(_sees, "y", "w", by)
    assert len(wanted[1]) == 1
    with ca.enable(backend="eager", tune=False) as session:
        for _ in range(2):
            assert _run(_sees, "y", "w", by) == wanted
    ((reason, count),) = session.stats().bypasses.items()
    assert "leads to any of the inputs" in reason and count == 2


def test_two_outputs_of_which_one_leads_to_an_input() -> None:
    """Of several outputs, eager calls only the hooks of those that lead to an input."""

    def run() -> Any:
        seen: list[Any] = []
        a, b = (torch.arange(3.0).add_(start).requires_grad_() for start in (0, 5))
        y, z = a.sin(), b.exp()
        for each in (y, z):
            each.register_hook(lambda grad: seen.append(grad.tolist()))
        torch.autograd.backward([y, z], [torch.ones(3), torch.full((3,), 2.0)], inputs=[a])
        return seen, a.grad.tolist(), b.grad

    wanted = run()
    assert len(wanted[0]) == 1
    with ca.enable(backend="eager", tune=False) as session:
        assert run() == run() == wanted
    assert session.stats().hits == 1


class _GivesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("also_used", [False, True])
def test_retain_grad_of_a_tensor_whose_gradient_is_undefined(also_used: bool) -> None:
    """The engine's seam, asked to call a hook of C++ with None, ended the process; a random tape found it."""

    def gradients(session: Any) -> list[Any]:
        x = torch.tensor(2.0, requires_grad=True)
        y = x * 3
        y.retain_grad()
        z = _GivesNone.apply(y)
        z = z + y if also_used else z
        if session is None:
            z.backward()
        else:
            with session:
                z.backward()
        return [x.grad, y.grad]

    wanted = gradients(None)
    assert (wanted[1] is None) != also_used
    session = ca.enable(backend="eager", cache_dir=False)
    for _ in range(3):
        assert gradients(session) == wanted
    assert (session.stats().hits, session.stats().bypasses) == (2, {})
