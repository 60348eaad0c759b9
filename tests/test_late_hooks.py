"""Hooks that users' code registers and removes while the backward runs: those to come are heeded, as by eager."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import compiled_autograd as ca
from compiled_autograd.torch_api.hook_handles import HANDLES

from .helpers import SineAndCosine, same_bits

Grads = list[torch.Tensor | None]
Backward = Callable[[Any], tuple[Grads, list[Any]]]


def _session(backend: Any = "eager") -> ca.Session:
    return ca.enable(backend=backend, cache_dir=False, tune=False)


def _compare(backward: Backward, late: int, backend: Any = "eager", steps: int = 3) -> ca.Session:
    """Gradients and calls of hooks are eager's in each step; ``late`` of these had late hooks."""
    session = _session(backend)
    for _ in range(steps):
        wanted, told = backward(contextlib.nullcontext())
        found, seen = backward(session)
        assert seen == told
        same = same_bits if backend == "eager" else torch.allclose
        for one, other in zip(found, wanted, strict=True):
            assert (one is None) is (other is None) and (one is None or same(one, other))
    assert session.stats().failures == late and not session.stats().bypasses
    return session


def _twice(*grads: Any) -> Any:
    return tuple(grad * 2 for grad in grads[0]) if isinstance(grads[0], tuple) else grads[0] * 2


def _doubles(leaf: torch.Tensor) -> None:
    assert leaf.grad is not None
    leaf.grad.mul_(2)


_REGISTER: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a tensor": lambda inner, leaf: inner.register_hook(_twice),
    "after a node": lambda inner, leaf: inner.grad_fn.register_hook(_twice),  # type: ignore[union-attr]
    "before a node": lambda inner, leaf: inner.grad_fn.register_prehook(_twice),  # type: ignore[union-attr]
    "a leaf": lambda inner, leaf: leaf.register_hook(_twice),
    "after a leaf": lambda inner, leaf: leaf.register_post_accumulate_grad_hook(_doubles),
}


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", _REGISTER)
@pytest.mark.parametrize("comes", [True, False])
def test_a_hook_comes_or_goes(where: str, comes: bool, backend: str) -> None:
    first, second = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def backward(around: Any) -> tuple[Grads, list[Any]]:
        first.grad = second.grad = None
        inner = (torch.ones(2, 4) @ first).tanh()
        outer = (inner @ second).sin()
        handles = [] if comes else [_REGISTER[where](inner, first)]

        def change(_: torch.Tensor) -> None:
            if comes:
                handles.append(_REGISTER[where](inner, first))
            else:
                handles[0].remove()

        outer.register_hook(change)
        with around:
            outer.pow(2).sum().backward()
        handles[0].remove()
        return [first.grad, second.grad], []

    session = _compare(backward, late=3, backend=backend)
    assert session.last is not None and "late_hook" in str(session.last.reasons[-1])


def test_only_the_first_of_some_hooks_is_called() -> None:
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]

    def backward(around: Any) -> tuple[Grads, list[Any]]:
        calls = []

        def first(grad: torch.Tensor) -> torch.Tensor:
            calls.append(grad.sum().item())
            for handle in handles:
                handle.remove()
            return grad * 0

        handles = [weight.register_hook(first) for weight in weights]
        value = torch.ones(2, 4)
        for weight in weights:
            weight.grad = None
            value = (value @ weight).tanh()
        with around:
            value.sum().backward()
        return [weight.grad for weight in weights], calls

    _compare(backward, late=3)


@pytest.mark.parametrize("of", ["input", "weight", "node"])
@pytest.mark.parametrize("asks", [False, True])
def test_what_a_checkpointed_function_registers_again(of: str, asks: bool) -> None:
    """It does so outside of what is made anew, and eager calls it twice."""
    first, second = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def backward(around: Any) -> tuple[Grads, list[Any]]:
        first.grad = second.grad = None
        handles = []
        inner = torch.ones(2, 4) @ first

        def function(value: torch.Tensor) -> torch.Tensor:
            assert value.grad_fn is not None
            on = {"input": value.register_hook, "weight": second.register_hook, "node": value.grad_fn.register_prehook}
            handles.append(on[of](_twice))
            return (value @ second).tanh()

        outer = checkpoint(function, inner, use_reentrant=False)
        with around:
            if asks:
                grads = torch.autograd.grad(outer.sum(), [first, second])
            else:
                outer.sum().backward()
                grads = [first.grad, second.grad]
        for handle in handles:
            handle.remove()
        return list(grads), [len(handles)]

    _compare(backward, late=3)


