"""Tensors of calls that were checkpointed without reentrance are unpacked together, and nothing else is moved."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import compiled_autograd as ca
from compiled_autograd.cache import forms
from compiled_autograd.steps.steps import RegionStep
from shadow_cache import Failure

from .helpers import assert_grads, assert_same, expect, in_subprocess

WIDTH = 8
Event = tuple[str, int]


class _Doubled(torch.autograd.Function):
    """Tells when its backward runs; what it saves is unpacked when it asks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tell: Callable[[], None]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.tell = tell
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.tell()
        return 2 * x * grad, None


class _Block(nn.Module):
    """Tells when its forward runs, and what its hooks see."""

    def __init__(self, number: int, events: list[Event], kind: str = "plain") -> None:
        super().__init__()
        self.number, self.events, self.kind = number, events, kind
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Block:
        other = _Block(self.number, [], self.kind)
        other.load_state_dict(self.state_dict())
        for name, parameter in self.named_parameters():
            other.get_parameter(name).requires_grad_(parameter.requires_grad)
        return other

    def tell(self, what: str) -> None:
        self.events.append((what, self.number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tell("forward")
        y = self.first(self.norm(x)).tanh()
        if self.kind == "hook":
            y.register_hook(lambda grad: self.tell("hook"))
        elif self.kind == "scale" and y.requires_grad:
            y.register_hook(lambda grad: 2 * grad)
        elif self.kind == "function":
            y = _Doubled.apply(y, lambda: self.tell("function"))
        elif self.kind == "in place":
            y = y.sin().mul_(1.5)
        elif self.kind == "saved and changed":  # which eager does not find where it was packed
            y = y.exp()
            y = y.mul_(y.detach())
        elif self.kind == "dropout":
            y = F.dropout(y, 0.5)
        elif self.kind == "inner":
            y = checkpoint(lambda z: z.sigmoid() * z, y, use_reentrant=False)
        elif self.kind == "late" and (node := torch._C._current_autograd_node()) is not None:
            node.register_hook(lambda *_: self.tell("late"))
        elif self.kind == "freed":
            with torch.no_grad():
                y = y + y.abs()
        return x + self.second(y)


class _Net(nn.Module):
    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.blocks = nn.ModuleList(_Block(number, self.events, kind) for number, kind in enumerate(kinds))
        self._share()

    def _share(self) -> None:
        self.events = []
        for block in self.blocks:
            block.events = self.events

    def __deepcopy__(self, memo: dict[int, Any]) -> _Net:
        other = _Net([])
        other.blocks = copy.deepcopy(self.blocks, memo)
        other._share()
        return other

    def forward(self, x: torch.Tensor, groups: Sequence[int], **how: Any) -> torch.Tensor:
        """``groups``: so many blocks in a row are checkpointed as one; 0 is one block that is not."""
        blocks = iter(self.blocks)
        for count in groups:
            part = nn.Sequential(*[next(blocks) for _ in range(count or 1)])
            x = part(x) if count == 0 else checkpoint(part, x, use_reentrant=False, **how)
        return x.square().sum()


def _pair(*kinds: str) -> tuple[_Net, _Net]:
    torch.manual_seed(0)
    model = _Net(kinds)
    return model, copy.deepcopy(model)


def _step(model: _Net, groups: Sequence[int], rows: int, around: Any, **how: Any) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, WIDTH).requires_grad_()
    loss = model(x, groups, **how)
    del model.events[:]
    with around:
        loss.backward()


def _both(
    pair: tuple[_Net, _Net], groups: Sequence[int], rows: int, session: ca.Session, zero: bool = True, **how: Any
) -> None:
    """A step of both: the same gradients, bit for bit, and users' code ran in the same order."""
    model, reference = pair
    if zero:
        model.zero_grad()
        reference.zero_grad()
    _step(reference, groups, rows, contextlib.nullcontext(), **how)
    _step(model, groups, rows, session, **how)
    bitwise = session.settings.backend == "eager"
    assert_grads(model, reference, bitwise=bitwise)
    assert model.events == reference.events


def _regions(session: ca.Session) -> int:
    assert session.last is not None and session.last.graph is not None
    (*_, variant) = session.last.graph.variants
    return sum(isinstance(step, RegionStep) for step in variant.program.schedule.steps)


def test_a_checkpointed_call_is_one_region() -> None:
    pair, session = _pair("plain", "plain", "plain"), ca.enable(backend="eager")
    for _ in range(3):
        _both(pair, (1, 1, 1), 4, session)
    expect(session.stats(), structure_misses=1, hits=2, captures=1)
    assert _regions(session) == 1 + 3  # what comes before the last call, and each call
    assert pair[0].events == [("forward", 2), ("forward", 1), ("forward", 0)]


def test_other_groups_in_tapes_of_one_structure() -> None:
    pair, session = _pair("plain", "plain", "plain", "plain"), ca.enable(backend="eager")
    for groups in ((1, 1, 1, 1), (2, 2), (2, 2), (1, 1, 1, 1), (4,), (1, 1, 2)):
        _both(pair, groups, 4, session)
        assert _regions(session) <= 1 + 4
    assert session.stats().captures == 1
    expect(session.stats(), structure_misses=1, shape_misses=3, hits=2)
    why = session.last.reasons[0]
    assert (why.kind, why.where) == ("ambient_state", "checkpointed")
    assert "group" in why.hint


_KINDS = ("hook", "scale", "function", "in place", "saved and changed", "dropout", "inner", "freed")


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", _KINDS)
def test_what_else_runs_keeps_its_place(kind: str, backend: str) -> None:
    pair, session = _pair("plain", kind, kind), ca.enable(backend=backend, cache_dir=False, tune=False)
    for rows in (4, 6, 6):
        for groups in ((1, 1, 1), (1, 2), (0, 2)):
            _both(pair, groups, rows, session)
    stats = session.stats()
    assert stats.hits >= 3 and not stats.bypasses and not stats.failures


def test_hooks_that_the_recomputed_forward_registers() -> None:
    pair, session = _pair("plain", "late"), ca.enable(backend="eager", cache_dir=False)
    for _ in range(3):
        _both(pair, (1, 1), 4, session)
    assert ("late", 1) in pair[0].events
    assert session.last is not None and "late_hook" in str(session.last.reasons[-1])  # the rest ran call by call


def test_groupings_that_never_come_back_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_MAX_KEPT", 2)
    pair, session = _pair(*["plain"] * 4), ca.enable(backend="eager", compile_budget=float("inf"))
    groupings = [(1, 1, 1, 1), (2, 2), (1, 3), (3, 1), (4,), (1, 1, 2)]
    for groups in groupings + groupings:
        _both(pair, groups, 4, session)
    expect(session.stats(), structure_misses=1, shape_misses=len(groupings) - 1, hits=len(groupings), captures=1)
    assert session.last is not None and session.last.graph is not None
    assert len(session.last.graph.forms._together) == 2


def test_hooks_of_leaves_keep_their_place() -> None:
    pair, session = _pair("plain", "plain"), ca.enable(backend="eager")
    for model in pair:
        model.blocks[1].first.weight.register_hook(lambda grad, model=model: model.events.append(("leaf", 1)))
        model.blocks[1].second.bias.register_post_accumulate_grad_hook(
            lambda leaf, model=model: model.events.append(("post", 1))
        )
    for _ in range(3):
        _both(pair, (1, 1), 4, session)
    assert {("leaf", 1), ("post", 1)} < set(pair[0].events)
    expect(session.stats(), structure_misses=1, hits=2)


def test_other_unpack_hooks_are_not_moved() -> None:
    events: list[str] = []

    def run(around: Any) -> torch.Tensor:
        x = torch.linspace(0.1, 1, 4, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: events.append("unpack") or t):
            y = x.exp().sin().tanh()
        y.register_hook(lambda grad: events.append("hook"))
        loss = y.sum()
        with around:
            loss.backward()
        return x.grad

    session = ca.enable(backend="eager")
    wanted, seen = run(contextlib.nullcontext()), events[:]
    for _ in range(2):
        del events[:]
        assert_same([run(session)], [wanted])
        assert events == seen
    expect(session.stats(), structure_misses=1, hits=1)


def test_retained_tapes_and_single_gradients() -> None:
    (model, reference), session = _pair("plain", "hook"), ca.enable(backend="eager")
    for _ in range(2):
        found = []
        for each, around in ((reference, contextlib.nullcontext()), (model, session)):
            x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).requires_grad_()
            loss = each(x, (1, 1))
            weight = each.blocks[1].first.weight
            del each.events[:]
            with around:
                loss.backward(retain_graph=True)
                found.append([*torch.autograd.grad(loss, (x, weight), retain_graph=True)])
                loss.backward()
        assert_same(found[1], found[0])
        assert_grads(model, reference)
        assert model.events == reference.events


