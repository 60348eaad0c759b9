"""The own loop beside the engine, where they could differ: what is asked meanwhile, hooks, errors, memory, threads."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from .own_loops import beside, extension, leaf, node_of, raised  # noqa: F401

pytestmark = pytest.mark.usefixtures("extension")


# ---- what is asked meanwhile ----------------------------------------------------------------------------------------


def test_which_nodes_run_is_told_to_what_unpacks() -> None:
    """No hook and no function of Python is on the tape: what unpacks saved tensors is not seen before it is called."""

    def program(around: Any) -> list[Any]:
        told: list[bool] = []

        def unpack(saved: torch.Tensor) -> torch.Tensor:
            told.extend(torch._C._will_engine_execute_node(node_of(each)) for each in (first, second, other, root))
            return saved

        x = torch.ones(3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            first = x.exp()
            second = first.sin()
        other, root = x.cos(), second.sum()
        with around:
            root.backward()
        return [told, x.grad]

    beside(program)


@pytest.mark.parametrize("roots", [1, 2])
def test_whether_a_root_runs(roots: int) -> None:
    """Of one root the engine does not know it."""

    def program(around: Any) -> list[Any]:
        told: list[bool] = []
        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        outputs = [y.sin().sum(), y.cos().sum()][:roots]
        y.register_hook(
            lambda _: told.extend(torch._C._will_engine_execute_node(node_of(each)) for each in (*outputs, y))
        )
        with around:
            torch.autograd.backward(outputs)
        return [told, x.grad]

    beside(program)


def test_hooks_over_several_gradients_of_which_one_is_the_root() -> None:
    for mode in ("all", "any"):

        def program(around: Any, mode: str = mode) -> list[Any]:
            called: list[Any] = []
            x = torch.ones(3, requires_grad=True)
            y, unused = x.exp(), x.cos()
            loss = y.sin().sum()
            torch.autograd.graph.register_multi_grad_hook((x, y, unused, loss), called.append, mode=mode)
            with around:
                loss.backward()
            return [called, x.grad]

        assert beside(program)[0], mode


@pytest.mark.parametrize("where", ["root", "middle", "unpack"])
def test_the_order_in_which_nodes_run(where: str) -> None:
    """It can be asked for where a hook has turned multithreading off."""

    def program(around: Any) -> list[Any]:
        answers: list[Any] = []

        def ask(*_: Any) -> None:
            answers.append(raised(torch._C._current_graph_task_execution_order) is not None)
            with torch.autograd.set_multithreading_enabled(False):
                try:
                    answers.append([node.name() for node in torch._C._current_graph_task_execution_order()])
                except RuntimeError:
                    answers.append("it is known at the beginning alone")

        def unpack(saved: torch.Tensor) -> torch.Tensor:
            ask()
            return saved

        x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        packs = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack)
        with packs if where == "unpack" else contextlib.nullcontext():
            z = (x * y).sin() + y
            loss = (z * x.cos()).sum()
        if where != "unpack":
            (loss if where == "root" else z).register_hook(ask)
        with around:
            loss.backward()
        return [answers, x.grad, y.grad]

    beside(program)


def test_numbers_of_tasks() -> None:
    """One backward has one number, a backward inside of it another."""

    def program(around: Any) -> list[Any]:
        numbers: list[int] = []
        w = torch.ones(3, requires_grad=True)

        def look(_: torch.Tensor) -> None:
            numbers.append(torch._C._current_graph_task_id())

        def inside(_: torch.Tensor) -> None:
            look(_)
            with torch.enable_grad():
                z = w.exp()
                z.register_hook(look)
                z.sum().backward()
            look(_)

        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        z = y.sin()
        z.register_hook(inside)
        y.register_hook(look)
        x.register_post_accumulate_grad_hook(look)
        with around:
            z.sum().backward()
        first = numbers[0]
        return [[number == first for number in numbers], torch._C._current_graph_task_id(), x.grad, w.grad]

    assert beside(program)[0] == [True, False, True, True, True]


def test_anomalies_inside_of_a_hook_name_the_node() -> None:
    """What is recorded there was made in a node; that it is ours is nothing to be told."""

    def program(around: Any) -> list[Any]:
        def record(_: torch.Tensor) -> None:
            with warnings.catch_warnings(), torch.enable_grad():
                warnings.simplefilter("ignore")
                with torch.autograd.detect_anomaly(check_nan=False):
                    inner = torch.ones(3, requires_grad=True).exp()
            metadata = node_of(inner).metadata
            parent = metadata.get("parent_")
            told.append(None if parent is None else parent.name())

        told: list[Any] = []
        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        y.register_hook(record)
        with around:
            y.sum().backward()
        return told

    beside(program)


# ---- the state of the thread ----------------------------------------------------------------------------------------


class _Sees(torch.overrides.TorchFunctionMode):
    seen: list[str]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Sees.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


def _enter(what: str) -> None:
    if what == "mode of functions":
        _Sees().__enter__()
    elif what == "saved-tensor hooks":
        torch._C._autograd._push_saved_tensors_default_hooks(lambda each: _Sees.seen.append("pack"), lambda each: each)
    elif what == "no saved-tensor hooks":
        torch._C._autograd._saved_tensors_hooks_disable("not here")
    elif what == "autocast":
        torch.set_autocast_enabled("cpu", True)
    elif what == "grad mode":
        torch._C._set_grad_enabled(True)
    elif what == "layouts":
        torch._C._set_view_replay_enabled(True)


_STATES = ["mode of functions", "saved-tensor hooks", "no saved-tensor hooks", "autocast", "grad mode", "layouts"]


def _look() -> list[Any]:
    _Sees.seen = []
    torch.sin(torch.ones(2))
    with torch.enable_grad():
        refused = raised(lambda: torch.ones(2, requires_grad=True).exp())
        packs = raised(lambda: torch._C._autograd._top_saved_tensors_default_hooks(True))
    return [
        list(_Sees.seen),
        refused,
        packs,
        torch._C._autograd._saved_tensors_hooks_is_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
        torch._C._is_view_replay_enabled(),
    ]


@pytest.mark.parametrize("what", _STATES)
@pytest.mark.parametrize("who", ["unpack", "late hook", "late prehook", "late hook of a leaf", "function"])
def test_who_leaves_the_thread_in_another_state(what: str, who: str) -> None:
    """The nodes after it run in the state that they would run in, whoever was not seen before the run."""

    def program(around: Any) -> list[Any]:
        seen: list[Any] = []

        def leave(*_: Any) -> None:
            _enter(what)

        def unpack(saved: torch.Tensor) -> torch.Tensor:
            if not seen:
                seen.append("unpack")
                if who == "unpack":
                    leave()
                elif who == "late hook":
                    first.register_hook(leave)
                elif who == "late prehook":
                    node_of(first).register_prehook(leave)
                elif who == "late hook of a leaf":
                    w.register_hook(leave)
            return saved

        def look(saved: torch.Tensor) -> torch.Tensor:
            seen.append(_look())
            return saved

        x, w = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, look):
            second = x.exp().sin()
        first = second.neg() + w
        if who == "function":
            first = _Leaves.apply(first, leave)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            loss = first.cos().sum()
        with around:
            loss.backward()
        return [seen, x.grad]

    before = _look()
    try:
        beside(program)
        assert _look() == before
    finally:
        torch.set_autocast_enabled("cpu", False)


class _Leaves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, leave: Callable[[], None]) -> torch.Tensor:
        ctx.leave = leave
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.leave()
        return gradient, None


@pytest.mark.parametrize("state", ["autocast", "mode of functions", "deterministic", "no grad", "forward"])
def test_the_state_around_a_backward(state: str) -> None:
    def program(around: Any) -> list[Any]:
        _Sees.seen = []
        x, y = leaf(4, 4), leaf(4, 4)
        z = x @ y
        z.register_hook(lambda gradient: seen.append([torch.is_autocast_enabled("cpu"), (gradient @ gradient).dtype]))
        seen: list[Any] = []
        loss = (z @ y).sum()
        if state == "autocast":
            inner: Any = torch.autocast("cpu", dtype=torch.bfloat16)
        elif state == "mode of functions":
            inner = _Sees()
        elif state == "deterministic":
            inner = _deterministic()
        elif state == "no grad":
            inner = torch.no_grad()
        else:
            inner = torch.autograd.forward_ad.dual_level()
        with around, inner:
            loss.backward()
        return [seen, x.grad, y.grad, _Sees.seen]

    beside(program)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_saved_tensor_hooks_around_a_reentrant_backward() -> None:
    def program(around: Any) -> list[Any]:
        layer = nn.Linear(3, 3)
        x = leaf(2, 3)
        loss = checkpoint(lambda each: layer(each).tanh(), x, use_reentrant=True).sum()
        with around, torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            failed = raised(loss.backward)
        return [failed, x.grad, *[each.grad for each in layer.parameters()]]

    beside(program)


# ---- gradients that come together -----------------------------------------------------------------------------------


class _Gives(torch.autograd.Function):
    """Gives what it is told to, in the place of its gradient."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[torch.Tensor], Any], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.make = make
        return torch.stack([each.detach().real.float() for each in inputs]).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *ctx.make(gradient)


