"""What a marked function depends on is changed by users' code of the same backward; and marked ones that are called."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from compiled_autograd.compiling.queue import QUEUE
from compiled_autograd.runtime.program import OpaqueStep
from shadow_cache import Miss

from .helpers import assert_close, assert_same

BACKENDS = ["aot_eager", "inductor"]
_FACTOR: Any = 1.0
_SCALES = {"by": 1.0}


@ca.traceable
class Scaled(torch.autograd.Function):
    """``x.sin() * factor``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: Any, reads_tensor: bool = False) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor, ctx.reads_tensor, ctx.tensor = factor, reads_tensor, x.detach()
        return x.sin() * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        if ctx.reads_tensor:
            x = ctx.tensor
        return grad * x.cos() * ctx.factor * _FACTOR * _by(), None, None


def _by() -> float:
    return _SCALES["by"]


class Unmarked(Scaled):
    """The same, and it is called."""


Change = Callable[[Any, Any], object]


def _attribute(node: Any, value: Any) -> None:
    node.factor = value


def _constant(node: Any, value: Any) -> None:
    globals()["_FACTOR"] = value


def _of_a_called_function(node: Any, value: Any) -> None:
    _SCALES["by"] = value


def _train(session: Any, values: list[Any], change: Change, rows: list[int] | None = None) -> list[torch.Tensor]:
    """A hook changes something just before the marked function would be called; what it was is put back."""
    global _FACTOR
    leaf = torch.linspace(-1, 1, 40).requires_grad_()
    found = []
    for step, value in enumerate(values):
        leaf.grad, _FACTOR, _SCALES["by"] = None, 1.0, 1.0
        x = leaf[: 8 if rows is None else rows[step]] * 1.0
        scaled = Scaled.apply(x, 2.0)
        hooked = scaled.tanh()
        hooked.register_hook(lambda grad, node=scaled.grad_fn, value=value: change(node, value))
        loss = hooked.square().sum()
        with session:
            loss.backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
    _FACTOR, _SCALES["by"] = 1.0, 1.0
    return found


@pytest.mark.parametrize(
    ("change", "backend"),
    [
        pytest.param(change, backend, marks=pytest.mark.slow if backend == "inductor" else ())
        for change in (_attribute, _constant, _of_a_called_function)
        for backend in BACKENDS
    ],
)
@pytest.mark.parametrize("check", ["new", False])
def test_what_a_hook_of_the_same_backward_changes_is_the_new_value(backend: str, change: Change, check: Any) -> None:
    values = [2.0, 3.0, 4.0, 3.0, 2.0, 4.0]
    session = ca.enable(backend=backend, check=check)
    assert_close(_train(session, values, change), _train(ca.disable(), values, change))
    stats = session.stats()
    assert (stats.captures, stats.hits, stats.shape_misses, stats.failures) == (1, 3, 2, 0)
    assert len([each for each in _regions(session) if each.asks_again]) == 1


def _regions(session: ca.Session) -> list[Any]:
    assert session.last is not None and session.last.graph is not None
    return session.last.graph.regions


def test_the_reason_says_so() -> None:
    session = ca.enable(backend="aot_eager")
    _train(session, [2.0, 3.0], _attribute)
    assert session.last is not None
    (miss,) = [each for each in session.last.reasons if isinstance(each, Miss)]
    assert miss.kind == "ambient_state" and miss.where == "traceable_functions, changed in the same backward"
    name = "Scaled.backward" if sys.version_info >= (3, 11) else "backward"  # code had no other name before
    assert (miss.old, miss.new) == tuple(
        f"{name}: factor={each}, reads_tensor=False, tensor, _FACTOR=1.0" for each in (2.0, 3.0)
    )


def test_a_value_that_is_another_at_each_step_has_the_function_called() -> None:
    values = [float(each) for each in range(20)]
    session = ca.enable(backend="aot_eager")
    with pytest.warns(UserWarning, match="changed during the backward, to more than 8 values"):
        found = _train(session, values, _attribute)
    assert_close(found, _train(ca.disable(), values, _attribute))
    stats = session.stats()
    assert stats.hits >= 20 - 9 and stats.compiles <= 11 and stats.bypasses == {}


