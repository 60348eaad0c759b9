"""Backwards left to eager that run without the engine's queue: they leave what eager leaves, bit for bit."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import compiled_autograd as ca
from compiled_autograd.engine.own_loop import running

from .helpers import Squares, expect, in_threads, mlp
from .own_loops import extension  # noqa: F401
from .own_loops import session as _session

Case = Callable[[], tuple[Any, Sequence[torch.Tensor]]]


pytestmark = pytest.mark.usefixtures("extension")


def _left(make: Case, around: Any, steps: int, seed: int, **arguments: Any) -> list[Any]:
    """What backwards leave in the leaves: values, sizes, strides."""
    torch.manual_seed(seed)
    left: list[Any] = []
    for _ in range(steps):
        outputs, leaves = make()
        outputs = outputs if isinstance(outputs, list) else [outputs]
        grads = [torch.randn_like(output) for output in outputs]
        with around:
            torch.autograd.backward(outputs, grads, **arguments)
        left += [leaf.grad if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
        left += [None if leaf.grad is None or leaf.grad.is_sparse else leaf.grad.stride() for leaf in leaves]
    return left


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        if wanted.is_sparse != found.is_sparse or found.dtype != wanted.dtype:
            return False
        if wanted.is_sparse:
            return torch.equal(found.to_dense(), wanted.to_dense())
        return found.shape == wanted.shape and torch.equal(found.nan_to_num(), wanted.nan_to_num())
    return bool(found == wanted)


def _compare(make: Case, *, loops: int | None = None, steps: int = 2, seed: int = 0, **arguments: Any) -> None:
    """The same, and so many of the backwards without the engine's queue: all, where that is not said."""
    wanted = _left(make, contextlib.nullcontext(), steps, seed, **arguments)
    session = _session()
    found = _left(make, session, steps, seed, **arguments)
    assert len(found) == len(wanted) and all(map(_same, found, wanted))
    stats = session.stats()
    expect(stats, bypasses=stats.bypasses, compiles=0)
    assert sum(stats.bypasses.values()) == steps
    assert stats.own_loop == (steps if loops is None else loops)


def _leaf(*sizes: int, **more: Any) -> torch.Tensor:
    return torch.randn(sizes, **more).requires_grad_()


def _of(module: nn.Module, *inputs: Any) -> tuple[Any, list[torch.Tensor]]:
    return module(*inputs), list(module.parameters())


def _packed_gru() -> tuple[Any, list[torch.Tensor]]:
    gru, table = nn.GRU(5, 7, batch_first=True), nn.Embedding(9, 5)
    lengths = torch.randint(2, 8, (4,))
    packed = pack_padded_sequence(table(torch.randint(0, 9, (4, 8))), lengths, batch_first=True, enforce_sorted=False)
    return gru(packed)[1][-1], [*gru.parameters(), *table.parameters()]


def _written_views() -> tuple[Any, list[torch.Tensor]]:
    x, y = _leaf(4, 4), _leaf(4)
    z = x * 2
    z[1] = y
    z[:, 2].mul_(y)
    return z.sin(), [x, y]


def _many_outputs() -> tuple[Any, list[torch.Tensor]]:
    x, y = _leaf(3, 4), _leaf(3, 4)
    first, _, last = (x * y).unbind(0)
    return [first.exp(), last.sin(), y], [x, y]


def _shared() -> tuple[Any, list[torch.Tensor]]:
    x, layer = _leaf(3, 4), nn.Linear(4, 4)
    y = layer(layer(x).tanh()) + x + x
    return y * y.sum(0).expand(3, 4), [x, *layer.parameters()]


def _transposed() -> tuple[Any, list[torch.Tensor]]:
    x = torch.randn(3, 4).t().requires_grad_()
    y = _leaf(5, 1).expand(5, 3)
    return x * 2 + (x @ y.t() @ y).flip(0), [x]


def _undefined() -> tuple[Any, list[torch.Tensor]]:
    """Of two outputs one is used, and one leaf gets nothing."""
    x, y = _leaf(3), _leaf(3)
    return torch.where(torch.tensor([True, False, True]), x, y.detach()).frexp()[0], [x, y]


