"""``traceable`` hooks: compiled where they compute alone, called where they do more."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compiled_autograd as ca
from compiled_autograd.runtime.program import AccumulateStep, OpaqueStep, RegionStep

from .helpers import assert_close, assert_same

BACKENDS = ["aot_eager", "inductor"]
_BY: Any = 2.0
_TABLE: dict[str, Any] = {"by": 2.0}
_SEEN: list[Any] = []
_HELD = torch.ones(1)


def clipped(grad: torch.Tensor) -> torch.Tensor:
    return grad.clamp(-0.1, 0.1) * 2


def _steps(session: ca.Session) -> list[type]:
    assert session.last is not None and session.last.graph is not None
    return [type(step) for step in session.last.graph.variants[-1].program.schedule.steps]


Attach = Callable[[torch.Tensor, torch.Tensor, Any], object]


def _on_tensor(leaf: torch.Tensor, value: torch.Tensor, hook: Any) -> None:
    value.register_hook(hook)


def _on_leaf(leaf: torch.Tensor, value: torch.Tensor, hook: Any) -> None:
    leaf.register_hook(hook)


def _before_node(leaf: torch.Tensor, value: torch.Tensor, hook: Any) -> None:
    def before(grads: tuple[torch.Tensor, ...]) -> Any:
        result = hook(grads[0])
        return None if result is None else (result, *grads[1:])

    assert value.grad_fn is not None
    value.grad_fn.register_prehook(_as_marked(before, hook))


def _after_node(leaf: torch.Tensor, value: torch.Tensor, hook: Any) -> None:
    def after(given: tuple[torch.Tensor, ...], got: tuple[torch.Tensor, ...]) -> Any:
        result = hook(given[0])
        return None if result is None else (result + 0 * got[0].sum(), *given[1:])

    assert value.grad_fn is not None
    value.grad_fn.register_hook(_as_marked(after, hook))


def _as_marked(function: Any, hook: Any) -> Any:
    return ca.traceable(function) if "_compiled_autograd_traceable" in vars(hook) else function


ATTACHED = [_on_tensor, _on_leaf, _before_node, _after_node]


def _train(session: Any, hooks: list[Any], attach: Attach = _on_tensor, twice: bool = False) -> list[Any]:
    """One step for each hook; None for a step without one."""
    found: list[Any] = []
    for hook in hooks:
        leaf = torch.linspace(-1, 1, 8).requires_grad_()
        value = (leaf * 1.5).sin()
        after = value.tanh()
        if hook is not None:
            attach(leaf, value, hook)
            if twice:
                attach(leaf, after, hook)
        loss = after.square().sum()
        with session:
            loss.backward()
        found.append(leaf.grad)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("attach", ATTACHED)
@pytest.mark.parametrize("twice", [False, True])
def test_it_is_part_of_one_region(backend: str, attach: Attach, twice: bool) -> None:
    hook = ca.traceable(lambda grad: grad.clamp(-0.1, 0.1) * 2)
    session = ca.enable(backend=backend)
    assert_close(_train(session, [hook] * 5, attach, twice), _train(ca.disable(), [hook] * 5, attach, twice))
    assert _steps(session) == [RegionStep, AccumulateStep]
    stats = session.stats()
    assert (stats.captures, stats.compiles, stats.hits, stats.failures) == (1, 1, 4, 0)


def test_it_is_called_no_more_once_it_was_compared() -> None:
    calls: list[str] = []
    hook = ca.traceable(lambda grad: torch.clamp(grad, -0.1, 0.1))

    def counting(frame: Any, event: str, arg: object) -> None:
        if event == "call" and frame.f_code is hook.__code__:
            calls.append(event)

    session = ca.enable(backend="aot_eager")
    _train(session, [hook] * 5)
    sys.setprofile(counting)
    try:
        _train(session, [hook] * 5)
        assert calls == [] and session.stats().hits == 9
        _train(ca.disable(), [hook])
        assert calls == ["call"]
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("attach", ATTACHED)
def test_a_bitwise_backend_calls_it(attach: Attach) -> None:
    session = ca.enable(backend="eager")
    hooks = [ca.traceable(_scaled_by) for _ in range(4)]
    assert_same(_train(session, hooks, attach), _train(ca.disable(), hooks, attach))
    assert OpaqueStep in _steps(session) and session.stats().hits == 3


def _scaled_by(grad: torch.Tensor, by: float = 3.0) -> torch.Tensor:
    return grad * by


@pytest.mark.parametrize("attach", ATTACHED)
def test_one_that_gives_nothing_changes_nothing(attach: Attach) -> None:
    hook = ca.traceable(lambda grad: None)
    session = ca.enable(backend="aot_eager")
    assert_close(_train(session, [hook] * 4, attach), _train(ca.disable(), [hook] * 4, attach))
    assert _steps(session) == [RegionStep, AccumulateStep] and session.stats().failures == 0


def _made(by: Any) -> Any:
    return ca.traceable(lambda grad: grad * by)


def test_plain_values_around_it_are_compiled_for_once_each() -> None:
    hooks = [_made(by) for by in (2.0, 3.0, 2, 2.0, 3.0, 2)]
    session = ca.enable(backend="aot_eager", check=False)
    assert_close(_train(session, hooks), _train(ca.disable(), hooks))
    stats = session.stats()
    assert (stats.captures, stats.hits, stats.shape_misses, stats.failures) == (1, 3, 2, 0)


@ca.traceable
def _by_constant(grad: torch.Tensor) -> torch.Tensor:
    return grad * _BY * _TABLE["by"] * _helped()


def _helped() -> Any:
    return _BY + 1


def test_variables_of_the_module_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ca.enable(backend="aot_eager", check=False)
    for by, table in [(2.0, 1.0), (3.0, 1.0), (2.0, 5.0), (2.0, 1.0), (3.0, 1.0), (2.0, 5.0)]:
        monkeypatch.setitem(globals(), "_BY", by)
        monkeypatch.setitem(_TABLE, "by", table)
        assert_close(_train(session, [_by_constant]), _train(ca.disable(), [_by_constant]))
    assert session.stats().hits == 3 and session.stats().failures == 0


def test_hooks_that_come_and_go_and_are_marked_or_not() -> None:
    """The engine's key says how many there are, and not which."""
    plain, marked = (lambda grad: grad * 5), ca.traceable(lambda grad: grad * 3)
    hooks = [marked, plain, None, marked, plain, None, marked]
    session = ca.enable(backend="aot_eager", check=False)
    assert_close(_train(session, hooks), _train(ca.disable(), hooks))
    stats = session.stats()
    assert (stats.captures, stats.hits, stats.shape_misses, stats.failures) == (2, 4, 1, 0)


