"""What lies around code that is marked as traceable and may change: attributes of functions and of ``ctx``, functions
deep in others, what modules were given, lists that others hold too."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import compiled_autograd as ca
from compiled_autograd.compiling.queue import QUEUE
from shadow_cache import Miss

Made = tuple[Any, Callable[[Any], object]]
_BY: Any = 2.0
_MASKED = False
_INNER: list[int] = []
_OUTER: dict[str, Any] = {"calls": _INNER}
_COUNTS = {"n": 0}


def _steps_of_hook(session: Any, hook: Any, values: list[Any], change: Callable[[Any], object]) -> list[Any]:
    found = []
    for value in values:
        change(value)
        leaf = torch.linspace(-1, 1, 8).requires_grad_()
        middle = (leaf * 1.5).sin()
        middle.register_hook(hook)
        loss = middle.tanh().square().sum()
        with session, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss.backward()
        found.append(leaf.grad)
    return found


def _steps_of_function(session: Any, function: Any, steps: int, twice: bool = False) -> list[Any]:
    found = []
    for _ in range(steps):
        leaf = torch.linspace(-1, 1, 8).requires_grad_()
        loss = function.apply(leaf * 1.5).square().sum()
        with session, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss.backward(retain_graph=twice)
            if twice:
                loss.backward()
        found.append(leaf.grad)
    return found


def _close(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def _helper(grad: torch.Tensor) -> torch.Tensor:
    return grad * getattr(_helper, "scale", 1.0)


def _by_attribute() -> Made:
    def hook(grad: torch.Tensor) -> torch.Tensor:
        return grad * hook.scale  # type: ignore[attr-defined]

    return hook, lambda value: setattr(hook, "scale", value)


def _by_helpers_attribute() -> Made:
    return lambda grad: _helper(grad), lambda value: setattr(_helper, "scale", value)


def _by_deep_function() -> Made:
    calls = "".join(f"def f{number}(grad): return f{number + 1}(grad)\n" for number in range(12))
    module: dict[str, Any] = {"__name__": "deep"}
    exec(f"{calls}def f12(grad): return grad * by", module)
    return module["f0"], lambda value: module.update(by=value)


def _by_what_a_module_was_given() -> Made:
    return lambda grad: grad * torch.of_the_users, lambda value: setattr(torch, "of_the_users", value)  # type: ignore[attr-defined]


def _by_a_function_that_a_module_was_given() -> Made:
    def change(value: Any) -> None:
        F.of_the_users = lambda grad: grad * value  # type: ignore[attr-defined]

    return lambda grad: F.of_the_users(grad), change  # type: ignore[attr-defined]


def _by_seed() -> Made:
    return lambda grad: grad * torch.initial_seed(), lambda value: torch.manual_seed(int(value))


def _by_generator() -> Made:
    return lambda grad: grad * torch.default_generator.initial_seed(), lambda value: torch.manual_seed(int(value))


class _Settings(Exception):
    scale = 1.0


def _by_class() -> Made:
    return lambda grad: grad * _Settings.scale, lambda value: setattr(_Settings, "scale", value)


@pytest.mark.parametrize("settings", [{"backend": "aot_eager"}, {"backend": "aot_eager", "check": False}])
@pytest.mark.parametrize(
    ("made", "traced"),
    [
        (_by_attribute, True),
        (_by_helpers_attribute, True),
        (_by_deep_function, False),
        (_by_what_a_module_was_given, True),
        (_by_a_function_that_a_module_was_given, False),
        (_by_seed, False),
        (_by_generator, False),
        (_by_class, False),
    ],
)
def test_a_hook_sees_what_changes(made: Any, traced: bool, settings: dict[str, Any]) -> None:
    values = [2.0, 2.0, 2.0, 3.0, 3.0, 2.0]
    hook, change = made()
    session = ca.enable(**settings)
    found = _steps_of_hook(session, ca.traceable(hook), values, change)
    _close(found, _steps_of_hook(ca.disable(), hook, values, change))
    stats = session.stats()
    assert (stats.captures, stats.bypasses, stats.failures) == (1, {}, 0 if traced else 1)
    assert stats.hits == (4 if traced else 5)


def test_what_a_function_keeps_in_an_attribute_is_not_lost() -> None:
    def hook(grad: torch.Tensor) -> torch.Tensor:
        hook.seen.append(1)  # type: ignore[attr-defined]
        return grad * 2

    hook.seen = seen = []  # type: ignore[attr-defined]
    session = ca.enable(backend="aot_eager")
    found = _steps_of_hook(session, ca.traceable(hook), [None] * 6, lambda value: None)
    assert len(seen) == 6 and hook.seen is seen  # type: ignore[attr-defined]
    _close(found, _steps_of_hook(ca.disable(), hook, [None] * 6, lambda value: None))
    assert session.stats().hits == 5


def test_a_list_inside_another_is_the_same_one_afterwards() -> None:
    """Others may hold it too."""

    def hook(grad: torch.Tensor) -> torch.Tensor:
        _OUTER["calls"].append(1)
        return grad * 2

    session = ca.enable(backend="aot_eager")
    _steps_of_hook(session, ca.traceable(hook), [None] * 6, lambda value: None)
    assert _OUTER["calls"] is _INNER and len(_INNER) == 6
    _INNER.clear()


def _end_compile_thread() -> None:
    if QUEUE._thread is not None:
        QUEUE._queue.put(None)
        QUEUE._thread.join()
        QUEUE._thread = None


def test_a_trace_touches_no_list_that_another_thread_may_change() -> None:
    """The real one has what the hook sees while it is called, and a copy what it sees while it is traced."""
    seen: list[bool] = []
    table = [1.0]

    def hook(grad: torch.Tensor) -> torch.Tensor:
        table.append(2.0)
        return grad * 2

    def watch(frame: types.FrameType, event: str, arg: object) -> None:
        if frame.f_code is hook.__code__:
            seen.append(frame.f_locals["table"] is table)

    session = ca.enable(backend="aot_eager")
    _end_compile_thread()  # the next one is traced
    threading.settrace(watch)
    sys.settrace(watch)
    try:
        _steps_of_hook(session, ca.traceable(hook), [None] * 3, lambda value: None)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        _end_compile_thread()
    assert False in seen and seen.count(True) == 3 and len(table) == 4


@ca.traceable
class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if _MASKED:
            ctx.mask = torch.zeros(8)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.mask if hasattr(ctx, "mask") else grad * 2


@ca.traceable
class _Stateful(torch.autograd.Function):
    """Multiplies by more each time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.state, ctx.counts = [1.0], _COUNTS
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        ctx.state[0] *= 2
        ctx.counts["n"] += 1
        return grad * ctx.state[0]


