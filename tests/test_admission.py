"""Where every tape is another, tapes are left to the eager engine, and none of a step's is lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import compiled_autograd as ca
from compiled_autograd.cache.graphs import REUSES_WORTH_COMPILING, CompiledGraph
from compiled_autograd.policies.admission import FIRST_PROBE, LAST_PROBE, WINDOW, Admission

from .helpers import assert_same, expect

Loss = Callable[[torch.Tensor], torch.Tensor]


def _losses() -> Iterator[Loss]:
    """Each of another structure."""
    for names in itertools.product(("sin", "cos", "tanh"), repeat=5):

        def loss(x: torch.Tensor, names: tuple[str, ...] = names) -> torch.Tensor:
            for name in names:
                x = getattr(torch, name)(x)
            return x.sum()

        yield loss


def _step(session: ca.Session, loss: Loss) -> str:
    """One backward, compared with eager's; its outcome, or the reason of a bypass."""
    x = torch.linspace(-1, 1, 5, requires_grad=True)
    seen: list[torch.Tensor] = []
    wanted = torch.autograd.grad(loss(x), x)
    x.register_hook(seen.append)
    with session:
        loss(x).backward()
    assert_same([x.grad, *seen], [*wanted, *wanted])
    assert session.last is not None
    return str(session.last.reasons[0]).partition(":")[0] if session.last.outcome == "bypass" else session.last.outcome


def test_structures_that_never_come_back_are_left_to_eager() -> None:
    session, losses = ca.enable(backend="eager", tune=True), _losses()
    outcomes = [_step(session, next(losses)) for _ in range(WINDOW + 3 * FIRST_PROBE)]
    captured = [index for index, outcome in enumerate(outcomes) if outcome == "structure_miss"]
    assert captured == [*range(WINDOW), WINDOW + FIRST_PROBE - 1, WINDOW + 3 * FIRST_PROBE - 1]
    assert set(outcomes) == {"structure_miss", "every_tape_new"}
    refused = len(outcomes) - len(captured)
    expect(
        session.stats(), structure_misses=len(captured), bypasses={"every_tape_new": refused}, captures=len(captured)
    )


def test_structures_that_come_back_once_or_twice_are_left_to_eager_too() -> None:
    """As under gradcheck, which asks for each pattern of undefined gradients twice."""
    session, losses = ca.enable(backend="eager", tune=True), list(_losses())
    for loss in losses[:WINDOW]:
        assert [_step(session, loss) for _ in range(REUSES_WORTH_COMPILING)] == ["structure_miss", "hit", "hit"]
    assert [_step(session, losses[WINDOW]) for _ in range(2)] == ["every_tape_new"] * 2


@pytest.mark.parametrize("which", [0, WINDOW - 1])
def test_when_one_of_them_comes_back_all_are_captured_again(which: int) -> None:
    session, losses = ca.enable(backend="eager", tune=True), list(_losses())
    outcomes = [_step(session, loss) for loss in losses[: WINDOW + 2]]
    assert outcomes[-2:] == ["every_tape_new"] * 2
    for often in range(REUSES_WORTH_COMPILING):
        assert _step(session, losses[WINDOW + 2 + often]) == "every_tape_new"
        assert _step(session, losses[which]) == "hit"
    assert _step(session, losses[WINDOW]) == "structure_miss"
    assert _step(session, losses[WINDOW]) == "hit"


def test_a_structure_that_is_known_is_never_left_to_eager() -> None:
    session, losses = ca.enable(backend="eager", tune=True), list(_losses())
    assert _step(session, losses[0]) == "structure_miss"
    for loss in losses[1 : WINDOW + 4]:
        _step(session, loss)
    assert _step(session, losses[WINDOW + 4]) == "every_tape_new"
    assert _step(session, losses[0]) == "hit"


@pytest.mark.parametrize("settings", [{"tune": False}, {"tune": True, "on_unsupported": "raise"}])
def test_what_the_settings_say(settings: dict[str, bool | str]) -> None:
    """Without tuning everything is captured; and to leave a tape to eager for its own good is no failure."""
    session, losses = ca.enable(backend="eager", **settings), _losses()
    outcomes = [_step(session, next(losses)) for _ in range(WINDOW + 2)]
    assert outcomes[-1] == ("every_tape_new" if settings["tune"] else "structure_miss")


def test_what_the_store_has_came_back(tmp_path: Path) -> None:
    losses = list(_losses())[: WINDOW + 3]
    before = ca.enable(backend="eager", tune=False, cache_dir=tmp_path)
    assert {_step(before, loss) for loss in losses} == {"structure_miss"}
    ca.reset()
    after = ca.enable(backend="eager", tune=True, cache_dir=tmp_path)
    assert [_step(after, loss) for loss in losses] == ["hit"] * len(losses)
    assert after.stats().loads == len(losses)


def test_a_reset_forgets() -> None:
    session, losses = ca.enable(backend="eager", tune=True), _losses()
    for _ in range(WINDOW + 1):
        outcome = _step(session, next(losses))
    assert outcome == "every_tape_new"
    ca.reset()
    assert _step(session, next(losses)) == "structure_miss"


def test_probes_become_rarer() -> None:
    admission, graphs = Admission(), []
    for _ in range(WINDOW):
        graphs.append(CompiledGraph(None))  # type: ignore[arg-type]
        admission.captured(graphs[-1])
    spacings, left = [], 0
    for _ in range(6000):
        left += 1
        if not admission.refuses():
            spacings.append(left)
            left = 0
    assert spacings == [16, 32, 64, 128, 256, 512, 1024, 1024, 1024, 1024] and spacings[-1] == LAST_PROBE
    graphs[3].met = REUSES_WORTH_COMPILING
    assert not admission.refuses()
    graphs[3].met -= 1
    assert admission.refuses()
