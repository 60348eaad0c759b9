"""Runs the backward of PyTorch's own sample inputs, and says for each operator or module what became of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

import compiled_autograd as ca
from shadow_cache import Failure

_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Beside the largest gradient of a backward: decompositions and factorisations lose some digits."""
_TRIES = 3
"""How often eager runs again before what differs from it is taken for a mistake of ours, where it may differ itself."""


class Where(NamedTuple):
    """What samples are made of."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float64


ON_CPU = Where()


@dataclasses.dataclass
class Verdict:
    """What became of one operator's or module's samples.

    Attributes:
        name: the operator's or module's name and variant.
        backwards: how many tapes ran.
        hits: how many of them ran what was compiled before.
        bypasses: reasons of the backwards that the eager engine ran, counted.
        untraced: calls that stayed opaque, and why.
        failures: what failed inside and was run a slower way.
        mismatches: samples whose gradients are not those of the eager engine.
        refused: samples that eager itself cannot run there, and why.
        scattered: of how many backwards eager's own gradients differ from one run to the next.
    """

    name: str
    backwards: int = 0
    hits: int = 0
    bypasses: dict[str, int] = dataclasses.field(default_factory=dict)
    untraced: set[str] = dataclasses.field(default_factory=set)
    failures: set[str] = dataclasses.field(default_factory=set)
    mismatches: list[str] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)
    scattered: int = 0

    @property
    def compiled(self) -> bool:
        """Every backward was compiled: none bypassed, and nothing inside failed."""
        return not self.bypasses and not self.failures


def operators(where: Where = ON_CPU) -> list[Any]:
    """Every operator of PyTorch's database that is differentiable there."""
    from torch.testing._internal.common_methods_invocations import op_db

    device, dtype = where
    return [op for op in op_db if op.supports_autograd and dtype in op.supported_backward_dtypes(device)]


def operator_name(op: Any) -> str:
    """Name and variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def check_operator(
    op: Any,
    limit: int | None = None,
    backend: Any = "eager",
    steps: int = 2,
    in_turn: bool = False,
    where: Where = ON_CPU,
) -> Verdict:
    """Compare the backward of an operator's sample inputs with eager's.

    Args:
        limit: how many samples, from the first on.
        backend: of the compiled runs; with ``"eager"`` every bit is compared, unless eager scatters itself, as atomic
            additions of a GPU do.
        steps: how often each sample runs, with new values each time.
        in_turn: the samples run one after the other at each step, so that sizes change from one tape to the next; else
            each runs its steps by itself.
    """

    def samples(step: int) -> Iterator[Any]:
        torch.manual_seed(step)
        return itertools.islice(op.sample_inputs(where.device, where.dtype, requires_grad=True), limit)

    def tape(sample: Any) -> tuple[list[Any], list[torch.Tensor]]:
        outputs = sample.output_process_fn_grad(op(sample.input, *sample.args, **sample.kwargs))
        return tree_leaves(outputs), _leaves(tree_leaves((sample.input, sample.args, sample.kwargs)))

    return _check(Verdict(operator_name(op)), samples, tape, backend, steps, in_turn, where)


def modules(where: Where = ON_CPU) -> list[Any]:
    """PyTorch's database of modules."""
    from torch.testing._internal.common_modules import module_db

    return [info for info in module_db if where.dtype in info.supported_dtypes(where.device)]


def check_module(
    info: Any,
    limit: int | None = None,
    backend: Any = "eager",
    steps: int = 2,
    in_turn: bool = False,
    where: Where = ON_CPU,
) -> Verdict:
    """The same for a module: gradients of its parameters and of its inputs."""

    def samples(step: int) -> Iterator[Any]:
        torch.manual_seed(step)
        given = {"device": where.device, "dtype": where.dtype, "requires_grad": True, "training": True}
        made = info.module_inputs_func(info, **given)
        return itertools.takewhile(lambda sample: sample.forward_input is not None, itertools.islice(made, limit))

    def tape(sample: Any) -> tuple[list[Any], list[torch.Tensor]]:
        torch.manual_seed(0)
        made, given = sample.constructor_input, sample.forward_input
        module = info.module_cls(*made.args, **made.kwargs).to(*where).train()
        outputs = module(*given.args, **given.kwargs)
        return tree_leaves(outputs), _leaves([*module.parameters(), *tree_leaves((given.args, given.kwargs))])

    return _check(Verdict(info.name), samples, tape, backend, steps, in_turn, where)


