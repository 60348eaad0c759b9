"""Refused tapes and skips: the engine is asked ever more seldom, and no gradient and no count is lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import fx, nn

import compiled_autograd as ca
from compiled_autograd.diagnostics.bypass import COMPILING, NOT_YET, OVER_BUDGET
from compiled_autograd.engine import backward, decide, records
from compiled_autograd.engine.call import Refused
from compiled_autograd.engine.session import Session, thread
from compiled_autograd.policies import decision, ledger
from compiled_autograd.policies.decision import State
from compiled_autograd.policies.ledger import LEDGER
from shadow_cache import Bypass, unsupported

from .helpers import assert_same, expect, in_threads, switching_every, total
from .tuned import leave, outcome_of, run_small, said_to_take, slow, soon  # noqa: F401

REASON = "unsupported(RuntimeError: view_fn not supported by compiled autograd)"


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grow by one with each tape that the engine is asked to walk."""
    asked: list[object] = []
    hand_over = backward.hand_over
    monkeypatch.setattr(backward, "hand_over", lambda *given: asked.append(given[0].outputs) or hand_over(*given))
    return asked


def _weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(8))


def _refused(x: torch.Tensor) -> torch.Tensor:
    """Write into a view that sizes and strides do not describe."""
    y = x * (1 + 1j)
    torch.view_as_real(y).mul_(2)
    return y.abs().sum()


def _captured(x: torch.Tensor) -> torch.Tensor:
    return x.exp().sum()


def _run(session: Session, times: int, loss_of: Callable[[torch.Tensor], torch.Tensor] = _refused) -> None:
    for _ in range(times):
        x = torch.randn(4, requires_grad=True)
        with ca.disable():
            wanted = torch.autograd.grad(loss_of(x), x)
        loss = loss_of(x)
        with session:
            assert_same(torch.autograd.grad(loss, x), wanted)


def test_the_engine_is_asked_ever_more_seldom(walks: list[object]) -> None:
    session = ca.enable(backend="eager")
    _run(session, 1000)
    assert 5 <= len(walks) <= 20
    expect(session.stats(), bypasses={REASON: 1000})
    ca.reset()
    walks.clear()
    _run(session, 1)
    assert len(walks) == 1, "all was forgotten"


def test_others_are_captured_between_refused_tapes(walks: list[object]) -> None:
    session = ca.enable(backend="eager", tune=False)
    for _ in range(20):
        _run(session, 1)
        _run(session, 1, _captured)
    expect(session.stats(), structure_misses=1, hits=19, captures=1, bypasses={REASON: 20})


def test_it_is_captured_once_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ca.enable(backend="eager", tune=False)
    with monkeypatch.context() as planted:
        planted.setattr(backward, "hand_over", lambda *given: Refused(unsupported("planted")))
        _run(session, 10, _captured)
    _run(session, 20, _captured)
    stats = session.stats()
    left = stats.bypasses["unsupported(planted)"]
    expect(stats, structure_misses=1, hits=29 - left, captures=1, bypasses={"unsupported(planted)": left})
    assert 10 <= left < 20


def test_on_unsupported_raise_raises_each_time() -> None:
    _run(ca.enable(backend="eager"), 10)
    with ca.enable(backend="eager", on_unsupported="raise"):
        for _ in range(10):
            with pytest.raises(ca.UnsupportedBackwardError, match="view_fn"):
                _refused(torch.randn(4, requires_grad=True)).backward()


@pytest.mark.parametrize("state", ["eager", "timing"])
def test_on_miss_raise_raises_for_a_tape_that_eager_runs(state: str) -> None:
    """All shapes of a tape have one record."""
    with ca.enable(backend="eager", on_miss="compile", dynamic=False):
        _captured(torch.randn(4, requires_grad=True)).backward()
    with ca.enable(backend="eager", on_miss="raise", dynamic=False) as session:
        _captured(torch.randn(4, requires_grad=True)).backward()
        (record,) = [each for each in LEDGER._records.values() if each.living()][1:] or [
            each for each in LEDGER._records.values() if each.living()
        ]
        reason = Bypass("not_worth_it") if state == "eager" else ledger.TIMED
        LEDGER._change(record, State.EAGER if state == "eager" else State.TIMING, reason)
        x = torch.randn(4, requires_grad=True)
        _captured(x).backward()
        assert session.last is not None and session.last.reasons == (reason,)
        y, before = torch.randn(5, requires_grad=True), session.stats().backwards
        with pytest.raises(ca.CacheMissError):
            _captured(y).backward()
        assert session.stats().backwards == before + 1
    assert y.grad is None and torch.allclose(x.grad, x.detach().exp())  # type: ignore[arg-type]


