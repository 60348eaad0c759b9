"""Compiles that are not worth their cost: their tapes run on eager, and all gradients are eager's."""

from __future__ import annotations

import itertools
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_autograd as ca
import shadow_cache
from compiled_autograd.compiling import queue
from compiled_autograd.engine.account import RunAccount
from compiled_autograd.engine.handles import KEPT
from compiled_autograd.policies import ledger
from compiled_autograd.policies.decision import MOST_SKIPPED, Record
from compiled_autograd.policies.ledger import LEDGER, LEFT_UNSAID, Ledger
from shadow_cache import Bypass
from shadow_cache.cli import main
from shadow_cache.report.from_store import store_report

from .helpers import assert_same, expect, in_threads

Loss = Callable[[torch.Tensor], torch.Tensor]
LEFT = "over_budget"
WARNED = "compiling lost"


@pytest.fixture(autouse=True)
def takes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """Seconds that each compile, hit and eager backward is said to take, and the time. The default budget holds."""
    takes = {"compile": 2.0, "hit": 0.0, "eager": 0.0, "now": 0.0}
    spend, pays, lost = Ledger._spend, Ledger._pays, Record.lost

    def lost_by_hits(self: Record) -> float:
        for variant in self.living():
            variant.ran = takes["hit"] * variant.hits
        return lost(self)

    def pay(record: Record, seconds: float, times: int) -> None:
        pays(record, takes["eager"], times)

    monkeypatch.setattr(Ledger, "_spend", lambda self, record, seconds: spend(self, record, takes["compile"]))
    monkeypatch.setattr(Ledger, "spent_more", lambda self, record, seconds: None)
    monkeypatch.setattr(Ledger, "_pays", staticmethod(pay))
    monkeypatch.setattr(Record, "lost", lost_by_hits)
    monkeypatch.setattr(LEDGER, "clock", lambda: takes["now"])
    for name, value in (("FIRST_SECONDS", 2.0), ("SECONDS", 10.0), ("SHARE", 0.05)):
        monkeypatch.setattr(ledger, name, value)
    monkeypatch.delenv("COMPILED_AUTOGRAD_COMPILE_BUDGET")
    LEDGER.clear()
    yield takes
    monkeypatch.undo()
    LEDGER.clear()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Only deterministic algorithms are used."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _losses(length: int = 5) -> Iterator[Loss]:
    """Yield losses of as many nodes, each of another structure."""
    for names in itertools.product(("sin", "cos", "tanh"), repeat=length):

        def loss(x: torch.Tensor, names: tuple[str, ...] = names) -> torch.Tensor:
            for name in names:
                x = getattr(torch, name)(x)
            return x.sum()

        yield loss


def _known(x: torch.Tensor) -> torch.Tensor:
    return (x.exp() * x).sum()


def _long(x: torch.Tensor) -> torch.Tensor:
    state = x
    for _ in range(50):
        state = (state * x).sin()
    return state.sum()


def _step(session: ca.Session, loss: Loss, size: int = 5) -> str:
    """Run one backward and compare it with eager's. Return its outcome, or the reason of a bypass."""
    x = torch.linspace(-1, 1, size, requires_grad=True)
    seen: list[torch.Tensor] = []
    with ca.disable():
        wanted = torch.autograd.grad(loss(x), x)
    x.register_hook(seen.append)
    with session:
        loss(x).backward()
    assert_same([x.grad, *seen], [*wanted, *wanted])
    assert session.last is not None
    first = session.last.reasons[0] if session.last.outcome == "bypass" else None
    return first.label if isinstance(first, Bypass) else session.last.outcome


def _spend_all(session: ca.Session, losses: Iterator[Loss]) -> int:
    """Run new structures until one is left to eager. Return how many were compiled."""
    outcomes = itertools.takewhile(lambda outcome: outcome != LEFT, (_step(session, each) for each in losses))
    return len([*outcomes])


# ---- new structures and shapes ---------------------------------------------------------------------------------------


def test_structures_that_never_come_back_are_left_to_eager() -> None:
    session, losses = ca.enable(backend="eager"), _losses()
    with pytest.warns(UserWarning, match=f"{WARNED} 10.0 s on 5 .*pad.*mark_dynamic.*disable") as warned:
        outcomes = [_step(session, next(losses)) for _ in range(100)]
    assert outcomes == ["structure_miss"] * 5 + [LEFT] * 95
    expect(session.stats(), structure_misses=5, bypasses={LEFT: 95}, captures=5, compiles=5)
    assert len([each for each in warned if WARNED in str(each.message)]) == 1


