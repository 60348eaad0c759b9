"""Tapes that cannot be captured, or of which nothing can be learnt: after a few tries the engine is not asked to report
them, but from time to time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import compiled_autograd as ca
from compiled_autograd.engine import backward
from compiled_autograd.engine.call import Refused
from compiled_autograd.policies import refusals, sketches
from shadow_cache import unsupported
from tests.helpers import assert_same, expect

REASON = "unsupported(RuntimeError: view_fn not supported by compiled autograd)"


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one with each tape that the engine is asked to walk."""
    asked: list[object] = []
    hand_over = backward.hand_over

    def counted(call: Any, *others: Any) -> Any:
        asked.append(call.outputs)
        return hand_over(call, *others)

    monkeypatch.setattr(backward, "hand_over", counted)
    return asked


def _refused(x: torch.Tensor) -> torch.Tensor:
    """Writes into a view that sizes and strides do not describe."""
    y = x * (1 + 1j)
    torch.view_as_real(y).mul_(2)
    return y.abs().sum()


def _captured(x: torch.Tensor) -> torch.Tensor:
    return x.exp().sum()


def _run(session: ca.Session, times: int, loss_of: Any = _refused) -> None:
    for _ in range(times):
        x = torch.randn(4, requires_grad=True)
        wanted = torch.autograd.grad(loss_of(x), x)
        loss = loss_of(x)
        with session:
            assert_same(torch.autograd.grad(loss, x), wanted)


def test_the_engine_is_asked_a_few_times_and_then_seldom(walks: list[object]) -> None:
    session = ca.enable(backend="eager")
    _run(session, 2 + refusals.TRIES + refusals.FIRST_SPACING)
    assert len(walks) == refusals.TRIES + 1  # it was tried once more, after so many
    expect(session.stats(), bypasses={REASON: 2 + refusals.TRIES + refusals.FIRST_SPACING})
    assert session.last is not None and session.last.reasons[0].label == REASON
    _run(session, 2 * refusals.FIRST_SPACING - 1)
    assert len(walks) == refusals.TRIES + 1
    _run(session, 2)
    assert len(walks) == refusals.TRIES + 2


def test_others_are_captured_beside_it(walks: list[object]) -> None:
    session = ca.enable(backend="eager", tune=False)
    for _ in range(20):
        _run(session, 1)
        _run(session, 1, _captured)
    expect(session.stats(), structure_misses=1, hits=19, captures=1, bypasses={REASON: 20})
    assert len(walks) <= refusals.TRIES + 20


def test_what_was_captured_once_is_always_tried(walks: list[object]) -> None:
    """Its nodes have the names of one that is refused."""

    def pieces(x: torch.Tensor, retains: bool) -> torch.Tensor:
        first, second = x.exp().unbind()
        if retains:
            second.retain_grad()  # the engine does not say of which of the two
        return (first * second).sum()

    def captured(x: torch.Tensor) -> torch.Tensor:
        return pieces(x.view(2, 2), False)

    def refused(x: torch.Tensor) -> torch.Tensor:
        return pieces(x.view(2, 2), True)

    session = ca.enable(backend="eager", tune=False, extension="off")
    _run(session, 1, captured)
    _run(session, 10, refused)
    _run(session, 3, captured)
    (label,) = session.stats().bypasses
    expect(session.stats(), structure_misses=1, hits=3, captures=1, bypasses={label: 10})
    assert label.startswith("unsupported(")
    assert len(walks) == 14


def test_it_is_captured_once_it_can_be(monkeypatch: pytest.MonkeyPatch, walks: list[object]) -> None:
    """The same names, refused at first: after a while it is asked for again."""
    monkeypatch.setattr(refusals, "FIRST_SPACING", 4)
    session = ca.enable(backend="eager", tune=False, extension="off")
    with monkeypatch.context() as planted:
        planted.setattr(backward, "hand_over", lambda *_: Refused(unsupported("planted")))
        _run(session, refusals.TRIES, _captured)
    _run(session, 4, _captured)
    assert not walks
    _run(session, 3, _captured)
    assert len(walks) == 3
    expect(session.stats(), structure_misses=1, hits=2, captures=1, bypasses={"unsupported(planted)": 6})


def test_who_wants_an_error_gets_one_each_time() -> None:
    _run(ca.enable(backend="eager"), 10)
    with ca.enable(backend="eager", on_unsupported="raise"):
        for _ in range(10):
            with pytest.raises(ca.UnsupportedBackwardError, match="view_fn"):
                _refused(torch.randn(4, requires_grad=True)).backward()


def test_a_mistake_of_the_users_is_no_refusal() -> None:
    x = torch.randn(4, requires_grad=True)
    with ca.enable(backend="eager"):
        for _ in range(5):
            with pytest.raises(RuntimeError, match="grad can be implicitly created"):
                x.exp().backward()
    assert not refusals.REFUSALS.active


