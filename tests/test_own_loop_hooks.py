"""The own loop beside the engine: the order of hooks, what they do to a tape that runs, errors, memory, threads."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import compiled_autograd as ca

from .helpers import in_threads, mlp
from .own_loops import beside, extension, leaf, node_of, raised, session  # noqa: F401

pytestmark = pytest.mark.usefixtures("extension")


def _accumulator(tensor: torch.Tensor) -> Any:
    return node_of(tensor.expand_as(tensor)).next_functions[0][0]


# ---- hooks ----------------------------------------------------------------------------------------------------------


def _all_kinds(log: list[Any], name: str, tensor: torch.Tensor) -> None:
    """One hook of each kind on a tensor and its node, each of which changes what it is given."""

    def told(kind: str, gradients: Any) -> None:
        log.append((name, kind, [None if each is None else each.clone() for each in gradients]))

    def before(gradient: torch.Tensor) -> torch.Tensor:
        told("tensor", [gradient])
        return gradient * 2

    tensor.register_hook(before)
    if tensor.grad_fn is None:
        tensor.register_post_accumulate_grad_hook(lambda leaf: told("leaf", [leaf.grad]))
        return
    tensor.retain_grad()

    def prehook(gradients: Any) -> Any:
        told("prehook", gradients)
        return tuple(None if each is None else each + 1 for each in gradients)

    def hook(given: Any, taken: Any) -> Any:
        told("given", given)
        told("taken", taken)
        return tuple(None if each is None else each * 0.5 for each in given)

    tensor.grad_fn.register_prehook(prehook)
    tensor.grad_fn.register_hook(hook)
    tensor.register_hook(lambda gradient: told("again", [gradient]))


def test_hooks_of_all_kinds_in_their_order() -> None:
    def program(around: Any) -> list[Any]:
        log: list[Any] = []
        x, y, w = leaf(3), leaf(3), leaf(3)
        first = x * y
        second, third = first.sin() + w, first.cos() * y
        parts = torch.stack([second, third]).unbind(0)
        loss = (parts[0] * second).sum() + third.sum()
        for name in ("x", "y", "w", "first", "second", "third", "loss"):
            _all_kinds(log, name, locals()[name])
        parts[0].register_hook(lambda gradient: log.append(gradient))
        for keep in (True, True, False):
            with around:
                loss.backward(retain_graph=keep)
        return [log, [each.grad for each in (x, y, w, first, second, third, loss)], raised(loss.backward)]

    assert len(beside(program, loops=3)[0]) > 60


@pytest.mark.parametrize("kind", ["tensor", "prehook", "hook", "leaf", "after the leaf", "unpack", "callback"])
@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_what_hooks_raise(kind: str, error: BaseException) -> None:
    """What was written before stays, what was freed stays freed, and the next backward says so."""

    def program(around: Any) -> list[Any]:
        def fail(*_: Any) -> Any:
            raise error

        def unpack(saved: torch.Tensor) -> torch.Tensor:
            return fail() if kind == "unpack" else saved

        x, y, z = leaf(3), leaf(3), leaf(3)
        first = x.exp()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            second = first.sin()
        third = second * y
        loss = (third + z).exp().sum()
        queue = torch.autograd.Variable._execution_engine.queue_callback
        kinds: dict[str, Callable[[], Any]] = {
            "tensor": lambda: second.register_hook(fail),
            "prehook": lambda: node_of(second).register_prehook(fail),
            "hook": lambda: node_of(second).register_hook(fail),
            "leaf": lambda: y.register_hook(fail),
            "after the leaf": lambda: y.register_post_accumulate_grad_hook(fail),
            "unpack": lambda: None,
            "callback": lambda: second.register_hook(lambda gradient: queue(fail)),
        }
        kinds[kind]()
        left: list[Any] = []
        for keep in (True, False, False):
            with around:
                failed = raised(lambda keep=keep: loss.backward(retain_graph=keep))  # type: ignore[misc]
            left += [failed, *[None if each.grad is None else each.grad.clone() for each in (x, y, z)]]
        other = leaf(3)
        with around:
            other.exp().sum().backward()
        return [left, other.grad, torch._C._current_graph_task_id(), torch.is_grad_enabled()]

    beside(program)


def _acts() -> dict[str, Callable[..., Any]]:
    def grad_is_none(x: torch.Tensor, **_: Any) -> None:
        x.grad = None

    def grad_is_another(x: torch.Tensor, **_: Any) -> None:
        x.grad = torch.full_like(x, 7.0)

    def no_gradient(x: torch.Tensor, **_: Any) -> None:
        x.requires_grad_(False)

    def other_data(x: torch.Tensor, **_: Any) -> None:
        x.data = torch.zeros(3)

    def writes_leaf(x: torch.Tensor, **_: Any) -> None:
        with torch.no_grad():
            x.mul_(3)

    def writes_saved(first: torch.Tensor, **_: Any) -> None:
        with torch.no_grad():
            first.mul_(3)

    def detaches(loss: torch.Tensor, first: torch.Tensor, **_: Any) -> None:
        loss.detach_()
        first.detach_()

    def rebases(first: torch.Tensor, **_: Any) -> None:
        with torch.enable_grad():
            first[0] = 5

    def runs_again(loss: torch.Tensor, log: list[Any], **_: Any) -> None:
        log.append(raised(lambda: loss.backward(retain_graph=True)))

    def runs_part(first: torch.Tensor, **_: Any) -> None:
        with torch.enable_grad():
            (first * 2).sum().backward(retain_graph=True)

    def frees_part(first: torch.Tensor, log: list[Any], **_: Any) -> None:
        log.append(raised(lambda: first.sum().backward()))

    def removes_itself(handles: list[Any], **_: Any) -> None:
        for handle in handles:
            handle.remove()

    def adds_hooks(x: torch.Tensor, first: torch.Tensor, log: list[Any], **_: Any) -> None:
        x.register_hook(lambda gradient: log.append(gradient.clone()))
        x.register_post_accumulate_grad_hook(lambda leaf: log.append(leaf.grad))
        first.register_hook(lambda gradient: gradient * 2)
        _accumulator(x).register_hook(lambda given, taken: log.append([*taken]))
        _accumulator(x).register_prehook(lambda taken: (taken[0] + 1,))

    def collects(**_: Any) -> None:
        gc.collect()

    def in_a_thread(w: torch.Tensor, around: Any, **_: Any) -> None:
        def work() -> None:
            with around, torch.enable_grad():
                w.exp().sum().backward()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    def same_in_a_thread(first: torch.Tensor, around: Any, **_: Any) -> None:
        def work() -> None:
            with around:
                first.backward(torch.ones(3), retain_graph=True)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    def takes_grad(first: torch.Tensor, x: torch.Tensor, log: list[Any], **_: Any) -> None:
        log.append(raised(lambda: log.append(torch.autograd.grad(first.sum(), x, retain_graph=True))))

    return {name: act for name, act in locals().items() if callable(act)}


@pytest.mark.parametrize("act", _acts())
@pytest.mark.parametrize("where", ["root", "middle", "last", "leaf"])
@pytest.mark.parametrize("keep", [False, True])
def test_what_hooks_do_to_a_tape_that_runs(act: str, where: str, keep: bool) -> None:
    def program(around: Any) -> list[Any]:
        log: list[Any] = []
        handles: list[Any] = []
        x, y, w = leaf(3), leaf(3), leaf(3)
        first = x.exp() + 0
        second = first.sin() * y + first.exp()
        loss = (second * first.sigmoid()).sum()
        told = {"x": x, "w": w, "first": first, "loss": loss, "log": log, "handles": handles, "around": around}

        def hook(_: torch.Tensor) -> None:
            log.append("hook")
            if log.count("hook") == 1:  # else it would go on for ever
                _acts()[act](**told)

        hooked = {"root": loss, "middle": second, "last": first, "leaf": y}[where]
        handles += [hooked.register_hook(hook), hooked.register_hook(lambda gradient: log.append("after"))]
        with around:
            failed = raised(lambda: loss.backward(retain_graph=keep))
        with around:
            again = raised(lambda: loss.backward())
        return [failed, again, log, *[each.grad for each in (x, y, w)], x.requires_grad]

    beside(program, loops=_SOME)


class _Some(int):
    """Any number of backwards but none."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and other > 0

    def __bool__(self) -> bool:
        return True

    __hash__ = int.__hash__


