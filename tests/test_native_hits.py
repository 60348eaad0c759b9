"""Hits of tapes that were walked in C++ leave what eager leaves, and are counted like others."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from compiled_autograd.engine import backward, seam
from compiled_autograd.engine.native_hits import NativeHits

from .both_walks import library_of
from .helpers import assert_same, expect, mlp

LEARNT_AFTER = 3
"""Backwards until a tape is known: it is captured, met again, and learnt."""


@pytest.fixture
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeHits]:
    """Plans of the test's own."""
    hits = NativeHits()
    hits.library = library_of(request.config)
    for module in (backward, seam):
        monkeypatch.setattr(module, "NATIVE_HITS", hits)
    yield hits
    ca.reset()


def _session(**settings: Any) -> ca.Session:
    return ca.enable(**{"backend": "eager", "cache_dir": False, "tune": False, "native": True, **settings})


def _steps(session: Any, make: Callable[[int], torch.Tensor], leaves: list[torch.Tensor], steps: range) -> list[Any]:
    """Gradients of all leaves, step by step."""
    found = []
    for step in steps:
        for leaf in leaves:
            leaf.grad = None
        loss = make(step)
        with session:
            loss.backward()
        found += [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    return found


def _compare(
    native: NativeHits, make: Callable[[int], torch.Tensor], leaves: list[torch.Tensor], steps: int = 8, **more: Any
) -> ca.Session:
    """All but the first backwards are walked in C++."""
    wanted = _steps(contextlib.nullcontext(), make, leaves, range(steps))
    session = _session(**more)
    assert_same(_steps(session, make, leaves, range(steps)), wanted)
    assert native.hits == steps - LEARNT_AFTER
    expect(session.stats(), structure_misses=1, hits=steps - 1, captures=1)
    return session


# ---- what they leave -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_gradients_and_counts(native: NativeHits, backend: str) -> None:
    model, x = mlp(), torch.randn(3, 8)
    leaves = list(model.parameters())
    wanted = _steps(contextlib.nullcontext(), lambda step: (model(x + step) ** 2).mean(), leaves, range(6))
    session = _session(backend=backend)
    found = _steps(session, lambda step: (model(x + step) ** 2).mean(), leaves, range(6))
    if backend == "eager":
        assert_same(found, wanted)
    else:
        torch.testing.assert_close(found, wanted)
    assert native.hits == 6 - LEARNT_AFTER
    expect(session.stats(), structure_misses=1, hits=5, captures=1, compiles=1)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * ctx.factor + 0 * x, None


def test_python_functions_and_hooks_of_this_very_tape(native: NativeHits) -> None:
    """Each tape has its own ``ctx`` and its own closure; they see this step's values."""
    x, seen = torch.randn(4, requires_grad=True), []

    def make(step: int) -> torch.Tensor:
        y = _Scaled.apply(x, 2.0)
        y.register_hook(lambda grad: seen.append((step, grad.tolist())) or grad * 2)
        return (y * (step + 1)).sum()

    _compare(native, make, [x])
    assert seen[:8] == seen[8:] and [step for step, _ in seen[8:]] == [*range(8)]


def test_accumulation_and_views(native: NativeHits) -> None:
    x, row = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)

    def make(step: int) -> torch.Tensor:
        written = x * (step + 1)
        written[1] = row * 2
        return (written * x).sum()

    _compare(native, make, [x, row])


def test_other_shapes_and_other_state(native: NativeHits) -> None:
    w = torch.randn(4, 4, requires_grad=True)
    sizes = [3, 3, 3, 3, 5, 6, 7, 3, 6, 3]

    def make(step: int) -> torch.Tensor:
        return (torch.full((sizes[step], 4), step + 1.0) @ w).sin().sum()

    wanted = _steps(contextlib.nullcontext(), make, [w], range(len(sizes)))
    session = _session()
    assert_same(_steps(session, make, [w], range(len(sizes))), wanted)
    stats = session.stats()
    assert (stats.captures, stats.structure_misses, stats.failures) == (1, 1, 0) and stats.shape_misses <= 2
    assert native.hits == len(sizes) - LEARNT_AFTER, "a shape miss is walked in C++ too"
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(_steps(session, make, [w], range(2)), wanted[:2])
    finally:
        torch.use_deterministic_algorithms(False)
    assert session.stats().shape_misses == stats.shape_misses + 1, "another ambient state is another variant"


def test_other_backends_share_plans_and_no_variants(native: NativeHits) -> None:
    model, x = mlp(), torch.randn(3, 8)
    make = lambda step: (model(x + step) ** 2).mean()  # noqa: E731
    _compare(native, make, list(model.parameters()))
    other = _session(backend="inductor")
    _steps(other, make, list(model.parameters()), range(4))
    expect(other.stats(), shape_misses=1, hits=3, compiles=1)


# ---- the tape --------------------------------------------------------------------------------------------------------


