"""``ctx.input_grad_buffers`` (since 2.15): a ``backward`` that adds to the engine's sum of gradients, and gives None.

The functions here ask for it as a program does that runs on older versions too: there they run without, and the tests
compare the same gradients.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import compiled_autograd as ca

from .both_walks import native_plans  # noqa: F401
from .helpers import assert_same, in_threads
from .own_loops import beside, extension, leaf, node_of, raised, session  # noqa: F401

HAS_BUFFERS = hasattr(torch.autograd.function.FunctionCtx, "input_grad_buffers")


def buffers_of(ctx: Any) -> tuple[Tensor | None, ...]:
    """None of them before 2.15."""
    return ctx.input_grad_buffers if HAS_BUFFERS else (None,) * len(ctx.needs_input_grad)


def hand_in(ctx: Any, log: list[Any], *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Add each gradient to its sum where there is one; gives the others. Notes what was there."""
    given, sums = [], buffers_of(ctx)
    log.append([None if each is None else each.clone() for each in sums])
    assert len(sums) == len(gradients)
    for gradient, total in zip(gradients, sums, strict=True):
        if gradient is not None and total is not None:
            total.add_(gradient)
            gradient = None
        given.append(gradient)
    return tuple(given)


class Multiplied(Function):
    """``x * w``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, log: list[Any]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.log = log
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return hand_in(ctx, ctx.log, gradient * w, gradient * x, None)


class Both(Function):
    """``x * w`` and ``x + w``, after two arguments that are no tensors; gradients that no output has may be None."""

    @staticmethod
    def forward(ctx: Any, log: list[Any], factor: float, x: Tensor, w: Tensor, wants_zeros: bool) -> Any:
        ctx.set_materialize_grads(wants_zeros)
        ctx.save_for_backward(x, w)
        ctx.log = log
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Any:
        x, w = ctx.saved_tensors
        gx = gw = second
        if first is not None:
            gx = first * w if gx is None else gx + first * w
            gw = first * x if gw is None else gw + first * x
        return hand_in(ctx, ctx.log, None, None, gx, gw, None)


Program = Callable[[list[Any]], tuple[Tensor, list[Tensor]]]
"""Builds a loss; gives it, and the leaves. The list takes what the functions note."""
PROGRAMS: dict[str, Program] = {}


def program(made: Program) -> Program:
    PROGRAMS[made.__name__.replace("_", " ")] = made
    return made


@program
def leaves(log: list[Any]) -> Any:
    x, w = leaf(4, 5), leaf(4, 5)
    early = Multiplied.apply(x, w, log)
    return early.sum() + (x.sin() * w.cos()).sum(), [x, w]


@program
def values_that_are_no_leaves(log: list[Any]) -> Any:
    a, w = leaf(4, 5), leaf(4, 5)
    x, y = a.tanh(), w.exp()
    early = Multiplied.apply(x, y, log)
    return (early * (x.sin() * y)).sum(), [a, w]


@program
def one_weight_in_several_batches(log: list[Any]) -> Any:
    w = leaf(4, 5)
    losses = [Multiplied.apply(torch.randn(4, 5), w, log).pow(2).sum() for _ in range(4)]
    return torch.stack(losses).sum(), [w]


@program
def several_outputs(log: list[Any]) -> Any:
    x, w = leaf(3), leaf(3)
    first, second = Both.apply(log, 2.0, x, w, True)
    return (first.sin() * second).sum() + (x.exp() * w.sin()).sum(), [x, w]


@program
def outputs_without_gradients(log: list[Any]) -> Any:
    x, w, y = leaf(3), leaf(3), leaf(3)
    first, _ = Both.apply(log, 2.0, x, w, True)
    _, fourth = Both.apply(log, 2.0, w, y, False)
    return (first * fourth).sum() + (x * w * y).sin().sum(), [x, w, y]


@program
def arguments_that_need_no_gradient(log: list[Any]) -> Any:
    x, w = torch.randn(3), leaf(3)
    first, second = Both.apply(log, 2.0, x, w, True)
    third = Multiplied.apply(w, x, log)
    return (first * second * third).sum() + w.exp().sum(), [w]


@program
def hooks_and_gradients_that_are_there(log: list[Any]) -> Any:
    """All of them see the whole sum, once."""
    x, w = leaf(3), leaf(3)
    x.grad, w.grad = torch.ones(3), torch.ones(3)
    y = w.exp()
    x.register_hook(lambda gradient: log.append(gradient.clone()))
    x.register_hook(lambda gradient: gradient * 2)
    y.register_hook(lambda gradient: log.append(gradient.clone()))
    y.retain_grad()
    w.register_post_accumulate_grad_hook(lambda leaf: log.append(leaf.grad.clone()))  # type: ignore[union-attr]
    early = Multiplied.apply(x, y, log)
    node_of(early).register_prehook(lambda gradients: (gradients[0] + 1,))
    return early.sum() + (x.sin() * y.cos()).sum(), [x, w, y]


@program
def views(log: list[Any]) -> Any:
    x, w = leaf(4, 6), leaf(6, 4)
    early = Multiplied.apply(x.t(), w[:, :].view(6, 4), log)
    parts = x.chunk(2)
    other = Multiplied.apply(parts[0], parts[1], log)
    return (early.sum() + other.sin().sum() + (x.t() * w).cos().sum() + parts[0].exp().sum()), [x, w]


@program
def writes_into_a_view(log: list[Any]) -> Any:
    x, w = leaf(4), leaf(2)
    y = x * 2
    early = Multiplied.apply(y, y.sin(), log)
    y = y.clone()
    y[:2] = Multiplied.apply(x[2:], w, log)
    return (early * y).sum() + (x * y.cos()).sum() + w.sin().sum(), [x, w]


@program
def other_dtypes(log: list[Any]) -> Any:
    x, w = leaf(3, dtype=torch.float64), leaf(3, dtype=torch.float16)
    early = Multiplied.apply(x, w.double(), log)
    half = Multiplied.apply(x.half(), w, log)
    return (early + half).sum() + (x * w).sin().sum() + w.float().exp().sum(), [x, w]


@program
def sums_that_are_shared(log: list[Any]) -> Any:
    """A gradient that went to two places is nobody's to add to; nor is one that is expanded."""
    x, w = leaf(3), leaf(3)
    early = Multiplied.apply(x, w, log)
    both = x + w
    return early.sum() + both.sum() + both.exp().sum(), [x, w]


