"""The walk in C++ decides as the engine does, and finds what the engine hands over."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import random
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compiled_autograd as ca
from compiled_autograd.cache.graphs import CompiledGraph
from compiled_autograd.cache.variants import Handover, Shapes, tensor_check
from compiled_autograd.engine.call import Call, HandedOver
from compiled_autograd.engine.seam import hand_over
from compiled_autograd.ir.order import order_shows
from compiled_autograd.native.library import Library, why_unsupported
from compiled_autograd.native.self_check import why_wrong

from .both_walks import assert_same, library_of
from .fuzz import execute
from .fuzz.backward import real
from .fuzz.generate import generate
from .helpers import ROOT, in_threads, resident_pages, switching_every
from .own_loops import looking_on

_SECONDS_TO_BUILD = 600.0


@pytest.fixture(scope="module")
def native(request: pytest.FixtureRequest) -> Any:
    """The extension, built once for all runs of the tests."""
    return library_of(request.config).module()


def _ones(*outputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(map(torch.ones_like, outputs))


def _on(act: Callable[..., Any], loss: Tensor, *more: Any) -> Any:
    """Call a method of the extension with a tape that is to begin with ones."""
    return act([loss], _ones(loss), *more)


def _seam(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    settings: Any,
    inputs: Sequence[Tensor] = (),
    captures: bool = False,
) -> HandedOver | None:
    """What the engine hands over; None where it refuses. The tape is gone then."""
    call = Call(tuple(outputs), tuple(gradients), False, False, tuple(inputs), True, not captures)
    given = hand_over(call, settings, None)
    return given if isinstance(given, HandedOver) else None


def _settings() -> Any:
    return ca.enable(backend="eager", cache_dir=False, tune=False).settings


# ---- both walks, side by side ----------------------------------------------------------------------------------------


class Both:
    """Has both walk each tape, and compares. The plans of a structure are kept by the seam's graph for it."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.settings = _settings()
        self.plans: dict[CompiledGraph, list[Any]] = {}
        self.serves: dict[int, list[Callable[[Handover], bool]]] = {}
        self.has_inputs: dict[int, bool] = {}
        self.counts: Counter[str] = Counter()

    def walk(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor] = (),
        captures: bool = False,
    ) -> None:
        """Compare what the two make of a tape."""
        asked = (outputs, gradients, inputs, captures)
        learnt = {shows: self.native.learn(outputs, gradients, shows, inputs, captures) for shows in (False, True)}
        found = {
            graph: answer
            for graph, plans in self.plans.items()
            for plan in plans
            if not isinstance(answer := plan.compare(*asked), str)
        }
        fresh = learnt[True] if isinstance(learnt[True], str) else learnt[True].compare(*asked)
        handed = _seam(outputs, gradients, self.settings, inputs, captures)
        if handed is None:
            self.counts["refused by the engine"] += 1
            assert not found
            return
        assert set(found) <= {handed.graph}
        if isinstance(fresh, str):
            self.counts[f"refused: {fresh}"] += 1
            assert not found
            return
        assert_same(fresh, handed.handover)
        if handed.graph in found:
            self.counts["hit"] += 1
            self.counts["hit with inputs"] += bool(inputs)
            self._compare_variants(handed.graph, found[handed.graph], outputs, gradients, handed.handover)
            return
        # Where all leaves are inputs the engine's structure may be that of a backward without any.
        with_inputs = bool(inputs) or any(self.has_inputs[id(plan)] for plan in self.plans.get(handed.graph, ()))
        kind = "stricter" if handed.graph in self.plans else "learnt"
        self.counts[f"{kind} with inputs" if with_inputs and kind == "stricter" else kind] += 1
        plan = learnt[order_shows(handed.graph.tape, bitwise=True) or order_shows(handed.graph.tape, bitwise=False)]
        self.plans.setdefault(handed.graph, []).append(plan)
        self.serves[id(plan)] = [_serves_like(handed.handover)]
        self.has_inputs[id(plan)] = bool(inputs)

    def _compare_variants(self, graph: Any, found: Any, outputs: Any, gradients: Any, handover: Handover) -> None:
        assert_same(found, handover)
        expected = [
            [index for index, serves in enumerate(self.serves[id(plan)]) if serves(handover)]
            for plan in self.plans[graph]
        ]
        assert [found[0]] in [indices or [-1] for indices in expected]
        self.counts["variant" if found[0] >= 0 else "shape miss"] += 1