def test_on_miss_raise_raises_before_anything_is_written() -> None:
    """Another session's compile of that tape has not ended."""
    ends = threading.Event()

    def slow(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        assert ends.wait(60)
        return graph_module.forward

    x = torch.randn(4, requires_grad=True)
    with ca.enable(backend=slow, on_miss="background", cache_dir=False) as beside:
        _captured(x).backward()
    x.grad, loss = None, _captured(x)
    with ca.enable(backend=slow, on_miss="raise", cache_dir=False):
        with pytest.raises(ca.CacheMissError, match="not compiled yet"):
            loss.backward()
        assert x.grad is None
        ends.set()
        assert beside.wait(60)
        loss.backward()
    assert torch.allclose(x.grad, x.detach().exp())  # type: ignore[arg-type]


def test_a_mistake_of_the_users_is_no_refusal(walks: list[object]) -> None:
    x = torch.randn(4, requires_grad=True)
    with ca.enable(backend="eager"):
        for _ in range(5):
            with pytest.raises(RuntimeError, match="grad can be implicitly created"):
                x.exp().backward()
    assert not LEDGER.watched


class _Training:
    """Train with a factor of the loss for each step: if it is zero, so are the gradients."""

    def __init__(self, **settings: Any) -> None:
        self.session = ca.enable(**{"backend": _forward, "cache_dir": False, "tune": True} | settings)

    def step(self, factor: float) -> str:
        x = torch.ones(4, requires_grad=True)
        with self.session:
            (x * torch.full((4,), factor) * 3).sum().backward()
        assert_same([x.grad], [torch.full((4,), 3 * factor)])
        return outcome_of(self.session)


def _forward(graph_module: Any, example_inputs: Any) -> Any:
    return lambda *arguments: graph_module.forward(*arguments)


def _wrong_unless_zero(graph_module: Any, example_inputs: Any) -> Any:
    return lambda *arguments: [each * 1.1 for each in graph_module.forward(*arguments)]


def test_a_tape_whose_gradients_are_all_zero_is_tried_ever_more_seldom() -> None:
    training = _Training()
    kinds = [training.step(0.0) for _ in range(200)]
    assert kinds[0] == "structure_miss" and set(kinds[1:]) == {"hit", "all_zero_gradients"}
    assert kinds.count("all_zero_gradients") > 180 and training.session.stats().compiles == 1
    kinds = [training.step(1.0) for _ in range(500)]
    assert "hit" in kinds and kinds[-1] != "all_zero_gradients", "something was proved"
    assert training.session.stats().failures == 0


def test_wrong_code_is_found_once_gradients_are_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "REST", 32)
    training = _Training(backend=_wrong_unless_zero)
    for factor in [0.0] * 60 + [1.0] * 200:
        training.step(factor)
    assert training.session.stats().failures == 1


@pytest.mark.parametrize("settings", [{"tune": False}, {"check": True}, {"check": False}], ids=str)
def test_other_settings_compare_or_serve_zeros(settings: dict[str, Any]) -> None:
    training = _Training(**settings)
    kinds = [training.step(0.0) for _ in range(4)]
    assert kinds[0] == "structure_miss" and "all_zero_gradients" not in kinds


