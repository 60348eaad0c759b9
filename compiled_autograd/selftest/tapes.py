"""The small tapes of the selftest: programs with one or several backwards, which give all that can be seen of them.

Each tape names dtype and device, draws from a generator of its own, and uses no module of ``torch.nn``. So defaults,
random numbers and global hooks of the user's process change nothing here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import graph
from torch.utils.checkpoint import checkpoint

from ..engine.session import BYPASS, HIT, SHAPE_MISS, STRUCTURE_MISS, Outcome, Session

STEPS = 5
"""The number of steps of each tape. The first one compiles, and the first two runs are compared with the real calls."""


class TapeStep:
    """One step of a tape, on eager or in a session. ``with step:`` stands around each backward.

    Attributes:
        number: the number of the step, from 0.
        log: the calls of hooks and functions, in order, with the tensors that they were given.
        outcomes: the outcome of each backward; empty on eager.
    """

    def __init__(self, number: int, session: Session | None, device: str = "cpu") -> None:
        self.number, self.device = number, device
        self.log: list[Any] = []
        self.outcomes: list[Outcome] = []
        self._session = session
        self._generator = torch.Generator("cpu").manual_seed(number)

    def leaf(self, *sizes: int) -> Tensor:
        """Random numbers that require a gradient: float32, of these sizes."""
        values = torch.randn(sizes, generator=self._generator, dtype=torch.float32, device="cpu")
        return values.to(self.device).requires_grad_()

    def hook(self, name: str, factor: float | None = None) -> Callable[[Tensor], Tensor | None]:
        """A hook that logs its gradient, and multiplies it by ``factor`` where one is given."""

        def hook(grad: Tensor) -> Tensor | None:
            self.log.append((name, grad.detach().clone()))
            return None if factor is None else grad * factor

        return hook

    def __enter__(self) -> None:
        if self._session is not None:
            self._session.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._session is not None:
            self._session.__exit__(*error)
            last = self._session.last
            if error[0] is None and last is not None:
                self.outcomes.append(last)


TapeProgram = Callable[[TapeStep], Sequence[Any]]
"""Runs one step; gives its gradients."""


@dataclass(frozen=True)
class TapeCase:
    """A program, and the outcomes that are expected of it.

    Attributes:
        outcomes: for each step the outcomes of its backwards; the last entry holds for all later steps.
    """

    run: TapeProgram
    outcomes: tuple[tuple[str, ...], ...] = ((STRUCTURE_MISS,), (HIT,))

    def expected(self, number: int) -> tuple[str, ...]:
        """The outcomes of one step."""
        return self.outcomes[min(number, len(self.outcomes) - 1)]


class Cube(torch.autograd.Function):
    """A function with a saved tensor and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.log = log
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        ctx.log.append(("cube", ctx.needs_input_grad, grad.clone()))
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad, None


class Branches(torch.autograd.Function):
    """A function with two results that takes undefined gradients and gives one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, log: list[Any]) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.log = log
        return x * 2, y * 3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        of_x, of_y = grads
        ctx.log.append(("branches", of_x, of_y))
        return None if of_x is None else of_x * 2, None if of_y is None else of_y * 3, None


def loss_of(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A small loss, of sizes (n, k), (k, m) and (m)."""
    return torch.tanh(x @ weight + bias).square().mean()


def tensor_hooks(step: TapeStep) -> Sequence[Any]:
    x, y = step.leaf(3, 4), step.leaf(3, 4)
    z = x * y
    x.register_hook(step.hook("x", 2.0))
    z.register_hook(step.hook("z"))
    z.register_hook(step.hook("z, the second", 0.5))
    z.register_hook(step.hook("removed")).remove()
    z.retain_grad()
    with step:
        (z.sin() + z).sum().backward()
    return [x.grad, y.grad, z.grad]