CASES: dict[str, Case] = {
    "mlp": lambda: _of(mlp(), torch.randn(5, 8)),
    "packed": _packed_gru,
    "lstm": lambda: (lambda m: (m(torch.randn(6, 2, 3))[0], list(m.parameters())))(nn.LSTM(3, 4, num_layers=2)),
    "attention": lambda: _of(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), torch.randn(2, 5, 8)),
    "convolution": lambda: _of(
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()), torch.randn(2, 2, 6, 6)
    ),
    "sparse": lambda: _of(nn.Embedding(7, 3, sparse=True), torch.tensor([1, 2, 1])),
    "sparse twice": lambda: (lambda m: (m(torch.tensor([1, 2])) + m(torch.tensor([2, 3])), [m.weight]))(
        nn.Embedding(7, 3, sparse=True)
    ),
    "sparse and dense": lambda: (lambda m: (m(torch.tensor([1, 2])) + m.weight[:2], [m.weight]))(
        nn.Embedding(7, 3, sparse=True)
    ),
    "views": _written_views,
    "outputs": _many_outputs,
    "shared": _shared,
    "transposed": _transposed,
    "undefined": _undefined,
    "a leaf": lambda: (lambda x: (x, [x]))(_leaf(3)),
    "complex": lambda: (lambda x: ((x * x.conj()).real.sum(), [x]))(_leaf(3, dtype=torch.complex64)),
    "half": lambda: (lambda x, y: ((x.double() @ y.bfloat16().double()), [x, y]))(_leaf(3, 4), _leaf(4, 2)),
    "number": lambda: (lambda x: (x * 3, [x]))(_leaf()),
    "nothing": lambda: (lambda x: (x.sin(), [x]))(_leaf(0, 3)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("keep", [False, True])
def test_what_is_left_is_eagers(case: str, keep: bool) -> None:
    _compare(CASES[case], retain_graph=keep)


@pytest.mark.parametrize("case", ["mlp", "packed", "sparse and dense", "shared", "transposed"])
def test_gradients_that_are_there_are_added_to(case: str) -> None:
    def again(around: Any) -> list[Any]:
        torch.manual_seed(3)
        outputs, leaves = CASES[case]()
        for retain in (True, True, False):
            with around:
                outputs.sum().backward(retain_graph=retain)
        return [leaf.grad for leaf in leaves]

    session, wanted = _session(), again(contextlib.nullcontext())
    assert all(map(_same, again(session), wanted))
    assert session.stats().own_loop == 3


def test_random_tapes() -> None:
    """Of views, writes, sums and products of what came before."""
    operators: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda a, b: a * b,
        lambda a, b: a - b.t(),
        lambda a, b: (a @ b) / 4,
        lambda a, b: torch.cat([a[1:], b[:1]]),
        lambda a, b: a.clone().index_add_(0, torch.tensor([0, 2]), b[1:3]),
        lambda a, b: (a + 0).mul_(b.sigmoid()),
        lambda a, b: a.sin().view(2, 8).view(4, 4) + b.sum(0),
        lambda a, b: torch.stack(a.chunk(2)).flatten(0, 1) * b.max(),
        lambda a, b: a.softmax(1).expand(2, 4, 4).mean(0) + b.detach(),
    ]

    def make() -> tuple[Any, list[torch.Tensor]]:
        leaves = [_leaf(4, 4) for _ in range(3)]
        values = [*leaves]
        for _ in range(int(torch.randint(1, 30, ()))):
            one, other, act = (int(torch.randint(0, 1000, ())) for _ in range(3))
            values.append(operators[act % len(operators)](values[one % len(values)], values[other % len(values)]))
        return [values[-1], sum(values[3:], values[0])], leaves

    _compare(make, steps=30)


def test_no_gradient_shares_memory() -> None:
    x, y = _leaf(3), _leaf(3)
    with _session() as session:
        (x + y).backward(torch.ones(3))
    assert x.grad is not None and y.grad is not None and session.stats().own_loop == 1
    assert x.grad.data_ptr() != y.grad.data_ptr()