_SOME = _Some(1)


@pytest.mark.parametrize("length", [6_000, pytest.param(60_000, marks=pytest.mark.slow)])
def test_a_hook_frees_the_last_names_of_a_long_tape(length: int) -> None:
    """It is freed without Python's or C's stack."""

    def program(around: Any) -> list[Any]:
        x = leaf(2)
        held = [x * 1.0]
        for _ in range(length):
            held.append(held.pop() * 1.0)
        held.append(held.pop().sum())
        node_of(held[0]).register_prehook(lambda _: held.clear())
        with around:
            held[0].backward()
        gc.collect()
        return [x.grad]

    beside(program)


def test_optimizers_inside_of_a_backward() -> None:
    """What one leaf got is used up and freed before the next one is reached."""

    def program(around: Any) -> list[Any]:
        model, most = mlp(16), [0]
        optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            most[0] = max(most[0], sum(each.grad is not None for each in optimizers))
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            with around:
                model(torch.randn(4, 16)).square().sum().backward()
        return [most, *model.parameters()]

    beside(program)


def test_callbacks() -> None:
    """Those that are queued by callbacks too, which may run backwards."""

    def program(around: Any) -> list[Any]:
        log: list[Any] = []
        queue = torch.autograd.Variable._execution_engine.queue_callback
        x, w = leaf(3), leaf(3)

        def inner() -> None:
            log.append(("inner", torch._C._current_graph_task_id() != -1, torch._C._current_autograd_node()))
            with torch.enable_grad():
                w.exp().sum().backward()

        def outer() -> None:
            log.append(("outer", x.grad is not None, torch.is_grad_enabled()))
            queue(inner)

        y = x.exp()
        y.register_hook(lambda _: queue(outer))
        with around:
            y.sum().backward()
        return [log, x.grad, w.grad, raised(lambda: queue(inner))]

    beside(program)