def _serves_like(handover: Handover) -> Callable[[Handover], bool]:
    """What ``Variant.serves`` asks of what was handed over."""
    shapes = Shapes.of(handover)
    check = tensor_check(handover.tensors, shapes.tensors)
    scalars = list(handover.scalars)
    return lambda other: shapes.serves(other.sizes) and scalars == other.scalars and check(*other.tensors)


def _run_program(both: Both, seed: int) -> None:
    """The tapes of a random program (and of its cousin), with what a backward leaves in ``.grad`` in between."""
    program = generate(seed)
    states = [execute.State(program)]
    if program.cousin >= 0:
        states.append(execute.State(program.varied()))
    for step in range(len(program.sizes)):
        for state in states:
            state.before_step(step)
            acts: list[Any] = [both.walk, "to some", _backward]
            for act in acts:
                pool = execute.forward(state, step)
                if act == "to some":
                    inputs, captures = _some(pool, seed)
                    if not inputs:
                        continue
                    act = functools.partial(both.walk, inputs=inputs, captures=captures)
                outputs = [pool[index] for index in program.outputs]
                outputs = [each for each in dict.fromkeys(outputs) if each.grad_fn is not None]
                if not outputs:
                    return
                if program.mode in ("sum", "mean_square"):
                    outputs = [sum(map(real, outputs))]  # type: ignore[list-item]
                    act(outputs, _ones(*outputs))
                else:
                    act(outputs, execute._gradients(program, outputs, step))


def _some(pool: Sequence[Tensor], seed: int) -> tuple[list[Tensor], bool]:
    """Inputs for a backward, the same for tapes of one program, and whether their gradients are captured: else they
    are leaves."""
    choose = random.Random(seed)
    captures = choose.random() < 0.7
    inputs = choose.choices(pool, k=choose.randint(1, 4))
    return [each for each in inputs if each.requires_grad and (captures or each.is_leaf)], captures


def _backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    with contextlib.suppress(Exception):  # of tapes changed in place, and of hooks that are given no gradient
        torch.autograd.backward(outputs, gradients)


def _compare_programs(native: Any, seeds: range) -> Counter[str]:
    """Each tape meets the plans of all that came before."""
    ca.reset()
    both = Both(native)
    for seed in seeds:
        _run_program(both, seed)
    return both.counts


@pytest.mark.parametrize("first", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in range(20, 120, 20))])
def test_random_tapes(native: Any, first: int) -> None:
    counts = _compare_programs(native, range(first, first + 20))
    assert counts["hit"] > counts["learnt"] > 0
    assert counts["variant"] > 0 < counts["hit with inputs"]
    assert counts["stricter"] == 0
    assert counts["stricter with inputs"] <= counts["hit with inputs"] / 10, (
        "of what leads to no input, edges are asked"
    )


@pytest.mark.slow
def test_many_random_tapes(native: Any) -> None:
    counts: Counter[str] = Counter()
    for first in range(1000, 3000, 50):
        counts += _compare_programs(native, range(first, first + 50))
    assert counts["hit"] > counts["learnt"] > 1000
    assert counts["stricter"] < counts["hit"] / 1000, "pieces of a tensor that nobody used count here alone"
    assert counts["stricter with inputs"] <= counts["hit with inputs"] / 10, (
        "of what leads to no input, edges are asked"
    )


# ---- planted differences ---------------------------------------------------------------------------------------------


def _leaves(count: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, requires_grad=True) for _ in range(count)]


def _tape(x: Tensor, y: Tensor, exponent: float = 2, hooked: bool = False, crossed: bool = False) -> Tensor:
    first, second = (x + y).unbind()
    if crossed:
        first, second = second, first
    left, right = first.sin(), second.cos()
    if hooked:
        left.register_hook(lambda grad: None)
    return (left.pow(exponent) + right * y[0]).sum()


def _frozen(value: Tensor) -> Tensor:
    return value.detach().clone()


def _swapped_leaves(x: Tensor, y: Tensor) -> Tensor:
    """As :func:`_tape`, but for the leaf that the product at its end is with."""
    first, second = (x + y).unbind()
    left, right = first.sin(), second.cos()
    return (left.pow(2) + right * x[0]).sum()


def _with_grad(x: Tensor, y: Tensor) -> Tensor:
    x.grad = torch.zeros_like(x)
    return _tape(x, y)


_PLANTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "exponent": lambda x, y: _tape(x, y, 3),
    "kind of exponent": lambda x, y: _tape(x, y, 2.5),
    "another input of the same node": lambda x, y: _tape(x, y, crossed=True),
    "leaves swapped": _swapped_leaves,
    "hook": lambda x, y: _tape(x, y, hooked=True),
    "dtype": lambda x, y: _tape(x.detach().double().requires_grad_(), y.detach().double().requires_grad_()),
    "requires_grad": lambda x, y: _tape(x, _frozen(y)),
    "one node fewer": lambda x, y: (x.unbind()[0].sin().pow(2) + y.unbind()[1].cos() * y[0]).sum(),
    "one node more": lambda x, y: _tape(x, y).neg().neg(),
    "an edge fewer": lambda x, y: _tape(x, x),
    "a gradient that was there": _with_grad,
}


