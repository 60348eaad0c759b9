"""Anomaly mode: a NaN is found at the node that gave it, in the engine's words, with the line of the forward."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import detect_anomaly

import compiled_autograd as ca

from .helpers import expect, mlp

pytestmark = pytest.mark.filterwarnings("ignore:Anomaly Detection")


class _Nan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("nan")


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient today")


def _of_an_operator(leaves: list[torch.Tensor], seen: list[Any]) -> torch.Tensor:
    first, second, third = leaves
    return ((first * 0).sqrt() * 0 + (second * third.exp()).cos()).sum()


def _in_a_chain(leaves: list[torch.Tensor], seen: list[Any]) -> torch.Tensor:
    first, second, third = leaves
    return (((first * second).sin() * 0).sqrt() * third).tanh().sum()


def _of_a_function(leaves: list[torch.Tensor], seen: list[Any]) -> torch.Tensor:
    first, second, third = leaves
    return _Nan.apply((first * second).sin()).mul(third).sum()


def _of_a_hook(leaves: list[torch.Tensor], seen: list[Any]) -> torch.Tensor:
    first, second, third = leaves
    between = first * second
    between.grad_fn.register_hook(lambda given, got: (given[0], given[1] * float("nan")))
    return (between * third).sin().sum()


def _mended_by_a_hook(leaves: list[torch.Tensor], seen: list[Any]) -> torch.Tensor:
    """A node gives a NaN, and its post-hook takes it away: the engine looks afterwards."""
    first, second, third = leaves
    between = (first * 0).sqrt()
    between.grad_fn.register_hook(lambda given, got: (torch.nan_to_num(given[0], 1.0, 2.0, 3.0),))
    return (between * second * third).sum()


def _between_hooks(leaves: list[torch.Tensor], seen: list[Any]) -> torch.Tensor:
    first, second, third = leaves
    late = (first * second).sin()
    late.register_hook(lambda grad: seen.append(grad.isnan().any().item()))
    between = (late * 0).sqrt()
    between.register_hook(lambda grad: seen.append(grad.sum().item()))
    third.register_post_accumulate_grad_hook(lambda leaf: seen.append("third"))
    return (between * third).sum()


def _into_a_view(leaves: list[torch.Tensor], seen: list[Any]) -> torch.Tensor:
    first, second, third = leaves
    base = first * second
    base[0] *= (third * 0).sqrt()[0]
    return base.sum()


def _of_something_unused(leaves: list[torch.Tensor], seen: list[Any]) -> torch.Tensor:
    first, second, third = leaves
    return (torch.hypot(first * 0, second * 0) * third).sum()


def _none(leaves: list[torch.Tensor], seen: list[Any]) -> torch.Tensor:
    first, second, third = leaves
    return ((first * second).exp() * third).mean()


def _raising(leaves: list[torch.Tensor], seen: list[Any]) -> torch.Tensor:
    first, second, third = leaves
    return (_Raises.apply(first * second) * third).sum()


def _raising_in_a_hook(leaves: list[torch.Tensor], seen: list[Any]) -> torch.Tensor:
    first, second, third = leaves
    between = first * second
    between.register_hook(lambda grad: seen[100])
    return (between * third).sum()


PROGRAMS: list[Callable[[list[torch.Tensor], list[Any]], torch.Tensor]] = [
    _of_an_operator,
    _in_a_chain,
    _of_a_function,
    _of_a_hook,
    _mended_by_a_hook,
    _between_hooks,
    _into_a_view,
    _of_something_unused,
    _none,
    _raising,
    _raising_in_a_hook,
]


@dataclass
class _Told:
    """What became of a backward: the error, the warnings, the gradients of leaves, and what hooks saw."""

    error: str
    warnings: list[str]
    grads: list[torch.Tensor | None]
    seen: list[Any]


def _told(program: Callable[..., torch.Tensor], check_nan: bool, forward_too: bool = True) -> _Told:
    torch.manual_seed(0)
    leaves = [torch.rand(2, 3, requires_grad=True) for _ in range(3)]
    seen: list[Any] = []
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with detect_anomaly(check_nan) if forward_too else contextlib.nullcontext():
            loss = program(leaves, seen)
        with detect_anomaly(check_nan):
            try:
                loss.backward()
            except Exception as raised:  # noqa: BLE001  whichever, it is compared
                error = f"{type(raised).__name__}: {raised}"
    return _Told(error, _texts(caught), [x.grad for x in leaves], seen)


def _texts(caught: list[warnings.WarningMessage]) -> list[str]:
    """What was told of where, without the frames around the line itself, which are the test's."""
    told = [each for each in caught if "detected in" in str(each.message) or "induced by" in str(each.message)]
    assert {Path(each.filename).name for each in told} <= {"graph.py", "execution.py"}  # the last is a bypass
    texts = [str(each.message).partition("(Triggered internally")[0].strip() for each in told]
    lines = [each.split("\n") for each in texts]
    return ["\n".join([*each[:1], *each[1:][-2:]]) for each in lines]