def test_a_reset_has_it_tried_again(walks: list[object]) -> None:
    session = ca.enable(backend="eager")
    _run(session, refusals.TRIES + 2)
    ca.reset()
    assert not refusals.REFUSALS.active
    _run(session, 1)
    assert len(walks) == refusals.TRIES + 1


@pytest.mark.parametrize("settings", [{}, {"on_miss": "eager"}], ids=str)
def test_what_has_no_tape_is_for_the_engine_to_judge(settings: dict[str, Any]) -> None:
    """Also where tapes are looked at before the engine is asked."""
    session = ca.enable(backend="eager", **settings)
    if not settings:
        _run(session, 2 + refusals.TRIES)
    x = torch.ones(3, requires_grad=True)
    with session:
        for outputs in [(torch.ones(()),), (x.sum(), torch.ones(()))]:
            with pytest.raises(RuntimeError, match="does not require grad and does not have a grad_fn"):
                torch.autograd.backward(outputs)
        assert torch.autograd.grad((), x, (), allow_unused=True) == (None,)


def test_one_that_is_captured_meanwhile_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is remembered all tapes are looked at, which takes as long as a small hit."""
    session = ca.enable(backend="eager", tune=False)
    with monkeypatch.context() as planted:
        planted.setattr(backward, "hand_over", lambda *_: Refused(unsupported("planted")))
        _run(session, 1, _captured)
    assert refusals.REFUSALS.active
    _run(session, 2, _captured)
    assert not refusals.REFUSALS.active
    expect(session.stats(), structure_misses=1, hits=1, captures=1, bypasses={"unsupported(planted)": 1})


def test_one_that_does_not_come_again_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketches, "PATIENCE_OF_ALL", 100)
    session = ca.enable(backend="eager", tune=False)
    _run(session, 5)
    _run(session, 1400, _captured)
    assert not refusals.REFUSALS.active
    expect(session.stats(), structure_misses=1, hits=1399, captures=1, bypasses={REASON: 5})


def test_it_is_forgotten_too_where_nothing_may_be_left_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """No such session would keep it alive, nor ever try it."""
    monkeypatch.setattr(sketches, "PATIENCE_OF_ALL", 100)
    _run(ca.enable(backend="eager", tune=False), 5)
    session = ca.enable(backend="eager", tune=False, on_unsupported="raise")
    _run(session, 1400, _captured)
    assert not refusals.REFUSALS.active
    expect(session.stats(), structure_misses=1, hits=1399, captures=1)


class _Training:
    """Two factors of a loss, by the step: where all are zero, so are the gradients."""

    def __init__(self, **settings: Any) -> None:
        self.session = ca.enable(**{"backend": _forward, "cache_dir": False, "tune": True} | settings)

    def step(self, factor: float) -> str:
        """What became of it: the outcome, or the reason of a bypass."""
        x = torch.ones(4, requires_grad=True)
        with self.session as session:
            (x * torch.full((4,), factor) * 3).sum().backward()
        assert_same([x.grad], [torch.full((4,), 3 * factor)])
        last = session.last
        assert last is not None
        return last.reasons[0].kind if last.outcome == "bypass" else last.outcome


def test_a_tape_whose_gradients_are_all_zero_is_left_to_eager_for_a_while() -> None:
    training, spacing = _Training(), refusals.FIRST_SPACING_OF_ZEROS
    assert training.step(0.0) == "structure_miss"
    assert [training.step(0.0) for _ in range(spacing)] == spacing * ["all_zero_gradients"]
    assert training.step(0.0) == "hit"
    assert [training.step(0.0) for _ in range(2 * spacing)] == 2 * spacing * ["all_zero_gradients"]
    assert [training.step(1.0) for _ in range(4)] == 4 * ["hit"]
    assert not refusals.REFUSALS.active, "something was learnt"
    assert training.step(0.0) == "hit"


def test_a_tape_that_was_proved_serves_zeros_too() -> None:
    training = _Training()
    assert [training.step(1.0) for _ in range(3)] == ["structure_miss", "hit", "hit"]
    assert [training.step(0.0) for _ in range(3)] == 3 * ["hit"]


@pytest.mark.parametrize("settings", [{"tune": False}, {"check": True}, {"check": False}])
def test_who_wants_it_otherwise_has_zeros_compared_or_served(settings: dict[str, Any]) -> None:
    training = _Training(**settings)
    assert [training.step(0.0) for _ in range(4)] == ["structure_miss", "hit", "hit", "hit"]
    assert not refusals.REFUSALS.active


def test_who_wants_it_otherwise_is_asked_what_others_have_left_to_eager() -> None:
    """Sessions with settings under which the same is compiled."""
    training, checked = _Training(), _Training(check=True)
    assert [training.step(0.0) for _ in range(3)] == ["structure_miss", "all_zero_gradients", "all_zero_gradients"]
    assert [checked.step(factor) for factor in (0.0, 0.0, 1.0)] == 3 * ["hit"]
    assert training.step(1.0) == "all_zero_gradients"


def test_zeros_of_one_region_of_two_leave_nothing_to_eager() -> None:
    """The other one has shown much, and serves."""
    session, outcomes = ca.enable(backend=_forward, cache_dir=False, tune=True), []
    for _ in range(4):
        x = torch.ones(4, requires_grad=True)
        y = x * 3
        y.register_hook(torch.zeros_like)
        with session:
            (y * 2).sum().backward()
        assert_same([x.grad], [torch.zeros(4)])
        assert session.last is not None
        outcomes.append(session.last.outcome)
    assert outcomes == ["structure_miss", "hit", "hit", "hit"]
    assert session.stats().compiles == 2


def test_wrong_code_is_found_once_gradients_are_not_zero() -> None:
    """However many steps without a gradient come before, none of them counts."""
    training = _Training(backend=_wrong_where_not_zero)
    steps = [training.step(0.0) for _ in range(200)]
    assert steps.count("hit") == 2
    kinds = [training.step(1.0) for _ in range(400)]
    assert training.session.stats().failures == 1
    assert "shape_miss" in kinds, "that of the hit which was found to be wrong"


def _forward(graph_module: Any, example_inputs: Any) -> Any:
    return lambda *arguments: graph_module.forward(*arguments)


def _wrong_where_not_zero(graph_module: Any, example_inputs: Any) -> Any:
    return lambda *arguments: [each * 1.1 for each in graph_module.forward(*arguments)]


def _late_hook(around: Any, late: bool, seen: list[float]) -> list[torch.Tensor]:
    """A backward in whose midst a hook registers another one further down, if ``late``."""
    x = torch.linspace(-1, 1, 4).requires_grad_()
    early = x.sin()
    middle = early.exp()

    def outer(grad: torch.Tensor) -> None:
        if late:
            early.register_hook(lambda grad: seen.append(grad.sum().item()))

    middle.register_hook(outer)
    with around:
        middle.square().sum().backward()
    assert x.grad is not None
    return [x.grad]


def _late_hooks(session: ca.Session, late: list[bool]) -> list[str]:
    kinds = []
    for each in late:
        wanted: list[float] = []
        seen: list[float] = []
        assert_same(_late_hook(session, each, seen), _late_hook(ca.disable(), each, wanted))
        assert seen == wanted
        last = session.last
        assert last is not None
        kinds.append(last.reasons[0].kind if last.reasons else last.outcome)
    return kinds


def test_hooks_that_come_late_each_time_leave_their_tape_to_eager() -> None:
    session, spacing = ca.enable(backend="eager", cache_dir=False, tune=True), refusals.FIRST_SPACING
    kinds = _late_hooks(session, (3 + spacing) * [True])
    assert kinds[:2] == ["first_seen", "late_hook"]
    assert kinds[2:] == spacing * ["call_by_call"] + ["late_hook"]
    assert _late_hooks(session, (2 * spacing + 1) * [True]) == 2 * spacing * ["call_by_call"] + ["late_hook"]
    assert session.stats().failures == 4


def test_hooks_that_come_late_now_and_then_leave_nothing_to_eager() -> None:
    session = ca.enable(backend="eager", cache_dir=False, tune=True)
    kinds = _late_hooks(session, 4 * [True, False, False])
    assert kinds[:3] == ["first_seen", "shape_miss", "hit"] and kinds[3::3] == 3 * ["late_hook"]
    assert {*kinds[4::3], *kinds[5::3]} <= {"hit", "tuning", "not_worth_it"}
    assert not refusals.REFUSALS.active


def test_a_tape_without_late_hooks_is_served_once_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "FIRST_SPACING", 4)
    session = ca.enable(backend="eager", cache_dir=False, tune=True)
    _late_hooks(session, 2 * [True])
    assert _late_hooks(session, 4 * [False]) == 4 * ["call_by_call"]
    assert _late_hooks(session, 2 * [False]) == ["shape_miss", "hit"]
    assert not refusals.REFUSALS.active


@pytest.mark.parametrize("settings", [{"tune": False}, {"check": True}, {"on_unsupported": "raise"}])
def test_who_wants_it_otherwise_has_late_hooks_called_in_compiled_backwards(settings: dict[str, Any]) -> None:
    session = ca.enable(**{"backend": "eager", "cache_dir": False, "tune": True} | settings)
    assert _late_hooks(session, 6 * [True])[1:] == 5 * ["late_hook"]
    assert not refusals.REFUSALS.active
