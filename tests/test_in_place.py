"""Saved tensors that users' code changes in place in the middle of a backward: answered as eager answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from compiled_autograd.user_code.in_place import changed, versions_of

from .helpers import Squares, assert_same

Make = Callable[[list[Any]], tuple[torch.Tensor, list[torch.Tensor]]]


def _zero(tensor: torch.Tensor) -> Callable[[Any], None]:
    def hook(_: Any) -> None:
        with torch.no_grad():
            tensor.mul_(0)

    return hook


def _leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(*shape, requires_grad=True) for shape in shapes]


# Each makes a loss and its leaves; what is to be called when all is over it puts into a list.


def _a_parameter_still_needed(over: list[Any]) -> Any:
    w, a = _leaves((3, 3), (3, 3))
    h = (a @ w).tanh() @ w
    h.register_hook(_zero(w))
    return h.sum(), [a, w]


def _needed_only_before(over: list[Any]) -> Any:
    w, a, b = _leaves((3, 3), (3, 3), (3, 3))
    h = a.sin() @ b
    h.register_hook(_zero(w))
    return (h @ w).sum(), [a, b, w]


def _only_accumulated_into(over: list[Any]) -> Any:
    w, a = _leaves((3, 3), (3, 3))
    h = (a + w).tanh()
    h.register_hook(_zero(w))
    return h.sum(), [a, w]


def _an_optimiser_in_a_hook(over: list[Any]) -> Any:
    w, a = _leaves((3, 3), (3, 3))
    for each in (w, a):
        handle = each.register_post_accumulate_grad_hook(lambda leaf: _zero(leaf)(None))
        over.append(handle.remove)
    return ((a @ w).exp() @ w).sum(), [a, w]


def _an_optimiser_too_early(over: list[Any]) -> Any:
    """The last layer's weight is also saved by the first."""
    w, a = _leaves((3, 3), (3, 3))
    other = torch.randn(3, 3, requires_grad=True)
    other.register_post_accumulate_grad_hook(lambda leaf: _zero(w)(None))
    return ((a @ w).exp() @ other).sum(), [a, w, other]


def _an_output(over: list[Any]) -> Any:
    """What ``tanh`` saved of its own result."""
    (a,) = _leaves((3, 4))
    h = a.tanh()
    y = h.clone()
    y.register_hook(_zero(h.detach()))
    return y.sum(), [a]


def _indices(over: list[Any]) -> Any:
    (a,) = _leaves((5,))
    values, indices = a.max(0, keepdim=True)
    y = values.clone()
    y.register_hook(_zero(indices))
    return y.sum(), [a]


def _the_second_of_two_outputs(over: list[Any]) -> Any:
    (a,) = _leaves((4, 3))
    _, r = torch.linalg.qr(a)
    y = r.clone()
    y.register_hook(_zero(r.detach()))
    return y.sum(), [a]


def _another_input(over: list[Any]) -> Any:
    (a,) = _leaves((4,))
    b = torch.randn(4).double()
    y = a.sin() * b
    z = y * 2
    z.register_hook(_zero(b[1:]))
    return z.sum(), [a]


def _by_another_function(over: list[Any]) -> Any:
    (a,) = _leaves((4,))
    b = torch.randn(4)

    class Changes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            b.zero_()
            return grad * 2

    return Changes.apply(a.cos() * b).sum(), [a]


def _asks(times: int, change: bool) -> Make:
    def make(over: list[Any]) -> Any:
        (a,) = _leaves((4,))

        class Asks(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                for _ in range(times):
                    grad = grad * ctx.saved_tensors[0]
                    if change:
                        a.detach().mul_(2)
                return grad

        y = Asks.apply(a)
        if not change:
            y.register_hook(_zero(a))
        return y.sum(), [a]

    return make


def _packed(over: list[Any]) -> Any:
    w, a = _leaves((3, 3), (3, 3))
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value.clone(), lambda value: value):
        h = (a @ w).tanh() @ w
    h.register_hook(_zero(w))
    return h.sum(), [a, w]


def _a_function_that_saved(over: list[Any]) -> Any:
    w, a = _leaves((4,), (4,))
    h = Squares.apply(w * a)
    y = h * 2
    y.register_hook(_zero(w))
    return y.sum(), [a, w]