def _check(program: Callable[..., torch.Tensor], backend: str, check_nan: bool, forward_too: bool = True) -> None:
    wanted = _told(program, check_nan, forward_too)
    with ca.enable(backend=backend, cache_dir=False) as session:
        for _ in range(2):
            found = _told(program, check_nan, forward_too)
            assert found.error == wanted.error
            assert found.warnings == wanted.warnings
            assert found.seen == wanted.seen
            for one, other in zip(found.grads, wanted.grads, strict=True):
                torch.testing.assert_close(one, other, equal_nan=True)
    expect(session.stats(), structure_misses=1, hits=1)


@pytest.mark.parametrize("check_nan", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_told_is_what_eager_tells(program: Callable[..., torch.Tensor], check_nan: bool) -> None:
    _check(program, "eager", check_nan)


def test_the_programs_fail_as_they_are_meant_to() -> None:
    errors = {program.__name__: _told(program, True).error for program in PROGRAMS}
    fine = [name for name, error in errors.items() if not error]
    assert fine == ["_mended_by_a_hook", "_none"]
    assert sum("returned nan values" in error for error in errors.values()) == len(PROGRAMS) - len(fine) - 2


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_with_inductor(program: Callable[..., torch.Tensor]) -> None:
    _check(program, "inductor", True)


def test_a_forward_outside_of_anomaly_mode() -> None:
    _check(_in_a_chain, "eager", True, forward_too=False)
    assert "No forward pass information" in _told(_in_a_chain, True, forward_too=False).warnings[0]


def test_a_node_made_in_another_backward() -> None:
    """What induced the calculation is told too."""

    def told() -> list[str]:
        x = torch.rand(3, requires_grad=True)
        with warnings.catch_warnings(record=True) as caught, detect_anomaly():
            warnings.simplefilter("always")
            (grad,) = torch.autograd.grad(x.pow(1.5).sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="returned nan values"):
                ((grad * 0).sqrt() * 0).sum().backward()
        return _texts(caught)

    wanted = told()
    with ca.enable(backend="eager") as session:
        assert told() == wanted
    assert session.stats().captures == 1
    assert session.stats().bypasses == {"create_graph": 1}


def test_with_and_without_are_two_variants() -> None:
    """What was compiled without looking for NaNs does not serve where they are looked for, and the other way about."""
    x = torch.rand(3, requires_grad=True)

    def run(factor: float) -> None:
        x.grad = None
        ((x * torch.full((3,), factor)).sqrt() * 0).sum().backward()

    with ca.enable(backend="eager") as session:
        run(1.0)
        for _ in range(2):
            run(0.0)
            with detect_anomaly(), pytest.raises(RuntimeError, match="Function 'SqrtBackward0' returned nan values"):
                run(0.0)
            with detect_anomaly():
                run(1.0)
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=5)
    assert session.last is not None and session.last.graph is not None
    assert len(session.last.graph.variants) == 2


def test_autograd_grad_looks_at_what_nobody_asked_for() -> None:
    """The engine looks at all that a node gives."""

    def run() -> None:
        x, y = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
        torch.autograd.grad(_TwoGradients.apply(x, y).sum(), y)

    for context in (contextlib.nullcontext(), ca.enable(backend="eager")):
        with context, detect_anomaly(), pytest.raises(RuntimeError, match="nan values in its 0th output"):
            run()


class _TwoGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad * float("nan"), grad


def test_sizes_that_change() -> None:
    x = torch.ones(3, requires_grad=True)

    def run(size: int, factor: float) -> None:
        x.grad = None
        data = torch.full((size, 1), factor)
        (((x * data).sqrt() * 0).sum(0) * x).sum().backward()

    with ca.enable(backend="eager", dynamic=True) as session, detect_anomaly():
        for size in (4, 5, 6):
            run(size, 1.0)
            with pytest.raises(RuntimeError, match="Function 'SqrtBackward0' returned nan values in its 0th output"):
                run(size, 0.0)
    assert session.stats().captures == 1
    assert session.stats().compiles == 1


@contextlib.contextmanager
def _failing_backend() -> Iterator[Any]:
    def fails(graph_module: Any, inputs: Any) -> Any:
        raise ValueError("not today")

    yield fails


def test_calls_that_run_one_by_one() -> None:
    """Where the backend fails, and while a region is compiled in the background."""
    wanted = _told(_in_a_chain, True)
    with _failing_backend() as backend, ca.enable(backend=backend):
        found = _told(_in_a_chain, True)
    assert (found.error, found.warnings) == (wanted.error, wanted.warnings)
    for one, other in zip(found.grads, wanted.grads, strict=True):
        torch.testing.assert_close(one, other)


def test_from_the_store(tmp_path: Path) -> None:
    """A variant that looks for NaNs is stored, and loaded by another process."""
    wanted = _told(_in_a_chain, True)
    for expected in ({"compiles": 1}, {"loads": 1}):
        ca.reset()
        with ca.enable(backend="eager", cache_dir=tmp_path) as session:
            found = _told(_in_a_chain, True)
        assert (found.error, found.warnings) == (wanted.error, wanted.warnings)
        assert all(getattr(session.stats(), name) == count for name, count in expected.items())


def test_a_model_trains_in_it() -> None:
    """No NaN, no difference, all hits."""

    def losses() -> list[float]:
        torch.manual_seed(1)
        model = mlp(depth=3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 3))
            with detect_anomaly():
                loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    wanted = losses()
    with ca.enable(backend="eager") as session:
        assert losses() == wanted
    expect(session.stats(), structure_misses=1, hits=3)
