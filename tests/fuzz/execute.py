"""One step of a program: its forward, its backward inside an engine, and all that could be observed of it."""

from __future__ import annotations

import contextlib
import random
import warnings
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

from . import functions, hooks, operators_nn, operators_views  # noqa: F401 (they enter their operators into the table)
from .backward import NoTapeError, ask
from .operators import TABLE
from .program import SKIP, Operator, Program
from .values import LAYOUTS, LEFT_OUT, PLACE, generator, lay_out, plain, share_memory, spoil

_CANNOT = (RuntimeError, IndexError, ValueError, NotImplementedError, TypeError, AssertionError)
_LARGEST = 40_000
_MAX_GRADIENTS = 40


@dataclass(frozen=True)
class Record:
    """A tensor, as it was when it was seen."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    bits: tuple[bool, bool]
    view: bool
    values: torch.Tensor

    @staticmethod
    def of(value: torch.Tensor) -> Record:
        """Write a tensor down."""
        view = value._is_view()
        value = value.detach()
        bits = (value.is_neg(), value.is_conj())
        dense = value.resolve_neg().resolve_conj().clone(memory_format=torch.contiguous_format)
        return Record(value.dtype, tuple(value.shape), tuple(value.stride()), bits, view, dense)


@dataclass
class Seen:
    """What one step left.

    Attributes:
        events: what hooks saw and ``autograd.grad`` gave, in order.
        grads: ``.grad`` of each leaf.
        error: what the backward raised.
        damage: inputs that the backward changed; gradients that share memory.
        tape: the names of the nodes, which say whether two steps have the same structure.
        outcomes: what became of the backwards, with their reasons.
    """

    events: list[tuple[str, list[Record | None]]] = field(default_factory=list)
    grads: dict[str, Record | None] = field(default_factory=dict)
    error: str = ""
    damage: list[str] = field(default_factory=list)
    tape: Any = None
    outcomes: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def see(self, name: str, given: Any) -> None:
        """A hook was called."""
        tensors = given if isinstance(given, tuple) else (given,)
        self.events.append((name, [None if each is None else Record.of(each) for each in tensors]))


class State:
    """The leaves of a program, which live from step to step."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.leaves: dict[str, torch.Tensor] = {}
        self.seen = Seen()

    def leaf(self, name: str, value: torch.Tensor, trained: bool, hook: int) -> torch.Tensor:
        """A leaf with these values: the one of the step before, where it has that shape."""
        old = self.leaves.get(name)
        if old is not None and old.shape == value.shape and old.stride() == value.stride() and not value.is_neg():
            if 0 not in old.stride() or old.is_contiguous():
                with torch.no_grad():
                    old.copy_(value)
            return old
        made = value.requires_grad_(trained)
        self.leaves[name] = made
        if hook and trained:
            hooks.hook_leaf(hook, name, made, lambda *what: self.seen.see(*what))
        return made

    def before_step(self, step: int) -> None:
        """What becomes of the gradients of the step before."""
        for name, leaf in self.leaves.items():
            if not leaf.requires_grad or self.program.grads == "keep":
                continue
            if self.program.grads == "zero" and leaf.grad is not None:
                leaf.grad.detach().zero_()
            elif self.program.grads == "given":
                layout = LAYOUTS[zlib.crc32(name.encode()) % 4]
                given = lay_out(plain(leaf.shape, leaf.dtype, "given", name, step), layout)
                leaf.grad = given.resolve_conj().resolve_neg()
            else:
                leaf.grad = None


