"""Random programs on the eager engine and with the own loop: every bit of every gradient, each call of a hook in its
order, and the words of errors are the same. With ``-m slow`` some thousands of them."""

from __future__ import annotations

import functools
import random
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from compiled_autograd.diagnostics.bypass import ON_MISS
from compiled_autograd.engine import backward
from compiled_autograd.engine.own_loop import running

from .own_loops import alike, extension, raised, session  # noqa: F401

PROGRAMS, MANY = 150, 10_000


pytestmark = pytest.mark.usefixtures("extension")


@pytest.fixture(autouse=True)
def _left_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "decide", lambda call, settings: ON_MISS)  # else each tape would be captured first


class _Pair(torch.autograd.Function):
    """Of two inputs and two outputs, any of whose gradients may be undefined."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor, how: int) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.how = how
        ctx.set_materialize_grads(how % 2 == 0)
        ctx.save_for_backward(one, other)
        return one * 2, other.exp()

    @staticmethod
    def backward(ctx: Any, one: Any, other: Any) -> Any:
        first, second = ctx.saved_tensors
        if ctx.how == 2:
            return one, one, None
        if ctx.how == 4:
            return one.t().contiguous().t(), None, None
        given = None if one is None else one * 2 + first * 0
        return given, None if other is None else other * second.exp(), None


Operator = Callable[[torch.Tensor, torch.Tensor, random.Random], torch.Tensor]


def _written(a: torch.Tensor, b: torch.Tensor, pick: random.Random) -> torch.Tensor:
    base = a + 0
    kind = pick.randrange(4)
    if kind == 0:
        base[pick.randrange(4)] = b[0]
    elif kind == 1:
        base[:, 1:3].mul_(b[:, 1:3])
    elif kind == 2:
        base.t()[1].add_(b[1]).sin_()
    else:
        base[:2].unflatten(1, (2, 2))[0].copy_(b[:2, 2:])
    return base


def _checkpointed(a: torch.Tensor, b: torch.Tensor, pick: random.Random) -> torch.Tensor:
    reentrant = pick.random() < 0.5
    made: torch.Tensor = checkpoint(
        lambda x, y: (x @ y).tanh() * x, a, b, use_reentrant=reentrant, preserve_rng_state=False
    )
    return made


def _packed(a: torch.Tensor, b: torch.Tensor, pick: random.Random) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda each: (each,), lambda each: each[0]):
        return a.sin() * b


OPERATORS: list[Operator] = [
    lambda a, b, _: a * b,
    lambda a, b, _: a - b.t(),
    lambda a, b, _: (a @ b) / 4,
    lambda a, b, _: torch.cat([a[1:], b[:1]]),
    lambda a, b, _: torch.cat([a[:1], b[:1], a[2:3], b.t()[3:]]),
    lambda a, b, _: a.clone().index_add_(0, torch.tensor([0, 2]), b[1:3]),
    lambda a, b, _: (a + 0).mul_(b.sigmoid()),
    lambda a, b, _: a.sin().reshape(2, 8).view(4, 4) + b.sum(0),
    lambda a, b, _: torch.stack(a.chunk(2)).flatten(0, 1) * b.max(),
    lambda a, b, _: a.softmax(1).expand(2, 4, 4).mean(0) + b.detach(),
    lambda a, b, _: nn.functional.layer_norm(a, (4,), b[0], b[1]),
    lambda a, b, _: nn.functional.linear(a, b, a[0]),
    lambda a, b, _: (a.double() * b.half().double()).float(),
    lambda a, b, _: torch.complex(a, b).conj().prod(1).imag + b,
    lambda a, b, _: torch.addcmul(a, a, b.t()),
    lambda a, b, _: a.unbind(0)[1] * b.unbind(1)[2] + a,
    lambda a, b, _: torch.where(a > b, a, b.neg()),
    lambda a, b, pick: a * torch.tensor([pick.random() for _ in range(16)]).view(4, 4) * b,
    lambda a, b, pick: _Pair.apply(a, b, pick.randrange(5))[pick.randrange(2)],
    lambda a, b, pick: sum(_Pair.apply(a, b, pick.randrange(5))),
    _written,
    _written,
    _checkpointed,
    _packed,
]


class Program:
    """One program. What is random of it comes from its seed alone, so that it is the same each time it runs."""

    def __init__(self, seed: int, around: Any) -> None:
        self.pick, self.around, self.log = random.Random(seed), around, []
        self.generator = torch.Generator().manual_seed(seed)
        self.kept: list[torch.Tensor] = []
        self.hooks = 0
        self.hooked = self.pick.random() < 0.7
        self.raising = self.pick.random() < 0.15
        self.calling = self.pick.random() < 0.15
        self.other = torch.ones(3, requires_grad=True)

    def run(self) -> list[Any]:
        """Gives all that can be seen of it."""
        pick = self.pick
        left: list[Any] = []
        leaves = [self._leaf() for _ in range(pick.randint(1, 4))]
        table = nn.Embedding(6, 4, sparse=pick.random() < 0.5, _weight=self._random(6))
        for _ in range(pick.randint(1, 3)):
            outputs = self._tape(leaves, table)
            gradients = [self._random(4) if each.dim() else torch.ones(()) for each in outputs]
            keeps = [pick.random() < 0.5 for _ in range(pick.randint(1, 3))]
            for keep in keeps:
                act = functools.partial(torch.autograd.backward, outputs, gradients, retain_graph=keep)
                with self.around:
                    left.append(raised(act))
                left += [None if each.grad is None else each.grad.clone() for each in [*leaves, table.weight]]
            if pick.random() < 0.3:
                for each in [*leaves, table.weight]:
                    each.grad = None
        return [left, self.log, self.other.grad, self.kept]

    def _random(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, 4, generator=self.generator)

    def _leaf(self) -> torch.Tensor:
        pick, value = self.pick, self._random(4)
        leaf = (value.t() if pick.random() < 0.3 else value).requires_grad_()
        if pick.random() < 0.2:
            leaf.grad = self._random(4).t() if pick.random() < 0.5 else self._random(4)
        if self.hooked and pick.random() < 0.3:
            self._hook(leaf)
        return leaf

    def _tape(self, leaves: list[torch.Tensor], table: nn.Embedding) -> list[torch.Tensor]:
        pick = self.pick
        values = [*leaves]
        for _ in range(pick.randint(0, 2)):
            values.append(table(torch.randint(0, 6, (4,), generator=self.generator)))
        for _ in range(pick.randint(1, 25)):
            one, other = pick.choice(values[-6:]), pick.choice(values)
            values.append(pick.choice(OPERATORS)(one, other, pick))
            if self.hooked and pick.random() < 0.2:
                self._hook(values[-1])
        outputs = [values[-1], *pick.sample(values, pick.choice([0, 0, 0, 1, 2]) % len(values))]
        if pick.random() < 0.5:
            outputs = [each.sum() if pick.random() < 0.5 else each * 1 for each in outputs]
        return outputs

    def _hook(self, tensor: torch.Tensor) -> None:
        """A hook of some kind, which does something."""
        pick, number = self.pick, self.hooks
        self.hooks += 1
        act, keeps, factor = pick.randrange(12), pick.random() < 0.1, pick.choice([None, None, 2.0, 0.5])

        def told(gradients: Any) -> Any:
            known = [each for each in gradients if isinstance(each, torch.Tensor)]
            self.log.append((number, [each.detach().clone() for each in known]))
            if keeps and len(self.kept) < 8:
                self.kept += known
            self._act(act)
            if factor is None:
                return None
            return tuple(each * factor if isinstance(each, torch.Tensor) else each for each in gradients)

        kind = pick.randrange(6)
        if kind == 0 and tensor.is_leaf:
            tensor.register_post_accumulate_grad_hook(lambda leaf: told([leaf.grad]) and None)
        elif kind == 1 and tensor.grad_fn is not None:
            tensor.grad_fn.register_hook(lambda given, taken: told(given))
        elif kind == 2 and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(told)
        elif kind == 3 and tensor.grad_fn is not None:
            tensor.retain_grad()
            self.kept.append(tensor)
        else:
            tensor.register_hook(lambda gradient: (told([gradient]) or [None])[0])

    def _act(self, act: int) -> None:
        if self.raising and act == 0:
            raise KeyError("from a hook")
        if self.calling and act in (1, 2):
            with torch.enable_grad():
                inner = (self.other * 2).sin().exp()
                inner.register_hook(lambda gradient: self.log.append(gradient.clone()))
                inner.sum().backward()
        if self.calling and act == 3:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.log.append("callback"))
        if self.calling and act == 4:
            thread = threading.Thread(target=self._elsewhere)
            thread.start()
            thread.join(60)
        if act == 5:
            torch._C._set_grad_enabled(True)
            self.log.append(torch._C._current_autograd_node().name())

    def _elsewhere(self) -> None:
        mine = torch.ones(3, requires_grad=True)
        with self.around, torch.enable_grad():
            (mine.exp() * mine).sum().backward()
        self.log.append(mine.grad)


def _differences(seeds: range) -> tuple[list[int], int, int]:
    """Programs that the loop runs otherwise; how many backwards were left to eager, and how many of them it ran."""
    different, left, served = [], 0, 0
    for seed in seeds:
        grad_mode = torch.is_grad_enabled()
        wanted = Program(seed, nullcontext()).run()
        used = session()
        found = Program(seed, used).run()
        assert torch.is_grad_enabled() == grad_mode
        if not alike(_plain(found), _plain(wanted)):
            different.append(seed)
        stats = used.stats()
        left, served = left + stats.backwards, served + stats.own_loop
    return different, left, served


def _plain(seen: Any) -> Any:
    """With the gradients of what was retained in the place of the tensors themselves."""
    *more, kept = seen
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [*more, [each.detach() for each in kept], [each.grad for each in kept]]


def test_random_programs() -> None:
    different, left, served = _differences(range(PROGRAMS))
    assert not different
    assert served > 0.5 * left > 40, (served, left)


def test_random_programs_in_threads() -> None:
    """Each has tapes and leaves of its own; the process they share."""
    found: list[Any] = []

    def work(first: int) -> None:
        found.append(_differences(range(first, first + 10)))

    threads = [threading.Thread(target=work, args=(10_000 + 100 * index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(280)
    assert len(found) == 3 and not [seed for different, _, _ in found for seed in different]
    assert sum(served for _, _, served in found) > 20


@pytest.mark.slow
def test_many_random_programs() -> None:
    different, left, served = _differences(range(100_000, 100_000 + MANY))
    assert not different
    assert served > 0.5 * left > 0.5 * MANY, f"{MANY} programs, {left} backwards, {served} without the engine's queue"


@pytest.mark.parametrize("fault", ["gradient", "order", "kept"])
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared here would show it."""
    number = running._number

    def wrong(module: Any, outputs: Any, grads: Any, keep_graph: bool) -> Any:
        if fault == "gradient":
            grads = tuple(each * (1 + 1e-6) for each in grads)
        if fault == "order":
            outputs, grads = outputs[:1], grads[:1]
        return number(module, outputs, grads, keep_graph or fault == "kept")

    monkeypatch.setattr(running, "_number", wrong)
    assert _differences(range(20))[0]