@pytest.mark.parametrize("planted", _PLANTED.values(), ids=_PLANTED)
def test_a_planted_difference_is_a_miss(native: Any, planted: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, y = _leaves()
    plan = native.learn([_tape(x, y)], _ones(_tape(x, y)), True)
    same = _on(_seam, _tape(x, y), _settings())
    loss = _tape(x, y)
    assert _on(plan.compare, loss)[0] == 0
    other = planted(x, y)
    assert isinstance(_on(plan.compare, other), str)
    handed = _seam([other], _ones(other), _settings())  # and so it is to the engine
    assert same is not None and handed is not None and handed.graph is not same.graph


def test_a_difference_in_shape_alone_is_another_variant(native: Any) -> None:
    x, y = _leaves()
    plan = _on(native.learn, _tape(x, y), True)
    wide = [torch.randn(2, 5, requires_grad=True) for _ in range(2)]
    loss = _tape(*wide)
    assert _on(plan.compare, loss)[0] == -1
    assert plan.add_variant([loss], _ones(loss))[0] == 1
    assert _on(plan.compare, loss)[0] == 1
    strided = [torch.randn(3, 2).t().requires_grad_() for _ in range(2)]
    loss = _tape(*strided)
    assert _on(plan.compare, loss)[0] == -1
    loss = _tape(x, y)
    assert plan.add_variant([loss], _ones(loss))[0] == 0


def test_writes_into_views_by_other_functions_are_told_apart(native: Any) -> None:
    """The engine's key has one for both, see ``capture/view_writes.py``."""

    def tape(write: str) -> Tensor:
        whole = leaf * 2
        getattr(whole[0], write)()
        return whole.sum()

    leaf = torch.randn(2, 3, requires_grad=True)
    plan = _on(native.learn, tape("sin_"), True)
    assert not isinstance(_on(plan.compare, tape("sin_")), str)
    assert isinstance(_on(plan.compare, tape("cos_")), str)


def test_unused_pieces_are_told_apart(native: Any) -> None:
    plan = _on(native.learn, torch.randn(3, 2, requires_grad=True).unbind()[0].sum(), True)
    assert isinstance(_on(plan.compare, torch.randn(5, 2, requires_grad=True).unbind()[0].sum()), str)


def test_the_dtype_that_a_leaf_wants_is_told_apart(native: Any) -> None:
    x, y = _leaves()
    plan = _on(native.learn, _tape(x, y), True)
    x.grad_dtype = torch.float64
    assert isinstance(_on(plan.compare, _tape(x, y)), str)


def test_another_order_of_creation_is_a_miss_where_it_shows(native: Any) -> None:
    """Three gradients are added up in the order in which the engine runs the nodes that they come from."""

    def tape(order: Sequence[int]) -> Tensor:
        acts = (torch.sin, torch.cos, torch.tanh)
        made = {index: acts[index](leaf) for index in order}
        return (made[0] + made[1] + made[2]).sum()

    leaf = torch.randn(2, 3, requires_grad=True)
    strict = _on(native.learn, tape((0, 1, 2)), True)
    lenient = _on(native.learn, tape((0, 1, 2)), False)
    handed = _on(_seam, tape((0, 1, 2)), _settings())
    assert order_shows(handed.graph.tape, bitwise=True)
    for order, is_same in (((0, 1, 2), True), ((2, 1, 0), False), ((0, 2, 1), False)):
        assert isinstance(_on(strict.compare, tape(order)), tuple) == is_same
        assert isinstance(_on(lenient.compare, tape(order)), tuple)
        assert (_on(_seam, tape(order), _settings()).graph is handed.graph) == is_same


# ---- what is refused -------------------------------------------------------------------------------------------------


class _Double(torch.autograd.Function):
    """Doubles; ``meanwhile`` is called while its node is asked for its key."""

    meanwhile: Callable[[], Any] | None = None

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
        if _Double.meanwhile is not None:
            _Double.meanwhile()
        return (ctx._autograd_function_id,)


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    return lambda act: monkeypatch.setattr(_Double, "meanwhile", staticmethod(act))


def _raising(error: BaseException) -> Callable[[], Any]:
    def act() -> None:
        raise copy.copy(error)  # one that is kept keeps the frames that it was raised in

    return act


def _refusal(native: Any, outputs: Sequence[Any], gradients: Sequence[Any] | None = None) -> str:
    answer = native.learn(outputs, _ones(*outputs) if gradients is None else gradients, True)
    assert isinstance(answer, str)
    return answer


def test_what_is_not_known_is_refused_with_a_reason(native: Any) -> None:
    x, y = _leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value.numpy(), torch.from_numpy):
        packed = (x.detach() * y).sum()
    assert _refusal(native, [packed]) == "saved-tensor hooks"
    assert "no tape" in _refusal(native, [x.detach()])
    assert "undefined" in _refusal(native, [_tape(x, y)], [None])
    assert "gradient for each" in _refusal(native, [_tape(x, y)], [])
    assert "no tensor" in _refusal(native, [torch.autograd.graph.get_gradient_edge(x)], [torch.ones(2, 3)])
    assert "subclass" in _refusal(native, [(x * _Subclass(torch.ones(2, 3))).sum()])
    sparse = torch.sparse.mm(torch.eye(2).to_sparse().requires_grad_(), torch.ones(2, 2)).sum()
    assert "strided" in _refusal(native, [sparse])
    assert "converts" in _refusal(native, [x * y], [torch.ones(7)])