def _late_hooks(session: Session, late: Sequence[bool]) -> list[str]:
    """Run backwards in whose midst a hook registers another one further down, if late."""
    kinds = []
    for is_late in late:
        seen: dict[bool, list[float]] = {False: [], True: []}
        grads = []
        for inside in (False, True):
            x = torch.linspace(-1, 1, 4).requires_grad_()
            early = x.sin()
            middle = early.exp()

            def outer(grad: torch.Tensor, early: torch.Tensor = early, seen: list[float] = seen[inside]) -> None:
                if is_late:  # noqa: B023
                    early.register_hook(lambda grad: seen.append(grad.sum().item()))

            middle.register_hook(outer)
            with session if inside else ca.disable():
                middle.square().sum().backward()
            grads.append(x.grad)
        assert_same(grads[:1], grads[1:])
        assert seen[False] == seen[True]
        assert session.last is not None
        kinds.append(session.last.reasons[0].kind if session.last.reasons else session.last.outcome)
    return kinds


def test_hooks_that_come_late_each_time_leave_their_tape_to_eager(takes: dict[str, float]) -> None:
    session = ca.enable(backend="eager", cache_dir=False, tune=True)
    kinds = _late_hooks(session, [True] * 60)
    assert kinds[:2] == ["first_seen", "late_hook"] and kinds.count("call_by_call") > 40
    takes["compiled"] = 1.0
    kinds = _late_hooks(session, [False] * 100)
    assert kinds[-20:] == ["hit"] * 20, "served once it was tried again"


def test_hooks_that_come_late_now_and_then_leave_nothing_to_eager(takes: dict[str, float]) -> None:
    takes["compiled"] = 1.0
    kinds = _late_hooks(ca.enable(backend="eager", cache_dir=False, tune=True), [True, False, False] * 6)
    assert "call_by_call" not in kinds and set(kinds[3::3]) == {"late_hook", "tuning"}


# ---- backwards that are skipped --------------------------------------------------------------------------------------