def test_shapes_that_never_come_back_are_left_to_eager() -> None:
    session, loss = ca.enable(backend="eager", dynamic=False), next(_losses())
    outcomes = [_step(session, loss, size) for size in range(2, 102)]
    assert outcomes == ["structure_miss", *["shape_miss"] * 4, *[LEFT] * 95]
    expect(session.stats(), structure_misses=1, shape_misses=4, bypasses={LEFT: 95}, captures=1, compiles=5)


def test_the_warning_comes_after_eight_and_a_reset_forgets() -> None:
    session, losses = ca.enable(backend="eager"), _losses()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _spend_all(session, losses)
        assert {_step(session, next(losses)) for _ in range(LEFT_UNSAID - 2)} == {LEFT}
    with pytest.warns(UserWarning, match=WARNED):
        assert _step(session, next(losses)) == LEFT
    ca.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _spend_all(session, losses) == 5, "all was forgotten, but for the warning"
        assert {_step(session, next(losses)) for _ in range(2 * LEFT_UNSAID)} == {LEFT}


def test_a_known_structure_is_a_hit_between_others_that_are_left_to_eager() -> None:
    session, losses = ca.enable(backend="eager"), _losses()
    assert _step(session, _known) == "structure_miss"
    _spend_all(session, losses)
    outcomes = [(_step(session, _known), _step(session, next(losses))) for _ in range(40)]
    assert outcomes == [("hit", LEFT)] * 40


def test_a_known_shape_is_soon_a_hit_between_others_that_are_left_to_eager() -> None:
    session, loss = ca.enable(backend="eager", dynamic=False), next(_losses())
    assert [_step(session, loss, size) for size in range(2, 7)] == ["structure_miss", *["shape_miss"] * 4]
    outcomes = [[_step(session, loss, size), *[_step(session, loss, 4) for _ in range(4)]] for size in range(10, 60)]
    assert {first for first, *_ in outcomes} == {LEFT}
    hits = [others.count("hit") for _, *others in outcomes]
    assert sum(hits) > 2 * len(hits) and set(itertools.chain(*outcomes)) == {LEFT, "hit"}


def test_hits_make_up_for_a_compile(takes: dict[str, float]) -> None:
    session, losses = ca.enable(backend="eager"), _losses()
    assert _step(session, _known) == "structure_miss"
    assert _spend_all(session, losses) == 4
    assert [_step(session, _known), _step(session, next(losses))] == ["hit", LEFT]
    takes["hit"] = 1.0
    assert [_step(session, each) for each in (_known, next(losses), next(losses))] == ["hit", "structure_miss", LEFT]


def test_time_allows_more(takes: dict[str, float]) -> None:
    session, losses = ca.enable(backend="eager"), _losses()
    assert _spend_all(session, losses) == 5
    takes["now"] = 80.0  # a twentieth of it is two compiles
    assert [_step(session, next(losses)) for _ in range(3)] == ["structure_miss"] * 2 + [LEFT]


def test_a_tape_that_runs_on_eager_for_as_long_as_a_compile_is_compiled(takes: dict[str, float]) -> None:
    session, losses = ca.enable(backend="eager"), _losses()
    _spend_all(session, losses)
    takes["eager"] = 0.25
    outcomes = [_step(session, _known) for _ in range(12)]
    assert outcomes == [LEFT] * 8 + ["structure_miss"] + ["hit"] * 3
    assert _step(session, next(losses)) == LEFT


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "compiled"),
    [
        ({"compile_budget": math.inf}, 30),
        ({"compile_budget": 20}, 10),
        ({"compile_budget": 5}, 2),
        ({"compile_budget": 0}, 0),
        ({"tune": True}, 5),
    ],
    ids=str,
)
def test_the_settings_say_how_many_are_compiled(settings: dict[str, Any], compiled: int) -> None:
    session, losses = ca.enable(backend="eager", **settings), _losses()
    outcomes = [_step(session, next(losses)) for _ in range(30)]
    assert outcomes == ["structure_miss"] * compiled + [LEFT] * (30 - compiled)


def test_the_environment_sets_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_AUTOGRAD_COMPILE_BUDGET", "6")
    assert _spend_all(ca.enable(backend="eager"), _losses()) == 3


def test_one_session_may_lose_more_than_another(takes: dict[str, float]) -> None:
    little, much = ca.enable(backend="eager"), ca.enable(backend="eager", compile_budget=math.inf)
    losses = _losses()
    _spend_all(little, losses)
    one, *others = itertools.islice(losses, 4)
    assert _step(little, one) == LEFT
    assert [_step(much, each) for each in (one, *others, one)] == ["structure_miss"] * 4 + ["hit"]
    assert _step(little, next(losses)) == LEFT
    takes["eager"] = 1.0
    assert [_step(little, one) for _ in range(3)] == [LEFT, LEFT, "hit"], "the other session has compiled it"