class _Subclass(Tensor):
    pass


def test_a_plan_is_not_for_other_outputs(native: Any) -> None:
    x, y = _leaves()
    plan = _on(native.learn, _tape(x, y), True)
    losses = [_tape(x, y), _tape(x, y)]
    assert isinstance(plan.compare(losses, _ones(*losses)), str)
    assert plan.compare([_tape(x, y)], [None]) == "a gradient that is undefined"


def test_freed_and_changed_tapes_are_refused_and_stay_as_they_are(native: Any) -> None:
    x, y = _leaves()
    plan = _on(native.learn, _tape(x, y), True)
    freed = _tape(x, y)
    freed.backward()
    x.grad = y.grad = None
    assert "second time" in _on(plan.compare, freed)
    assert "second time" in _refusal(native, [freed])
    changed = _tape(x, y)
    with torch.no_grad():
        x.mul_(1)
        y.mul_(1)
    assert "modified by an inplace operation" in _on(plan.compare, changed)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed.backward()


def test_an_error_of_a_users_leaves_the_tape_whole(native: Any, meanwhile: Any) -> None:
    x, y = _leaves()
    plan = _on(native.learn, _Double.apply(_tape(x, y)), True)
    loss = _Double.apply(_tape(x, y))
    meanwhile(_raising(ValueError("no key")))
    assert _on(plan.compare, loss) == "no key"
    meanwhile(_raising(KeyboardInterrupt()))
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            _on(plan.compare, loss)
        with pytest.raises(KeyboardInterrupt):
            _on(native.learn, loss, True)
    meanwhile(lambda: None)
    assert _on(plan.compare, loss)[0] == 0
    loss.backward()
    assert x.grad is not None


def test_a_walk_inside_a_walk(native: Any, meanwhile: Any) -> None:
    x, y = _leaves()
    inner = _on(native.learn, _tape(x, y), True)
    outer = _on(native.learn, _Double.apply(_tape(x, y)), True)
    seen = []

    def act() -> None:
        seen.append(_on(inner.compare, _tape(x, y))[0])

    meanwhile(act)
    assert _on(outer.compare, _Double.apply(_tape(x, y)))[0] == 0
    assert seen == [0]


# ---- sizes, threads, memory ------------------------------------------------------------------------------------------


def test_a_long_tape(native: Any) -> None:
    def tape() -> Tensor:
        value = x
        for _ in range(100_000):
            value = value + 1
        return value.sum()

    x = torch.zeros(1, requires_grad=True)
    plan = _on(native.learn, tape(), True)
    assert plan.nodes == 100_003
    assert _on(plan.compare, tape())[0] == 0