def test_other_shapes_with_symbols() -> None:
    rows, values = [8, 9, 11, 7, 8, 30, 12], [2.0, 3.0, 3.0, 2.0, 3.0, 2.0, 3.0]
    session = ca.enable(backend="aot_eager", check=False)
    assert_close(_train(session, values, _attribute, rows), _train(ca.disable(), values, _attribute, rows))
    assert session.stats().hits >= 3 and session.stats().failures == 0


def test_nothing_is_asked_where_nothing_of_the_users_runs_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from compiled_autograd.lowering import region_compiler

    session = ca.enable(backend="aot_eager")
    leaf = torch.linspace(-1, 1, 8).requires_grad_()

    def step() -> None:
        x = leaf * 1.0
        x.register_hook(lambda grad: grad * 2)  # after the function
        loss = Scaled.apply(x, 2.0).sum()
        with session:
            loss.backward()

    for _ in range(5):
        step()
    asked: list[Any] = []
    monkeypatch.setattr(region_compiler, "with_depended_on", lambda kind, *args: asked.append(args) or kind)
    step()
    assert session.last is not None and session.last.outcome == "hit" and asked == []


@contextmanager
def _no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("reads_tensor", [False, True])
def test_one_that_is_called_hits_as_an_unmarked_one_does(backend: str, reads_tensor: bool) -> None:
    """With another factor at each step, since a bitwise backend calls it, or it turned out that it cannot be traced."""
    if backend != "eager" and not reads_tensor:
        pytest.skip("it is traced")

    def train(session: Any, function: Any) -> list[Any]:
        leaf, found = torch.linspace(-1, 1, 8).requires_grad_(), []
        for factor in range(6):
            leaf.grad = None
            loss = function(function(leaf * 1.0, factor, reads_tensor).tanh(), factor, reads_tensor).square().sum()
            with session:
                loss.backward()
            found.append(leaf.grad)
        return found

    wanted = train(ca.disable(), Unmarked.apply)
    for function in (Unmarked.apply, Scaled.apply):
        session = ca.enable(backend=backend)
        with _no_warning():
            assert_same(train(session, function), wanted)
        stats = session.stats()
        assert (stats.hits, stats.shape_misses, stats.captures) == (5, 0, 1)
        assert session.last is not None and session.last.graph is not None
        assert [type(each) for each in session.last.graph.variants[-1].program.schedule.steps].count(OpaqueStep) == 2


def test_a_traced_one_that_turns_out_untraceable_later_serves_no_other_value() -> None:
    """The variant that has it compiled is for its own values alone, also afterwards."""

    def train(session: Any) -> list[Any]:
        leaf, found = torch.linspace(-1, 1, 8).requires_grad_(), []
        for factor, reads_tensor in [(2.0, False), (3.0, False), (2.0, True), (3.0, False), (5.0, False), (2.0, False)]:
            leaf.grad = None
            loss = Scaled.apply(leaf * 1.0, factor, reads_tensor).sum()
            with session:
                loss.backward()
            found.append(leaf.grad)
        return found

    session = ca.enable(backend="aot_eager")
    with pytest.warns(UserWarning, match=r"untraceable in .*reads ctx\.tensor"):
        found = train(session)
    assert_close(found, train(ca.disable()))
    stats = session.stats()
    assert (stats.hits, stats.shape_misses, stats.captures) == (3, 2, 1)


