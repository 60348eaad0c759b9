"""``traceable``: the ``backward`` of a marked function is compiled, and depends on what it says it does."""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from compiled_autograd.runtime.program import AccumulateStep, OpaqueStep, RegionStep

from .helpers import assert_close, assert_same

BACKENDS = ["aot_eager", "inductor"]
INDUCTOR_IS_SLOW = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@ca.traceable
class Scaled(torch.autograd.Function):
    """``x.sin() * factor``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        ctx.tensor = x.detach()
        return x.sin() * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * x.cos() * ctx.factor, None


class _Calls:
    """Counts the calls of a function's ``backward``, which may do nothing of that kind itself."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.code, self.count = function.backward.__code__, 0  # type: ignore[attr-defined]

    def __enter__(self) -> _Calls:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: Any, event: str, argument: object) -> None:
        self.count += event == "call" and frame.f_code is self.code


def _train(
    session: Any,
    factors: list[Any],
    rows: list[int] | None = None,
    function: Callable[[torch.Tensor, Any], torch.Tensor] = Scaled.apply,
) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
    found: list[torch.Tensor | None] = []
    for factor, count in zip(factors, rows or itertools.repeat(5), strict=False):
        net.zero_grad()
        x = torch.linspace(-1, 1, 6 * count).view(count, 6)
        loss = function(net[1](function(net[0](x), factor)), factor).square().sum()
        with session:
            loss.backward()
        found += [parameter.grad for parameter in net.parameters()]
    return found


def _steps(session: ca.Session) -> list[type]:
    assert session.last is not None and session.last.graph is not None
    return [type(step) for step in session.last.graph.variants[-1].program.schedule.steps]


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_part_of_one_region_and_is_called_no_more(backend: str) -> None:
    session = ca.enable(backend=backend)
    factors = [2.0] * 6
    wanted = _train(ca.disable(), factors)
    with _Calls(Scaled) as first:
        assert_close(_train(session, factors), wanted)
    assert _steps(session) == [RegionStep, AccumulateStep]
    stats = session.stats()
    assert (stats.captures, stats.compiles, stats.hits, stats.failures) == (1, 1, 5, 0)
    assert 0 < first.count < 2 * len(factors)  # traced once for each of the two, and called while it was proved
    with _Calls(Scaled) as later:
        assert_close(_train(session, factors), wanted)
    assert later.count == 0


def test_a_bitwise_backend_calls_it() -> None:
    session = ca.enable(backend="eager")
    factors = [2.0] * 3
    wanted = _train(ca.disable(), factors)
    with _Calls(Scaled) as calls:
        assert_same(_train(session, factors), wanted)
    assert OpaqueStep in _steps(session) and calls.count == 2 * len(factors)
    assert session.stats().hits == 2


@pytest.mark.parametrize("backend", INDUCTOR_IS_SLOW)
@pytest.mark.parametrize(
    ("factors", "compiles"),
    [
        ([1, 2, 3, 1, 2, 3], 3),
        ([1, 1.0, True, 1, 1.0, True], 3),
        ([0.0, -0.0, 0.0, -0.0], 2),
        ([float("nan")] * 3, 1),
    ],
)
def test_plain_attributes_are_compiled_for_once_each(backend: str, factors: list[Any], compiles: int) -> None:
    session = ca.enable(backend=backend, check=2)
    wanted = _train(ca.disable(), factors)
    found = _train(session, factors)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
    # Code that two values share is compiled once; what counts is that none serves another's.
    assert session.stats().compiles <= compiles and session.stats().captures == 1
    assert session.stats().hits == len(factors) - compiles
    graph = session.last.graph if session.last else None
    assert graph is not None and len(graph.variants) == compiles


@pytest.mark.parametrize("backend", INDUCTOR_IS_SLOW)
def test_other_shapes(backend: str) -> None:
    rows = [5, 7, 9, 4, 5, 12]
    session = ca.enable(backend=backend, check=2)
    assert_close(_train(session, [2.0] * 6, rows), _train(ca.disable(), [2.0] * 6, rows))
    assert session.stats().captures == 1 and session.stats().compiles == 2 and session.stats().failures == 0


