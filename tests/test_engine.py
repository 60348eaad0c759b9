"""The choke point, the seam, nesting, bypasses before the capture, and backwards inside backwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Variable, forward_ad
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import compiled_autograd as ca
from compiled_autograd.capture import tape
from compiled_autograd.threads.gate import GATE

from .helpers import assert_grads, assert_same, compare, expect, in_subprocess, mlp

_seam = torch._C._dynamo.compiled_autograd


def _prior() -> Any:
    """What the seam is set to; it is left as it was."""
    prior = _seam.set_autograd_compiler(None, False)
    _seam.set_autograd_compiler(*prior)
    return prior[0]


@pytest.fixture(autouse=True)
def seam_restored() -> Iterator[None]:
    """After every test: the seam unset, nobody in the gate, multithreading as it was, grad mode on."""
    yield
    assert _prior() is None
    assert GATE.idle()
    assert torch._C._is_multithreading_enabled() and torch.is_grad_enabled()


def _square(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


# ---- the choke point -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda x: _square(x).backward(),
        lambda x: torch.autograd.backward(_square(x)),
        lambda x: torch.autograd.backward([_square(x)], inputs=[x]),
        lambda x: _square(x).backward(inputs=x),
        lambda x: torch.autograd.grad(_square(x), x),
        lambda x: torch.autograd.backward(GradientEdge(_square(x).grad_fn, 0), torch.tensor(1.0)),
    ],
)
def test_every_way_in_is_captured(call: Callable[[torch.Tensor], Any]) -> None:
    x = torch.randn(3, requires_grad=True)
    reference = x.detach().clone().requires_grad_()
    wanted = call(reference)
    with ca.enable(backend="eager") as session:
        found = call(x)
    assert_same([x.grad], [reference.grad])
    if wanted is not None:
        assert_same(found, wanted)
    expect(session.stats(), structure_misses=1, captures=1, compiles=1)


def test_outside_of_a_session_nothing_is_captured() -> None:
    x = torch.randn(3, requires_grad=True)
    session = ca.enable(backend="eager")
    with session:
        pass
    _square(x).backward()
    assert isinstance(Variable._execution_engine, torch._C._ImperativeEngine)
    expect(session.stats())
    assert session.last is None


def test_the_engine_is_replaced_once() -> None:
    with ca.enable(backend="eager"):
        first = Variable._execution_engine
        with ca.enable(backend="eager"):
            assert Variable._execution_engine is first


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("the user's own")


def test_an_error_of_the_user_is_raised_as_it_is() -> None:
    x = torch.randn(3, requires_grad=True)
    with ca.enable(backend="eager") as session:
        for _ in range(2):
            with pytest.raises(KeyError, match="the user's own"):
                _RaisesInBackward.apply(x).sum().backward()
        assert _prior() is None
        _square(x).backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())
    assert session.stats().backwards == 3


class _Interrupted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


def test_an_interrupt_leaves_everything_in_order() -> None:
    x = torch.randn(3, requires_grad=True)
    with ca.enable(backend="eager") as session, pytest.raises(KeyboardInterrupt):
        _Interrupted.apply(x).sum().backward()
    assert session.stats().backwards == 1
    with session:
        _square(x).backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())


def test_a_session_is_left_when_its_body_raises() -> None:
    session = ca.enable(backend="eager")
    with pytest.raises(ValueError), session:
        raise ValueError
    _square(torch.randn(3, requires_grad=True)).backward()
    expect(session.stats())


# ---- nesting -------------------------------------------------------------------------------------------------------


def test_the_innermost_session_counts() -> None:
    x = torch.randn(3, requires_grad=True)
    outer, inner = ca.enable(backend="eager"), ca.enable(backend="eager")
    with outer:
        _square(x).backward()
        with inner:
            x.grad = None
            _square(x).backward()
        x.grad = None
        _square(x).backward()
    expect(outer.stats(), structure_misses=1, hits=1)
    expect(inner.stats(), hits=1, captures=0, compiles=0)


def test_disable_inside_enable_inside_disable() -> None:
    x = torch.randn(3, requires_grad=True)
    with ca.enable(backend="eager") as session, ca.disable():
        _square(x).backward()
        with session:
            x.grad = None
            _square(x).backward()
        _square(x).backward()
    expect(session.stats(), structure_misses=1)
    assert x.grad is not None and torch.equal(x.grad, 4 * x.detach())


def test_a_session_can_be_entered_again_and_inside_itself() -> None:
    x = torch.randn(3, requires_grad=True)
    session = ca.enable(backend="eager")
    for _ in range(3):
        with session, session:
            x.grad = None
            _square(x).backward()
    expect(session.stats(), structure_misses=1, hits=2)


def test_disable_can_be_used_again() -> None:
    x = torch.randn(3, requires_grad=True)
    off = ca.disable()
    with ca.enable(backend="eager") as session:
        for _ in range(2):
            with off:
                _square(x).backward()
    expect(session.stats())


# ---- backwards inside backwards ------------------------------------------------------------------------------------


class _BackwardInside(torch.autograd.Function):
    """Its backward differentiates another tape: by ``autograd.grad`` and by ``backward`` into a leaf of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            inner.sin().sum().backward()
            (again,) = torch.autograd.grad(inner.sin().sum(), inner)
        assert inner.grad is not None and torch.equal(inner.grad, again)
        return grad * again