def test_threads(native: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    answers: list[Any] = []

    def loss_of(model: nn.Module) -> Tensor:
        return _Double.apply(model(torch.ones(2, 3)).sum())

    plan = _on(native.learn, loss_of(model), True)

    def work() -> None:
        for _ in range(300):
            loss = loss_of(model)
            found = _on(plan.compare, loss)
            answers.append(found if isinstance(found, str) else found[0])

    with switching_every(1e-6):
        in_threads(*[work] * 4)
    assert Counter(answers) == {0: 1200}


def test_nothing_is_kept(native: Any, meanwhile: Any) -> None:
    x, y = _leaves()
    plan = _on(native.learn, _Double.apply(_tape(x, y)), True)
    saved = weakref.ref(x.detach())
    for act in (lambda: None, _raising(ValueError())):
        meanwhile(act)
        kept = torch.randn(2, 3, requires_grad=True)
        saved = weakref.ref(kept)
        loss = _Double.apply(_tape(kept, y))
        _on(plan.compare, loss)
        _on(native.learn, loss, True)
        del kept, loss
        gc.collect()
        assert saved() is None


def test_nothing_leaks(native: Any) -> None:
    x, y = _leaves()
    plan = _on(native.learn, _tape(x, y, hooked=True), True)
    same, other = _tape(x, y, hooked=True), _tape(x, y, 3, hooked=True)
    gradients = _ones(same)

    def walk(times: int) -> None:
        for _ in range(times):
            plan.compare([same], gradients)
            plan.compare([other], gradients)
            plan.compare([same], [None])

    walk(10_000)
    references, before = sys.getrefcount(x), resident_pages()
    walk(34_000)
    assert sys.getrefcount(x) == references
    assert resident_pages() - before < 256


@pytest.mark.slow
def test_under_sanitizers() -> None:
    """The tests of the room and of the fast path, with the extension built to find reads and writes of what is not its
    own."""
    if why_unsupported():
        pytest.skip(f"there is no extension here: {why_unsupported()}")
    names = ("libasan.so", "libubsan.so", "libstdc++.so.6")
    found = [subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True) for name in names]
    libraries = [each.stdout.strip() for each in found]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("g++ has no sanitizers here")
    options = {"ASAN_OPTIONS": "detect_leaks=0", "LD_PRELOAD": " ".join(libraries), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "tests.sanitized", "-q", "-k", "not leaks"]
    command += [f"tests/test_native_{what}.py" for what in ("walk", "hits", "runs")]
    command += [f"tests/test_fast_path{what}.py" for what in ("", "_odd", "_long")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


# ---- the self-check --------------------------------------------------------------------------------------------------


def test_the_self_check_finds_a_walk_that_is_wrong(native: Any) -> None:
    class Wrong:
        """Gives the tensors in another order, or takes all tapes for the same."""

        def __init__(self, plan: Any, how: str) -> None:
            self.plan, self.how = plan, how

        def compare(self, *given: Any) -> Any:
            found = self.plan.compare(*given)
            if self.how == "order" and not isinstance(found, str):
                return (found[0], found[1][::-1], *found[2:])
            return self.known if isinstance(found, str) and self.how == "same" else self._keep(found)

        def _keep(self, found: Any) -> Any:
            self.known = found
            return found

    assert why_wrong(native) == ""
    for how, said in (("order", "other tensors"), ("same", "for another one")):
        methods = {"learn": lambda _, *given, how=how: Wrong(native.learn(*given), how), "apart": native.apart}
        module = type("Module", (), methods)()
        assert said in why_wrong(module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_self_check_goes_by_no_default_of_the_users(native: Any, dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        torch.set_default_device("meta")
        assert why_wrong(native) == ""
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


@pytest.mark.parametrize("state", looking_on(lambda *given: None))
def test_the_self_check_shows_nothing_of_itself(request: pytest.FixtureRequest, native: Any, state: str) -> None:
    """The extension is loaded in whatever state the thread is in that first needs it."""
    found = Library(library_of(request.config)._folder)
    seen: list[Any] = []
    with looking_on(seen.append)[state]():
        assert found.module() is not None and found.reason == ""
    assert not seen


def test_a_peek_tells_first_nodes_apart(native: Any) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * grad

    class Triple(Double):
        pass

    x = torch.randn(3, requires_grad=True)
    roots = [Double.apply(x), Triple.apply(x), x.exp(), x.sin().exp(), x.exp() + x.exp(), x + x.exp()]
    peeks = [native.peek((root,), 0, 1) for root in roots]
    peeks += [native.peek((x.exp(),), 1, 1), native.peek((x.exp(),), 0, 2), native.peek((x.exp(), x.exp()), 0, 1)]
    assert len(set(peeks)) == len(peeks)
    small = [(inputs, number) for inputs in range(40) for number in range(40)]
    assert len({native.peek((x,), *each) for each in small}) == len(small), "numbers are told apart on their own"
    assert [native.peek((make(x),), 0, 1) for make in (Double.apply, torch.exp)] == [peeks[0], peeks[2]]
    deep = x
    for _ in range(70):
        deep = deep.exp()
    assert native.peek((deep,), 0, 1) == native.peek((deep.exp(),), 0, 1), "of 64 nodes"
    assert native.peek((torch.autograd.graph.get_gradient_edge(x.exp()),), 0, 1) is None