def node_hooks(step: TapeStep) -> Sequence[Any]:
    x, y = step.leaf(3, 4), step.leaf(3, 4)
    z = (x * y).exp()
    node: Any = z.grad_fn

    def before(grads: Any) -> Any:
        step.log.append(("before", [each.clone() for each in grads]))
        return tuple(each + 1 for each in grads)

    def after(given: Any, taken: Any) -> None:
        step.log.append(("after", [each.clone() for each in given], [each.clone() for each in taken]))

    node.register_prehook(before)
    node.register_hook(after)
    with step:
        (z * x).sum().backward()
    return [x.grad, y.grad]


def leaf_hooks(step: TapeStep) -> Sequence[Any]:
    x, y = step.leaf(3, 4), step.leaf(3, 4)

    def accumulated(leaf: Tensor) -> None:
        assert leaf.grad is not None
        step.log.append(("accumulated", leaf.shape, leaf.grad.clone()))
        leaf.grad.mul_(2)

    def all_there(grads: Sequence[Tensor | None]) -> None:
        step.log.append(("all", [None if each is None else each.clone() for each in grads]))

    handles = [each.register_post_accumulate_grad_hook(accumulated) for each in (x, y)]
    handles.append(graph.register_multi_grad_hook((x, y), all_there))
    with step:
        (x.exp() * y).sum().backward()
    for handle in handles:
        handle.remove()
    return [x.grad, y.grad]


def custom_function(step: TapeStep) -> Sequence[Any]:
    x, y = step.leaf(3, 4), step.leaf(3, 4)
    with step:
        (Cube.apply(x * y, step.log).sin() * x).sum().backward()
    return [x.grad, y.grad]


def views_and_writes(step: TapeStep) -> Sequence[Any]:
    x, y = step.leaf(6), step.leaf(3)
    z = x * 2
    z[:3].mul_(y)
    z.view(2, 3)[1] = y.exp()
    z.view(3, 2).t()[0].add_(x[::2])
    with step:
        (z.cos() + z.unfold(0, 3, 1).sum(1).sum()).sum().backward()
    return [x.grad, y.grad]


def double_backward(step: TapeStep) -> Sequence[Any]:
    x, y = step.leaf(3, 4), step.leaf(3, 4)
    with step:
        (first,) = torch.autograd.grad((x.exp() * y).sum(), x, create_graph=True)
    with step:
        (first * first).sum().backward()
    return [first.detach(), x.grad, y.grad]


def changing_sizes(step: TapeStep) -> Sequence[Any]:
    x, weight, bias = step.leaf(4 + 3 * max(0, step.number - 1), 5), step.leaf(5, 3), step.leaf(3)
    with step:
        loss_of(x, weight, bias).backward()
    return [x.grad, weight.grad, bias.grad]


def retained_graph(step: TapeStep) -> Sequence[Any]:
    x, y = step.leaf(3, 4), step.leaf(3, 4)
    loss = (x.sin() * y).sum()
    grads = []
    for last in (False, True):
        with step:
            loss.backward(retain_graph=not last)
        assert x.grad is not None
        grads.append(x.grad.clone())
    try:  # the graph is gone, as on eager
        loss.backward()
    except RuntimeError as error:
        step.log.append(str(error))
    return [*grads, x.grad, y.grad]


def existing_grad(step: TapeStep) -> Sequence[Any]:
    x, y = step.leaf(3, 4), step.leaf(3, 4)
    x.grad = torch.full_like(x, 0.25)
    before, pointer = x.grad, x.grad.data_ptr()
    with step:
        (x.sin() * y).sum().backward()
    return [x.grad, y.grad, x.grad is before, x.grad.data_ptr() == pointer]


def undefined_gradients(step: TapeStep) -> Sequence[Any]:
    x, y, unused = step.leaf(3), step.leaf(3), step.leaf(3)
    double, _ = Branches.apply(x, y, step.log)
    with step:
        (double.exp() + x).sum().backward()
    return [x.grad, y.grad, unused.grad]


def checkpointing(step: TapeStep) -> Sequence[Any]:
    x, weight = step.leaf(3, 4), step.leaf(4, 4)

    def block(value: Tensor) -> Tensor:
        step.log.append("block")
        return torch.tanh(value @ weight).exp()

    once = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    twice = checkpoint(block, once, use_reentrant=True, preserve_rng_state=False)
    assert twice is not None
    with step:
        twice.square().mean().backward()
    return [x.grad, weight.grad]