_CHANGED: dict[str, Make] = {
    "a parameter still needed": _a_parameter_still_needed,
    "an optimiser that is too early": _an_optimiser_too_early,
    "an output": _an_output,
    "indices": _indices,
    "the second of two outputs": _the_second_of_two_outputs,
    "another input": _another_input,
    "by another function": _by_another_function,
    "a function that asks": _asks(1, change=False),
    "a function that asks twice": _asks(2, change=True),
    "below a function": _a_function_that_saved,
}
_UNCHANGED: dict[str, Make] = {
    "needed only before": _needed_only_before,
    "only accumulated into": _only_accumulated_into,
    "an optimiser in a hook": _an_optimiser_in_a_hook,
    "a function that does not ask": _asks(0, change=False),
    "a function that asked before": _asks(1, change=True),
    "packed": _packed,
}


def _run(make: Make) -> tuple[str, list[torch.Tensor | None]]:
    torch.manual_seed(0)
    over: list[Any] = []
    loss, leaves = make(over)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error), [leaf.grad for leaf in leaves]
    finally:
        for each in over:
            each()
    return "", [leaf.grad for leaf in leaves]


def _as_eager(make: Make, backend: str = "eager", **settings: Any) -> tuple[str, ca.Session]:
    wanted, wanted_grads = _run(make)
    session = ca.enable(backend=backend, **settings)
    for _ in range(3):
        with session:
            words, grads = _run(make)
        assert words == wanted
        assert_same(grads, wanted_grads)  # after an error too: what was written before it
    assert session.stats().backwards == 3 and not session.stats().failures
    return wanted, session


@pytest.mark.parametrize("case", _CHANGED)
def test_what_was_changed_and_is_needed_is_answered_in_eagers_words(case: str) -> None:
    words, session = _as_eager(_CHANGED[case])
    assert "modified by an inplace operation" in words
    assert session.stats().hits >= 1 and not session.stats().bypasses


@pytest.mark.parametrize("case", _UNCHANGED)
def test_what_was_changed_and_is_not_needed_any_more_is_nobodys_concern(case: str) -> None:
    words, session = _as_eager(_UNCHANGED[case])
    assert not words
    assert session.stats().hits >= 1 and not session.stats().bypasses


@pytest.mark.parametrize("case", ["a parameter still needed", "an output", "a function that asks"])
def test_in_anomaly_mode(case: str) -> None:
    with pytest.warns(UserWarning), torch.autograd.set_detect_anomaly(True):
        words, session = _as_eager(_CHANGED[case])
    assert words.endswith("Good luck!") and session.stats().hits == 2


@pytest.mark.parametrize("case", ["a parameter still needed", "a function that asks", "an output"])
def test_where_a_plan_cannot_be_made(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the tape graph's calls run one by one."""

    def fails(*args: Any) -> Any:
        raise ValueError("on purpose")

    wanted, _ = _run(_CHANGED[case])
    monkeypatch.setattr("compiled_autograd.cache.graphs.Program", fails)
    with ca.enable(backend="eager") as session, pytest.warns(UserWarning, match="on purpose"):
        assert _run(_CHANGED[case])[0] == wanted
    assert session.stats().failures == 1


def test_a_tape_without_users_code_looks_at_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    (a, w) = _leaves((3, 3), (3, 3))
    with ca.enable(backend="eager") as session:
        for _ in range(2):
            (a @ w).sin().sum().backward()
        assert session.last is not None and session.last.graph is not None
        (variant,) = session.last.graph.variants
    assert not variant.program.schedule.watched
    assert not any(getattr(step, "saved", ()) for step in variant.program.schedule.steps)


def test_what_has_no_version() -> None:
    with torch.inference_mode():
        inference = torch.ones(2)
    values = [inference, torch.ones(2), None, torch.ones(2).zero_()]
    versions = versions_of(range(4), values)
    assert versions == {1: 0, 3: 1} and not changed(range(4), values, versions)
    values[1].zero_()  # type: ignore[union-attr]
    assert changed(range(4), values, versions) and not changed([0, 2, 3], values, versions)