def test_the_order_of_several_hooks_on_one_tensor() -> None:
    order: list[str] = []

    def told(name: str, by: float) -> Any:
        def hook(grad: torch.Tensor) -> torch.Tensor:
            order.append(f"{name} {grad.sum():.4f}")
            return grad + by

        return hook

    def step(session: Any) -> Any:
        leaf = torch.linspace(-1, 1, 8).requires_grad_()
        value = leaf * 1.5
        value.register_hook(told("first", 1.0))
        value.register_hook(ca.traceable(lambda grad: grad * 3))
        value.register_hook(told("last", 2.0))
        loss = value.sin().sum()
        with session:
            loss.backward()
        return leaf.grad

    wanted = step(ca.disable())
    expected, session = order[:], ca.enable(backend="aot_eager")
    for _ in range(4):
        order.clear()
        assert_close([step(session)], [wanted])
        assert order == expected
    assert session.stats().hits == 3


class _More:
    """Hooks that do more than compute."""

    @staticmethod
    def prints(grad: torch.Tensor) -> torch.Tensor:
        print("called")  # noqa: T201
        return grad * 2

    @staticmethod
    def appends(grad: torch.Tensor) -> torch.Tensor:
        _SEEN.append(grad.shape)
        return grad * 2

    @staticmethod
    def keeps(grad: torch.Tensor) -> torch.Tensor:
        _SEEN.append(grad)
        return grad * 2

    @staticmethod
    def calls_one_that_appends(grad: torch.Tensor) -> torch.Tensor:
        _note(1)
        return grad * 2

    @staticmethod
    def counts(grad: torch.Tensor) -> torch.Tensor:
        _TABLE["count"] = _TABLE.get("count", 0) + 1
        return grad * 2

    @staticmethod
    def sets_a_variable(grad: torch.Tensor) -> torch.Tensor:
        global _BY
        _BY = 2.0
        return grad * 2

    @staticmethod
    def sets_an_attribute(grad: torch.Tensor) -> torch.Tensor:
        _More.count = getattr(_More, "count", 0) + 1  # type: ignore[attr-defined]
        return grad * 2

    @staticmethod
    def writes(grad: torch.Tensor) -> torch.Tensor:
        return grad.mul_(2)

    @staticmethod
    def reads_a_tensor(grad: torch.Tensor) -> torch.Tensor:
        return grad * _HELD

    @staticmethod
    def reads_a_number(grad: torch.Tensor) -> torch.Tensor:
        return grad * float(grad.sum())

    @staticmethod
    def imports(grad: torch.Tensor) -> torch.Tensor:
        import logging

        logging.getLogger("x").debug("called")
        return grad * 2

    @staticmethod
    def has_a_default(grad: torch.Tensor, seen: list[int] = []) -> torch.Tensor:  # noqa: B006
        seen.append(1)
        return grad * 2