def test_what_a_region_has_made_for_a_leaf_alone_is_not_lost() -> None:
    first, second, third = (torch.randn(4, requires_grad=True) for _ in range(3))

    def backward(around: Any) -> tuple[Grads, list[Any]]:
        first.grad = second.grad = third.grad = None
        inner = third.sin()

        def change(_: torch.Tensor) -> None:
            handles.append(inner.register_hook(_twice))

        handles = [first.register_post_accumulate_grad_hook(change)]
        with around:
            (first * second * inner).sum().backward()
        for handle in handles:
            handle.remove()
        return [first.grad, second.grad, third.grad], []

    _compare(backward, late=4, steps=4)


def test_hooks_of_what_is_asked_for() -> None:
    """Of a tensor whose node does not run they are called, and of one whose node does its gradient is from before."""
    leaf = torch.randn(4, requires_grad=True)

    def backward(around: Any) -> tuple[Grads, list[Any]]:
        inner = leaf.sin()
        outer = inner.exp()
        handles = []

        def change(_: torch.Tensor) -> None:
            handles.extend(each.register_hook(_twice) for each in (leaf, inner))

        outer.register_hook(change)
        with around:
            grads = torch.autograd.grad(outer.sum(), [leaf, inner])
        for handle in handles:
            handle.remove()
        return list(grads), []

    _compare(backward, late=3)


@pytest.mark.parametrize("repeats", [1, 1200])
def test_a_hook_of_what_is_asked_for_sees_the_whole_gradient(repeats: int) -> None:
    """The tensors of checkpointed calls are unpacked together, before the nodes that bring the last terms."""
    leaf, weight = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)

    def twice(value: torch.Tensor) -> torch.Tensor:
        return (value.sin() * weight).tanh() * weight

    def backward(around: Any) -> tuple[Grads, list[Any]]:
        seen: list[Any] = []
        handles = []
        outer = checkpoint(twice, leaf, use_reentrant=False)
        for _ in range(repeats):
            outer = (outer * weight).tanh()
        outer.register_hook(lambda _: handles.append(weight.register_hook(lambda grad: seen.append(grad.tolist()))))
        with around:
            grads = torch.autograd.grad(outer.sum(), [leaf, weight])
        for handle in handles:
            handle.remove()
        return list(grads), seen

    _compare(backward, late=3)


def test_a_dict_that_is_being_read_is_called_as_it_was() -> None:
    """``_call_hooks`` (``python_hook.cpp``, 2.13) takes its values first."""
    leaf = torch.randn(4, requires_grad=True)

    def backward(around: Any) -> tuple[Grads, list[Any]]:
        leaf.grad, calls = None, []

        def change(_: torch.Tensor) -> None:
            calls.append("first")
            second.remove()
            handles.append(leaf.register_hook(lambda _: calls.append("third")))

        handles = [leaf.register_hook(change)]
        second = leaf.register_hook(lambda _: calls.append("second"))
        with around:
            leaf.sin().sum().backward()
        for handle in handles:
            handle.remove()
        return [leaf.grad], calls

    _compare(backward, late=0)


def test_hooks_that_are_of_no_use_to_this_backward_cost_nothing() -> None:
    """Of other tapes, of modules, and of nodes that have run: it is a hit."""
    leaf, other = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    module = torch.nn.Linear(4, 4)

    def backward(around: Any) -> tuple[Grads, list[Any]]:
        leaf.grad = None
        outer = leaf.sin().exp()
        loss = outer.sum()

        def change(_: torch.Tensor) -> None:
            handles.extend([outer.register_hook(_twice), loss.grad_fn.register_prehook(_twice)])  # type: ignore[union-attr]
            handles.append(other.register_hook(_twice))
            with torch.enable_grad():
                handles.append(other.exp().register_hook(_twice))
            handles.append(module.register_forward_hook(lambda *_: None))
            handles[0].remove()

        handles = [outer.register_hook(change)]
        with around:
            loss.backward()
        for handle in handles:
            handle.remove()
        return [leaf.grad], []

    assert _compare(backward, late=0).stats().hits == 2


def test_a_backward_inside_registers_hooks_of_the_one_around_it() -> None:
    leaf, other = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)

    def backward(around: Any) -> tuple[Grads, list[Any]]:
        leaf.grad = other.grad = None
        inner = leaf.sin()
        handles = []

        def nested(_: torch.Tensor) -> None:
            with torch.enable_grad():
                value = other.exp()
                value.register_hook(lambda _: handles.append(inner.register_hook(_twice)))
                value.sum().backward()

        outer = inner.exp()
        outer.register_hook(nested)
        with around:
            outer.sum().backward()
        return [leaf.grad, other.grad], []

    _compare(backward, late=3)