@program
def sums_that_are_sparse(log: list[Any]) -> Any:
    x, w = leaf(4, 2), leaf(4, 2)
    early = Multiplied.apply(x, w, log)
    rows = torch.tensor([1, 3, 1])
    return early.sum() + torch.embedding(x, rows, -1, False, True).exp().sum() + w.sin().sum(), [x, w]


@program
def the_same_argument_twice(log: list[Any]) -> Any:
    x = leaf(3)
    early = Multiplied.apply(x, x, log)
    y = x.exp()
    other = Multiplied.apply(y, y, log)
    return early.sum() + (x.sin() * y.cos()).sum() + other.sum(), [x]


@program
def one_function_after_the_other(log: list[Any]) -> Any:
    x, w = leaf(3), leaf(3)
    first = Multiplied.apply(x, w, log)
    second = Multiplied.apply(first, w, log)
    third = Multiplied.apply(second, first, log)
    return (third * first.sin()).sum() + (second * x.cos() * w).sum(), [x, w]


@program
def functions_within_functions(log: list[Any]) -> Any:
    """A ``backward`` that calls a backward of its own, in which other functions ask."""

    class Outer(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x * w.sin()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            with torch.enable_grad():
                inner = [each.detach().requires_grad_() for each in ctx.saved_tensors]
                loss = Multiplied.apply(inner[0], inner[1].sin(), log) * gradient
                (loss.sum() + 0 * (inner[0].exp() * inner[1].exp()).sum()).backward()
            return hand_in(ctx, log, inner[0].grad, inner[1].grad)

    x, w = leaf(3), leaf(3)
    early = Outer.apply(x, w)
    return early.sum() + (x.cos() * w.exp()).sum(), [x, w]


@program
def asked_twice_and_by_others(log: list[Any]) -> Any:
    """By the public name and the other, in a function that it calls, and by somebody who keeps the tuple."""

    def look(ctx: Any) -> list[bool]:
        sums = ctx._input_grad_buffers if HAS_BUFFERS else buffers_of(ctx)
        return [each is not None for each in sums]

    class Asks(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x, w = ctx.saved_tensors
            log.append([look(ctx), look(ctx)])
            sums = buffers_of(ctx)
            log.append([look(ctx), [each is not None for each in sums]])
            del sums
            return hand_in(ctx, log, gradient * w, gradient * x)

    x, w = leaf(3), leaf(3)
    early = Asks.apply(x, w)
    return early.sum() + (x.sin() * w.cos()).sum(), [x, w]


@program
def a_new_class_each_time(log: list[Any]) -> Any:
    class Again(Multiplied):
        pass

    x, w = leaf(3), leaf(3)
    early = Again.apply(x, w, log)
    return early.sum() + (x.sin() * w.cos()).sum(), [x, w]


@program
def needs_that_somebody_has_set(log: list[Any]) -> Any:
    """As operators with lists do: what is whose argument is as before."""

    class Sets(Function):
        @staticmethod
        def forward(ctx: Any, number: int, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x, w = ctx.saved_tensors
            one, *others = ctx.needs_input_grad
            ctx.needs_input_grad = (one, [*others])
            try:
                if HAS_BUFFERS:
                    return hand_in(ctx, log, None, gradient * w, gradient * x)
                return None, gradient * w, gradient * x
            finally:
                ctx.needs_input_grad = (one, *others)

    x, w = torch.randn(3), leaf(3)
    early = Sets.apply(1, x, w)
    return early.sum() + (x.sin() * w.cos()).sum(), [w]


def _twice(made: Program, around: Any, keep: bool = True) -> list[Tensor]:
    """What two backwards of one tape leave, or what one does."""
    torch.manual_seed(1)
    loss, wanted = made([])
    found = []
    for again in (True, False) if keep else (False,):
        with around:
            loss.backward(retain_graph=again)
        found += [each.grad.clone() for each in wanted if each.grad is not None]
    return found


# ---- which sums are shown -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.usefixtures("extension")
def test_the_own_loop_shows_what_the_engine_shows(name: str) -> None:
    """The same sums, in every bit, and None where the engine has None."""

    def run(around: Any) -> Any:
        log: list[Any] = []
        found = []
        loss, wanted = PROGRAMS[name](log)
        for keep in (True, True, False):
            with around:
                loss.backward(retain_graph=keep)
            found.append([None if each.grad is None else each.grad.clone() for each in wanted])
        return [log, found]

    log, _ = beside(run)
    shown = [isinstance(each, Tensor) for entry in log if isinstance(entry, list) for each in entry]
    assert any(shown) == (HAS_BUFFERS and name != "sums that are shared"), log


@pytest.mark.parametrize("native", [False, True], ids=["python", "c++"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_compiled_backward_shows_none(name: str, native: bool, request: pytest.FixtureRequest) -> None:
    """At its first run and at hits, in either walk; the gradients are eager's in every bit."""
    if native:
        request.getfixturevalue("native")
    wanted = _twice(PROGRAMS[name], contextlib.nullcontext())
    with ca.enable(backend="eager", cache_dir=False, extension="auto" if native else "off") as used:
        for _ in range(3):
            assert_same(_twice(PROGRAMS[name], contextlib.nullcontext()), wanted)
    stats = used.stats()
    assert stats.hits >= 4 and not stats.bypasses and not stats.failures, stats
    log: list[Any] = []
    PROGRAMS["leaves"](log)[0].backward()  # and afterwards the engine shows its own
    assert log == [[None, None, None]] or HAS_BUFFERS


def _random(seed: int) -> Program:
    def made(log: list[Any]) -> Any:
        random = Random(seed)
        wanted = [leaf(3, 2) for _ in range(3)]
        values = [*wanted, torch.randn(3, 2)]
        for _ in range(random.randint(3, 14)):
            one, other = (random.choice(values[-6:]) for _ in range(2))
            kind = random.randrange(7)
            if kind < 3 and (one.requires_grad or other.requires_grad):
                values.append(Multiplied.apply(one, other, log))
            elif kind == 3 and (one.requires_grad or other.requires_grad):
                values += Both.apply(log, 1.0, one, other, bool(random.randrange(2)))
            else:
                functions: list[Any] = [torch.add, torch.mul, lambda x, y: (x.t() @ y.sin()).sum() + x.cos()]
                values.append(functions[random.randrange(3)](one, other))
            if values[-1].requires_grad and not random.randrange(5):
                values[-1].register_hook(lambda given: log.append(None if given is None else given.clone()))
        used = [each for each in values if each.requires_grad and random.randrange(3)] or wanted
        return torch.stack([each.sin().sum() for each in used]).sum(), wanted

    return made


@pytest.mark.parametrize("seed", [*range(12), *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 300)]])
@pytest.mark.usefixtures("extension")
def test_random_programs(seed: int) -> None:
    def run(around: Any) -> Any:
        log: list[Any] = []
        loss, wanted = _random(seed)(log)
        with around:
            loss.backward()
        return [log, [each.grad for each in wanted]]

    _, wanted = beside(run)
    with ca.enable(backend="eager", cache_dir=False):
        for _ in range(2):
            torch.manual_seed(1)
            assert_same(run(contextlib.nullcontext())[1], wanted)


@pytest.mark.parametrize("asks", ["grad", "inputs", "create_graph", "nothing is captured"])
def test_other_ways_to_ask_for_gradients(asks: str) -> None:
    """``create_graph`` is left to the engine, which raises."""

    def run(around: Any) -> Any:
        torch.manual_seed(1)
        log: list[Any] = []
        loss, wanted = PROGRAMS["values that are no leaves"](log)
        with around:
            if asks == "grad":
                return list(torch.autograd.grad(loss, wanted))
            if asks == "create_graph":
                return raised(lambda: loss.backward(create_graph=True))
            loss.backward(inputs=wanted[:1] if asks == "inputs" else None)
        return [*[each.grad for each in wanted], len(log)]

    wanted = run(contextlib.nullcontext())
    settings: Any = {"on_miss": "eager"} if asks == "nothing is captured" else {}
    with ca.enable(backend="eager", cache_dir=False, **settings):
        for _ in range(3):
            found = run(contextlib.nullcontext())
            if asks == "create_graph":
                assert found == wanted and (found is not None) == HAS_BUFFERS
            else:
                assert found[2:] == wanted[2:]
                assert_same(found[:2], wanted[:2])


@pytest.mark.parametrize("settings", [{"check": True}, {"check": 1}, {"on_miss": "background"}], ids=str)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_with_comparisons_and_compiled_elsewhere(backend: str, settings: dict[str, Any]) -> None:
    for name in ("leaves", "one weight in several batches", "functions within functions"):
        wanted = _twice(PROGRAMS[name], contextlib.nullcontext(), keep=False)
        tapes = []
        for _ in range(6):
            torch.manual_seed(1)
            tapes.append(PROGRAMS[name]([]))
        with ca.enable(backend=backend, cache_dir=False, **settings) as used:
            for loss, leaves in tapes:
                loss.backward()
                assert_same([each.grad for each in leaves], wanted, bitwise=backend == "eager")
            used.wait(60)
        assert not used.stats().failures, used.last
        ca.reset()


# ---- marked functions -----------------------------------------------------------------------------------------------


@ca.traceable
class Marked(Function):
    """``x * w.sin()``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w = ctx.saved_tensors
        gx, gw = gradient * w.sin(), gradient * x * w.cos()
        sums = ctx.input_grad_buffers if hasattr(ctx, "input_grad_buffers") else (None, None)
        if sums[0] is not None:
            sums[0].add_(gx)
            gx = None
        if sums[1] is not None:
            sums[1].add_(gw)
            gw = None
        return gx, gw


def _marked(hook: bool = False) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    x, w = leaf(3, 4), leaf(3, 4)
    early = Marked.apply(x, w)
    if hook:
        node_of(early).register_hook(lambda given, taken: None)
    return early.sum() + (x.sin() * w.exp()).sum(), [x, w]


def test_a_marked_function_is_traced(tmp_path: Path) -> None:
    """As one that has none; a reproduction of it too."""
    wanted = _twice(lambda log: _marked(), contextlib.nullcontext())
    with ca.enable(backend="aot_eager", cache_dir=False) as used:
        for _ in range(3):
            assert_same(_twice(lambda log: _marked(), contextlib.nullcontext()), wanted, bitwise=False)
    assert not used.stats().failures, used.last
    assert used.last is not None and used.last.graph is not None
    graph = used.last.graph
    assert len(graph.regions) == 1, "it was traced"
    graph.save(tmp_path / "backward.zip")
    compared = ca.load(tmp_path / "backward.zip").compare("eager")
    assert compared.compiles and compared.is_rounding and not compared.reasons


# ---- errors ---------------------------------------------------------------------------------------------------------


def _hooked() -> Tensor:
    log: list[Any] = []
    x, w = leaf(3), leaf(3)
    early = Multiplied.apply(x, w, log)
    node_of(early).register_hook(lambda given, taken: None)
    return early.sum() + (x.sin() * w.cos()).sum()


def _with_anomaly() -> Tensor:
    loss, _ = PROGRAMS["leaves"]([])

    def turn_on(gradient: Tensor) -> None:
        torch.autograd.set_detect_anomaly(True)

    loss.register_hook(turn_on)
    return loss


class _Within(Function):
    """Calls what it is given in its ``backward``; has a ``ctx`` to give away."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[Any], Any]) -> Tensor:
        ctx.act = act
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.act(ctx)
        return gradient * 1, None


def _of_another(log: list[Any]) -> Tensor:
    """One asks of the ``ctx`` of one that has run, of one that has not, and a hook of either."""
    x = leaf(3)
    first = _Within.apply(x, lambda ctx: log.append(raised(lambda: buffers_of(node_of(second)))))
    second = _Within.apply(first, lambda ctx: log.append(raised(lambda: buffers_of(node_of(first)))))
    first.register_hook(lambda gradient: log.append(raised(lambda: buffers_of(node_of(first)))))
    return second.sum() + x.sin().sum()


def _of_another_thread(log: list[Any]) -> Tensor:
    """It is in no backward."""
    x = leaf(3)

    def act(ctx: Any) -> None:
        log.extend(in_threads(lambda: raised(lambda: buffers_of(ctx))))

    return _Within.apply(x, act).sum() + x.sin().sum()


def _errors(log: list[Any], kind: str) -> Any:
    torch.manual_seed(1)
    losses = {"hooks": _hooked, "anomaly mode": _with_anomaly}
    loss = losses[kind]() if kind in losses else {"another": _of_another, "a thread": _of_another_thread}[kind](log)
    try:
        log.append(raised(loss.backward))
    finally:
        torch.autograd.set_detect_anomaly(False)
    return log


@pytest.mark.filterwarnings("ignore:.*nomaly")
@pytest.mark.parametrize("kind", ["hooks", "another", "a thread", "anomaly mode"])
def test_errors_are_the_engines(kind: str) -> None:
    """In a compiled backward, at its first run and at hits."""
    if kind == "anomaly mode":
        with torch.autograd.set_detect_anomaly(True):
            wanted = raised(PROGRAMS["leaves"]([])[0].backward)
            with ca.enable(backend="eager", cache_dir=False):
                found = [raised(PROGRAMS["leaves"]([])[0].backward) for _ in range(3)]
        assert found == [wanted] * 3 and (wanted is not None) == HAS_BUFFERS
        return
    wanted = _errors([], kind)
    with ca.enable(backend="eager", cache_dir=False) as used:
        assert [_errors([], kind) for _ in range(3)] == [wanted] * 3
    assert used.stats().hits >= 2
    assert any(each is not None for each in wanted) == HAS_BUFFERS


@pytest.mark.filterwarnings("ignore:.*nomaly")
@pytest.mark.parametrize("kind", ["hooks", "another", "a thread", "anomaly mode"])
@pytest.mark.usefixtures("extension")
def test_errors_are_the_engines_in_the_own_loop(kind: str) -> None:
    def run(around: Any) -> Any:
        with around:
            return _errors([], kind)

    found = beside(run)
    assert any(each is not None for each in found) == HAS_BUFFERS


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_marked_function_with_a_hook(backend: str) -> None:
    """It raises as on eager, and so it does once it was traced without the hook."""
    wanted = raised(_marked(hook=True)[0].backward)
    with ca.enable(backend=backend, cache_dir=False):
        for hook in (False, True, False, True):
            assert raised(_marked(hook)[0].backward) == (wanted if hook else None)


def test_outside_of_a_backward() -> None:
    """A ``ctx`` that somebody has kept."""

    def run() -> Any:
        kept: list[Any] = []
        x = leaf(3)
        made = _Within.apply(x, kept.append)
        before = raised(lambda: buffers_of(node_of(made)))
        (made.sum() + x.exp().sum()).backward()
        return before, raised(lambda: buffers_of(kept[0]))

    wanted = run()
    with ca.enable(backend="eager", cache_dir=False):
        assert [run() for _ in range(3)] == [wanted] * 3
    assert run() == wanted
    assert (wanted[0] is not None) == HAS_BUFFERS


# ---- threads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_loop", [False, True])
def test_two_threads_in_one_function(own_loop: bool, request: pytest.FixtureRequest) -> None:
    """While one is in it compiled, which has none, the engine's own backward of another shows its sums."""
    if own_loop:
        request.getfixturevalue("extension")
    inside, done = threading.Event(), threading.Event()
    shown: dict[str, list[bool]] = {}
    here = threading.local()

    class Waits(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            if here.name == "compiled":
                inside.set()
                assert done.wait(60)
            (total,) = buffers_of(ctx)
            shown.setdefault(here.name, []).append(total is not None)
            if total is None:
                return gradient * 1
            total.add_(gradient)
            return None

    x = leaf(3)
    y = x.exp()
    made = Waits.apply(y)
    loss = made.sum() + y.sin().sum()

    used = session(backend="aot_eager") if own_loop else None  # for which nothing is compiled
    with contextlib.nullcontext() if used is None else used:
        leaf(3).exp().sum().backward()  # the extension is loaded

    def compiled() -> Any:
        here.name = "compiled"
        with ca.enable(backend="eager", cache_dir=False) as compiles:
            loss.backward(retain_graph=True)
        return compiles.stats().bypasses

    def eager() -> None:
        here.name = "eager"
        assert inside.wait(60)
        try:
            with ca.disable() if used is None else used:
                for _ in range(3):
                    loss.backward(retain_graph=True)
        finally:
            done.set()

    bypasses, _ = in_threads(compiled, eager)
    assert used is None or used.stats().own_loop > 1
    if own_loop:  # the first one is found to have no compiled code once it was handed over, and its calls are run
        assert len(shown["eager"]) == 3 and all(shown.pop("eager")[1:]) == HAS_BUFFERS
    assert not bypasses and shown == {"compiled": [False]} | ({} if own_loop else {"eager": [HAS_BUFFERS] * 3})
    assert x.grad is not None
    found, x.grad = x.grad, None
    here.name = "after"
    for _ in range(4):
        loss.backward(retain_graph=True)
    assert_same([found], [x.grad])


def test_anomaly_mode_of_another_thread() -> None:
    """It is of the whole process, and AOTAutograd has it on while it traces in any thread: a step goes on without."""
    wanted = _twice(PROGRAMS["leaves"], contextlib.nullcontext(), keep=False)

    def run() -> list[Tensor]:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            return _twice(PROGRAMS["leaves"], contextlib.nullcontext(), keep=False)

    for settings in ({}, {"on_miss": "eager"}):
        with ca.enable(backend="eager", cache_dir=False, **settings):  # type: ignore[arg-type]
            for _ in range(3):
                assert_same(run(), wanted)
        ca.reset()


@pytest.mark.usefixtures("extension")
def test_a_backward_inside_after_a_sum_was_read() -> None:
    """Eager raises, since its queue might run other nodes meanwhile. The own loop has none, and runs it."""

    def run(around: Any, ask_first: bool) -> list[Any]:
        class Nests(Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 1

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Any:
                sums = buffers_of(ctx) if ask_first else ()
                with torch.enable_grad():
                    inner = gradient.detach().requires_grad_()
                    inner.sin().sum().backward()
                if inner.grad is None:
                    return None
                if sums and sums[0] is not None:
                    sums[0].add_(inner.grad)
                    return None
                return inner.grad

        torch.manual_seed(1)
        x = leaf(3)
        loss = Nests.apply(x).sum() + x.sin().sum()
        with around:
            failed = raised(loss.backward)
        return [failed, x.grad]

    failed, _ = run(contextlib.nullcontext(), True)
    assert (failed is not None) == HAS_BUFFERS
    wanted = run(contextlib.nullcontext(), False)[1]
    used = session()
    for around in (used, used, ca.enable(backend="eager", cache_dir=False)):
        failed, found = run(around, True)
        assert failed is None
        assert_same([found], [wanted])
    assert used.stats().own_loop == used.stats().backwards