_FACTOR: Any = 2.0


def _made(closed: Any, default: Any) -> type[torch.autograd.Function]:
    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, factor: Any) -> torch.Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor, by: Any = default) -> tuple[torch.Tensor, None]:
            return grad * closed * by * _FACTOR, None

    return ca.traceable(Made)


@pytest.mark.parametrize("backend", INDUCTOR_IS_SLOW)
def test_closures_defaults_and_variables_of_the_module_are_looked_at(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ca.enable(backend=backend)
    for _ in range(2):
        for closed, default, variable in [(1.0, 1.0, 1.0), (3.0, 1.0, 1.0), (1.0, 3.5, 1.0), (1.0, 1.0, 4.0)]:
            monkeypatch.setitem(globals(), "_FACTOR", variable)
            function = _made(closed, default).apply
            wanted = _train(ca.disable(), [0], function=function)
            assert_close(_train(session, [0], function=function), wanted)
    assert session.stats().captures == 1 and session.stats().hits == 4 and session.stats().failures == 0


@ca.traceable
class Changed(torch.autograd.Function):
    """Breaks its word: what it gives depends on who calls it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: Any) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * (2.0 if type(grad) is torch.Tensor else 3.0), None


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_that_depends_on_something_else_is_found_at_its_first_run(backend: str) -> None:
    session = ca.enable(backend=backend)
    wanted = _train(ca.disable(), [0], function=Changed.apply)
    with pytest.warns(UserWarning, match="mismatch"):
        assert_close(_train(session, [0], function=Changed.apply), wanted)
    for _ in range(3):  # from now on it is called, once each at each step
        with _Calls(Changed) as calls:
            assert_close(_train(session, [0], function=Changed.apply), wanted)
        assert calls.count == 2


@ca.traceable
class Looking(torch.autograd.Function):
    """Breaks its word, and does not let that be seen while it is traced."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: Any) -> torch.Tensor:
        ctx.tensor = x.detach()
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * (2 if type(ctx).__name__ == "LookingBackward" else 3), None


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_compared_with_the_real_backward_and_its_real_context(backend: str) -> None:
    """And not with what was traced, run once more."""
    session = ca.enable(backend=backend)
    wanted = _train(ca.disable(), [0] * 4, function=Looking.apply)
    with pytest.warns(UserWarning, match="mismatch"):
        assert_close(_train(session, [0] * 4, function=Looking.apply), wanted)
    assert session.stats().backwards == 4 and session.stats().failures == 1


class _Odd:
    """What a ``backward`` may not do while it is traced."""

    @staticmethod
    def tensor(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.tensor

    @staticmethod
    def looks_through(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * vars(ctx).get("factor", 1.0)

    @staticmethod
    def sets(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        ctx.seen = True
        return grad * 2

    @staticmethod
    def number(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float(grad.detach().sum())

    @staticmethod
    def writes(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0].mul_(2.0) * grad

    @staticmethod
    def prints(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        print("called")  # noqa: T201
        return grad * 2

    @staticmethod
    def counts(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _COUNTS["calls"] += 1
        return grad * 2

    @staticmethod
    def catches(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        try:
            return grad + 0 * ctx.tensor
        except TypeError:
            return grad * 3

    @staticmethod
    def configured(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * _CONFIG.factor

    @staticmethod
    def of_a_class(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * _Config.factor

    @staticmethod
    @torch.autograd.function.once_differentiable
    def inside_a_wrapper(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * _CONFIG.factor


class _Config:
    factor = 3.0


_CONFIG = _Config()
_COUNTS = {"calls": 0}


@pytest.mark.parametrize("name", [name for name in vars(_Odd) if not name.startswith("_")])
def test_what_cannot_be_traced_is_called_at_each_step(name: str) -> None:
    body = getattr(_Odd, name)

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, factor: Any) -> torch.Tensor:
            ctx.save_for_backward(x.detach().clone())
            ctx.tensor, ctx.factor = x.detach().clone(), 3.0
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return body(ctx, grad), None

    ca.traceable(Odd)
    wanted = _train(ca.disable(), [0] * 4, function=Odd.apply)
    session = ca.enable(backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = _COUNTS["calls"]
        assert_close(_train(session, [0] * 4, function=Odd.apply), wanted)
    assert _COUNTS["calls"] - before == 8 * (name == "counts")
    assert _steps(session).count(OpaqueStep) == 2 and session.stats().hits == 3


def _with_backward(backward: Any, value: Any = None) -> Any:
    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, factor: Any) -> torch.Tensor:
            ctx.value = value
            return x * 1.0

    Made.backward = staticmethod(backward)  # type: ignore[method-assign, assignment]
    return ca.traceable(Made).apply


def _class_with(number: float) -> type:
    class Held:
        factor = number

    return Held


_SAME_TEXT = "def backward(ctx, grad):\n    return times(grad), None\n"


def _of_module(by: float) -> Any:
    """Of a module of its own, whose text others have too."""
    module: dict[str, Any] = {"__name__": "one_of_many", "times": (lambda: lambda grad: grad * by)()}
    exec(compile(_SAME_TEXT, "one_of_many.py", "exec"), module)
    return module["backward"]


def _gets(by: float) -> Any:
    get = {"scale": by}.get
    return lambda ctx, grad: (grad * get("scale"), None)


def _holds(by: float) -> Any:
    held = _class_with(by)
    return lambda ctx, grad: (grad * held.factor, None)  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [_of_module, _gets, _holds])
def test_what_only_looks_alike_is_told_apart(make: Callable[[float], Any]) -> None:
    made = {by: _with_backward(make(by)) for by in (2.0, 3.0)}
    session = ca.enable(backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for by in (2.0, 2.0, 2.0, 3.0, 3.0, 2.0):
            wanted = _train(ca.disable(), [0], function=made[by])
            assert_close(_train(session, [0], function=made[by]), wanted)
    assert session.stats().backwards == 6 and session.stats().bypasses == {}


def _nested(levels: int, width: int) -> list[Any]:
    value: list[Any] = [1.0]
    for _ in range(levels):
        value = [value] * width
    return value


def _inside_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize("value", [_inside_itself(), _nested(2000, 1), _nested(22, 2)], ids=["itself", "deep", "wide"])
def test_attributes_that_have_no_end(value: Any) -> None:
    function = _with_backward(lambda ctx, grad: (grad * 2, None), value)
    session = ca.enable(backend="aot_eager")
    wanted = _train(ca.disable(), [0] * 3, function=function)
    assert_close(_train(session, [0] * 3, function=function), wanted)
    assert session.stats().hits == 2 and session.stats().failures == 0


def test_functions_in_the_closures_of_one_another_are_looked_at_once() -> None:
    from compiled_autograd.user_code.marked_code import Code

    def tangle(width: int) -> Any:
        functions: list[Any] = []

        def make(at: int) -> Any:
            cells = [*functions]
            a, b, c = (cells + [None] * 3)[:3]
            return lambda: (a, b, c, at)

        for at in range(width):
            functions.insert(0, make(at))
        return functions[0]

    class Counting(Code):
        asked = 0

        def of(self, function: Any, depth: int) -> Any:
            self.asked += 1
            return super().of(function, depth)

    looked_at = Counting(strictly=False)
    looked_at.of(tangle(40), 0)
    assert 40 > len(looked_at._seen) > 8 and looked_at.asked <= 1 + 3 * len(looked_at._seen)


def _times(by: float, ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return grad * by * ctx.factor, None


def test_one_that_is_no_python_function_is_called() -> None:
    class Partial(Scaled):
        backward = staticmethod(functools.partial(_times, 3.0))  # type: ignore[assignment]

    ca.traceable(Partial)
    factors = [1.0, 2.0, 1.0, 2.0]
    session = ca.enable(backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _train(session, factors, function=Partial.apply)
    assert_close(found, _train(ca.disable(), factors, function=Partial.apply))
    assert OpaqueStep in _steps(session) and session.stats().hits == 3


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"traceable takes a subclass of torch\.autograd\.Function"):
        ca.traceable(nn.Linear)  # type: ignore[type-var]


def test_a_subclass_is_not_marked() -> None:
    class Sub(Scaled):
        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return grad * 7, None

    session = ca.enable(backend="aot_eager")
    wanted = _train(ca.disable(), [2.0] * 3, function=Sub.apply)
    assert_same(_train(session, [2.0] * 3, function=Sub.apply), wanted)
    assert OpaqueStep in _steps(session)


class _Step(torch.autograd.Function):
    """One of several ways, with several inputs and outputs, some of which get no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, y: torch.Tensor, way: str, numbers: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, y if way != "one" else None)
        ctx.way, ctx.numbers = way, numbers
        ctx.aside = x.detach()
        if way == "lazy":
            ctx.set_materialize_grads(False)
        return x * y, x.t() + y.t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, first: Any, second: Any) -> tuple[Any, ...]:
        x, y = ctx.saved_tensors
        if ctx.way == "lazy" and (first is None or second is None):
            return (first if second is None else second.t()), None, None, None
        to_x = first * (y if y is not None else 1.5) + second.t() * ctx.numbers["scale"]
        to_y = (first * x + second.t()).sin() if ctx.needs_input_grad[1] else None
        if ctx.numbers.get("view"):
            to_x = to_x.t().contiguous().t()
        return to_x, to_y, None, None


def _random_training(seed: int, session: Any, function: Any) -> list[torch.Tensor | None]:
    random = Random(seed)
    generator = torch.Generator().manual_seed(seed)  # the process's own is that of other threads too
    leaves = [torch.randn(6, 6, requires_grad=True, generator=generator) for _ in range(3)]
    ways = random.choices(["both", "one", "lazy"], k=2)
    keep, rows = random.random() < 0.3, [6, 6, 6] if random.random() < 0.5 else [6, 3, 5]
    found: list[torch.Tensor | None] = []
    used = random.choice(["all", "first", "second"])
    frozen, hooked = random.random() < 0.3, random.random() < 0.3
    for count in rows:
        numbers = {"scale": random.choice([0.5, 2.0, 2]), "view": random.random() < 0.5}
        x = leaves[0][:count] * 1.0
        y = leaves[1][:count].detach() if frozen else leaves[1][:count] + 0.0
        a, b = function.apply(x, y, ways[0], dict(numbers))
        c, d = function.apply(a.contiguous(), y.tanh(), ways[1], dict(numbers))
        if hooked:
            c.register_hook(lambda grad: None if grad is None else grad * 0.5)
        parts = {"all": [b, c, d], "first": [c], "second": [d, b]}[used]
        loss = sum((each.sin().sum() for each in parts), torch.zeros(())) + leaves[2].square().sum()
        with session:
            loss.backward(retain_graph=keep)
            if keep:
                loss.backward()
        found += [None if each.grad is None else each.grad.clone() for each in leaves]
        if random.random() < 0.5:
            for leaf in leaves:
                leaf.grad = None
    return found


def _compare_random(seeds: range, **settings: Any) -> None:
    ca.traceable(_Step)
    for seed in seeds:
        session = ca.enable(**settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _random_training(seed, session, _Step)
        for one, other in zip(found, _random_training(seed, ca.disable(), _Step), strict=True):
            assert (one is None) == (other is None), seed
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=lambda m, s=seed: f"{s}: {m}")


@pytest.mark.parametrize("check", [True, 2, False])
@pytest.mark.parametrize("seeds", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_random_trainings(check: Any, seeds: int) -> None:
    _compare_random(range(seeds), backend="aot_eager", check=check)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_random_trainings(backend: str) -> None:
    _compare_random(range(100, 400) if backend == "aot_eager" else range(100, 130), backend=backend)


@pytest.mark.parametrize("seeds", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_threads(seeds: int) -> None:
    with ThreadPoolExecutor(4) as pool:
        runs = [
            pool.submit(_compare_random, range(start, start + seeds), backend="aot_eager") for start in (20, 20, 30, 40)
        ]
        for run in runs:
            run.result()