@ca.traceable
class _OfItsClass(torch.autograd.Function):
    """Uses what every ``ctx`` has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (2 if getattr(ctx, "next_functions", None) is None else 3)


def test_an_attribute_that_is_no_plain_value_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    session, found, wanted = ca.enable(backend="aot_eager"), [], []
    for masked in [False, False, False, True, True, False]:
        monkeypatch.setitem(globals(), "_MASKED", masked)
        found += _steps_of_function(session, _Masked, 1)
        wanted += _steps_of_function(ca.disable(), _Masked, 1)
    _close(found, wanted)
    assert (session.stats().captures, session.stats().bypasses, session.stats().failures) == (1, {}, 1)


@pytest.mark.parametrize("twice", [False, True])
def test_what_a_backward_keeps_in_an_attribute_is_not_lost(twice: bool) -> None:
    _COUNTS["n"] = 0
    wanted, counted = _steps_of_function(ca.disable(), _Stateful, 6, twice), _COUNTS["n"]
    _COUNTS["n"] = 0
    session = ca.enable(backend="aot_eager")
    _close(_steps_of_function(session, _Stateful, 6, twice), wanted)
    assert _COUNTS["n"] == counted == 6 * (1 + twice)
    stats = session.stats()
    assert stats.captures == stats.failures == 1 + twice and stats.hits == (10 if twice else 5)


@pytest.mark.parametrize("check", ["new", False])
def test_what_every_ctx_has_is_there(check: Any) -> None:
    session = ca.enable(backend="aot_eager", check=check)
    _close(_steps_of_function(session, _OfItsClass, 3), _steps_of_function(ca.disable(), _OfItsClass, 3))
    assert session.stats().failures == 1


def test_the_reason_names_what_lies_around_a_hook() -> None:
    by = 2.0

    def change(value: Any) -> None:
        nonlocal by
        by = value

    session = ca.enable(backend="aot_eager")
    _steps_of_hook(session, ca.traceable(lambda grad: grad * by * _BY), [2.0, 3.0], change)
    assert session.last is not None
    (miss,) = session.last.reasons
    assert isinstance(miss, Miss) and miss.old.endswith("by=2.0, _BY=2.0") and miss.new.endswith("by=3.0, _BY=2.0")


def test_an_operator_that_gives_nothing_is_called() -> None:
    """It is there for what else it does, and nothing in a graph needs it."""
    calls: list[int] = []
    library = torch.library.Library("compiled_autograd_test", "FRAGMENT")
    library.define("noted(Tensor x) -> ()")
    library.impl("noted", lambda x: calls.append(1), "CompositeExplicitAutograd")

    def hook(grad: torch.Tensor) -> torch.Tensor:
        torch.ops.compiled_autograd_test.noted(grad)
        return grad * 2

    session = ca.enable(backend="aot_eager")
    wanted = _steps_of_hook(ca.disable(), hook, [None] * 5, lambda value: None)
    calls.clear()
    _close(_steps_of_hook(session, ca.traceable(hook), [None] * 5, lambda value: None), wanted)
    assert len(calls) == 5 and (session.stats().hits, session.stats().failures) == (4, 1)
    library._destroy()


def test_what_is_no_function_of_python_is_said_to_be_none() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        backward = functools.partial(lambda ctx, grad: grad * 2)

    session = ca.enable(backend="aot_eager")
    with pytest.warns(UserWarning, match="is no function written in Python"):
        leaf = torch.ones(3, requires_grad=True)
        loss = ca.traceable(Doubled).apply(leaf * 1.0).sum()
        with session:
            loss.backward()
    _close([leaf.grad], [torch.full((3,), 2.0)])


def test_what_depends_on_a_counter_is_called() -> None:
    """Each value would be compiled for once, and come back never."""
    by = 0.0

    def change(value: float) -> None:
        nonlocal by
        by = value

    def hook(grad: torch.Tensor) -> torch.Tensor:
        return grad * by

    values = [float(value) for value in range(40)]
    session = ca.enable(backend="aot_eager", tune=False)
    found = _steps_of_hook(session, ca.traceable(hook), values, change)
    _close(found, _steps_of_hook(ca.disable(), hook, values, change))
    stats = session.stats()
    assert (stats.captures, stats.failures, stats.bypasses) == (1, 1, {})
    assert (stats.hits, stats.compiles) == (31, 10)  # eight values, and the two regions around the call


def test_a_value_that_stays_for_a_while_is_compiled_for() -> None:
    by = 0.0

    def change(value: float) -> None:
        nonlocal by
        by = value

    values = [float(value // 3) for value in range(60)]
    session = ca.enable(backend="aot_eager", tune=False)
    hook = ca.traceable(lambda grad: grad * by)
    found = _steps_of_hook(session, hook, values, change)
    _close(found, _steps_of_hook(ca.disable(), hook, values, change))
    assert (session.stats().hits, session.stats().compiles, session.stats().failures) == (40, 20, 0)


def _with_a_leaf_that_comes_first(session: Any, kind: str, fails: bool = False) -> list[Any]:
    """Eager writes a weight before it comes to something marked, which reads the weight's ``.grad``, or fails."""
    weight = torch.ones(8, requires_grad=True)

    def hook(grad: torch.Tensor) -> torch.Tensor:
        if fails:
            raise ValueError("the hook's own")
        return grad if weight.grad is None else grad * (2 + weight.grad.sum())

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return hook(grad)

    ca.traceable(Sine if kind == "function" else hook)  # type: ignore[type-var]
    found: list[Any] = []
    for _ in range(5):
        weight.grad = None
        leaf = torch.linspace(-1, 1, 8).requires_grad_()
        middle = Sine.apply(leaf * 1.0) if kind == "function" else leaf.sin()
        if kind == "hook":
            middle.register_hook(hook)
        loss = (middle * weight).tanh().square().sum()
        with session, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if fails:
                with pytest.raises(ValueError, match="the hook's own"):
                    loss.backward()
            else:
                loss.backward()
        found += [leaf.grad, weight.grad]
    return found