def _note(value: Any) -> None:
    _SEEN.append(value)


@pytest.mark.parametrize("name", [name for name in vars(_More) if not name.startswith("_")])
def test_one_that_does_more_than_compute_is_called_at_each_step(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    hook = ca.traceable(getattr(_More, name))

    def counted(session: Any) -> tuple[Any, ...]:
        _SEEN.clear()
        _TABLE.pop("count", None)
        hook.__defaults__ = ([],) if hook.__defaults__ else None
        _More.count = 0  # type: ignore[attr-defined]
        capsys.readouterr()
        found = _train(session, [hook] * 5)
        kinds = [type(each) for each in _SEEN]
        done = (kinds, _TABLE.get("count"), _More.count, capsys.readouterr().out, repr(hook.__defaults__))  # type: ignore[attr-defined]
        return found, done

    wanted, expected = counted(ca.disable())
    session = ca.enable(backend="aot_eager")
    with pytest.warns(UserWarning, match="untraceable in"):
        found, done = counted(session)
    assert_close(found, wanted)
    assert done == expected
    assert OpaqueStep in _steps(session) and session.stats().hits == 4 and session.stats().bypasses == {}


def test_what_takes_over_the_attributes_of_a_marked_one_is_not_marked() -> None:
    calls: list[int] = []

    @functools.wraps(ca.traceable(clipped))
    def counting(grad: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return clipped(grad)

    session = ca.enable(backend="aot_eager")
    assert_close(_train(session, [counting] * 4), _train(ca.disable(), [counting] * 4))
    assert len(calls) == 8 and OpaqueStep in _steps(session) and session.stats().failures == 0


class _Wrong:
    @staticmethod
    def shape(grad: torch.Tensor) -> torch.Tensor:
        return grad.sum()

    @staticmethod
    def kind(grad: torch.Tensor) -> Any:
        return 3

    @staticmethod
    def raises(grad: torch.Tensor) -> Any:
        raise ValueError("the hook's own")


@pytest.mark.parametrize("name", ["shape", "kind", "raises"])
def test_mistakes_are_told_as_under_eager(name: str) -> None:
    hook = ca.traceable(getattr(_Wrong, name))
    with pytest.raises(Exception) as wanted:
        _train(ca.disable(), [hook])
    session = ca.enable(backend="aot_eager")
    for _ in range(2):
        with warnings.catch_warnings(), pytest.raises(type(wanted.value)) as found:
            warnings.simplefilter("ignore")
            _train(session, [hook])
        assert str(found.value) == str(wanted.value)


def test_retain_grad_beside_it() -> None:
    def train(session: Any, before: bool) -> list[Any]:
        found: list[Any] = []
        for _ in range(4):
            leaf = torch.linspace(-1, 1, 8).requires_grad_()
            value = leaf * 1.5
            if before:
                value.retain_grad()
            value.register_hook(ca.traceable(lambda grad: grad * 3))
            if not before:
                value.retain_grad()
            loss = value.sin().sum()
            with session:
                loss.backward()
            found += [leaf.grad, value.grad]
        return found

    for before in (False, True):
        session = ca.enable(backend="aot_eager")
        assert_close(train(session, before), train(ca.disable(), before))
        assert session.stats().hits == 3 + before  # it is one structure


def test_post_accumulate_hooks_and_hooks_behind_leaves_are_called() -> None:
    calls: list[float] = []

    def train(session: Any) -> list[Any]:
        found: list[Any] = []
        for _ in range(4):
            leaf = torch.linspace(-1, 1, 8).requires_grad_()
            leaf.register_post_accumulate_grad_hook(ca.traceable(lambda leaf: calls.append(float(leaf.grad.sum()))))
            behind = torch.autograd.graph.get_gradient_edge(leaf).node
            behind.register_hook(ca.traceable(lambda given, got: calls.append(2.0)))
            behind.register_prehook(ca.traceable(lambda grads: (grads[0] * 2,)))
            loss = leaf.sin().sum()
            with session:
                loss.backward()
            found.append(leaf.grad)
        return found

    wanted = train(ca.disable())
    expected, session = calls[:], ca.enable(backend="aot_eager")
    calls.clear()
    assert_close(train(session), wanted)
    assert calls == pytest.approx(expected) and len(calls) == 8 and session.stats().hits == 3


def test_undefined_gradients() -> None:
    """A function hands on nothing, at some steps: the tape leads a gradient to the hook all the same."""

    class Maybe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, gives: bool) -> torch.Tensor:
            ctx.gives = gives
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
            return (grad * 2 if ctx.gives else None), None

    seen: list[bool] = []

    def told(grad: torch.Tensor | None) -> None:
        seen.append(grad is None)

    def train(session: Any) -> list[Any]:
        found: list[Any] = []
        for gives in [True, False, True, False, True]:
            leaf, other = (torch.linspace(-1, 1, 8).requires_grad_() for _ in range(2))
            value = leaf * 1.5
            value.register_hook(ca.traceable(lambda grad: None if grad is None else grad * 3))
            value.register_hook(told)
            loss = Maybe.apply(value, gives).sum() + other.sin().sum()
            with session:
                loss.backward()
            found += [leaf.grad, other.grad]
        return found

    wanted = train(ca.disable())
    expected, session = seen[:], ca.enable(backend="aot_eager")
    seen.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_close(train(session), wanted)
    assert seen == expected and session.stats().bypasses == {}


def test_what_another_hook_changes_in_the_same_backward() -> None:
    def train(session: Any) -> list[Any]:
        global _BY
        found: list[Any] = []
        for by in [2.0, 3.0, 4.0, 3.0, 2.0]:
            _BY = 2.0
            leaf = torch.linspace(-1, 1, 8).requires_grad_()
            value = leaf * 1.5
            value.register_hook(_by_constant)
            after = value.sin()
            after.register_hook(lambda grad, by=by: globals().update(_BY=by))
            loss = after.sum()
            with session:
                loss.backward()
            found.append(leaf.grad)
        _BY = 2.0
        return found

    session = ca.enable(backend="aot_eager", check=False)
    assert_close(train(session), train(ca.disable()))
    assert (session.stats().hits, session.stats().shape_misses) == (2, 2)


def test_gradients_that_were_asked_for_are_those_before_the_hooks_of_a_node_that_runs() -> None:
    def step(session: Any) -> list[Any]:
        leaf = torch.linspace(-1, 1, 8).requires_grad_()
        value = leaf * 1.5
        value.register_hook(ca.traceable(lambda grad: grad * 3))
        loss = value.sin().sum()
        with session:
            return [*torch.autograd.grad(loss, [value, leaf])]

    session = ca.enable(backend="aot_eager")
    for _ in range(4):
        assert_close(step(session), step(ca.disable()))
    assert session.stats().hits == 3


def test_anomaly_mode_names_the_node_and_checkpointed_layers_keep_their_values() -> None:
    from torch.utils.checkpoint import checkpoint

    def step(session: Any, bad: bool) -> Any:
        leaf = torch.linspace(-1, 1, 8).requires_grad_()
        value = checkpoint(lambda x: (x * 1.5).sin().tanh(), leaf, use_reentrant=False)
        value.register_hook(ca.traceable(lambda grad: grad * (float("nan") if bad else 3.0)))
        loss = checkpoint(lambda x: x.sin().exp(), value, use_reentrant=False).sum()
        with session:
            loss.backward()
        return leaf.grad

    session = ca.enable(backend="aot_eager")
    for _ in range(3):
        assert_close([step(session, False)], [step(ca.disable(), False)])
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert_close([step(session, False)], [step(ca.disable(), False)])
            with pytest.raises(RuntimeError) as wanted:
                step(ca.disable(), True)
            with pytest.raises(RuntimeError) as found:
                step(session, True)
            assert str(found.value) == str(wanted.value)


def test_it_is_not_stored(tmp_path: Any) -> None:
    session = ca.enable(backend="inductor", cache_dir=tmp_path)
    _train(session, [ca.traceable(clipped)] * 3)
    assert session.last is not None and session.last.graph is not None
    assert "marked as traceable" in session.last.graph.variants[-1].not_stored


def test_profilers_and_reports_name_it(tmp_path: Any) -> None:
    session = ca.enable(backend="aot_eager")
    _train(session, [ca.traceable(clipped)] * 3)
    with torch.profiler.profile() as profile:
        _train(session, [ca.traceable(clipped)])
    assert any(each.key.startswith("compiled_autograd: ") for each in profile.key_averages())
    graph = session.last.graph if session.last else None
    assert graph is not None and "tensor_hook" in graph.readable() and "region 0" in graph.readable("regions")
    graph.save(tmp_path / "saved.zip")
    session.report(tmp_path / "report.html")
    assert ca.load(tmp_path / "saved.zip") is not None


def _random_hook(random: Random) -> Any:
    by = random.choice([0.5, 2.0, 2, -1.0])
    hook = random.choice(
        [
            lambda grad: grad * by,
            lambda grad: None,
            lambda grad: grad,
            lambda grad: grad.clamp(-0.3, 0.3),
            lambda grad: grad / (1 + grad.norm()),
            lambda grad: F.normalize(grad, dim=0),
            lambda grad: grad.flip(0),
            lambda grad: torch.where(grad > 0, grad, grad * by),
            lambda grad: grad.clone().fill_(by),
        ]
    )
    return ca.traceable(hook) if random.random() < 0.7 else hook


def _random_training(seed: int, session: Any) -> list[torch.Tensor | None]:
    random = Random(seed)
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(6, 5, requires_grad=True, generator=generator) for _ in range(3)]
    depth = random.randint(2, 4)
    found: list[torch.Tensor | None] = []
    placed = [(random.randrange(2 * depth), random.choice(ATTACHED[:1] + ATTACHED[2:])) for _ in range(3)]
    keep, lasting = random.random() < 0.2, random.random() < 0.4
    if lasting:
        leaves[0].register_hook(_random_hook(random))
    for _ in range(random.randint(5, 9)):
        rows = random.choice([6, 6, 4])
        values = [leaves[0][:rows] * 1.0]
        for level in range(depth):
            values.append(values[-1].sin() + leaves[1][:rows])
            values.append((values[-1] * leaves[2][:rows]).tanh() if level % 2 else values[-1].t().contiguous().t())
        for place, attach in placed:
            if random.random() < 0.8:
                attach(leaves[0], values[1 + place], _random_hook(random))
        if random.random() < 0.2:
            values[2].retain_grad()
        loss = values[-1].square().sum()
        with session:
            loss.backward(retain_graph=keep)
            if keep:
                loss.backward()
        found += [None if each.grad is None else each.grad.clone() for each in leaves]
        if random.random() < 0.6:
            for leaf in leaves:
                leaf.grad = None
    return found