def test_one_that_is_called_is_users_code() -> None:
    """What it changes in place is seen by who saved it, and PyTorch's own functions see a subclass as under eager."""

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
            ctx.held = held
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            ctx.held.mul_(2.0)
            return grad * 1.0, None

    ca.traceable(Writes)
    leaf = torch.linspace(-1, 1, 8).requires_grad_()

    def step(session: Any) -> None:
        held = torch.ones(8)
        loss = Writes.apply(leaf * held, held).sum()
        with session:
            loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(ca.disable())
    session = ca.enable(backend="aot_eager")
    for _ in range(3):
        with _no_warning(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(session)


def test_a_region_that_is_compiled_for_each_set_of_shapes_hits() -> None:
    """Its ``ctx`` is another at each step, and no part of what it is compiled for."""

    def no_symbols(graph_module: torch.fx.GraphModule, examples: Any) -> Any:
        if any(
            isinstance(each, torch.SymInt) or any(isinstance(s, torch.SymInt) for s in each.shape) for each in examples
        ):
            raise ValueError("no symbols, please")
        return graph_module

    def train(session: Any) -> list[Any]:
        leaf, found = torch.linspace(-1, 1, 40).requires_grad_(), []
        for rows in [8, 9, 9, 9, 11, 11, 9]:
            leaf.grad = None
            loss = Scaled.apply(leaf[:rows] * 1.0, 2.0).square().sum()
            with session:
                loss.backward()
            found.append(leaf.grad)
        return found

    session = ca.enable(backend=no_symbols)
    with _no_warning():
        assert_close(train(session), train(ca.disable()))
    assert session.stats().hits >= 4


def test_in_the_background_what_changed_meanwhile_is_not_baked_in() -> None:
    """The region waits to be traced while users' code goes on."""
    session = ca.enable(backend="aot_eager", on_miss="background")

    def train(session: Any, wait: bool) -> list[Any]:
        leaf, found = torch.linspace(-1, 1, 8).requires_grad_(), []
        for step in range(6):
            leaf.grad = None
            scaled = Scaled.apply(leaf * 1.0, 2.0)
            loss = scaled.square().sum()
            node = scaled.grad_fn
            del scaled
            with session:
                loss.backward()
            node.factor = 100.0  # what the thread may find
            if wait and step:
                assert QUEUE.wait(60)
            found.append(leaf.grad)
        return found

    with _no_warning():
        found = train(session, True)
    assert_close(found, train(ca.disable(), False))


def _random_training(seed: int, session: Any) -> list[torch.Tensor | None]:
    """Hooks at random places that change attributes of random functions, others that only look, at many steps."""
    global _FACTOR
    random = Random(seed)
    leaves = [torch.linspace(-1, 1, 12).requires_grad_(), torch.linspace(0.5, 1, 12).requires_grad_()]
    depth, places = random.randint(2, 5), random.randint(1, 4)
    hooked = random.choices(range(2 * depth), k=places)
    kinds = random.choices(["tensor", "pre", "post"], k=places)
    found: list[torch.Tensor | None] = []
    for _ in range(random.randint(6, 12)):
        _FACTOR, _SCALES["by"] = 1.0, 1.0
        rows = random.choice([12, 12, 7])
        values, functions = [leaves[0][:rows] * 1.0], []
        for level in range(depth):
            values.append(Scaled.apply(values[-1], random.choice([0.5, 2.0])))
            functions.append(values[-1].grad_fn)
            values.append(values[-1].tanh() + leaves[1][:rows] * level)
        for place, kind in zip(hooked, kinds, strict=True):
            target, value = random.choice(functions), random.choice([0.5, 2.0, 3.0, 2])
            change = random.choice([_attribute, _attribute, _constant, _of_a_called_function])
            if random.random() < 0.3:
                continue

            def hook(*args: Any, target: Any = target, value: Any = value, change: Change = change) -> None:
                change(target, value)

            tensor = values[1 + place]
            if kind == "tensor":
                tensor.register_hook(hook)
            elif kind == "pre":
                tensor.grad_fn.register_prehook(hook)
            else:
                tensor.grad_fn.register_hook(hook)
        loss = values[-1].square().sum()
        with session:
            loss.backward()
        found += [None if each.grad is None else each.grad.clone() for each in leaves]
        for leaf in leaves:
            leaf.grad = None
    _FACTOR, _SCALES["by"] = 1.0, 1.0
    return found


def _compare_random(seeds: range, **settings: Any) -> None:
    for seed in seeds:
        session = ca.enable(**settings)
        with _no_warning():
            found = _random_training(seed, session)
        for one, other in zip(found, _random_training(seed, ca.disable()), strict=True):
            assert one is not None and other is not None
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=lambda m, s=seed: f"{s}: {m}")


@pytest.mark.parametrize(
    ("check", "seeds"), [(2, 1), *(pytest.param(each, 6, marks=pytest.mark.slow) for each in (False, 2))]
)
def test_random_changes(check: Any, seeds: int) -> None:
    _compare_random(range(seeds), backend="aot_eager", check=check)


@pytest.mark.slow
def test_many_random_changes() -> None:
    _compare_random(range(100, 220), backend="aot_eager", check=False)
    _compare_random(range(300, 306), backend="inductor", check=False)