@pytest.mark.parametrize("kind", ["hook", "function"])
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_called_sees_the_leaves_that_eager_has_written_before(kind: str, fails: bool) -> None:
    session = ca.enable(backend="aot_eager", tune=False)
    found = _with_a_leaf_that_comes_first(session, kind, fails)
    wanted = _with_a_leaf_that_comes_first(ca.disable(), kind, fails)
    assert [each is None for each in found] == [each is None for each in wanted]
    _close([each for each in found if each is not None], [each for each in wanted if each is not None])
    stats = session.stats()
    assert (stats.captures, stats.hits, stats.bypasses) == (1, 4, {})


@pytest.mark.parametrize("kind", ["hook", "function"])
def test_so_does_what_is_called_while_it_is_compiled_elsewhere(kind: str) -> None:
    session = ca.enable(backend="aot_eager", tune=False, on_miss="background")
    for _ in range(3):
        found = _with_a_leaf_that_comes_first(session, kind)
        _close(found, _with_a_leaf_that_comes_first(ca.disable(), kind))
        QUEUE.wait()
    stats = session.stats()
    assert stats.captures == 1 and stats.hits >= 4


@pytest.mark.parametrize("kind", ["hook", "function"])
def test_so_does_what_is_called_where_nothing_can_be_compiled(kind: str) -> None:
    def fails(graph_module: Any, inputs: Any) -> Any:
        raise RuntimeError("planted")

    session = ca.enable(backend=fails, tune=False)
    _close(_with_a_leaf_that_comes_first(session, kind), _with_a_leaf_that_comes_first(ca.disable(), kind))
    assert (session.stats().captures, session.stats().hits) == (1, 4)