def _kept(gradient: torch.Tensor) -> list[torch.Tensor]:
    _KEPT[:] = [gradient * 2]
    return [_KEPT[0], _KEPT[0]]


_KEPT: list[torch.Tensor] = []
_GIVEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "the same twice": lambda g: [g * 2] * 2,
    "kept": _kept,
    "undefined": lambda g: [None, g],
    "all undefined": lambda g: [None, None],
    "expanded": lambda g: [g[:1].expand(3, 3), g],
    "to be summed": lambda g: [torch.stack([g, g]), g],
    "of one number": lambda g: [g.sum(), g],
    "transposed": lambda g: [g.t(), g.t()],
    "overlapping": lambda g: [g.flatten().repeat(2).as_strided((3, 3), (1, 2)), g],
    "a view": lambda g: [torch.cat([g, g])[3:], torch.cat([g, g])[:3]],
    "negative": lambda g: [torch._neg_view(g), torch._neg_view(g)],
    "conjugate": lambda g: [torch.complex(g, g).conj(), torch.complex(g, g).conj()],
    "another dtype": lambda g: [g.double(), g.half()],
    "sparse": lambda g: [g.to_sparse(), g],
    "sparse twice": lambda g: [g.to_sparse(), g.t().to_sparse()],
    "compressed": lambda g: [g.to_sparse_csr(), g.to_sparse_csr()],
    "zero": lambda g: [torch._efficientzerotensor((3, 3)), g],
    "zero twice": lambda g: [torch._efficientzerotensor((3, 3)), torch._efficientzerotensor((3, 3))],
    "wanting gradients": lambda g: [g.clone().requires_grad_(), g],
    "too few": lambda g: [g],
    "too many": lambda g: [g, g, g],
    "of the wrong shape": lambda g: [g[:2], g],
    "of integers": lambda g: [g.long(), g],
    "no tensor": lambda g: ["x", g],
    "on meta": lambda g: [g.to("meta"), g],
}