def test_leaves_are_written_when_eager_writes_them() -> None:
    """A forward that saves the memory of a ``.grad`` sees whether a leaf was written before."""

    def run(around: Any) -> torch.Tensor:
        w, x = torch.ones(3, requires_grad=True), torch.full((3,), 0.5, requires_grad=True)
        w.grad = torch.full((3,), 2.0)
        loss = ((x.sin() * w.grad.data).cos() * w.exp()).sum()
        with around:
            loss.backward()
        assert x.grad is not None
        return torch.stack([x.grad, w.grad])

    session = _session()
    assert torch.equal(run(session), run(contextlib.nullcontext())) and session.stats().own_loop == 1


# ---- errors ---------------------------------------------------------------------------------------------------------


def _error(act: Callable[[], None]) -> tuple[type, str]:
    with pytest.raises(Exception) as raised:
        act()
    return raised.type, str(raised.value)


def _freed() -> tuple[torch.Tensor, torch.Tensor]:
    x = _leaf(3)
    y = x.exp()
    y.sin().sum().backward()
    return (y * 2).sum(), x


def _written() -> tuple[torch.Tensor, torch.Tensor]:
    x = _leaf(3)
    y = x.exp()
    z = (y.sin() * x).sum()
    with torch.no_grad():
        y.add_(1)
    return z, x