def _check(
    verdict: Verdict,
    samples: Callable[[int], Iterator[Any]],
    tape: Callable[[Any], tuple[list[Any], list[torch.Tensor]]],
    backend: Any,
    steps: int,
    in_turn: bool,
    where: Where,
) -> Verdict:
    drawn = [list(samples(step)) for step in range(steps)]
    order = [(step, index) for step in range(steps) for index in range(min(map(len, drawn)))]
    for step, index in order if in_turn else sorted(order, key=lambda pair: pair[1]):
        what = f"sample {index}, step {step}"
        try:
            outputs, leaves = tape(drawn[step][index])
        except RuntimeError as error:
            if where.device == "cpu":
                raise
            verdict.refused.append(f"{what}: {error}")  # a library that is missing there, or a size it cannot do
            continue
        _compare(verdict, what, outputs, leaves, backend, where)
    return verdict


def _leaves(values: Sequence[Any]) -> list[torch.Tensor]:
    found = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
    return list(dict.fromkeys(found))


def _compare(
    verdict: Verdict, what: str, outputs: list[Any], leaves: list[torch.Tensor], backend: Any, where: Where
) -> None:
    outputs = [output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]
    outputs = [output for output in outputs if output.grad_fn is not None]
    if not outputs or not leaves:
        return
    grads = [_gradient_for(output) for output in outputs]

    def run() -> Sequence[torch.Tensor | None]:
        return torch.autograd.grad(outputs, leaves, grads, retain_graph=True, allow_unused=True)

    try:
        wanted = run()
    except RuntimeError as error:
        verdict.refused.append(f"{what}: {error}")
        return
    with ca.enable(backend=backend) as session:
        found = run()
    verdict.backwards += 1
    verdict.hits += session.stats().hits
    rounding = None if backend == "eager" else _ROUNDING[where.dtype]
    if not _same(found, wanted, rounding):
        if where.device == "cpu" or all(_same(run(), wanted, None) for _ in range(_TRIES)):
            verdict.mismatches.append(what)
        else:
            verdict.scattered += 1
            if not _same(found, wanted, _ROUNDING[where.dtype]):
                verdict.mismatches.append(f"{what}, where eager scatters too")
    _note(verdict, session, what)


def _note(verdict: Verdict, session: ca.Session, what: str) -> None:
    for reason, count in session.stats().bypasses.items():
        verdict.bypasses[reason] = verdict.bypasses.get(reason, 0) + count
    assert session.last is not None
    for reason in session.last.reasons:
        if isinstance(reason, Failure):
            verdict.failures.add(str(reason))
            if reason.kind == "mismatch":  # the right gradients were used, but compiled code gave others
                verdict.mismatches.append(f"{what}: {reason}")
    if session.last.graph is not None:
        for node, reason in session.last.graph.variants[-1].program.schedule.untraceable.items():
            verdict.untraced.add(f"{node.target}: {reason.splitlines()[0]}")


def _gradient_for(output: torch.Tensor) -> torch.Tensor:
    if output.layout is torch.strided and not output.is_nested:
        return torch.randn(output.shape, dtype=output.dtype, device=output.device)
    return torch.ones_like(output)


def _same(found: Sequence[Any], wanted: Sequence[Any], rounding: float | None) -> bool:
    """Kinds, and values: every bit, or as much of them as `rounding` leaves (strides are another test's)."""
    dense = [each for each in wanted if each is not None and each.layout is torch.strided and each.numel()]
    largest = max((float(each.abs().nan_to_num(0, 0, 0).max()) for each in dense), default=0.0)
    if rounding is not None and all(each.dtype is torch.float64 for each in dense):
        # Where the gradient is zero in theory, as that of `normalize` over one element, all of it is rounding.
        largest = max(largest, 16 * torch.finfo(torch.float64).eps / rounding)
    for one, other in zip(found, wanted, strict=True):
        if one is None or other is None:
            if one is not other:
                return False
            continue
        same_kind = one.dtype == other.dtype and one.shape == other.shape and one.layout == other.layout
        if not same_kind or not _equal(one, other, None if rounding is None else rounding * largest):
            return False
    return True


def _equal(one: torch.Tensor, other: torch.Tensor, tolerance: float | None) -> bool:
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    one, other = one.nan_to_num(nan=123.0), other.nan_to_num(nan=123.0)
    return torch.equal(one, other) if tolerance is None else bool((one - other).abs().le(tolerance).all())


def check_all(
    checks: Sequence[tuple[Callable[..., Verdict], Any]], limit: int | None = None, **how: Any
) -> Iterator[Verdict]:
    """One verdict for each operator or module; memory is given back in between."""
    for index, (check, each) in enumerate(checks):
        yield check(each, limit, **how)
        if index % 50 == 49:
            ca.reset()