@pytest.mark.parametrize("given", _GIVEN)
@pytest.mark.parametrize("into", ["leaves", "one leaf", "views", "one view", "hooks", "complex"])
def test_gradients_of_all_kinds(given: str, into: str) -> None:
    """Added up in place or not, cast, summed, kept by leaves or copied; and refused in the same words."""

    def program(around: Any) -> list[Any]:
        seen: list[Any] = []
        leaves = [leaf(3, 3, dtype=torch.complex64 if into == "complex" else torch.float32) for _ in range(2)]
        one, other = leaves
        if into == "one leaf":
            other = one
        elif into in ("views", "hooks"):
            one, other = one * 2, other.t() * 3
        elif into == "one view":
            one = other = one.t() * 2
        if into == "hooks":
            one.register_hook(lambda gradient: seen.append(gradient.clone()))
            other.register_hook(lambda gradient: gradient * 2)
        loss = _Gives.apply(_GIVEN[given], one, other).sin().sum() + (one * other).real.sum()
        with around, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            failed = raised(loss.backward)
        grads = [each.grad for each in leaves]
        memory = [each is not None and each.layout is torch.strided and each.is_leaf for each in grads]
        shared = [each.data_ptr() == _KEPT[0].data_ptr() for each in grads if _KEPT and each is not None]
        _KEPT.clear()
        return [failed, seen, grads, memory, shared, [str(each.message) for each in told]]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(2).to_sparse_csr()  # warns once in a process
    beside(program)