def test_a_backward_inside_a_functions_backward_is_captured_too() -> None:
    x = torch.randn(5, requires_grad=True)
    (wanted,) = torch.autograd.grad(_BackwardInside.apply(x * 2).sum(), x)
    with ca.enable(backend="eager") as session:
        for _ in range(2):
            (found,) = torch.autograd.grad(_BackwardInside.apply(x * 2).sum(), x)
            assert_same([found], [wanted])
    stats = session.stats()
    expect(stats, structure_misses=3, hits=3, captures=3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    batch = torch.randn(4, 8)

    def loss(model: Any) -> torch.Tensor:
        hidden = model[0](batch)
        hidden = checkpoint(lambda h: F.dropout(model[2](F.gelu(h)), 0.5), hidden, use_reentrant=reentrant)
        return model[4](hidden).square().mean()

    result = compare(mlp, loss, steps=3, counts=False)
    if reentrant:  # has a backward of its own
        expect(result.stats, structure_misses=2, hits=4)
    else:  # recomputes in saved-tensor hooks
        expect(result.stats, structure_misses=1, hits=2)


def test_reentrant_checkpoint_is_refused_with_inputs_as_eager_does() -> None:
    x = torch.randn(4, requires_grad=True)
    for session in (ca.disable(), ca.enable(backend="eager")):
        y = checkpoint(torch.sin, x * 2, use_reentrant=True)
        with session, pytest.raises(RuntimeError, match=r"use_reentrant=True"):
            torch.autograd.grad(y.sum(), x)


def test_a_session_entered_by_a_functions_backward() -> None:
    inner_session = ca.enable(backend="eager")

    class Enters(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            inner = grad.detach().clone().requires_grad_()
            with torch.enable_grad(), inner_session:
                return torch.autograd.grad((inner * inner).sum(), inner)[0]

    x = torch.randn(3, requires_grad=True)
    with ca.enable(backend="eager") as session:
        (found,) = torch.autograd.grad((Enters.apply(x) * 3).sum(), x)
    assert torch.equal(found, torch.full_like(x, 6.0))
    expect(session.stats(), structure_misses=1)
    expect(inner_session.stats(), structure_misses=1)


def test_a_backward_inside_one_that_bypassed_is_captured() -> None:
    x = torch.randn(3, requires_grad=True)
    with ca.enable(backend="eager") as session:
        y = _BackwardInside.apply(x)
        (found,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert_same([found], torch.autograd.grad(_BackwardInside.apply(x).sum(), x))
    stats = session.stats()
    assert stats.bypasses == {"create_graph": 1} and stats.backwards == 3
    assert stats.structure_misses + stats.hits == 2


def test_callbacks_run_at_the_end() -> None:
    order: list[str] = []

    class Queues(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
            ctx.label = name
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            order.append(ctx.label)
            Variable._execution_engine.queue_callback(lambda: order.append(f"end of {ctx.label}"))
            return grad, None

    def run() -> list[str]:
        order.clear()
        x = torch.randn(3, requires_grad=True)
        Queues.apply(Queues.apply(x, "first") * 2, "second").sum().backward()
        order.append("grad" if x.grad is not None else "none")
        return list(order)

    wanted = run()
    assert wanted[:2] == ["second", "first"] and wanted[-1] == "grad"
    with ca.enable(backend="eager") as session:
        assert run() == wanted
        assert run() == wanted
    expect(session.stats(), structure_misses=1, hits=1)


def test_a_callback_queued_by_a_callback_runs_too() -> None:
    def run() -> list[int]:
        seen: list[int] = []

        class Queues(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                def first() -> None:
                    seen.append(1)
                    Variable._execution_engine.queue_callback(lambda: seen.append(2))

                Variable._execution_engine.queue_callback(first)
                return grad

        Queues.apply(torch.randn(3, requires_grad=True)).sum().backward()
        return seen

    wanted = run()
    with ca.enable(backend="eager"):
        assert run() == wanted == [1, 2]


def test_queue_callback_outside_of_a_backward_is_the_engines_error() -> None:
    with ca.enable(backend="eager"), pytest.raises(RuntimeError, match="Final callbacks can only be installed"):
        Variable._execution_engine.queue_callback(lambda: None)


# ---- keeping the tape ----------------------------------------------------------------------------------------------


def test_retain_graph_lets_a_second_backward_run() -> None:
    x = torch.randn(3, requires_grad=True)
    loss = _square(x.exp())
    wanted = torch.autograd.grad(loss, x, retain_graph=True)
    with ca.enable(backend="eager") as session:
        for _ in range(3):
            assert_same(torch.autograd.grad(loss, x, retain_graph=True), wanted)
        assert_same(torch.autograd.grad(loss, x), wanted)
        with pytest.raises(RuntimeError) as raised:
            torch.autograd.grad(loss, x)
    with pytest.raises(RuntimeError) as eagers:
        torch.autograd.grad(loss, x)
    assert str(raised.value) == str(eagers.value) and "a second time" in str(raised.value)
    stats = session.stats()
    assert (stats.structure_misses, stats.hits, sum(stats.bypasses.values())) == (1, 3, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: torch.autograd.grad(x.sum(), torch.randn(3, requires_grad=True)),
        lambda x: (x * 2).backward(),
        lambda x: torch.autograd.grad((x * 2), x, torch.ones(4)),
        lambda x: torch.autograd.grad((x * 2), x, torch.ones(3, dtype=torch.complex64)),
        lambda x: x.detach().sum().backward(),
        lambda x: torch.autograd.grad(x.sum(), []),
        lambda x: torch.autograd.grad((x.sum(), x.exp().sum()), x, (torch.ones(()),)),
        lambda x: x.exp().sum().backward(inputs=[]),
        lambda x: x.exp().sum().backward(inputs=[torch.randn(3)]),
        lambda x: torch.autograd.grad(x.sum(), torch.randn(3)),
    ],
)
def test_mistakes_are_answered_in_eagers_words(wrong: Callable[[torch.Tensor], Any]) -> None:
    def message() -> tuple[type, str]:
        with pytest.raises(Exception) as raised:
            wrong(torch.randn(3, requires_grad=True))
        return type(raised.value), str(raised.value)

    wanted = message()
    with ca.enable(backend="eager"):
        assert message() == wanted


def test_a_saved_tensor_that_was_changed_is_answered_in_eagers_words() -> None:
    def message() -> str:
        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        loss = y.sum()
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(RuntimeError) as raised:
            loss.backward()
        return str(raised.value)

    wanted = message()
    assert "modified by an inplace operation" in wanted
    with ca.enable(backend="eager"):
        assert message() == wanted


# ---- what bypasses before the capture ------------------------------------------------------------------------------


class _Passes(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _create_graph(x: torch.Tensor) -> torch.Tensor:
    (first,) = torch.autograd.grad(_square(x * x), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)[0]


def _batched(x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(x * x * 3, x, torch.eye(3), is_grads_batched=True)[0]


def _dispatch_mode(x: torch.Tensor) -> torch.Tensor:
    loss = _square(x)
    with _Passes():
        return torch.autograd.grad(loss, x)[0]


def _forward_over_reverse(x: torch.Tensor) -> torch.Tensor:
    """The tangent of a gradient: the second derivative times a direction."""
    with forward_ad.dual_level():
        loss = (forward_ad.make_dual(x, torch.ones(3)).sin() * x).sum()
        (gradient,) = torch.autograd.grad(loss, x)
        tangent = forward_ad.unpack_dual(gradient).tangent
        assert tangent is not None
        return tangent.clone()


def _torch_compiled_autograd(x: torch.Tensor) -> torch.Tensor:
    from torch._dynamo.compiled_autograd import _enable

    loss = _square(x)
    with _enable(lambda graph_module: graph_module):
        return torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize(
    ("call", "reason", "others"),
    [
        (_create_graph, "create_graph", 1),
        (_batched, "batched_grads", 0),
        (_dispatch_mode, "dispatch_mode", 0),
        (_forward_over_reverse, "forward_ad", 0),
        (_torch_compiled_autograd, "torch_compiled_autograd", 0),
    ],
)
def test_bypasses_have_a_reason_and_eagers_gradients(call: Callable[..., Any], reason: str, others: int) -> None:
    x = torch.randn(3, requires_grad=True)
    with ca.disable():
        wanted = call(x)
    with ca.enable(backend="eager") as session:
        found = call(x)
    assert_same([found], [wanted])
    assert session.stats().bypasses == {reason: 1}
    assert session.stats().backwards == 1 + others
    assert session.stats().structure_misses == others


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_functional_transforms_inside_a_session(transform: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).sum()

    x = torch.randn(3, 4)
    call = torch.func.grad(f) if transform == "grad" else torch.func.vmap(torch.func.grad(f))
    wanted = call(x)
    with ca.enable(backend="eager") as session:
        assert_same([call(x)], [wanted])
    assert set(session.stats().bypasses) <= {"batched_grads", "create_graph"}
    assert session.stats().structure_misses == 0


def test_raise_instead_of_bypassing() -> None:
    x = torch.randn(3, requires_grad=True)
    loss = _square(x)
    with ca.enable(backend="eager", on_unsupported="raise") as session:
        with pytest.raises(ca.UnsupportedBackwardError, match="create_graph") as raised:
            loss.backward(create_graph=True)
        assert x.grad is None
        assert raised.value.reason.kind == "create_graph"
        assert session.stats().bypasses == {"create_graph": 1}
        loss.backward()  # the tape is whole
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())
    assert session.stats().backwards == 2


def test_raise_for_what_the_capture_refuses() -> None:
    x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]).requires_grad_()
    loss = _square(x.to_padded_tensor(0.0))
    refused = pytest.raises(ca.UnsupportedBackwardError, match="NestedTensor")
    with ca.enable(backend="eager", on_unsupported="raise") as session, refused:
        loss.backward()
    assert x.grad is None and session.stats().backwards == 1
    loss.backward()
    assert torch.equal(x.grad.to_padded_tensor(0.0), 2 * x.detach().to_padded_tensor(0.0))  # type: ignore[union-attr]


def test_raise_does_not_hide_the_users_own_mistake() -> None:
    """A second backward through a freed tape is no limit of ours: eager's error is the right answer."""
    x = torch.randn(3, requires_grad=True)
    with ca.enable(backend="eager", on_unsupported="raise"):
        loss = _square(x)
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()


# ---- beside PyTorch's own compiled autograd ------------------------------------------------------------------------


def test_pytorchs_own_before_and_after_ours() -> None:
    """They share the engine's cache of structures: neither may run the other's graph."""
    from torch._dynamo.compiled_autograd import _enable

    x = torch.randn(3, requires_grad=True)
    wanted = [2 * x.detach()]

    def theirs() -> Any:
        with ca.disable(), _enable(lambda graph_module: graph_module):
            return torch.autograd.grad(_square(x), x)

    def ours() -> Any:
        with ca.enable(backend="eager") as session:
            found = torch.autograd.grad(_square(x), x)
        assert not session.stats().bypasses
        return found

    for call in (theirs, ours, theirs, ours, ours, theirs):
        assert_same(call(), wanted)


# ---- processes -----------------------------------------------------------------------------------------------------

_FORK = """
import os, signal, sys, threading
signal.alarm(60)
import torch
import compiled_autograd as ca
torch.set_num_threads(1)
x = torch.randn(4, requires_grad=True)
session = ca.enable(backend="eager")
with session:
    (x * x).sum().backward()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        x.grad = None
        (x * x).sum().backward()
        x.grad = None
        (x.exp() * x).sum().backward()
        ok = torch.allclose(x.grad, x.detach().exp() * (1 + x.detach()))
        stats = session.stats()
        os._exit(0 if ok and stats.backwards == 3 and not stats.bypasses and not stats.failures else 1)
_, status = os.waitpid(pid, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_can_go_on() -> None:
    done = in_subprocess(_FORK)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_fork_made_while_another_thread_is_in_backward_does_not_hang_the_child() -> None:
    code = _FORK.replace(
        "    pid = os.fork()",
        """    entered, leave = threading.Event(), threading.Event()
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()
        @staticmethod
        def backward(ctx, grad):
            entered.set(); leave.wait(20)
            return grad
    def work():
        Waits.apply(torch.ones(2, requires_grad=True)).sum().backward()
    thread = threading.Thread(target=work, daemon=True); thread.start(); entered.wait(20)
    pid = os.fork()""",
    )
    done = in_subprocess(code)
    assert done.returncode == 0, done.stderr


_FORK_WITHIN_A_LOOK = """
import os, signal, sys, threading
import torch
from compiled_autograd.runtime.running_backward import Ends

class Slow(list):
    def __iter__(self):
        entered.set(); leave.wait(20)
        return super().__iter__()

entered, leave = threading.Event(), threading.Event()
x = torch.randn(4, requires_grad=True)
slow, other = (Ends(kind([torch.autograd.graph.get_gradient_edge(x.exp())]), ()) for kind in (Slow, list))
thread = threading.Thread(target=lambda: slow.nodes, daemon=True); thread.start()
assert entered.wait(20)
pid = os.fork()
if pid == 0:
    signal.alarm(10)
    os._exit(0 if len(other.nodes) == 2 and len(other.numbers) == 2 else 1)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
leave.set(); thread.join()
sys.exit(status)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_made_while_another_thread_looks_at_its_tape_does_not_hang_the_child() -> None:
    """Before Python 3.12 a ``functools.cached_property`` has one lock for all objects: the child found it taken."""
    done = in_subprocess(_FORK_WITHIN_A_LOOK)
    assert done.returncode == 0, done.stderr


def test_a_model_moved_between_sessions_keeps_its_gradients() -> None:
    reference, model = mlp(), mlp()
    model.load_state_dict(reference.state_dict())
    batch = torch.randn(4, 8)
    for network, context in ((reference, ca.disable()), (model, ca.enable(backend="eager"))):
        with context:
            network(batch).sum().backward()
        network(batch * 2).square().sum().backward()
    assert_grads(model, reference)
    assert isinstance(model, nn.Module)


def test_an_engine_that_fails_in_the_middle_of_a_report_writes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the node saved may be lost then, and eager would compute with that: an error is all that is right."""
    from compiled_autograd.capture.capture import Capture

    x = torch.randn(3, requires_grad=True)
    loss = _square(x)
    monkeypatch.setattr(Capture, "apply_functional", lambda *args: "nothing that the engine can use")
    with ca.enable(backend="eager") as session, pytest.raises(ca.BrokenCaptureError, match=r"reported SumBackward0"):
        loss.backward()
    assert x.grad is None
    expect(session.stats(), bypasses={"broken_capture": 1})


def test_what_fails_before_the_first_report_is_left_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an error of a signal's handler may: the tape is whole."""
    x = torch.randn(3, requires_grad=True)
    loss = _square(x)

    def call(*of: Any) -> Any:
        monkeypatch.undo()
        raise ValueError("planted")

    monkeypatch.setattr("compiled_autograd.ir.TapeCall", call)
    with ca.enable(backend="eager") as session:
        loss.backward()
    assert_same(x.grad, 2 * x.detach())
    assert session.last is not None and "planted" in str(session.last.reasons[0])
    expect(session.stats(), bypasses={session.last.reasons[0].label: 1})


def test_very_deep_reentrant_backwards_are_left_to_eager() -> None:
    class Deep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            if ctx.depth:
                with torch.enable_grad():
                    inner = torch.ones(3, requires_grad=True)
                    Deep.apply(inner, ctx.depth - 1).sum().backward()
                grad = grad + inner.grad
            return grad, None

    def run(depth: int) -> torch.Tensor:
        x = torch.ones(3, requires_grad=True)
        return torch.autograd.grad(Deep.apply(x, depth).sum(), x)[0]

    for depth in (30, 200):  # after some 60 of its own the engine goes on in another thread, which no session holds in
        wanted = run(depth)
        with ca.enable(backend="eager") as session:
            found = run(depth)
        assert_same([found], [wanted])
        stats = session.stats()
        assert stats.bypasses["deep_reentrant"] == stats.backwards - 9 >= 22


def test_a_graph_whose_program_cannot_be_made_runs_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tape is released by then: whatever fails, the step goes on from the tape graph, hooks and all."""
    from compiled_autograd.cache.graphs import CompiledGraph

    def run(context: Any) -> list[Any]:
        torch.manual_seed(0)
        x = torch.randn(3, requires_grad=True)
        seen: list[torch.Tensor] = []
        leaf_node = x.view_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        leaf_node.register_hook(lambda into, out: seen.append(out[0].clone()))
        with context:
            _square(x).backward()
        return [x.grad, *seen]

    wanted = run(ca.disable())
    monkeypatch.setattr(CompiledGraph, "add", lambda *args: 1 / 0)
    session = ca.enable(backend="eager")
    with pytest.warns(UserWarning, match="division by zero"):
        found = run(session)
    assert_same(found, wanted)
    expect(session.stats(), structure_misses=1, failures=1)


def test_a_freed_tape_is_refused_in_eagers_words_by_nodes_that_look_while_they_report() -> None:
    x = torch.randn(4, requires_grad=True)
    y = x * 1
    y[torch.tensor([0, 2])] = x[:2] * 2
    loss = y.square().sum()
    with ca.enable(backend="eager"):
        loss.backward()
        with pytest.raises(RuntimeError, match=r"Trying to backward through the graph a second time"):
            loss.backward()


class _Two(torch.autograd.Function):
    """Saves a tensor; ``looks`` says whether its backward reads it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, looks: bool) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        ctx.looks = looks
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.looks:
            assert ctx.saved_tensors
        return 2 * one + 3 * other, None


def _ends(make: Callable[[torch.Tensor], torch.Tensor], settings: dict[str, Any] | None) -> tuple[Any, ...]:
    """The words of a second backward, if it has any, and what both left."""
    x = torch.arange(1.0, 5.0, requires_grad=True)
    loss = make(x)
    session = ca.disable() if settings is None else ca.enable(backend="eager", **settings)
    said = ""
    with session:
        loss.backward()
        try:
            loss.backward()
        except RuntimeError as error:
            said = str(error)
    if isinstance(session, ca.Session):
        assert sum(session.stats().bypasses.values()) == 1
    assert x.grad is not None
    return said, x.grad.tolist()


@pytest.mark.parametrize("on_unsupported", ["eager", "raise"])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: _Two.apply(x, True)[0].sum(),
        lambda x: _Two.apply(x, False)[0].sum(),
        lambda x: _Two.apply(x, True)[0].exp().sum(),
        lambda x: torch.stack(_Two.apply(x, True)).sum(),
        lambda x: checkpoint(lambda x: _Two.apply(x.exp(), True), x, use_reentrant=True)[0].sum(),
        lambda x: checkpoint(lambda x: _Two.apply(x.exp(), True), x, use_reentrant=False)[0].sum(),
        lambda x: torch.split(x.exp(), 2)[0].square().sum(),
        lambda x: torch.linalg.svd(x.diag() + 1)[1].sum(),
        lambda x: torch.utils.checkpoint.checkpoint_sequential(
            [nn.Tanh(), nn.Sigmoid()], 2, x, use_reentrant=True
        ).sum(),
    ],
)
def test_a_second_backward_ends_as_under_eager(
    make: Callable[[torch.Tensor], torch.Tensor], on_unsupported: str
) -> None:
    assert _ends(make, {"on_unsupported": on_unsupported}) == _ends(make, None)


