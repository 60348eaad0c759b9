"""Python functions called after the engine let go of their tape: what a ``ctx`` shows, to whom, and how long."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.autograd import Function

import compiled_autograd as ca
from compiled_autograd.engine import seam
from compiled_autograd.engine.handles import KEPT, Handle
from compiled_autograd.user_code import functions

from .helpers import WAIT, Squares, assert_same, both, expect, in_subprocess, in_threads

# ---- undefined gradients ---------------------------------------------------------------------------------------------


class _GivesNone(Function):
    """Its gradient is undefined, which nobody knows before it has run."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


def _notes(wants_zeros: bool | None, outputs: int = 1, dtype: torch.dtype | None = None) -> tuple[Any, list[Any]]:
    """A function that notes the gradients it sees, and the notes."""
    notes: list[Any] = []

    class Notes(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            if wants_zeros is not None:
                ctx.set_materialize_grads(wants_zeros)
            results = tuple(x.to(dtype or x.dtype) * (index + 2) for index in range(outputs))
            return results if outputs > 1 else results[0]

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
            notes.append([None if grad is None else (grad.dtype, grad.tolist()) for grad in grads])
            defined = [grad.to(torch.float32) for grad in grads if grad is not None]
            return sum(defined) if defined else None

    return Notes, notes


@pytest.mark.parametrize("wants_zeros", [None, True, False])
@pytest.mark.parametrize("where", ["known at the capture", "known at the run", "one of two"])
def test_a_function_sees_zeros_for_undefined_gradients_only_where_it_wants_them(
    where: str, wants_zeros: bool | None
) -> None:
    function, notes = _notes(wants_zeros, 1 if where == "known at the run" else 2, torch.float64)

    def make() -> Any:
        x = torch.randn(3, requires_grad=True)
        made = function.apply(x)
        if where == "known at the run":
            return _GivesNone.apply(made).sum() + x.sum(), [x]
        if where == "one of two":
            return _GivesNone.apply(made[0]).sum() + made[1].sum(), [x]
        return made[1].sum(), [x]

    expect(both(make), structure_misses=1, hits=1, captures=1)
    assert len(notes) == 3 and notes[0] == notes[1] == notes[2]
    undefined = [each for each in notes[0] if each is None]
    assert len(undefined) == (wants_zeros is False)


@pytest.mark.parametrize("between", ["nothing", "a hook", "a sum"])
@pytest.mark.parametrize("layout", ["coo", "csr", "strided"])
def test_zeros_have_the_layout_of_the_output(layout: str, between: str) -> None:
    """Also where nobody knows before the run that they are needed."""
    seen: list[Any] = []

    class Sparse(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return {"coo": x.to_sparse, "csr": x.to_sparse_csr, "strided": x.clone}[layout]()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append((grad.layout, grad.dtype, grad.shape))
            return grad if layout == "strided" else grad.to_dense()

    class Dense(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.ones(2, 3)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:
            return None

    def make() -> Any:
        x = torch.randn(2, 3, requires_grad=True)
        y = Sparse.apply(x)
        if between == "a hook":
            y.register_hook(lambda grad: None)
        return Dense.apply(y).sum() + (Dense.apply(y).sum() if between == "a sum" else 0) + x.sum(), [x]

    expect(both(make), structure_misses=1, hits=1, captures=1)
    assert len(seen) == 3 and seen[0] == seen[1] == seen[2]
    assert (seen[0][0] is torch.strided) is (layout == "strided")


def test_functions_that_want_zeros_and_those_that_do_not_are_different_structures() -> None:
    """One class may choose at each call."""
    seen: list[bool] = []

    class Chooses(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, wants_zeros: bool) -> torch.Tensor:
            ctx.set_materialize_grads(wants_zeros)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
            seen.append(grad is not None)
            return grad, None

    with ca.enable(backend="eager") as session:
        for wants_zeros in (True, False, True, False):
            x = torch.randn(3, requires_grad=True)
            _GivesNone.apply(Chooses.apply(x, wants_zeros)).sum().backward()
            assert (x.grad is not None) is wants_zeros
    assert seen == [True, False, True, False]
    expect(session.stats(), structure_misses=2, hits=2, captures=2)


def test_a_function_whose_wish_cannot_be_read_is_left_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_place_of_flag", lambda: None)
    function, notes = _notes(False)
    x = torch.randn(3, requires_grad=True)
    with ca.enable(backend="eager") as session:
        _GivesNone.apply(function.apply(x)).sum().backward()
    assert notes == [[None]] and x.grad is None
    (reason,) = session.stats().bypasses
    assert "wants zeros" in reason


# ---- saved tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2])
def test_saved_tensors_that_may_be_asked_for_once(times: int) -> None:
    class Once(Function):
        clear_saved_tensors_on_access = True

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            for _ in range(times):
                (x,) = ctx.saved_tensors
            return 2 * x * grad

    if not hasattr(Function, "clear_saved_tensors_on_access"):
        pytest.skip("torch has no clear_saved_tensors_on_access before 2.12")

    def run() -> str:
        x = torch.ones(3, requires_grad=True)
        try:
            Once.apply(x).sum().backward()
        except RuntimeError as error:
            return str(error)
        return str(x.grad)

    wanted = run()
    assert ("only be accessed once" in wanted) is (times == 2)
    with ca.enable(backend="eager") as session:
        assert [run(), run()] == [wanted] * 2
    expect(session.stats(), structure_misses=1, hits=1)


@pytest.mark.parametrize("keep", [False, True])
def test_what_a_function_lets_go_of_stays_where_the_graph_is_kept(keep: bool) -> None:
    left: list[int] = []

    class Clears(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            ctx.maybe_clear_saved_tensors()
            try:
                left.append(len(ctx.saved_tensors))
            except RuntimeError:  # of the engine's, for what was let go of
                left.append(0)
            return 2 * x * grad

    def make() -> Any:
        x = torch.randn(3, requires_grad=True)
        return Clears.apply(x).sum(), [x]

    expect(both(make, retain_graph=keep), structure_misses=1, hits=1)
    assert left == [int(keep)] * 3


@pytest.mark.parametrize("on_miss", ["compile", "eager"])
def test_functions_with_another_name_at_each_step_leave_nothing_behind(
    on_miss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The structure is known, and the engine does not know it: it reports each, and keeps each until it forgets all."""
    monkeypatch.setattr(seam, "MAX_REPORTS", 8)
    x, other = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    session = ca.enable(backend="eager", on_miss=on_miss)

    def step(function: Any, leaf: torch.Tensor) -> torch.Tensor | None:
        leaf.grad = None
        function.apply(leaf).sum().backward()
        return leaf.grad

    def handles() -> int:
        return sum(type(each) is Handle for each in gc.get_objects())

    ca.reset()
    most, before = 0, handles()
    for number in range(30):
        function = type("Squares", (Squares,), {"__qualname__": f"made_in_step_{number}.Squares"})
        with session:
            step(function, x)
            step(Squares, other)  # one that comes back
        assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())
        assert other.grad is not None and torch.equal(other.grad, 2 * other.detach())
        most = max(most, len(KEPT.handles), len(functions._numbers), len(KEPT.left_to_eager))
    assert most <= 10 and handles() - before <= 10
    if on_miss == "compile":
        expect(session.stats(), structure_misses=1, hits=59, compiles=2)


# ---- several calls at once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves_first", ["who came first", "who came last"])
def test_two_threads_in_one_function_of_a_kept_graph(leaves_first: str) -> None:
    """Both are in its backward at once, as under eager; each leaves before, or after, the other has asked."""
    inside, order = threading.Barrier(2), [threading.Event(), threading.Event()]
    together = threading.local()

    class Meets(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if not hasattr(together, "waits_for"):
                (x,) = ctx.saved_tensors
                return grad * x.cos()
            inside.wait(WAIT)
            assert together.waits_for is None or together.waits_for.wait(WAIT)
            (x,) = ctx.saved_tensors
            return grad * x.cos()

    x = torch.randn(4, requires_grad=True)
    y = Meets.apply(x).sum()
    ctx = y.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    own_class = type(ctx)
    wanted = torch.autograd.grad(y, x, retain_graph=True)
    session = ca.enable(backend="eager")
    with session:
        torch.autograd.grad(y, x, retain_graph=True)

    def work(number: int) -> None:
        first = number == (leaves_first == "who came last")
        together.waits_for = None if first else order[0]
        with session:
            assert_same(torch.autograd.grad(y, x, retain_graph=True), wanted)
        if first:
            order[0].set()

    in_threads(lambda: work(0), lambda: work(1))
    expect(session.stats(), structure_misses=1, hits=2)
    assert type(ctx) is own_class and not [name for name in vars(ctx) if "compiled" in name]


def test_a_function_of_a_kept_graph_that_calls_its_own_backward() -> None:
    depths: list[int] = []

    class Recurses(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            depths.append(len(depths))
            if len(depths) % 3:
                torch.autograd.grad(here[0], here[1], retain_graph=True)
            (x,) = ctx.saved_tensors
            return grad * x.cos()

    here: list[torch.Tensor] = []

    def make() -> Any:
        x = torch.randn(4, requires_grad=True)
        here[:] = Recurses.apply(x).sum(), x
        return here[0], [x]

    stats = both(make, retain_graph=True)
    assert len(depths) == 9 and type(here[0].grad_fn.next_functions[0][0]).__module__ != functions.__name__  # type: ignore[union-attr]
    expect(stats, structure_misses=1, shape_misses=1, hits=4)  # a call inside reaches the second region first


def test_a_thread_that_backward_starts_may_ask_for_saved_tensors() -> None:
    class Asks(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen: list[Any] = []
            in_threads(lambda: seen.extend(ctx.saved_tensors))
            return 2 * seen[0] * grad

    def make() -> Any:
        x = torch.randn(3, requires_grad=True)
        return Asks.apply(x).sum(), [x]

    expect(both(make), structure_misses=1, hits=1)


# ---- for how long ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["function", "subclass", "hook"])
def test_what_a_step_made_goes_with_it(how: str) -> None:
    """Classes and hooks that are made anew at each step, and what they close over."""

    def step() -> list[Any]:
        large = torch.ones(4)

        class Made(Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)
                return x * 2

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return grad * 2 * large * ctx.saved_tensors[0]

        class Sub(Made):
            pass

        x = torch.randn(4, requires_grad=True)
        y = Sub.apply(x) if how == "subclass" else Made.apply(x)
        if how == "hook":
            y.register_hook(lambda grad: grad * large)
            x.register_post_accumulate_grad_hook(lambda leaf: large.sum().item() and None)
        y.sum().backward()
        return [weakref.ref(each) for each in (Made, Sub, large, x, y)]

    kept: list[Any] = []
    with ca.enable(backend="eager") as session:
        for _ in range(4):
            kept += step()
    gc.collect()
    assert not [ref() for ref in kept if ref() is not None]
    expect(session.stats(), structure_misses=1, hits=3)


def test_the_first_function_of_a_process_that_ends_is_captured() -> None:
    """No thread starts then."""
    done = in_subprocess("""
import atexit, torch
import compiled_autograd as ca
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x
    @staticmethod
    def backward(ctx, grad):
        return 2 * grad
@atexit.register
def last():
    x = torch.ones(3, requires_grad=True)
    with ca.enable(backend="eager") as session:
        Double.apply(x).sum().backward()
    print(session.last.outcome, *session.last.reasons, x.grad.tolist())
""")
    assert done.stdout.startswith("structure_miss first_seen") and "[2.0, 2.0, 2.0]" in done.stdout, done.stdout