@pytest.mark.parametrize(
    "given",
    ["expanded", "conjugate", "negative", "double", "shape", "wants", "its own", "another's", "the leaf", "twice"],
)
@pytest.mark.parametrize("through", ["operators", "nothing"])
def test_gradients_that_a_backward_begins_with(given: str, through: str) -> None:
    def program(around: Any) -> list[Any]:
        complex_ = given == "conjugate"
        x = leaf(3, 3, dtype=torch.complex64) if complex_ else leaf(3, 3)
        y = x.sin() if through == "operators" else x
        x.grad = torch.ones_like(x) if given == "its own" else None
        gradients: dict[str, Any] = {
            "expanded": torch.ones(3, 1).expand(3, 3),
            "conjugate": torch.randn(3, 3, dtype=torch.complex64).conj(),
            "negative": torch._neg_view(torch.randn(3, 3)),
            "double": torch.randn(3, 3).double(),
            "shape": torch.randn(4, 3),
            "wants": leaf(3, 3),
            "its own": x.grad,
            "another's": torch.ones(3, 3),
            "the leaf": x.detach(),
            "twice": torch.ones(3, 3),
        }
        outputs = [y, x.cos() if through == "operators" else x] if given == "twice" else [y]
        gradient = gradients[given]
        before = gradient.clone()
        with around:
            failed = raised(lambda: torch.autograd.backward(outputs, [gradient] * len(outputs)))
        assert x.grad is None or given == "its own" or x.grad.data_ptr() != gradient.data_ptr()
        return [failed, x.grad, gradient, before]

    beside(program, loops=0 if given == "shape" else None)


def test_leaves_that_share_their_gradient() -> None:
    """What they get is added in eager's order, so that it is rounded as there."""

    def program(around: Any) -> list[Any]:
        x, y, z = leaf(5), leaf(5), leaf(5)
        x.grad = y.grad = z.grad = torch.randn(5) * 1e4
        loss = (torch.cat([x, y.exp(), z]) * torch.randn(15) * 1e-3).sum()
        with around:
            loss.backward()
        return [x.grad, x.grad is y.grad]

    beside(program)


def test_a_leaf_that_cannot_be_written() -> None:
    """Which leaves were written before the error is what it is under the engine."""

    def program(around: Any) -> list[Any]:
        leaves = [leaf(3) for _ in range(4)]
        with torch.inference_mode():
            leaves[1].grad = torch.ones(3)
        x, y, z, w = leaves
        loss = ((x * y + z).sin() * w.exp() + z.tan()).sum()
        with around:
            failed = raised(loss.backward)
            again = raised(loss.backward)
        return [failed, again, *[None if each.grad is None else each.grad.clone() for each in leaves]]

    assert beside(program)[0] is not None


# ---- what is left to the engine -------------------------------------------------------------------------------------


class _Wrapped(torch.Tensor):
    """Operators on it call users' code, which asks which leaves were written."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map_only(_Wrapped, lambda each: each.inner, (args, kwargs or {}))
        made = function(*plain[0], **plain[1])
        return tree_map_only(torch.Tensor, lambda each: each if isinstance(each, _Wrapped) else _Wrapped(each), made)


@pytest.mark.parametrize("what", ["subclass", "gradient of a subclass", "nested", "sparse gradient"])
def test_tensors_that_are_no_plain_ones(what: str) -> None:
    def program(around: Any) -> list[Any]:
        x = leaf(3, 3)
        if what == "subclass":
            wrapped = _Wrapped(torch.ones(3, 3)).requires_grad_()
            loss, gradient = wrapped.exp(), _Wrapped(torch.ones(3, 3))
            leaves = [wrapped]
        elif what == "gradient of a subclass":
            loss, gradient, leaves = x.exp(), _Wrapped(torch.ones(3, 3)), [x]  # type: ignore[assignment]
        elif what == "nested":
            nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).requires_grad_()
            loss, gradient, leaves = (nested * 2), torch.ones_like(nested), [nested]  # type: ignore[assignment,list-item]
        else:
            loss, gradient, leaves = x * 2, torch.eye(3).to_sparse(), [x]  # type: ignore[assignment,list-item]
        with around:
            failed = raised(lambda: loss.backward(gradient))  # type: ignore[no-untyped-call]
        grads = [each.grad for each in leaves]
        plain = [each.inner if isinstance(each, _Wrapped) else each for each in grads]
        return [failed, [each.unbind() if each is not None and each.is_nested else each for each in plain]]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        beside(program, loops=0)


def test_calls_that_the_engine_refuses() -> None:
    """It takes tuples, a gradient for each output, and no names."""

    def program(around: Any) -> list[Any]:
        x = leaf(3)
        run = torch.autograd.Variable._execution_engine.run_backward
        calls: list[Any] = [
            ([x.exp()], (torch.ones(3),)),
            ((x.exp(),), [torch.ones(3)]),
            ((x.exp(), x.sin()), (torch.ones(3),)),
            ((x.exp(),), (None,)),
            ((x.detach(),), (torch.ones(3),)),
        ]
        with around:
            return [raised(lambda each=each: run(*each, False, False, (), True, True)) for each in calls]  # type: ignore[misc]

    assert None not in beside(program, loops=0)