@pytest.fixture
def peeks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grow by one with each tape whose first nodes are read."""
    read: list[object] = []
    key_of = records.key_of
    monkeypatch.setattr(records, "key_of", lambda *given: read.append(given[0]) or key_of(*given))
    return read


def _longer(weight: torch.Tensor) -> torch.Tensor:
    return weight.cos().exp().tanh().exp().sin().exp().sum()


def _slow_unless_longer(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    return graph_module.forward if "tanh" in graph_module.code else slow(graph_module, examples)


def _one_of(session: Session, weight: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]) -> str:
    wanted = torch.autograd.grad(loss(weight), weight)
    with session:
        assert_same(torch.autograd.grad(loss(weight), weight), wanted)
    return outcome_of(session)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> tuple[Session, nn.Parameter]:
    """A session that leaves a short tape to eager for long, and for which a longer one is a hit."""
    monkeypatch.setattr(ledger, "REST", 10**6)
    monkeypatch.setattr(ledger, "WORTH", 2.0)
    session, weight = ca.enable(backend=_slow_unless_longer, tune=True), _weight()
    time = LEDGER._time

    def timed(record: Any, times: list[float], seconds: float) -> None:
        is_slow = times is record.compiled and len(record.living()[-1].program.tape.calls) < 8
        time(record, times, 3.0 if is_slow else 1.0)

    monkeypatch.setattr(LEDGER, "_time", timed)
    assert [_one_of(session, weight, _longer) for _ in range(16)][-1] == "hit"
    assert run_small(session, weight, 16)[-1] == "not_worth_it"
    return session, weight


def test_backwards_that_are_skipped_are_counted(left: tuple[Session, nn.Parameter], peeks: list[object]) -> None:
    session, weight = left
    before = session.stats()
    leave(session, weight, 3000)
    after = session.stats()
    assert after.backwards == before.backwards + 3000 and len(peeks) < 800
    assert after.bypasses["not_worth_it"] == before.bypasses["not_worth_it"] + 3000
    assert outcome_of(session) == "not_worth_it"


def test_a_hit_is_soon_found_after_many_that_were_left(left: tuple[Session, nn.Parameter]) -> None:
    session, weight = left
    leave(session, weight, 5000)
    outcomes = [_one_of(session, weight, _longer) for _ in range(100)]
    first = outcomes.index("hit")
    assert first <= decision.MOST_SKIPPED and set(outcomes[first:]) == {"hit"}
    assert set(outcomes[:first]) <= {"not_worth_it"}


@pytest.mark.parametrize("policy", ["on_miss", "on_unsupported"])
def test_sessions_that_raise_skip_nothing(policy: str, left: tuple[Session, nn.Parameter], peeks: list[object]) -> None:
    session, weight = left
    leave(session, weight, 2000)
    strict = ca.enable(backend=_slow_unless_longer, tune=True, **{policy: "raise"})
    loss = _refused if policy == "on_unsupported" else lambda x: x.sin().sum()
    for _ in range(3):
        with strict, pytest.raises((ca.CacheMissError, ca.UnsupportedBackwardError)):
            torch.autograd.grad(loss(weight), weight)
    peeks.clear()
    leave(strict, weight, 100)
    assert len(peeks) >= 100


@pytest.mark.parametrize("what", ["another session", "another thread", "a reset"])
def test_skips_hold_for_one_thread_and_session(what: str, left: tuple[Session, nn.Parameter]) -> None:
    session, weight = left
    plain = ca.enable(backend=_slow_unless_longer, tune=False)
    run_small(plain, weight, 1)
    while thread.here.unseen <= 10:
        leave(session, weight, 1)
    if what == "another session":
        outcomes = [(run_small(plain, weight, 1), run_small(session, weight, 1)) for _ in range(50)]
        assert outcomes == [(["hit"], ["not_worth_it"])] * 50
    elif what == "another thread":
        assert in_threads(lambda: run_small(plain, weight, 3)) == [["hit"] * 3]
        assert in_threads(lambda: _one_of(session, weight, _longer)) == ["hit"]
    else:
        ca.reset()
        assert run_small(session, weight, 1) == ["structure_miss"]


def test_threads_that_share_a_session_lose_no_count(left: tuple[Session, nn.Parameter]) -> None:
    session, weight = left
    before = session.stats().backwards
    with switching_every(1e-6):
        in_threads(*[lambda: leave(session, weight, 400)] * 4)
    stats = session.stats()
    assert stats.backwards == before + 1600 == total(stats)
    assert stats.bypasses["not_worth_it"] > 1500


@pytest.mark.parametrize("seed", range(4))
def test_tapes_in_any_order_lose_nothing(seed: int, left: tuple[Session, nn.Parameter]) -> None:
    """Hits, tapes that are left, refused ones and unknown ones come in rows, of several sessions and threads."""
    session, weight = left
    random, other = Random(seed), ca.enable(backend="eager", tune=False)
    around = [session, session, session, other, contextlib.nullcontext()]
    losses: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: (x.exp() * x).sum(),
        _longer,
        _refused,
        lambda x: (x.exp() * x).sum() * (x.sum() if random.random() < 0.5 else 2.0),
    ]
    counted = [0]

    def run(kind: int, inside: Any) -> None:
        loss, retain = losses[kind](weight), random.random() < 0.1
        with inside:
            found = torch.autograd.grad(loss, weight, retain_graph=True)
            if retain:
                assert_same(torch.autograd.grad(loss, weight, retain_graph=True), found)
        assert_same(found, torch.autograd.grad(loss, weight))
        counted[0] += (1 + retain) * (inside is session)

    def run_all(row: list[tuple[int, Any]]) -> None:
        for each in row:
            run(*each)

    before = session.stats().backwards
    for _ in range(30):
        often, seldom = random.sample(range(len(losses)), 2)
        row = [(often, session)] * random.choice([1, 3, 40, 80]) + [(seldom, random.choice(around))]
        if random.random() < 0.1:
            in_threads(lambda row=row: run_all(row))
        else:
            run_all(row)
    stats = session.stats()
    assert stats.backwards - before == counted[0] and total(stats) == stats.backwards


@pytest.mark.parametrize("reason", [NOT_YET, OVER_BUDGET, COMPILING, ledger.TIMED], ids=lambda reason: reason.kind)
def test_a_choice_of_the_ledger_is_no_failure(reason: Bypass) -> None:
    """Sessions with ``on_unsupported="raise"`` run it on eager."""
    assert decide.is_policy(reason)
