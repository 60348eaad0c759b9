"""Strides that change where sizes do not tell how: a slice has the length of what it was taken from in its stride."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from compiled_autograd.guards.shapes import size_in, static_parts, strides_in, widened, with_strides

from .helpers import assert_grads, assert_same, expect, in_subprocess


class _FirstOfAll(nn.Module):
    """What is told of a sequence by its first element, as BERT's pooler does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.pooler, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pooler(self.inner(x).tanh()[:, 0]).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_first_of_a_sequence_needs_two_compiles_for_all_lengths(backend: str) -> None:
    model, session = _FirstOfAll(), ca.enable(backend=backend, tune=False)
    other, lengths = copy.deepcopy(model), (31, 37, 23, 39, 5, 31, 12)
    for length in lengths:
        x = torch.randn(4, length, 8)
        for each, around in ((model, session), (other, contextlib.nullcontext())):
            each.zero_grad()
            loss = each(x).square().mean()
            with around:
                loss.backward()
        assert_grads(model, other, bitwise=backend == "eager")
    expect(session.stats(), structure_misses=1, shape_misses=1, hits=len(lengths) - 2, captures=1)


def _miss_of(first: torch.Tensor, second: torch.Tensor, **settings: Any) -> tuple[ca.Session, Any]:
    weight, session = torch.randn(2, requires_grad=True), ca.enable(backend="eager", tune=False, **settings)
    for x in (first, second):
        weight.grad, loss = None, (x @ weight).sin().sum()
        with session:
            loss.backward()
    assert session.last is not None
    return session, session.last.reasons[0]


def test_a_stride_alone_is_said_to_change() -> None:
    session, why = _miss_of(torch.randn(3, 5, 2)[:, 0], torch.randn(3, 7, 2)[:, 0])
    assert (why.kind, why.old, why.new) == ("layout", "(10, 1)", "(14, 1)") and "now dynamic" in why.hint
    assert session.stats().shape_misses == 1


def test_with_dynamic_false_nothing_does() -> None:
    _, why = _miss_of(torch.randn(3, 5, 2)[:, 0], torch.randn(3, 7, 2)[:, 0], dynamic=False)
    assert why.kind == "layout" and "contiguous()" in why.hint


def test_of_another_order_nothing_is_made() -> None:
    _, why = _miss_of(torch.randn(3, 2), torch.randn(2, 3).t())
    assert why.kind == "layout" and "contiguous()" in why.hint


@pytest.mark.parametrize("lengths", [(1, 5, 9, 1, 7), (5, 9, 1, 7, 1), (2, 1, 3, 8, 1)], ids=str)
def test_a_length_of_one_is_compiled_by_itself(lengths: tuple[int, ...]) -> None:
    """There the stride is that of a contiguous tensor."""
    weight, session = torch.randn(2, requires_grad=True), ca.enable(backend="eager", tune=False)
    for length in lengths:
        x, weight.grad = torch.randn(3, length, 2)[:, 0], None
        loss = (x @ weight).sin().sum()
        wanted = torch.autograd.grad(loss, [weight], retain_graph=True)
        with session:
            loss.backward()
        assert_same([weight.grad], wanted)
    assert session.stats().captures == 1 and session.stats().shape_misses <= 3


# ---- specs -----------------------------------------------------------------------------------------------------------


def test_what_a_spec_has_of_strides() -> None:
    old, new = torch.empty(4, 9, 8)[:, 0], torch.empty(4, 7, 8)[:, 0]
    spec = with_strides((4, 8), new, old.stride())
    assert spec == ((4, 72, 56), 8)
    assert [size_in(part) for part in spec] == [4, 8] == static_parts(spec) and strides_in(spec[0]) == (72, 56)
    assert widened(spec, torch.empty(5, 8)) == ((4, 5, 72, 56), 8)
    assert size_in((4, 5, 72, 56)) == (4, 5) and strides_in((4, 5, 72, 56)) == (72, 56)
    assert strides_in((4, 5)) == () == strides_in(4) and static_parts(((4, 5, 72, 56), 8)) == [None, 8]
    assert with_strides(spec, torch.empty(4, 6, 8)[:, 0], new.stride()) == spec  # it is a symbol


def test_what_sizes_tell_is_no_history() -> None:
    assert with_strides(((9, 7), 8), torch.empty(7, 8), (8, 1)) == ((9, 7), 8)
    assert with_strides(((3, 5), (9, 7)), torch.empty(5, 7), (9, 1)) == ((3, 5), (9, 7))


def test_a_stride_that_stays_is_a_number() -> None:
    """That of a piece of a projection, whose outermost stride is a product of it."""
    new = torch.empty(2, 7, 3, 8)[:, :, 0]
    assert with_strides((2, (9, 7), 8), new, (9 * 24, 24, 1)) == (2, (9, 7), 8)


# ---- random slices ---------------------------------------------------------------------------------------------------


def _sliced(source: random.Random) -> list[tuple[int, str, int]]:
    """Which dimension of four is cut in which way: what is left has other sizes, or the same."""
    ways = ["select", "narrow", "step", "unfold", "flip", "diagonal"]
    return [(source.randrange(3), source.choice(ways), source.randrange(3)) for _ in range(source.randint(1, 3))]