@pytest.mark.parametrize("make", [_freed, _written])
def test_errors_are_eagers(make: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """And so is what was written before."""

    def run(around: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        loss, x = make()
        with around:
            return _error(loss.backward), x.grad

    session = _session()
    wanted, found = run(contextlib.nullcontext()), run(session)
    assert found[0] == wanted[0] and _same(found[1], wanted[1])
    assert session.stats().own_loop == 1


def test_a_tape_is_freed() -> None:
    x = _leaf(3)
    y = x.exp()
    loss, saved = y.sin().sum(), weakref.ref(y)
    session = _session()
    with session:
        loss.backward()
        del y
        gc.collect()
        assert saved() is None
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert session.stats().own_loop == 2


def test_nothing_is_kept() -> None:
    session = _session()
    x = _leaf(3)
    for _ in range(3):
        loss = x.exp().sum()
        with session:
            loss.backward()
    saved = weakref.ref(loss)
    del loss
    gc.collect()
    assert saved() is None


# ---- users' code ----------------------------------------------------------------------------------------------------


def test_saved_tensors_are_unpacked_under_the_engine() -> None:
    """What the hooks ask is answered by the engine, what they queue is called, and what they raise is raised."""
    seen: list[Any] = []

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        seen.append((torch._C._current_graph_task_id() != -1, torch.is_grad_enabled()))
        torch.autograd.Variable._execution_engine.queue_callback(lambda: seen.append("end"))
        return saved

    def run(around: Any) -> list[Any]:
        seen.clear()
        x = torch.ones(3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            loss = x.exp().sin().sum()
        with around:
            loss.backward()
        return [*seen, x.grad]

    session = _session()
    wanted, found = run(contextlib.nullcontext()), run(session)
    assert found[:-1] == wanted[:-1] and "end" in found and torch.equal(found[-1], wanted[-1])
    assert session.stats().own_loop == 1


def test_a_hook_that_leaves_the_thread_in_another_state() -> None:
    """The nodes after it run in the state that they would run in."""
    seen: list[bool] = []

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        torch._C._set_grad_enabled(True)
        return saved

    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = x.exp().sin().exp().sum()
    session = _session()
    with session, torch.no_grad():
        loss.backward()
        assert not torch.is_grad_enabled()
    assert seen == [False] * 3 and x.grad is not None and not x.grad.requires_grad
    assert session.stats().own_loop == 1


class _Leaves(torch.autograd.Function):
    """Leaves something in the state of the thread."""

    leave: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _Leaves.leave()
        return gradient


@pytest.mark.parametrize("what", ["saved-tensor hooks", "a mode of functions"])
def test_functions_that_leave_the_thread_in_another_state(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Sees(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    def look(gradient: torch.Tensor) -> None:
        torch.sin(gradient)
        with torch.enable_grad():
            torch.ones(2, requires_grad=True).exp()

    def leave() -> None:
        if what == "saved-tensor hooks":
            torch._C._autograd._push_saved_tensors_default_hooks(seen.append, seen.append)
        else:
            Sees().__enter__()

    monkeypatch.setattr(_Leaves, "leave", staticmethod(leave))
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y.register_hook(look)
    loss, session = _Leaves.apply(y).sum(), _session()
    with session:
        loss.backward()
    assert seen == [] and x.grad is not None and session.stats().own_loop == 1


class _AddsAndKeeps(torch.autograd.Function):
    given = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = gradient * 2
        _AddsAndKeeps.given = both.data_ptr()
        return both, both


def test_a_leaf_keeps_what_also_goes_nowhere() -> None:
    """As under the engine: the other one has ended when the leaf is reached."""
    session = _session()
    for around, loops in ((contextlib.nullcontext(), 0), (session, 1)):
        x = torch.ones(3, requires_grad=True)
        loss = _AddsAndKeeps.apply(x, torch.ones(3)).sum()
        with around:
            loss.backward()
        assert x.grad is not None and x.grad.data_ptr() == _AddsAndKeeps.given and session.stats().own_loop == loops


def test_hooks_that_come_meanwhile_are_called() -> None:
    def run(around: Any) -> list[Any]:
        called: list[Any] = []

        def unpack(saved: torch.Tensor) -> torch.Tensor:
            if not called:
                called.append("unpack")
                first.register_hook(lambda gradient: gradient * 2)
                assert first.grad_fn is not None
                first.grad_fn.register_prehook(lambda gradients: (gradients[0] + 1,))
                first.grad_fn.register_hook(lambda given, taken: called.append((*given, *taken)))
            return saved

        x = torch.ones(3, requires_grad=True)
        first = x.exp()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            loss = first.sin().sum()
        with around:
            loss.backward()
        return [*called[1], x.grad]

    session = _session()
    wanted, found = run(contextlib.nullcontext()), run(session)
    assert all(map(torch.equal, found, wanted)) and session.stats().own_loop == 1


def test_a_backward_inside_of_it() -> None:
    w = torch.ones(3, requires_grad=True)

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            (w * 2).sum().backward()
        return saved

    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = x.exp().sin().sum()
    session = _session()
    with session:
        loss.backward()
    assert w.grad is not None and w.grad.tolist() == [4.0] * 3
    stats = session.stats()
    assert stats.own_loop == stats.backwards == 3


def test_checkpoints() -> None:
    layers = mlp()

    def make() -> tuple[Any, list[torch.Tensor]]:
        copy = [each.detach().clone().requires_grad_() for each in layers.parameters()]
        names = [name for name, _ in layers.named_parameters()]

        def forward(x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(layers, dict(zip(names, copy, strict=True)), x)

        return checkpoint(forward, torch.randn(5, 8), use_reentrant=False), copy

    _compare(make)


def _hooked(register: Callable[[torch.Tensor, torch.Tensor], Any]) -> Case:
    def make() -> tuple[Any, list[torch.Tensor]]:
        x = _leaf(3)
        y = x.exp()
        register(x, y)
        return y.sin(), [x]

    return make


def _retained() -> tuple[Any, list[torch.Tensor]]:
    x = _leaf(3)
    y = x.exp()
    y.retain_grad()
    y.register_hook(lambda gradient: gradient * 2)
    return y.sin(), [x, y]


def _in_python_and_out() -> tuple[Any, list[torch.Tensor]]:
    x, y = _leaf(3), _leaf(3)
    z = Squares.apply(x * y) + Squares.apply(y)
    z[:2].copy_((x * x)[:2])
    return Squares.apply(z).sum() + z.sin().sum(), [x, y]


def _reentrant() -> tuple[Any, list[torch.Tensor]]:
    layer, x = nn.Linear(3, 3), _leaf(2, 3)
    return checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=True), [x, *layer.parameters()]


CALLED: dict[str, Case] = {
    "hook of a tensor": _hooked(lambda x, y: y.register_hook(lambda gradient: gradient * 2)),
    "hook of a leaf": _hooked(lambda x, y: x.register_hook(lambda gradient: gradient * 2)),
    "hook of a node": _hooked(lambda x, y: y.grad_fn.register_hook(lambda given, taken: (given[0] * taken[0],))),  # type: ignore[union-attr]
    "prehook of a node": _hooked(lambda x, y: y.grad_fn.register_prehook(lambda taken: (taken[0] + 1,))),  # type: ignore[union-attr]
    "hook after a leaf": _hooked(lambda x, y: x.register_post_accumulate_grad_hook(_doubles)),
    "retain_grad": _retained,
    "functions of Python": _in_python_and_out,
}


def _doubles(leaf: torch.Tensor) -> None:
    assert leaf.grad is not None
    leaf.grad.mul_(2)


@pytest.mark.parametrize("case", CALLED)
@pytest.mark.parametrize("keep", [False, True])
def test_users_code_that_is_called(case: str, keep: bool) -> None:
    _compare(CALLED[case], retain_graph=keep)


def test_reentrant_checkpoints() -> None:
    session = _session()
    wanted, found = _left(_reentrant, contextlib.nullcontext(), 2, 0), _left(_reentrant, session, 2, 0)
    assert all(map(_same, found, wanted))
    assert session.stats().own_loop == session.stats().backwards == 4


def _at_once(count: int, hooks: bool, roots: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """Outputs, their leaves, which are ready at the same time, and the order in which their hooks are called."""
    leaves, order = [_leaf(2) for _ in range(count)], []
    for number, leaf in enumerate(leaves if hooks else []):
        leaf.register_post_accumulate_grad_hook(lambda leaf, number=number: order.append(number))
    return (leaves if roots else [torch.cat([*leaves, leaves[0].exp(), leaves[0].sin()])]), leaves, order


@pytest.mark.parametrize("roots", [False, True])
@pytest.mark.parametrize(("count", "hooks", "loops"), [(2, True, 1), (3, True, 0), (7, True, 0), (7, False, 1)])
def test_leaves_that_are_ready_at_once(count: int, hooks: bool, loops: int, roots: bool) -> None:
    """Their order depends on what else is in the engine's queue, and is seen by hooks alone."""

    def run(around: Any) -> tuple[list[int], list[Any]]:
        torch.manual_seed(0)
        outputs, leaves, order = _at_once(count, hooks, roots)
        with around:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        return order, [leaf.grad for leaf in leaves]

    session = _session()
    wanted, found = run(contextlib.nullcontext()), run(session)
    assert found[0] == wanted[0] and len(found[0]) == hooks * count and all(map(_same, found[1], wanted[1]))
    assert session.stats().own_loop == loops


def test_hooks_over_several_gradients() -> None:
    """They ask the engine how many of the nodes will run."""

    def run(around: Any) -> list[Any]:
        called: list[Any] = []
        x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        first, second, unused = x.exp(), (x * y).sin(), y.cos()
        torch.autograd.graph.register_multi_grad_hook((first, second, unused), called.append)
        loss = (first * second).sum()
        with around:
            loss.backward()
        return [*called[0], x.grad, y.grad]

    session = _session()
    wanted, found = run(contextlib.nullcontext()), run(session)
    assert all(map(_same, found, wanted)) and session.stats().own_loop == 1


class _Asks(torch.autograd.Function):
    """Asks about the backward that is under way."""

    answers: list[Any]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        engine = torch.autograd.Variable._execution_engine
        current = torch._C._current_autograd_node()
        inner = torch.ones(2, requires_grad=True)
        with torch.enable_grad():
            inside = inner.exp().sum()
        names: list[str] = []
        inside.grad_fn.register_prehook(lambda taken: names.append(torch._C._current_autograd_node().name()))
        inside.backward()
        _Asks.answers += [
            current is ctx,
            names,
            torch._C._current_graph_task_id() != -1,
            torch._C._autograd._get_current_graph_task_keep_graph(),
            torch._C._will_engine_execute_node(ctx),
            torch._C._will_engine_execute_node(inside.grad_fn),
            engine.is_checkpoint_valid(),
            torch.is_grad_enabled(),
            ctx.needs_input_grad,
        ]
        engine.queue_callback(lambda: _Asks.answers.append("end"))
        return gradient


@pytest.mark.parametrize("keep", [False, True])
def test_answers_are_the_engines(keep: bool) -> None:
    def run(around: Any) -> list[Any]:
        _Asks.answers = []
        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        y.register_hook(lambda gradient: _Asks.answers.append(torch._C._current_autograd_node().name()))
        loss = _Asks.apply(y).sum()
        with around:
            loss.backward(retain_graph=keep)
        return [*_Asks.answers, torch._C._current_autograd_node()]

    session = _session()
    wanted, found = run(contextlib.nullcontext()), run(session)
    assert found == wanted and wanted[0] is True and wanted[-2] == "end"
    assert session.stats().own_loop == 2


def test_what_python_raises() -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, how: str) -> torch.Tensor:
            ctx.how = how
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            if ctx.how == "raises":
                raise KeyError("mine")
            return (torch.ones(7), None) if ctx.how == "shape" else (gradient,)

    for how in ("raises", "shape", "number"):

        def run(around: Any, how: str = how) -> Any:
            x = torch.ones(3, requires_grad=True)
            loss = Raises.apply(x, how).exp().sum()
            with around:
                return _error(loss.backward)

        session = _session()
        assert run(session) == run(contextlib.nullcontext()) and session.stats().own_loop == 1


def test_ctrl_c_is_raised() -> None:
    def interrupt(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y.register_hook(interrupt)
    with _session() as session, pytest.raises(KeyboardInterrupt):
        y.sum().backward()
    assert session.stats().own_loop == 1


def test_a_deep_pile_of_backwards() -> None:
    """The engine has threads for backwards inside one another, and so have these."""

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            if ctx.depth:
                with torch.enable_grad():
                    Nested.apply(w * 1, ctx.depth - 1).sum().backward()
            return gradient, None

    w = torch.ones(2, requires_grad=True)
    session = _session()
    with session:
        Nested.apply(w * 1, 80).sum().backward()
    assert w.grad is not None and w.grad.tolist() == [81.0, 81.0]
    assert session.stats().own_loop > 0


# ---- what is left to the engine -------------------------------------------------------------------------------------


def _node_of_a_leaf() -> tuple[Any, list[torch.Tensor]]:
    x = _leaf(3)
    y = x.exp()
    assert y.grad_fn is not None
    y.grad_fn.next_functions[0][0].register_hook(lambda given, taken: None)  # type: ignore[union-attr]
    return y, [x]


REFUSED: dict[str, Case] = {
    "hook of a leaf's node": _node_of_a_leaf,
    "write by a function of Python": lambda: (lambda x: (_SquaresInPlace.apply((x * 1)[:2]), [x]))(_leaf(3)),
}


class _SquaresInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.clone())
        ctx.mark_dirty(x)
        return x.mul_(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@pytest.mark.parametrize("case", REFUSED)
def test_refused_tapes(case: str) -> None:
    _compare(REFUSED[case], loops=0)


class _Passes(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_refused_calls() -> None:
    session = _session()
    x = _leaf(3)
    with session:
        torch.autograd.grad(x.exp().sum(), x)
        x.exp().sum().backward(inputs=[x])
        x.exp().sum().backward(create_graph=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly():
                x.exp().sum().backward()
        with torch.profiler.profile() as profile:
            x.exp().sum().backward()
        with _Passes():
            x.exp().sum().backward()
        with torch.autograd.set_multithreading_enabled(False):
            x.exp().sum().backward()
    assert any("ExpBackward0" in event.name for event in profile.events())
    assert session.stats().own_loop == 0 and session.stats().backwards == 7
    with _session(extension="hits") as session:
        x.exp().sum().backward()
    with _session(extension="off") as other:
        x.exp().sum().backward()
    assert session.stats().own_loop == other.stats().own_loop == 0
    with _session() as session:
        x.exp().sin().sum().backward()  # what it was refused for rests
    assert session.stats().own_loop == 1


def test_no_sequence_number_is_taken() -> None:
    def taken(session: ca.Session) -> int:
        x = torch.ones(3, requires_grad=True)
        loss = x.sin().sum()
        with session:
            loss.backward()
        assert session.stats().own_loop == session.settings.own_loop
        return x.sin().grad_fn._sequence_nr() - loss.grad_fn._sequence_nr()  # type: ignore[union-attr]

    taken(_session())  # at its first tape a thread looks for the number of the next node
    assert taken(_session()) == taken(_session(extension="hits"))


def test_small_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the engine less."""
    monkeypatch.setattr(running, "LEAST_NODES", 5)
    session = _session()
    for operators in (2, 3, 4):  # and one sum, one leaf
        x = torch.ones(3, requires_grad=True)
        y = x
        for _ in range(operators):
            y = y.sin()
        with session:
            y.sum().backward()
    assert session.stats().own_loop == 2


def test_nodes_of_two_threads() -> None:
    """Which of two nodes was made later cannot be known, where two threads have made them."""
    leaf = _leaf(3)
    made: list[torch.Tensor] = []
    in_threads(lambda: made.append(leaf.exp().sin()))
    session = _session()
    with session:
        (made[0] + leaf.cos()).sum().backward()
    x = leaf.detach().requires_grad_()
    (x.exp().sin() + x.cos()).sum().backward()
    assert leaf.grad is not None and torch.allclose(leaf.grad, x.grad)
    assert session.stats().bypasses


def test_several_threads_at_once() -> None:
    model = mlp(16)
    inputs = [torch.randn(4, 16) for _ in range(4)]
    for x in inputs:
        model(x).sum().backward()
    wanted = [each.grad for each in model.parameters()]
    model.zero_grad()
    sessions, start = [_session() for _ in inputs], threading.Barrier(len(inputs))

    def work(index: int) -> None:
        loss = model(inputs[index]).sum()
        start.wait()
        with sessions[index]:
            loss.backward()

    in_threads(*(lambda index=index: work(index) for index in range(len(inputs))))
    for found, one in zip([each.grad for each in model.parameters()], wanted, strict=True):
        torch.testing.assert_close(found, one)
    assert all(session.stats().own_loop == 1 for session in sessions)


def test_one_leaf_of_many_threads() -> None:
    """It gets all that it is given."""
    leaf = torch.ones(64, requires_grad=True)
    leaf.grad = torch.zeros(64)
    sessions = [_session() for _ in range(4)]

    def work(session: ca.Session) -> None:
        for _ in range(50):
            y = (leaf * 2).sin().exp().log()
            with session:
                (y.detach() * 0 + leaf).sum().backward()

    in_threads(*(lambda session=session: work(session) for session in sessions))
    assert leaf.grad is not None and leaf.grad.tolist() == [200.0] * 64
    assert [session.stats().own_loop for session in sessions] == [50] * 4


def test_a_long_tape() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x
    for _ in range(5000):
        y = y * 1.0
    session = _session()
    with session:
        y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0] * 3 and session.stats().own_loop == 1


def test_one_output_twice() -> None:
    def make() -> tuple[Any, list[torch.Tensor]]:
        x = _leaf(3)
        y = x.exp()
        return [y, y, x], [x]

    _compare(make)


def test_a_compiled_forward() -> None:
    """Its backward is one function of Python."""
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager")  # type: ignore[call-overload]
    x = torch.randn(5, 8)
    model(x).sum().backward()
    wanted = [each.grad for each in model.parameters()]
    model.zero_grad()
    compiled(x).sum().backward()
    model.zero_grad()
    session = _session()
    with session:
        compiled(x).sum().backward()
    for found, one in zip([each.grad for each in model.parameters()], wanted, strict=True):
        torch.testing.assert_close(found, one)
    assert session.stats().own_loop == 1


def test_over_budget() -> None:
    """The tapes that this is for: each is another one."""
    session = _session(on_miss="compile", compile_budget=0)

    def make(layers: int, around: Any) -> list[Any]:
        torch.manual_seed(layers)
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
        loss = F.mse_loss(model(torch.randn(3, 4)), torch.zeros(3, 4))
        with around:
            loss.backward()
        return [each.grad for each in model.parameters()]

    for layers in range(2, 12):
        assert all(map(torch.equal, make(layers, session), make(layers, contextlib.nullcontext())))
    stats = session.stats()
    expect(stats, bypasses={"over_budget": 10}, captures=0)
    assert stats.own_loop == 10