def test_under_deterministic_algorithms_the_clock_decides_nothing(takes: dict[str, float], deterministic: None) -> None:
    """Each compile, hit and miss counts as one second: ten are lost, and a tape is compiled at its second miss."""
    takes.update(dict.fromkeys(takes, math.nan))
    session, losses = ca.enable(backend="eager", tune=True), _losses()
    assert _spend_all(session, losses) == 10
    assert [_step(session, _known) for _ in range(30)] == [LEFT, "structure_miss", *["hit"] * 28]
    assert _step(session, next(losses)) == LEFT, "hits make up for their own compile alone"
    expect(session.stats(), structure_misses=11, hits=28, bypasses={LEFT: 3}, compiles=11)


# ---- long captures and traces ----------------------------------------------------------------------------------------


def test_a_capture_that_takes_longer_than_the_budget_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "FIRST_SECONDS", 0.0)
    session = ca.enable(backend="eager", compile_budget=0, on_unsupported="raise")
    reports = KEPT.reports
    assert [_step(session, _long) for _ in range(6)] == [LEFT] * 6
    assert KEPT.reports == reports + 1, "the other tapes were not even reported"
    expect(session.stats(), bypasses={LEFT: 6}, captures=0, compiles=0)


def test_a_trace_that_takes_longer_than_the_budget_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tape is released by then, so that its calls run one by one."""
    session, spent = ca.enable(backend="eager", compile_budget=2), LEDGER.spent
    with monkeypatch.context() as patch:
        patch.setattr(RunAccount, "left", lambda self: -1.0)
        patch.setattr(LEDGER, "spent", lambda record, seconds: spent(record, 3.0))
        assert _step(session, _long) == "structure_miss"
    assert session.last is not None and "compile_budget is spent" in str(session.last.reasons)
    outcomes = [_step(session, _long) for _ in range(6)]
    assert outcomes[-1] == LEFT and session.stats().compiles == 0, outcomes


def test_a_region_of_a_known_variant_is_not_compiled_over_the_budget() -> None:
    """A function passes on another layout than before: the calls of its region run one by one."""
    session = ca.enable(backend="eager")

    _Transposed.layout = "plain"
    assert [_step(session, _passes_on) for _ in range(2)] == ["structure_miss", "hit"]
    _spend_all(session, _losses())
    compiles = session.stats().compiles
    _Transposed.layout = "transposed"
    assert _step(session, _passes_on) == "shape_miss"
    assert session.last is not None and "compile_budget" in str(session.last.reasons[0])
    assert {_step(session, _passes_on) for _ in range(8)} <= {"shape_miss", LEFT}
    assert session.stats().compiles == compiles


class _Transposed(torch.autograd.Function):
    layout = "plain"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        return grad if _Transposed.layout == "plain" else grad.t().contiguous().t()


def _passes_on(x: torch.Tensor) -> torch.Tensor:
    return _Transposed.apply((x[:, None] * x).sin()).sum()  # type: ignore[no-any-return,no-untyped-call]


# ---- the store, threads, the background ------------------------------------------------------------------------------


def test_structures_in_the_store_are_loaded_although_the_budget_is_spent(
    takes: dict[str, float], tmp_path: Path
) -> None:
    losses = [*itertools.islice(_losses(), 20)]
    before = ca.enable(backend="eager", compile_budget=math.inf, cache_dir=tmp_path)
    assert {_step(before, loss) for loss in losses} == {"structure_miss"}
    ca.reset()
    after = ca.enable(backend="eager", cache_dir=tmp_path)
    assert _spend_all(after, _losses(4)) == 5
    takes["compile"] = 0.0  # loads take less
    assert [_step(after, loss) for loss in losses for _ in range(2)] == ["hit"] * 40
    assert after.stats().loads == 20


def test_the_store_is_searched_once_for_each_tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, searched = ca.enable(backend="eager", cache_dir=tmp_path), []
    asked = Ledger.asked_store
    monkeypatch.setattr(Ledger, "asked_store", lambda *given: searched.append(given[1]) or asked(*given))
    assert _spend_all(session, _losses()) == 5
    assert [_step(session, _known) for _ in range(10)] == [LEFT] * 10
    assert len(searched) == len({*searched}) == 2 and session.stats().captures == 5


def test_threads_share_one_budget() -> None:
    losses, outcomes, lock = [*itertools.islice(_losses(), 60)], [], threading.Lock()

    def run(number: int) -> None:
        session = ca.enable(backend="eager")
        for loss in losses[number::4]:
            outcome = _step(session, loss)
            with lock:
                outcomes.append(outcome)

    in_threads(*[lambda number=number: run(number) for number in range(4)])
    assert len(outcomes) == 60 and {*outcomes} <= {"structure_miss", LEFT, "other_thread_in_backward"}
    assert outcomes.count("structure_miss") <= 5 + 3, "those that other threads were compiling meanwhile"


def test_the_command_line_and_the_report_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "cache"
    session, losses = ca.enable(backend="eager", cache_dir=cache), _losses()
    for _ in range(12):
        _step(session, next(losses))
    page = session.report(tmp_path / "report.html").read_text()
    assert LEFT in page
    ca.reset()
    with pytest.raises(SystemExit):
        main(["why", "--last", "--cache-dir", str(cache)])
    said = " ".join(capsys.readouterr().out.split())
    assert f"kind {LEFT}" in said and "compiling lost 10.0 s on 5 tapes" in said
    with shadow_cache.open(cache) as store:
        assert store.stats().bypasses == {LEFT: 1} and LEFT not in store.stats().misses
        events = store_report(store).timeline.events
        assert [each.outcome for each in events if each.reasons[0].kind == LEFT] == ["bypass"]
    with pytest.raises(SystemExit):
        main(["stats", "--cache-dir", str(cache)])
    assert f"\n1 bypass, by reason\n  {LEFT}  1 " in capsys.readouterr().out


def test_a_new_tape_is_compiled_in_the_background_once_it_has_run_for_long_enough(takes: dict[str, float]) -> None:
    takes["eager"] = 0.5
    session = ca.enable(backend="eager", on_miss="background")
    assert [_step(session, _known) for _ in range(5)] == ["not_yet"] * 4 + ["structure_miss"]
    assert session.wait(60) and [_step(session, _known) for _ in range(3)] == ["hit"] * 3
    expect(session.stats(), structure_misses=1, hits=3, bypasses={"not_yet": 4}, compiles=1)
    assert len(LEDGER._costs) == 1, "no hit is taken for a compile"


def test_while_it_is_compiled_beside_it_runs_on_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "FIRST_SECONDS", 0.0)
    compiles, entered, leave = queue.compile_elsewhere, threading.Event(), threading.Event()

    def slowly(*given: Any) -> Any:
        entered.set()
        assert leave.wait(60)
        return compiles(*given)

    monkeypatch.setattr(queue, "compile_elsewhere", slowly)
    session = ca.enable(backend="eager", on_miss="background")
    assert _step(session, _known) == "structure_miss"
    assert entered.wait(60)
    outcomes = [_step(session, _known) for _ in range(5)]
    leave.set()
    assert outcomes == ["compiling"] * 5 and session.wait(60)
    assert [_step(session, _known) for _ in range(3)] == ["hit"] * 3


def test_the_budget_holds_in_the_background_too(takes: dict[str, float]) -> None:
    takes["eager"] = 1.0
    session, losses = ca.enable(backend="eager", on_miss="background", compile_budget=6), _losses()
    outcomes = []
    for loss in itertools.islice(losses, 6):
        outcomes.append([_step(session, loss) for _ in range(4) if session.wait(60)])
    assert outcomes == [["not_yet", "not_yet", "structure_miss", "hit"]] * 3 + [[LEFT] * 4] * 3
    assert session.stats().compiles == 3


def test_a_region_of_a_known_variant_is_not_compiled_in_the_background_at_once(takes: dict[str, float]) -> None:
    """The calls of the region run one by one until they have taken as long as a compile."""
    session = ca.enable(backend="eager", on_miss="background")
    _Transposed.layout = "plain"
    takes["eager"] = 1.0
    assert [_step(session, _passes_on) for _ in range(3)] == ["not_yet", "not_yet", "structure_miss"]
    assert session.wait(60) and _step(session, _passes_on) == "hit"
    _Transposed.layout = "transposed"
    assert _step(session, _passes_on) == "shape_miss"
    outcomes = [_step(session, _passes_on) for _ in range(8) if session.wait(60)]
    assert outcomes[0] != "hit" and outcomes[-1] == "hit"


@pytest.mark.parametrize("on_miss", ["compile", "background"])
def test_a_budget_below_the_likely_time_of_a_first_compile(takes: dict[str, float], on_miss: Any) -> None:
    """Two seconds, for the import of a slow backend: others take milliseconds."""
    takes["compile"] = takes["eager"] = 0.01
    session = ca.enable(backend="eager", compile_budget=0.5, on_miss=on_miss, tune=False)
    for _ in range(100 + MOST_SKIPPED):  # it is compiled at a look
        x = torch.ones(8, requires_grad=True)
        with session:
            (x.exp() * 2).sum().backward()
        assert session.wait(60)
    assert session.stats().compiles == 1 and session.stats().hits > 40