# ---- what is alive when ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("failing", [False, True])
def test_gradients_and_saved_tensors_are_freed_as_early(keep: bool, failing: bool) -> None:
    """At each hook the same of them are alive, and what an error leaves too."""

    def program(around: Any) -> list[Any]:
        alive: list[weakref.ref[torch.Tensor]] = []
        seen: list[list[bool]] = []

        def look(number: int, gradient: torch.Tensor) -> None:
            seen.append([each() is not None for each in alive])
            alive.append(weakref.ref(gradient))
            if failing and number == 4:
                raise ValueError

        x, w = leaf(64), leaf(64)
        value = x * 1
        for number in range(12):
            value = (value * w).exp().sin() + value
            alive.append(weakref.ref(value))
            value.register_hook(functools.partial(look, number))
        loss = value.sum()
        del value
        with around:
            failed = raised(functools.partial(loss.backward, retain_graph=keep))
        seen.append([each() is not None for each in alive])
        del loss
        seen.append([each() is not None for each in alive])
        return [seen, failed, x.grad, w.grad]

    beside(program)


def test_memory_at_its_peak() -> None:
    """Of the C++ side: what the allocator is asked for and given back, as a profiler of memory sees it."""
    sizes: list[list[int]] = []
    for around in (None, session()):
        x = torch.ones(1 << 18, requires_grad=True)
        held: list[int] = []

        def look(gradient: torch.Tensor, held: list[int] = held) -> None:
            held.append(_resident())

        y = x
        for _ in range(24):
            y = (y * 1.5).sin()
            y.register_hook(look)
        loss = y.sum()
        if around is None:
            loss.backward()
        else:
            with around:
                loss.backward()
            assert around.stats().own_loop == 1
        sizes.append([each - held[0] for each in held])
    assert max(sizes[1]) <= max(sizes[0]) + 4 * (1 << 20), sizes


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_nothing_is_left_over() -> None:
    """Of backwards that end well, in errors, and are refused: no object more for each."""
    model, x = mlp(8), torch.randn(3, 8)
    used = session()

    def once(how: int) -> None:
        loss = model(x).sum()
        if how == 1:
            node_of(loss).register_prehook(lambda _: 1 / 0)
        if how == 2:
            _accumulator(next(model.parameters())).register_hook(lambda *_: None).remove()
        with used:
            assert (raised(loss.backward) is not None) == (how == 1)
        model.zero_grad()

    for how in range(3):
        for _ in range(5):
            once(how)
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(50):
            once(how)
        gc.collect()
        assert len(gc.get_objects()) - before < 25, how