class Scope:
    """What one operator may ask for (``operators.Env``)."""

    def __init__(self, state: State, operator: Operator, position: int, step: int) -> None:
        self.state, self.operator, self.position, self.step = state, operator, position, step
        self.threads = state.program.threads
        self._name = f"v{position}"

    def see(self, what: str, given: Any) -> None:
        self.state.seen.see(f"{what} at {self._name}", given)

    def random(self) -> random.Random:
        return random.Random(f"{self.operator.name} {self.operator.salt}")

    def _layout(self, slot: str) -> tuple[str, random.Random]:
        draw = random.Random(f"{self.operator.salt} {slot}")
        return (draw.choice(LAYOUTS) if draw.random() < 0.4 else "contiguous"), draw

    def weight(self, slot: str, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
        layout, draw = self._layout(slot)
        name = f"{self._name}.{slot}{self.operator.salt}"
        value = self._values(name, shape, scale)
        trained = random.Random(f"trained {self.operator.salt}").random() < 0.6  # all of an operator's, or none
        return self.state.leaf(name, lay_out(value, layout), trained, draw.choice((0, 0, 0, 0, 1, 2, 4)))

    def constant(self, slot: str, shape: tuple[int, ...]) -> torch.Tensor:
        return lay_out(self._values(f"{self._name}.{slot}", shape, 1.0), self._layout(slot)[0])

    def indices(self, slot: str, shape: tuple[int, ...], below: int) -> torch.Tensor:
        made = torch.randint(0, below, shape, generator=generator(self._name, slot, self.step))
        return made.to(PLACE.device)

    def _values(self, name: str, shape: tuple[int, ...], scale: float) -> torch.Tensor:
        program = self.state.program
        inner = max(1, shape[-1]) if len(shape) > 1 else 1
        return plain(shape, getattr(torch, program.dtype), program.seed, self.step, name) * (scale / inner**0.5)


def forward(state: State, step: int) -> list[torch.Tensor]:
    """The pool: the leaves, and the result of each operator."""
    program = state.program
    sizes = dict(program.sizes[step % len(program.sizes)])
    dtype = getattr(torch, program.dtype)
    pool = []
    for index, leaf in enumerate(program.leaves):
        shape = tuple(1 if dim == "1" else sizes[dim] for dim in leaf.dims)
        value = lay_out(plain(shape, dtype, program.seed, step, index), leaf.layout)
        pool.append(state.leaf(f"v{index}", value, leaf.trained, leaf.hook))
    torch.manual_seed(1000 + step)
    for position, operator in enumerate(program.operators, len(pool)):
        pool.append(_apply(state, operator, position, step, pool))
    return pool


def _apply(state: State, operator: Operator, position: int, step: int, pool: list[torch.Tensor]) -> torch.Tensor:
    x, y = pool[operator.first], pool[operator.second]
    if operator.name == SKIP or operator.name in LEFT_OUT:
        return x
    see = lambda *what: state.seen.see(*what)  # noqa: E731
    packed = hooks.packing(operator.packed, f"v{position}", see) if operator.packed else contextlib.nullcontext()
    try:
        with packed:
            made = TABLE[operator.name][0](Scope(state, operator, position, step), x, y)
    except _CANNOT:
        return x
    if not isinstance(made, torch.Tensor) or made.numel() > _LARGEST or made.dim() > 6:
        return x
    if made.requires_grad and made is not x and operator.hook:
        hooks.hook_result(operator.hook, f"v{position}", made, see)
        if operator.hook == 5:
            state.leaves[f"retained v{position}"] = made
    return made


def structure(outputs: list[torch.Tensor]) -> tuple[Any, ...]:
    """Names of the tape's nodes and where their edges lead: two steps with another one have another structure."""
    nodes: dict[Any, int] = {}
    queue = [output.grad_fn for output in outputs if output.grad_fn is not None]
    lines = []
    for node in queue:
        nodes.setdefault(node, len(nodes))
    for node in queue:
        edges = []
        for following, number in node.next_functions:
            if following is not None and following not in nodes:
                nodes[following] = len(nodes)
                queue.append(following)
            edges.append((nodes.get(following), number))
        lines.append((type(node).__name__, tuple(edges)))
    return tuple(lines)


def run_step(state: State, step: int, session: Any, poison: bool) -> Seen:
    """Forward and backward.

    Args:
        session: the engine, a context manager; one of ours has ``last``.
        poison: fill memory with junk between the two.
    """
    seen = state.seen = Seen()
    program = state.program
    for name in [name for name in state.leaves if name.startswith("retained")]:
        del state.leaves[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state.before_step(step)
        pool = forward(state, step)
        outputs = [pool[index] for index in program.outputs]
        outputs = [each for each in dict.fromkeys(outputs) if each.grad_fn is not None]
        seen.tape = structure(outputs), tuple((each.shape, each.stride(), each.dtype) for each in pool)
        gradient = _gradients(program, outputs, step)
        inputs = [each for each in dict.fromkeys(pool) if each.requires_grad]
        watched = [*dict.fromkeys([*pool, *gradient])] if program.hold else gradient
        before = [Record.of(each) for each in watched]
        counts = sorted({each.numel() for each in pool} | {1, 2, 3, 4})
        if not program.hold:
            del pool
        if poison:
            spoil(counts, step)
        try:
            ask(program.mode, outputs, gradient, inputs, seen.see, session, seen.outcomes)
        except NoTapeError:
            seen.tape = None
        except Exception as error:  # noqa: BLE001 (whatever it is, eager must raise the same)
            seen.error = f"{type(error).__name__}: {error}"
    for value, record in zip(watched, before, strict=True):
        if not same_values(Record.of(value), record):
            seen.damage.append(f"changed an input of {record.shape}")
    _look_at_grads(state, watched, seen)
    return seen


def same_values(one: Record, other: Record) -> bool:
    """Bit for bit; a NaN equals a NaN."""
    first, second = one.values, other.values
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.is_complex():
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    return torch.equal(first.nan_to_num(nan=12345.0), second.nan_to_num(nan=12345.0))


def _gradients(program: Program, outputs: list[torch.Tensor], step: int) -> list[torch.Tensor]:
    layout = program.gradient
    if layout == "alternating":
        layout = "transposed" if step % 2 else "contiguous"
    made = []
    for index, output in enumerate(outputs):
        value = plain(output.shape, output.dtype, program.seed, step, "gradient", index)
        if layout == "row":
            made.append(torch.stack([value] * 4)[step % 4])
        else:
            made.append(lay_out(value, layout))
    return made


def _look_at_grads(state: State, watched: list[torch.Tensor], seen: Seen) -> None:
    leaves = {name: leaf for name, leaf in state.leaves.items() if leaf.requires_grad}
    for name, leaf in leaves.items():
        seen.grads[name] = None if leaf.grad is None else Record.of(leaf.grad)
    grads = [(name, leaf.grad) for name, leaf in leaves.items() if leaf.grad is not None][:_MAX_GRADIENTS]
    for index, (name, grad) in enumerate(grads):
        others = [other for _, other in grads[:index]] + watched + list(state.leaves.values())
        if any(share_memory(grad, other) for other in others if other is not grad):
            seen.damage.append(f"{name}.grad shares memory")