def _compare_random(seeds: range, **settings: Any) -> None:
    for seed in seeds:
        session = ca.enable(**settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _random_training(seed, session)
        for one, other in zip(found, _random_training(seed, ca.disable()), strict=True):
            assert (one is None) == (other is None), seed
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=lambda m, s=seed: f"{s}: {m}")


@pytest.mark.parametrize(
    ("check", "seeds"), [("new", 1), *(pytest.param(each, 8, marks=pytest.mark.slow) for each in ("new", False))]
)
def test_random_trainings(check: Any, seeds: int) -> None:
    _compare_random(range(seeds), backend="aot_eager", check=check)


@pytest.mark.slow
def test_many_random_trainings() -> None:
    _compare_random(range(100, 250), backend="aot_eager", check=False)
    _compare_random(range(300, 306), backend="inductor", check=False)


def test_a_module_with_hooks_in_training() -> None:
    """Gradients of parameters are clipped by hooks that stay."""

    def train(session: Any) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        for parameter in net.parameters():
            parameter.register_hook(ca.traceable(clipped))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(6):
            optimizer.zero_grad()
            loss = net(torch.linspace(-1, 1, 30).view(5, 6)).square().sum()
            with session:
                loss.backward()
            optimizer.step()
        return [*net.parameters()]

    session = ca.enable(backend="aot_eager")
    assert_close(train(session), train(ca.disable()))
    assert _steps(session) == [RegionStep, AccumulateStep]
    assert (session.stats().hits, session.stats().compiles) == (5, 1)