@pytest.mark.parametrize("how", [{"early_stop": False}, {"debug": True}, {"determinism_check": "none"}])
def test_settings_of_a_checkpoint(how: dict[str, Any]) -> None:
    pair, session = _pair("plain", "plain"), ca.enable(backend="eager")
    for _ in range(2):
        _both(pair, (1, 1), 4, session, **how)
    expect(session.stats(), structure_misses=1, hits=1)
    assert _regions(session) == 1 + 2


def test_selective_checkpointing() -> None:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    kept = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    pair, session = _pair("plain", "hook"), ca.enable(backend="eager")
    for _ in range(3):
        _both(pair, (1, 1), 4, session, context_fn=contexts)
    expect(session.stats(), structure_misses=1, hits=2)


def test_a_forward_that_is_another_the_second_time_is_told_in_pytorchs_words() -> None:
    calls = []

    def changing(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.exp().sin() if len(calls) % 2 else x[:1].exp().sin()

    words = []
    for around in (contextlib.nullcontext(), ca.enable(backend="eager")):
        x = torch.ones(3, requires_grad=True)
        loss = checkpoint(changing, x, use_reentrant=False).sum()
        with around, pytest.raises(torch.utils.checkpoint.CheckpointError) as error:
            loss.backward()
        words.append(str(error.value).partition("\n")[0])
        assert x.grad is None
    assert words[0] == words[1]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_grad_that_was_saved_and_is_added_to(backend: str) -> None:
    """Eager reads it after the sum, as nothing looks for changes of what was packed."""

    def run(around: Any) -> list[torch.Tensor]:
        x, w = torch.linspace(-1, 1, 4).requires_grad_(), torch.arange(1.0, 5).requires_grad_()
        w.grad = torch.ones(4)
        loss = checkpoint(lambda x: (x.sin() * w.grad).cos() * w, x, use_reentrant=False).sum()
        with around:
            loss.backward()
        assert x.grad is not None
        return [x.grad, w.grad]

    session = ca.enable(backend=backend, cache_dir=False, tune=False)
    wanted = run(contextlib.nullcontext())
    for _ in range(3):
        found = run(session)
        assert_same(found, wanted)
        assert session.last is not None
        assert [each.kind for each in session.last.reasons if isinstance(each, Failure)] == ["saved_grad"]
    expect(session.stats(), structure_misses=1, shape_misses=2, failures=3, captures=1)  # call by call is no hit


def test_gradients_that_are_added_to_leave_a_call_one_region() -> None:
    pair, session = _pair("plain", "plain"), ca.enable(backend="eager")
    for _ in range(4):
        _both(pair, (1, 1), 4, session, zero=False)
    expect(session.stats(), structure_misses=2, hits=2)
    assert _regions(session) == 1 + 2


def test_anomaly_mode() -> None:
    pair, session = _pair("plain", "plain"), ca.enable(backend="eager")
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        _both(pair, (1, 1), 4, session)
        _both(pair, (1, 1), 4, session)
    _both(pair, (1, 1), 4, session)
    assert session.stats().hits == 1


_TRAINS = """
import compiled_autograd as ca
from tests.test_checkpoints import _both, _pair
session = ca.enable(backend="inductor", tune=False)
pair = _pair("plain", "plain", "plain")
for groups in ((1, 1, 1), (1, 2), (1, 1, 1)):
    _both(pair, groups, 4, session)
stats = session.stats()
print(stats.compiles > 0, stats.loads > 0, stats.hits, stats.shape_misses, stats.failures)
"""


@pytest.mark.slow
def test_a_second_process_loads_each_grouping(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    done = [in_subprocess(_TRAINS, COMPILED_AUTOGRAD_CACHE_DIR=str(tmp_path / "cache")) for _ in range(2)]
    assert [each.stdout.split() for each in done] == [
        ["True", "False", "1", "1", "0"],
        ["False", "True", "3", "0", "0"],
    ], done[-1].stderr


# ---- random nets ----------------------------------------------------------------------------------------------------

_KINDS = ("plain", "plain", "hook", "scale", "function", "in place", "dropout", "inner", "freed")


def _groups(draw: random.Random, blocks: int) -> Iterator[int]:
    left = blocks
    while left:
        count = draw.choice((0, 1, 1, 2, 3))
        if max(count, 1) <= left:
            left -= max(count, 1)
            yield count


def _random_net(seed: int, backend: str) -> ca.Stats:
    """Some steps of a random net: other groups, other sizes, frozen parts, gradients that were there."""
    draw = random.Random(seed)
    kinds = [draw.choice(_KINDS) for _ in range(draw.randint(2, 4))]
    pair, session = _pair(*kinds), ca.enable(backend=backend, cache_dir=False, tune=False)
    names = [name for name, _ in pair[0].named_parameters()]
    for name in draw.sample(names, draw.randint(0, len(names) // 2)):
        for model in pair:
            model.get_parameter(name).requires_grad_(False)
    if draw.random() < 0.4:
        name = draw.choice(names)
        for model in pair:
            if model.get_parameter(name).requires_grad:
                model.get_parameter(name).register_hook(lambda grad, model=model: model.events.append(("leaf", 0)))
    groupings = [tuple(_groups(draw, len(kinds))) for _ in range(2)]
    for _ in range(6):
        _both(pair, draw.choice(groupings), draw.choice((3, 3, 5)), session, zero=draw.random() < 0.7)
    return session.stats()


@pytest.mark.parametrize(
    ("backend", "seeds"),
    [
        pytest.param("eager", range(4), id="eager, few"),
        pytest.param("eager", range(15), id="eager", marks=pytest.mark.slow),
        pytest.param("inductor", range(2), id="inductor", marks=pytest.mark.slow),
        pytest.param("eager", range(100, 700), id="eager, many", marks=pytest.mark.slow),
        pytest.param("inductor", range(100, 140), id="inductor, many", marks=pytest.mark.slow),
    ],
)
def test_random_nets(backend: str, seeds: range) -> None:
    hits = 0
    for seed in seeds:
        try:
            stats = _random_net(seed, backend)
        except BaseException:
            sys.stderr.write(f"seed {seed}\n")
            raise
        assert not stats.failures and not stats.bypasses
        hits += stats.hits
    assert hits > len(seeds) // 2
