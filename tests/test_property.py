"""Random tapes: whatever is drawn, gradients, hook calls and their order are eager's, at the first run and at a hit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import compiled_autograd as ca

from .helpers import assert_same

SHAPE = (3, 4)


class _Scaled(torch.autograd.Function):
    """A Python function in the middle of the tape, with two outputs of which one is often unused."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * scale, x * x

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return first * ctx.scale + second * 2 * x, None


def _write(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[1:, ::2].mul_(0.5)
    return y


def _write_other(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    y[0] = x[1] * 2
    return y


UNARY: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.sin,
    torch.tanh,
    torch.relu,
    torch.neg,
    lambda x: x * 0.5,
    lambda x: x.t().reshape(SHAPE),
    lambda x: x.contiguous().view(-1).view(SHAPE),
    lambda x: x.sum(0).expand(SHAPE),
    lambda x: torch.cat([x[:, 2:], x[:, :2]], 1),
    lambda x: x.softmax(-1),
    lambda x: x.detach(),
    lambda x: _Scaled.apply(x, 0.7)[0],
    lambda x: sum(_Scaled.apply(x, 0.3)),
    _write,
    _write_other,
]
BINARY: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    torch.add,
    torch.sub,
    torch.mul,
    lambda x, y: x @ y.t() @ y,
    torch.maximum,
    lambda x, y: torch.where(x > 0, x, y),
]


@dataclass(frozen=True)
class Step:
    """One operator of a drawn program, and what is hooked onto its result."""

    operator: int
    first: int
    second: int
    hook: int
    packed: bool


@dataclass
class Run:
    """One execution of a program: the leaves, and what its hooks saw, in order."""

    leaves: list[torch.Tensor]
    kept: list[torch.Tensor] = field(default_factory=list)
    events: list[tuple[str, Any]] = field(default_factory=list)

    def saw(self, name: str, grads: Any) -> None:
        """A hook was called."""
        tensors = grads if isinstance(grads, tuple) else (grads,)
        self.events.append((name, [None if grad is None else grad.detach().clone() for grad in tensors]))


def _hook(run: Run, kind: int, index: int, tensor: torch.Tensor) -> None:
    name = f"{kind} on {index}"

    def see(grad: Any) -> None:
        run.saw(name, grad)

    def double(grad: torch.Tensor) -> torch.Tensor:
        run.saw(name, grad)
        return grad * 2

    def see_both(into: Any, out: Any) -> None:
        run.saw(name, (*into, *out))

    def halve_first(grads: Any) -> Any:
        run.saw(name, grads)
        return tuple(None if grad is None else grad * 0.5 for grad in grads)

    node = tensor.grad_fn
    if kind == 1:
        tensor.register_hook(see)
    elif kind == 2:
        tensor.register_hook(double)
    elif kind == 3 and node is not None:
        node.register_prehook(halve_first)
    elif kind == 4 and node is not None:
        node.register_hook(see_both)
    elif kind == 5:
        tensor.retain_grad()
        run.kept.append(tensor)


def _leaf_hook(run: Run, kind: int, index: int, leaf: torch.Tensor) -> None:
    if kind == 1:
        leaf.register_hook(lambda grad: run.saw(f"leaf {index}", grad))
    elif kind == 2:
        leaf.register_post_accumulate_grad_hook(lambda each: run.saw(f"after leaf {index}", each.grad))


def execute(steps: list[Step], leaf_hooks: list[int], context: Any) -> Run:
    """Run a program's forward, then its backward inside ``context``."""
    torch.manual_seed(0)
    run = Run([torch.randn(SHAPE, dtype=torch.float64, requires_grad=True) for _ in range(2)])
    for index, (kind, leaf) in enumerate(zip(leaf_hooks, run.leaves, strict=True)):
        _leaf_hook(run, kind, index, leaf)
    pool: list[torch.Tensor] = list(run.leaves)
    for index, step in enumerate(steps):
        x, y = pool[step.first % len(pool)], pool[step.second % len(pool)]

        def apply(step: Step = step, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            if step.operator < len(UNARY):
                return UNARY[step.operator](x)
            return BINARY[step.operator - len(UNARY)](x, y)

        if step.packed:
            unpack = lambda packed, index=index: run.saw(f"unpack {index}", packed) or packed  # noqa: E731
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
                result = apply()
        else:
            result = apply()
        if result.requires_grad:
            _hook(run, step.hook, index, result)
        pool.append(result)
    loss = (pool[-1] + pool[len(pool) // 2] + run.leaves[0]).sum()
    with context:
        loss.backward()
    return run


def same(found: Run, wanted: Run) -> None:
    """The same gradients, and the same hook calls in the same order."""
    assert [name for name, _ in found.events] == [name for name, _ in wanted.events]
    for (_, one), (_, other) in zip(found.events, wanted.events, strict=True):
        assert_same(one, other)
    assert_same([leaf.grad for leaf in found.leaves], [leaf.grad for leaf in wanted.leaves])
    assert_same([tensor.grad for tensor in found.kept], [tensor.grad for tensor in wanted.kept])


def check(steps: list[Step], leaf_hooks: list[int]) -> None:
    """Eager, the first compiled run, and a hit."""
    ca.reset()
    wanted = execute(steps, leaf_hooks, ca.disable())
    with ca.enable(backend="eager") as session:
        pass
    same(execute(steps, leaf_hooks, session), wanted)
    same(execute(steps, leaf_hooks, session), wanted)
    stats = session.stats()
    assert (stats.structure_misses, stats.hits, stats.bypasses, stats.failures) == (1, 1, {}, 0)


_STEP = st.builds(
    Step,
    operator=st.integers(0, len(UNARY) + len(BINARY) - 1),
    first=st.integers(0, 7),
    second=st.integers(0, 7),
    hook=st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5]),
    packed=st.sampled_from([False, False, False, True]),
)
_PROGRAM = given(st.lists(_STEP, min_size=1, max_size=8), st.lists(st.integers(0, 2), min_size=2, max_size=2))
_SUPPRESSED = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=_SUPPRESSED)
@_PROGRAM
def test_random_tapes(steps: list[Step], leaf_hooks: list[int]) -> None:
    check(steps, leaf_hooks)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=_SUPPRESSED)
@_PROGRAM
def test_many_random_tapes(steps: list[Step], leaf_hooks: list[int]) -> None:
    check(steps, leaf_hooks)