def sparse_gradients(step: TapeStep) -> Sequence[Any]:
    table, weight = step.leaf(5, 3), step.leaf(3, 2)
    rows = torch.tensor([1, 3, 1], device=step.device)
    with step:
        (F.embedding(rows, table, sparse=True) @ weight).square().sum().backward()
    return [table.grad, weight.grad]


def grad_of_inputs(step: TapeStep) -> Sequence[Any]:
    x, y, unused = step.leaf(3, 4), step.leaf(3, 4), step.leaf(3)
    z = x * y
    outputs = [z.sin(), (z + x).exp()]
    given = [torch.ones_like(z), torch.full_like(z, 0.5)]
    with step:
        grads = torch.autograd.grad(outputs, [x, y, unused], given, allow_unused=True)
    return [*grads, x.grad]


def saved_tensor_hooks(step: TapeStep) -> Sequence[Any]:
    x, y = step.leaf(3, 4), step.leaf(3, 4)

    def unpack(value: Tensor) -> Tensor:
        step.log.append(("unpack", value.clone()))
        return value * 1

    with graph.saved_tensors_hooks(lambda value: value.detach().clone(), unpack):
        z = (x * y).sin()
    with step:
        (z * y).sum().backward()
    return [x.grad, y.grad]


def threads(step: TapeStep) -> Sequence[Any]:
    """Two threads, each with tensors of its own, one after the other: at the same time they may refuse each other."""
    leaves = [(step.leaf(3, 4), step.leaf(3, 4)) for _ in range(2)]
    errors: list[BaseException] = []

    def work(x: Tensor, y: Tensor) -> None:
        try:
            with step:
                (x.cos() * y).sum().backward()
        except BaseException as error:  # noqa: BLE001  raised again in the thread of the tape
            errors.append(error)

    for pair in leaves:
        thread = threading.Thread(target=work, args=pair)
        thread.start()
        thread.join()
    if errors:
        raise errors[0]
    return [each.grad for pair in leaves for each in pair]


def left_to_eager(step: TapeStep) -> Sequence[Any]:
    """Long enough for the own loop."""
    x, y = step.leaf(3, 4), step.leaf(3, 4)
    z = x * y
    z.register_hook(step.hook("z"))
    for _ in range(6):
        z = (z.sin() + x).exp().tanh()
    with step:
        z.sum().backward()
    return [x.grad, y.grad]


SIZES = TapeCase(changing_sizes, ((STRUCTURE_MISS,), (HIT,), (SHAPE_MISS,), (HIT,)))
"""Sizes as at the step before, other sizes, and then symbols for them."""
LEFT_TO_EAGER = TapeCase(left_to_eager, ((BYPASS,),))
HERE: dict[str, TapeCase] = {
    "tensor hooks": TapeCase(tensor_hooks),
    "node hooks": TapeCase(node_hooks),
    "leaf hooks": TapeCase(leaf_hooks),
    "custom functions": TapeCase(custom_function),
    "views and in-place writes": TapeCase(views_and_writes),
    "double backward": TapeCase(double_backward, ((BYPASS, STRUCTURE_MISS), (BYPASS, HIT))),
    "changing sizes": SIZES,
    "retain_graph": TapeCase(retained_graph, ((STRUCTURE_MISS, STRUCTURE_MISS), (HIT, HIT))),
    "existing .grad": TapeCase(existing_grad),
    "undefined gradients": TapeCase(undefined_gradients),
    "checkpointing": TapeCase(checkpointing),
    "sparse gradients": TapeCase(sparse_gradients),
    "autograd.grad": TapeCase(grad_of_inputs),
    "saved-tensor hooks": TapeCase(saved_tensor_hooks),
    "threads": TapeCase(threads, ((STRUCTURE_MISS, HIT), (HIT, HIT))),
}
"""The tapes that run in this process on ``backend="eager"``, in a few seconds."""