@ca.traceable
def _asks_for_the_dtype_of_autocast(grad: torch.Tensor) -> torch.Tensor:
    return grad * (2 if torch.get_autocast_dtype("cpu") is torch.float16 else 3)


@ca.traceable
def _autocasts(grad: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        return torch.mm(torch.outer(grad, grad), grad[:, None])[:, 0].to(grad.dtype)


@ca.traceable
def _asks_whether_it_warns(grad: torch.Tensor) -> torch.Tensor:
    return grad * (2 if torch.is_warn_always_enabled() else 3)


@ca.traceable
def _asks_for_the_cache_of_autocast(grad: torch.Tensor) -> torch.Tensor:
    return grad * (2 if torch.is_autocast_cache_enabled() else 3)


def _set_dtype_of_autocast(other: bool) -> None:
    torch.set_autocast_dtype("cpu", torch.float16 if other else torch.bfloat16)


class _AsksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor) -> torch.Tensor:
        return batch.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.to(torch.get_autocast_dtype("cpu")).to(grad.dtype)


ASKED: dict[str, tuple[Any, Callable[[bool], object]]] = {
    "dtype_of_autocast": (_asks_for_the_dtype_of_autocast, _set_dtype_of_autocast),
    "inside_autocast": (_autocasts, _set_dtype_of_autocast),
    "warns": (_asks_whether_it_warns, torch.set_warn_always),
    "cache_of_autocast": (_asks_for_the_cache_of_autocast, lambda other: torch.set_autocast_cache_enabled(not other)),
}
LATE = [False] * 8 + [True] * 2
"""After the first runs, which are compared with the real calls."""


@pytest.mark.parametrize("name", ASKED)
def test_what_a_hook_asks_pytorch_for_may_change(name: str) -> None:
    hook, change = ASKED[name]
    try:
        wanted = _steps_of_hook(contextlib.nullcontext(), hook, LATE, change)
        session = ca.enable(backend=_as_it_is, tune=False)
        _close(_steps_of_hook(session, hook, LATE, change), wanted)
    finally:
        change(False)
    assert not torch.equal(wanted[0], wanted[-1])
    assert session.stats().hits >= 8
    assert session.stats().failures == (name == "cache_of_autocast")  # it is called: while it is traced, it is off


def test_what_a_backward_asks_pytorch_for_may_change() -> None:
    function = ca.traceable(_AsksInBackward)
    session = ca.enable(backend=_as_it_is, tune=False)
    try:
        wanted, found = [], []
        for other in LATE:
            _set_dtype_of_autocast(other)
            wanted += _steps_of_function(contextlib.nullcontext(), function, 1)
            found += _steps_of_function(session, function, 1)
    finally:
        _set_dtype_of_autocast(False)
    for one, other_one in zip(found, wanted, strict=True):
        assert torch.equal(one, other_one)
    assert not torch.equal(wanted[0], wanted[-1])


def _as_it_is(graph_module: Any, example_inputs: Any) -> Any:
    return graph_module