def test_a_hook_that_could_be_any_of_several_is_an_error() -> None:
    """Which of them was removed is known by the tensor, and that is no more."""
    leaf = torch.randn(4, requires_grad=True)
    inner = leaf.sin()
    handle = inner.register_hook(_twice)
    outer = inner.exp()
    outer.register_hook(_twice)
    last = outer.cos()
    last.register_hook(lambda _: handle.remove())
    loss = last.sum()
    del inner, outer, last
    with _session(), pytest.raises(RuntimeError, match="is registered on several tensors"):
        loss.backward()
    assert leaf.grad is None


def test_handles_tell_nobody_outside_of_a_backward() -> None:
    with _session():
        leaf = torch.randn(4, requires_grad=True)
        leaf.register_hook(lambda _: None)
        with pytest.raises(ZeroDivisionError):
            (leaf * 2).register_hook(lambda _: 1 / 0)
            value = leaf * 2
            value.register_hook(lambda _: 1 / 0)
            value.sum().backward()
    assert HANDLES.told == ()


# ---- at random -------------------------------------------------------------------------------------------------------


class _Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> Any:
        ctx.save_for_backward(one, other)
        return one * other, one + other

    @staticmethod
    def backward(ctx: Any, product: torch.Tensor, total: torch.Tensor) -> Any:
        one, other = ctx.saved_tensors
        ctx.change()
        return product * other + total, product * one + total