def test_a_tape_is_freed_or_kept_as_by_the_engine(native: NativeHits) -> None:
    x = torch.randn(4, requires_grad=True)
    session, held = _session(), []
    for step in range(8):
        y = x.sin()
        product = y * y
        held.append(weakref.ref(product.exp().detach()))
        loss = product.exp().sum()
        with session:
            loss.backward(retain_graph=step % 2 == 0)
            if step % 2 == 0:
                loss.backward()
            before = native.hits
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
            assert native.hits == before
        node = product.grad_fn
        assert node is not None
        with pytest.raises(RuntimeError, match="after they have already been freed"):
            _ = node._saved_self
    assert native.hits >= 6


def test_what_was_saved_is_let_go_of(native: NativeHits) -> None:
    x, session = torch.randn(4, requires_grad=True), _session()
    for step in range(6):
        factor = torch.randn(4)
        gone = weakref.ref(factor)
        loss = (x * factor).sum()
        del factor
        x.grad = None
        with session:
            loss.backward()
        gc.collect()
        assert gone() is None, f"step {step}"
    assert native.hits == 6 - LEARNT_AFTER


def test_a_saved_tensor_that_was_changed_is_an_error_in_eagers_words(native: NativeHits) -> None:
    x, session = torch.randn(4, requires_grad=True), _session()
    for step in range(6):
        factor = torch.randn(4)
        loss = (x * factor).sum()
        x.grad = None
        if step == 5:
            factor.add_(1)
            with session, pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            break
        with session:
            loss.backward()
    assert native.hits == 5 - LEARNT_AFTER


def test_an_error_of_a_hook_is_the_users(native: NativeHits) -> None:
    x, session = torch.randn(4, requires_grad=True), _session()
    for step in range(7):
        y = x * 2

        def hook(grad: torch.Tensor, at: int = step) -> None:
            if at == 5:
                raise ValueError("of the user")

        y.register_hook(hook)
        x.grad = None
        with session, pytest.raises(ValueError, match="of the user") if step == 5 else contextlib.nullcontext():
            y.sum().backward()
        assert (x.grad is None) == (step == 5)
    assert native.hits == 7 - LEARNT_AFTER


# ---- what stays with the engine --------------------------------------------------------------------------------------


def test_what_no_plan_serves_takes_the_way_through_the_engine(native: NativeHits) -> None:
    x, session = torch.randn(4, requires_grad=True), _session()
    for _ in range(6):
        x.grad = torch.zeros(4)
        with session:
            torch.autograd.grad((x * 2).sin().sum(), x)
            torch.autograd.backward((x * 2).cos().sum(), inputs=[x])
            y = x * 3
            y.retain_grad()
            y.sum().backward()
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed):
                z = x.exp()
            z.sum().backward()
    assert native.hits == 0
    stats = session.stats()
    assert stats.captures == 4 and stats.hits == 20 and stats.bypasses == {}


def test_false_is_none_of_it(native: NativeHits) -> None:
    x, session = torch.randn(4, requires_grad=True), _session(native=False)
    _steps(session, lambda step: (x * step).sum(), [x], range(6))
    assert native.hits == 0 and session.stats().hits == 5


def test_a_reset_forgets(native: NativeHits) -> None:
    x = torch.randn(4, requires_grad=True)
    make = lambda step: (x * step).sum()  # noqa: E731
    _compare(native, make, [x])
    ca.reset()
    session = _session()
    _steps(session, make, [x], range(5))
    expect(session.stats(), structure_misses=1, hits=4, captures=1)
    assert native.hits == 8 - LEARNT_AFTER + 5 - LEARNT_AFTER


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_threads_hit_at_once(native: NativeHits) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            w = torch.randn(6, 6, generator=generator).requires_grad_()
            for step in range(40):
                x = torch.randn(3, 6, generator=generator)
                loss, again = (x @ w).tanh().sum(), (x @ w).tanh().sum()
                with ca.disable():
                    again.backward()
                wanted, w.grad = w.grad, None
                with session:
                    loss.backward()
                assert torch.equal(w.grad, wanted), step
                w.grad = None
        except BaseException as error:  # noqa: BLE001  told below
            errors.append(error)

    session = _session()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert native.hits > 50


def test_two_threads_on_one_tape(native: NativeHits) -> None:
    """One of them in the eager engine: both get all gradients, as with the engine alone."""
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(20)])
    session, x = _session(), torch.randn(8, 32)
    for _ in range(4):
        with session:
            model(x).sum().backward()
    for _ in range(30):
        model.zero_grad()
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        wanted = [parameter.grad * 3 for parameter in model.parameters()]  # type: ignore[operator]
        errors: list[BaseException] = []

        def eager(loss: torch.Tensor = loss, errors: list[BaseException] = errors) -> None:
            try:
                loss.backward(retain_graph=True)
            except BaseException as error:  # noqa: BLE001  told below
                errors.append(error)

        thread = threading.Thread(target=eager)
        thread.start()
        with session:
            loss.backward(retain_graph=True)
        thread.join()
        assert not errors
        for parameter, want in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, want)