# ---- threads --------------------------------------------------------------------------------------------------------


def test_threads_that_share_a_tape_and_its_leaves() -> None:
    """Each runs what it is asked for; what both add to a leaf is all there."""
    used = [session() for _ in range(4)]
    x, w = torch.ones(64, requires_grad=True), torch.ones(64, requires_grad=True)
    shared = (x * 2).sin().exp().log().asin() * w
    for each in (x, w):
        each.grad = torch.zeros(64)
    start = threading.Barrier(len(used))

    def work(mine: ca.Session) -> None:
        start.wait()
        for _ in range(25):
            with mine:
                shared.backward(torch.ones(64), retain_graph=True)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        in_threads(*(functools.partial(work, mine) for mine in used))
    finally:
        sys.setswitchinterval(switch)
    once = torch.ones(64, requires_grad=True)
    ((once * 2).sin().exp().log().asin() * 1).sum().backward()
    assert x.grad is not None and w.grad is not None and once.grad is not None
    torch.testing.assert_close(x.grad, 100 * once.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(w.grad, 100 * shared.detach(), rtol=1e-3, atol=1e-3)
    assert sum(each.stats().own_loop for each in used) > 0


def test_threads_that_free_a_tape_with_writes_into_views() -> None:
    """What writes into a view is let go of without the GIL, by whoever runs it first: the others get an error."""
    for _ in range(20):
        x = torch.ones(64, requires_grad=True)
        base = x * 1
        for index in range(20):
            base[index : index + 2].mul_(1.5)
        failed: list[Any] = []
        start = threading.Barrier(4)

        def work(base: torch.Tensor = base, failed: list[Any] = failed, start: threading.Barrier = start) -> None:
            start.wait()
            with session():
                failed.append(raised(lambda: base.backward(torch.ones(64))))

        in_threads(*([work] * 4))
        assert len(failed) == 4 and sum(each is None for each in failed) <= 1
        assert all(each is None or "second time" in each[1] for each in failed)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_one_another(reentrant: bool) -> None:
    def program(around: Any) -> list[Any]:
        layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        numbers: list[int] = []

        def block(depth: int, x: torch.Tensor) -> torch.Tensor:
            numbers.append(depth)
            x = torch.tanh(layers[depth](x))
            if depth < 3:
                x = checkpoint(functools.partial(block, depth + 1), x, use_reentrant=reentrant) + x
            return torch.nn.functional.dropout(x, 0.2)

        x = leaf(2, 4)
        loss = checkpoint(functools.partial(block, 0), x, use_reentrant=reentrant).sum()
        with around:
            loss.backward()
        return [numbers, x.grad, *[each.grad for each in layers.parameters()]]

    beside(program)
