"""Runs the backward of PyTorch's own sample inputs, and says for each operator or module what became of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import compiled_autograd as ca


@dataclasses.dataclass
class Verdict:
    """What became of one operator's or module's samples.

    Attributes:
        name: the operator's or module's name and variant.
        backwards: how many tapes ran.
        bypasses: reasons of the backwards that the eager engine ran, counted.
        untraced: calls that stayed opaque, and why.
        failures: what failed inside and was run a slower way.
        mismatches: samples whose gradients are not those of the eager engine.
    """

    name: str
    backwards: int = 0
    bypasses: dict[str, int] = dataclasses.field(default_factory=dict)
    untraced: set[str] = dataclasses.field(default_factory=set)
    failures: set[str] = dataclasses.field(default_factory=set)
    mismatches: list[str] = dataclasses.field(default_factory=list)

    @property
    def compiled(self) -> bool:
        """Every backward was compiled: none bypassed, and nothing inside failed."""
        return not self.bypasses and not self.failures


def operators() -> list[Any]:
    """Every differentiable operator of PyTorch's database, in float64."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.supports_autograd and torch.float64 in op.supported_backward_dtypes("cpu")]


def operator_name(op: Any) -> str:
    """Name and variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def check_operator(op: Any, limit: int | None = None, backend: Any = "eager") -> Verdict:
    """Compare the backward of an operator's sample inputs with eager's, sample by sample, bit for bit."""
    verdict = Verdict(operator_name(op))
    torch.manual_seed(0)
    for index, sample in enumerate(op.sample_inputs("cpu", torch.float64, requires_grad=True)):
        if limit is not None and index >= limit:
            break
        outputs = sample.output_process_fn_grad(op(sample.input, *sample.args, **sample.kwargs))
        given = tree_leaves((sample.input, sample.args, sample.kwargs))
        _compare(verdict, f"sample {index}", tree_leaves(outputs), _leaves(given), backend)
    return verdict


def modules() -> list[Any]:
    """PyTorch's database of modules."""
    from torch.testing._internal.common_modules import module_db

    return module_db


def check_module(info: Any, limit: int | None = None, backend: Any = "eager") -> Verdict:
    """The same for a module: gradients of its parameters and of its inputs."""
    verdict = Verdict(info.name)
    samples = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=True)
    for index, sample in enumerate(samples):
        if (limit is not None and index >= limit) or sample.forward_input is None:
            break
        torch.manual_seed(0)
        made, given = sample.constructor_input, sample.forward_input
        module = info.module_cls(*made.args, **made.kwargs).to(torch.float64).train()
        outputs = module(*given.args, **given.kwargs)
        leaves = _leaves([*module.parameters(), *tree_leaves((given.args, given.kwargs))])
        _compare(verdict, f"sample {index}", tree_leaves(outputs), leaves, backend)
    return verdict


def _leaves(values: Sequence[Any]) -> list[torch.Tensor]:
    found = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
    return list(dict.fromkeys(found))


def _compare(verdict: Verdict, what: str, outputs: list[Any], leaves: list[torch.Tensor], backend: Any) -> None:
    outputs = [output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]
    outputs = [output for output in outputs if output.grad_fn is not None]
    if not outputs or not leaves:
        return
    grads = [_gradient_for(output) for output in outputs]

    def run() -> Sequence[torch.Tensor | None]:
        return torch.autograd.grad(outputs, leaves, grads, retain_graph=True, allow_unused=True)

    try:
        wanted = run()
    except RuntimeError:
        return  # eager cannot either
    for again in (False, True):
        with ca.enable(backend=backend) as session:
            found = run()
        verdict.backwards += 1
        if not _same(found, wanted):
            verdict.mismatches.append(what + (" (second run)" if again else ""))
        _note(verdict, session)


def _note(verdict: Verdict, session: ca.Session) -> None:
    for reason, count in session.stats().bypasses.items():
        verdict.bypasses[reason] = verdict.bypasses.get(reason, 0) + count
    assert session.last is not None
    for reason in session.last.reasons:
        if type(reason).__name__ == "Failure":
            verdict.failures.add(str(reason))
    if session.last.graph is not None:
        for node, reason in session.last.graph.variants[-1].program.untraceable.items():
            verdict.untraced.add(f"{node.target}: {reason.splitlines()[0]}")


def _gradient_for(output: torch.Tensor) -> torch.Tensor:
    if output.layout is torch.strided and not output.is_nested:
        return torch.randn(output.shape, dtype=output.dtype)
    return torch.ones_like(output)


def _same(found: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor | None]) -> bool:
    for one, other in zip(found, wanted, strict=True):
        if one is None or other is None:
            if one is not other:
                return False
            continue
        same_kind = one.dtype == other.dtype and one.shape == other.shape and one.layout == other.layout
        if not same_kind or not _equal(one, other):
            return False
    return True


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    return torch.equal(one.nan_to_num(nan=123.0), other.nan_to_num(nan=123.0))


def check_all(checks: Sequence[tuple[Callable[..., Verdict], Any]], limit: int | None = None) -> Iterator[Verdict]:
    """One verdict for each operator or module; memory is given back in between."""
    for index, (check, each) in enumerate(checks):
        yield check(each, limit)
        if index % 50 == 49:
            ca.reset()