# ---- beside torch.compile ------------------------------------------------------------------------------------------


def test_a_step_that_torch_compile_compiles_is_captured() -> None:
    """Dynamo leaves the backward to Python, and keeps away from what runs there."""
    models = [nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    data = torch.randn(2, 4)

    def step(model: nn.Module) -> None:
        model.zero_grad()
        model(data).sum().backward()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager")
    with ca.enable(backend="eager") as session:
        for _ in range(4):
            compiled(models[0])
    step(models[1])
    assert_grads(models[0], models[1])
    expect(session.stats(), structure_misses=1, hits=3, captures=1)


def test_the_first_enable_imports_no_dynamo() -> None:
    done = in_subprocess(
        "import sys, torch, compiled_autograd as ca\n"
        "with ca.enable(backend='eager'): pass\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert done.returncode == 0, done.stderr


def test_pytorchs_own_around_ours_captures_once() -> None:
    from torch._dynamo.compiled_autograd import _enable

    x = torch.randn(3, requires_grad=True)
    made: list[Any] = []

    def compile_it(graph_module: Any) -> Any:
        made.append(graph_module)
        return graph_module

    with ca.enable(backend="eager") as session, _enable(compile_it):
        for _ in range(4):
            assert_same(torch.autograd.grad(_square(x), x), [2 * x.detach()])
    assert len(made) == 1
    expect(session.stats(), bypasses={"torch_compiled_autograd": 4})


def test_a_thread_that_imports_pytorchs_own_compiled_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies among the modules before it has anything in it: until then it is not on, and has captured nothing."""
    half = ModuleType("torch._dynamo.compiled_autograd")
    half.__spec__ = ModuleSpec(half.__name__, None)
    half.__spec__._initializing = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, half.__name__, half)
    x = torch.randn(3, requires_grad=True)
    with ca.enable(backend="eager", cache_dir=False) as session:
        (found,) = torch.autograd.grad(x.sin().sum(), x)
    assert torch.equal(found, x.detach().cos())
    expect(session.stats(), structure_misses=1)


def test_a_backward_goes_on_from_a_tensor_whose_gradient_was_asked_for() -> None:
    """The engine's seam frees each node that it walks over; the eager engine those that ran."""
    x = torch.randn(3, requires_grad=True)
    session = ca.enable(backend="eager")
    for keeps in (False, True):
        for _ in range(3):
            hidden = x.sin()
            loss = hidden.exp().sum()
            with session:
                (gradient,) = torch.autograd.grad(loss, [hidden], retain_graph=keeps)
                (found,) = torch.autograd.grad(hidden, [x], gradient)
            assert torch.equal(found, x.cos() * x.sin().exp())
    stats = session.stats()
    assert stats.bypasses == {"intermediate_input": 3} and stats.hits == 7


def test_a_function_that_was_freed_and_does_not_run() -> None:
    """The walk ends at it, since the gradient of what it made is asked for."""
    x = torch.randn(3, requires_grad=True)
    session = ca.enable(backend="eager", cache_dir=False)
    for around in (nullcontext(), session, session, session):
        hidden = _Two.apply(x, True)[0]
        last = hidden.sin() + _Two.apply(hidden, True)[1]
        with around:
            hidden.sum().backward()
            found = [torch.autograd.grad(last.sum(), [hidden], retain_graph=True) for _ in range(2)]
            with pytest.raises(RuntimeError, match="a second time"):
                torch.autograd.grad(last.sum(), [hidden, x], retain_graph=True)
        assert_same([each for (each,) in found], [hidden.detach().cos() + 3] * 2)
    stats = session.stats()
    assert (stats.structure_misses, stats.hits, sum(stats.bypasses.values())) == (2, 7, 3)


@pytest.mark.parametrize("scale", [2, 3])
def test_a_node_that_saved_nothing_may_be_freed(scale: int) -> None:
    x = torch.randn(3, requires_grad=True)
    session = ca.enable(backend="eager")
    for _ in range(3):
        hidden = x.sum() + scale
        with session:
            (gradient,) = torch.autograd.grad(hidden.exp(), [hidden])
            (found,) = torch.autograd.grad(hidden, [x], gradient)
        assert torch.equal(found, (x.sum() + scale).exp().expand(3).detach())
    assert not session.stats().bypasses


def test_a_node_that_runs_is_freed_as_eager_frees_it() -> None:
    """Its gradient is asked for, and one below it."""
    x = torch.randn(3, requires_grad=True)
    for on in (False, True):
        hidden = x.sin()
        with ca.enable(backend="eager") if on else nullcontext() as session:
            torch.autograd.grad(hidden.exp().sum(), [hidden, x])
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                torch.autograd.grad(hidden.sum(), [x])
    assert session is not None and session.stats().structure_misses == 1


def test_many_inputs_inside_the_tape_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, requires_grad=True)
    asked: list[int] = []
    first_nodes = tape.first_nodes
    monkeypatch.setattr(tape, "first_nodes", lambda *ends: asked.append(len(found := first_nodes(*ends))) or found)
    for leaves in ([], [x]):
        hidden = [x.sin()]
        while len(hidden) < 20:
            hidden.append(hidden[-1].sin())
        asked.clear()
        found = tape.freed_at_the_end([*hidden, *leaves])
        assert found is (not leaves) and asked == [21]


@pytest.mark.parametrize("roots", [1, 2])
@pytest.mark.parametrize("how", ["backward", "inputs", "grad"])
def test_whether_a_root_runs_is_answered_as_by_the_engine(roots: int, how: str) -> None:
    """Of an only root it does not say so: a hook over several gradients with that one among them reckons with it."""

    def run(around: Any) -> list[Any]:
        told: list[Any] = []
        for _ in range(3):
            x = torch.ones(3, requires_grad=True)
            y = x.exp()
            outputs = [y.sin().sum(), y.cos().sum()][:roots]
            nodes = [each.grad_fn for each in (*outputs, y)]
            y.register_hook(lambda _, nodes=nodes: told.append([*map(torch._C._will_engine_execute_node, nodes)]))
            torch.autograd.graph.register_multi_grad_hook((y, *outputs), lambda given: told.append(len(given)))
            with around:
                if how == "grad":
                    torch.autograd.grad(outputs, [x])
                else:
                    torch.autograd.backward(outputs, inputs=[x] if how == "inputs" else None)
        return told

    session = ca.enable(backend="eager")
    assert run(session) == run(nullcontext())
    expect(session.stats(), structure_misses=1, hits=2)