class _Program:
    """A random tape with hooks that are called, and change others, in ways that are the same in each step."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.leaves = [torch.randn(3, 3, requires_grad=True) for _ in range(self.random.randint(1, 3))]

    def __call__(self, around: Any) -> tuple[Grads, list[Any]]:
        self.random.seed(self.seed)
        self.calls: list[Any] = []
        self.handles: list[Any] = []
        self.values = list(self.leaves)
        for leaf in self.leaves:
            leaf.grad = None
        for _ in range(self.random.randint(2, 7)):
            self._operate()
        for _ in range(self.random.randint(1, 6)):
            self._register(self._change() if self.random.random() < 0.8 else None)
        loss = torch.stack([value.sin().sum() for value in self.values]).sum()
        asked = self.values[self.random.randint(0, 1) :: 2] or self.leaves
        with around:
            if self.random.random() < 0.35:
                grads: Any = torch.autograd.grad(loss, asked, allow_unused=True)
            else:
                loss.backward()
                grads = [leaf.grad for leaf in self.leaves]
        for handle in self.handles:
            handle.remove()
        return list(grads), self.calls

    def _operate(self) -> None:
        one, other = self.random.choices(self.values, k=2)
        kind = self.random.choice(["sin", "mul", "two", "mm", "split", "checkpoint", "view"])
        change = self._change()
        if kind == "two":
            made = _Two.apply(one, other)
            made[0].grad_fn.change = change
            self.values += made
        elif kind == "split":
            left, right = torch.split(one, [1, 2])
            self.values.append(torch.cat([right, left * 2]))
        elif kind == "checkpoint":

            def function(value: torch.Tensor) -> torch.Tensor:
                change()
                return (value.sin() * other).tanh()

            self.values.append(checkpoint(function, one, use_reentrant=False))
        else:
            made = {"sin": one.sin, "mul": lambda: one * other, "mm": lambda: (one @ other).tanh(), "view": one.t}
            self.values.append(made[kind]())

    def _change(self) -> Callable[[], None]:
        removes, number, registers = self.random.random() < 0.5, self.random.random(), self.random.random() < 0.6
        own = random.Random(number)
        state = own.getstate()

        def change() -> None:
            own.setstate(state)
            if removes and self.handles:
                self.handles[int(number * len(self.handles))].remove()
            if registers:
                self._register(None, own)

        return change

    def _register(self, change: Callable[[], None] | None, by: random.Random | None = None) -> None:
        by = by or self.random
        value, factor = by.choice(self.values), by.choice([0.5, 2, None])
        name = len(self.handles)

        def told(*grads: Any) -> Any:
            self.calls.append((name, [None if each is None else each.sum().item() for each in grads]))
            if change is not None:
                change()
            made = tuple(None if each is None or factor is None else each * factor for each in grads)
            return None if factor is None else made

        def accumulated(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            told(leaf.grad)
            leaf.grad.mul_(factor or 1)

        kind = by.choice(["tensor", "before", "after", "leaf"])
        if kind == "leaf":
            self.handles.append(by.choice(self.leaves).register_post_accumulate_grad_hook(accumulated))
        elif kind == "tensor" or value.grad_fn is None:
            self.handles.append(value.register_hook(lambda grad: (told(grad) or (None,))[0]))
        elif kind == "before":
            self.handles.append(value.grad_fn.register_prehook(lambda entered: told(*entered)))
        else:
            self.handles.append(value.grad_fn.register_hook(lambda left, entered: told(*left)))


@pytest.mark.parametrize("seed", [*range(12), *[pytest.param(each, marks=pytest.mark.slow) for each in range(12, 300)]])
def test_hooks_that_change_others_at_random(seed: int) -> None:
    program, session = _Program(seed), _session()
    for _ in range(3):
        wanted, told = program(contextlib.nullcontext())
        found, seen = program(session)
        assert seen == told
        assert all((one is None) is (other is None) for one, other in zip(found, wanted, strict=True))
        assert all(same_bits(one, other) for one, other in zip(found, wanted, strict=True) if one is not None)
    stats = session.stats()
    assert stats.backwards == 3 and stats.bypasses.keys() <= {"intermediate_input"}


@pytest.mark.parametrize("had", [False, True])
@pytest.mark.parametrize("asks", [False, True])
def test_what_retain_grad_keeps_has_seen_the_hooks_that_came(had: bool, asks: bool) -> None:
    """It comes after all other hooks of the tensor; ``backward(inputs=...)`` has it keep a gradient too."""
    first, second = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def backward(around: Any) -> tuple[Grads, list[Any]]:
        first.grad = second.grad = None
        inner = (torch.ones(2, 4) @ first).tanh()
        if had:
            inner.register_hook(torch.sin)
        if not asks:
            inner.retain_grad()
        outer = (inner @ second).sin()
        outer.register_hook(lambda _: inner.register_hook(_twice) and None)
        with around:
            outer.sum().backward(inputs=[inner, first] if asks else None)
        return [inner.grad, first.grad, second.grad], []

    _compare(backward, late=3)


@pytest.mark.parametrize("where", ["a tensor", "before the node", "after the node"])
@pytest.mark.parametrize("marked", [False, True])
def test_hooks_that_came_see_undefined_gradients(where: str, marked: bool) -> None:
    """The engine makes zeros of them for the function, after these hooks."""
    function: Any = ca.traceable(type("_Marked", (SineAndCosine,), {})) if marked else SineAndCosine
    leaf = torch.randn(4, requires_grad=True)

    def backward(around: Any) -> tuple[Grads, list[Any]]:
        leaf.grad = None
        seen: list[bool] = []
        sin, cos = function.apply(leaf)

        def noisy(grad: torch.Tensor | None) -> torch.Tensor | None:
            seen.append(grad is None)
            return None if grad is None else grad + 1

        def register(_: torch.Tensor) -> None:
            if where == "a tensor":
                cos.register_hook(noisy)
            elif where == "before the node":
                cos.grad_fn.register_prehook(lambda grads: tuple(map(noisy, grads)))
            else:
                cos.grad_fn.register_hook(lambda _, entered: seen.extend(each is None for each in entered))

        value = sin.tanh()
        value.register_hook(register)
        with around:
            value.sum().backward()
        return [leaf.grad], seen

    _compare(backward, late=3)


@pytest.mark.parametrize("hooks", [1, 2])
def test_the_rest_holds_no_leaf_whose_hooks_have_run(hooks: int) -> None:
    """Another thread can give to it, as under eager, whichever of its hooks has changed what is to run."""
    first, second = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    under_way, done = threading.Event(), threading.Event()
    inner = (torch.ones(2, 4) @ first).tanh()
    waited: list[bool] = []

    def late(_: torch.Tensor) -> None:
        under_way.set()
        waited.append(done.wait(20))

    def gives_to_it() -> None:
        under_way.wait(20)
        with session:
            (second * 2).sum().backward()
        done.set()

    second.register_post_accumulate_grad_hook(lambda _: None if waited else inner.register_hook(late) and None)
    if hooks == 2:
        second.register_post_accumulate_grad_hook(lambda _: None)
    thread = threading.Thread(target=gives_to_it)
    with _session() as session:
        thread.start()
        (inner @ second).sin().sum().backward()
    thread.join()
    assert waited == [True]


@pytest.mark.parametrize("comes", [True, False])
def test_a_hook_of_an_undefined_gradient_beside_late_ones(comes: bool) -> None:
    """It is not taken for one of the first gradient that enters the node."""
    leaf = torch.randn(4, requires_grad=True)

    def backward(around: Any) -> tuple[Grads, list[Any]]:
        leaf.grad = None
        seen: list[Any] = []
        sin, cos = SineAndCosine.apply(leaf)  # type: ignore[no-untyped-call]
        had = cos.register_hook(lambda grad: seen.append(grad is None))
        value = sin.tanh()
        value.register_hook(lambda _: sin.register_hook(_twice) and None if comes else had.remove())
        with around:
            value.sum().backward()
        return [leaf.grad], seen

    _compare(backward, late=3)