def _slice(x: torch.Tensor, cuts: list[tuple[int, str, int]]) -> torch.Tensor:
    for dim, way, number in cuts:
        dim %= x.dim()
        size = x.shape[dim]
        if way == "select" and x.dim() > 2:
            x = x.select(dim, min(number, size - 1))
        elif way == "narrow":
            x = x.narrow(dim, 0, min(2, size))
        elif way == "step":
            x = x[(slice(None),) * dim + (slice(None, None, number + 1),)]
        elif way == "unfold":
            x = x.unfold(dim, min(2, size), 1)
        elif way == "diagonal" and x.dim() > 2:
            x = x.diagonal(0, 0, 1)
        elif way == "flip":
            x = x.transpose(0, dim)
    return x


_AFTER: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, scale: (x * scale).sin().sum(),
    lambda x, scale: ((x * scale).exp() @ x.transpose(-1, -2)).tanh().sum(),
    lambda x, scale: nn.functional.softmax(x * scale, -1).square().sum(),
    lambda x, scale: (x.cumsum(-1) * scale).square().mean(),
    lambda x, scale: nn.functional.gelu(x * scale).contiguous().view(-1).square().sum(),
    lambda x, scale: torch.einsum("...a,...a->...", x, x.cos()).mul(scale).sum(),
]


def _programs_agree(seed: int, backend: str, **settings: Any) -> ca.Session:
    """A tape that saves slices of tensors of three changing sizes, for some steps."""
    source = random.Random(seed)
    cuts, after, before = _sliced(source), source.choice(_AFTER), source.random() < 0.5
    changing = [source.random() < 0.6 for _ in range(3)]
    sizes = [source.randint(2, 6) for _ in range(3)]
    session = ca.enable(backend=backend, tune=False, compile_budget=float("inf"), **settings)
    for step in range(7):
        now = [source.randint(1, 9) if change else size for size, change in zip(sizes, changing, strict=True)]
        torch.manual_seed(step)
        made, grads = torch.randn(*now, 4), []
        for around in (contextlib.nullcontext(), session):
            x = made.clone().requires_grad_()
            scale = torch.tensor(0.5, requires_grad=True)
            loss = after(_slice(x.sin() if before else x, cuts), scale)
            with around:
                loss.backward()
            grads.append([x.grad, scale.grad])
        try:
            assert_same(grads[1], grads[0], bitwise=backend == "eager")
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {step}, sizes {now}, cuts {cuts}") from error
    assert not session.stats().failures and not session.stats().bypasses, (seed, session.stats())
    return session


@pytest.mark.parametrize(
    "seeds",
    [range(5), *(pytest.param(range(first, first + 25), marks=pytest.mark.slow) for first in range(0, 300, 25))],
    ids=str,
)
def test_random_slices(seeds: range) -> None:
    sessions = [_programs_agree(seed, "eager") for seed in seeds]
    assert sum(session.stats().hits for session in sessions) > len(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_random_slices_with_inductor(part: int) -> None:
    sessions = [_programs_agree(seed, "inductor") for seed in range(10_000 + 4 * part, 10_000 + 4 * part + 4)]
    assert sum(session.stats().hits for session in sessions) > 2


# ---- another process -------------------------------------------------------------------------------------------------

_TRAINING = """
import sys
import torch
import compiled_autograd as ca
from tests.test_dynamic_strides import _FirstOfAll
torch.manual_seed(0)
model = _FirstOfAll()
session = ca.enable(backend="BACKEND", cache_dir=FOLDER, tune=False)
for length in LENGTHS:
    x = torch.randn(4, length, 8)
    loss = model(x).square().mean()
    wanted = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    model.zero_grad()
    with session:
        loss.backward()
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
stats = session.stats()
print(stats.compiles, stats.loads, stats.hits)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_another_process_loads_it(backend: str, tmp_path: Path) -> None:
    code = _TRAINING.replace("BACKEND", backend).replace("FOLDER", repr(str(tmp_path)))
    first = in_subprocess(code.replace("LENGTHS", "(9, 7, 5)"))
    assert (first.returncode, first.stdout.split()[0]) == (0, "2"), first.stderr
    again = in_subprocess(code.replace("LENGTHS", "(6, 11, 9)"))
    assert (again.returncode, again.stdout.split()[0]) == (0, "0"), again.stdout + again.stderr


# ---- strides of what has sizes that change already -------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_stride_that_changes_after_the_sizes_is_a_symbol_too(backend: str, dynamic: bool | None) -> None:
    weight, session = torch.randn(2, requires_grad=True), ca.enable(backend=backend, tune=False, dynamic=dynamic)
    for sizes in ((3, 5), (4, 5), (4, 7), (4, 9), (5, 11), (3, 13), (6, 8), (4, 4)):
        x, weight.grad = torch.randn(*sizes, 2)[:, 0], None
        loss = (x @ weight).sin().sum()
        wanted = torch.autograd.grad(loss, [weight], retain_graph=True)
        with session:
            loss.backward()
        assert_same([weight.grad], wanted, bitwise=backend == "eager")
    assert session.stats().shape_misses <= 2 and session.stats().hits >= 5, session.stats()
