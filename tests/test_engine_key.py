"""What a capture says of a tape and the engine's key leaves out: a tape that differs in that alone is no hit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from compiled_autograd.capture import view_writes

from .helpers import assert_same, expect, in_subprocess

Program = Callable[[], Sequence[torch.Tensor | None]]


def _run(*programs: Program) -> ca.Stats:
    """Each of them on eager and compiled, with the same gradients."""
    session = ca.enable(backend="eager", cache_dir=False)
    for program in programs:
        torch.manual_seed(0)
        wanted = program()
        torch.manual_seed(0)
        with session:
            found = program()
        assert_same(found, wanted)
    stats = session.stats()
    stats.bypasses = dict(Counter(label.partition("(")[0] for label in Counter(stats.bypasses).elements()))
    return stats


def _writes(name: str, by_grad: bool = False) -> Program:
    def program() -> Sequence[torch.Tensor | None]:
        x = torch.randn(3, 4, requires_grad=True)
        whole = x * 2
        getattr(whole[0], name)(*[torch.ones(4)] * (name in ("add_", "sub_")))
        return torch.autograd.grad(whole.sum(), [x]) if by_grad else _grads(whole.sum(), x)

    return program


def _grads(loss: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor | None]:
    loss.backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize(("one", "other"), [("sin_", "cos_"), ("add_", "sub_"), ("neg_", "zero_")])
@pytest.mark.parametrize("by_grad", [False, True])
def test_functions_that_write_into_a_part_are_told_apart(one: str, other: str, by_grad: bool) -> None:
    programs = [_writes(name, by_grad) for name in (one, one, other, one)]
    expect(_run(*programs), structure_misses=1, hits=2, bypasses={"view_write": 1})


def test_a_written_part_of_unknown_functions_is_left_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_writes, "_place_of_function", lambda: None)
    expect(_run(_writes("sin_"), _writes("sin_")), bypasses={"view_write": 2})


def test_after_reset_the_other_function_is_captured() -> None:
    expect(_run(_writes("sin_")), structure_misses=1)
    ca.reset()
    expect(_run(_writes("cos_"), _writes("cos_")), structure_misses=1, hits=1)


def _retains(*which: int) -> Program:
    def program() -> Sequence[torch.Tensor | None]:
        x = torch.randn(2, 4, requires_grad=True)
        parts = x.unbind()
        for index in which:
            parts[index].retain_grad()
        (parts[0].sin() * parts[1].exp()).sum().backward()
        return [x.grad, *[parts[index].grad for index in which]]

    return program


def test_of_which_output_the_gradient_is_retained() -> None:
    expect(_run(_retains(0), _retains(1), _retains(1, 0), _retains(0, 1)), bypasses={"unsupported": 4})


_REFUSED_FIRST = """
import torch, compiled_autograd as ca
with ca.enable(backend="eager") as session:
    for retained in (True, False):
        one, other = torch.ones(2, 4, requires_grad=True).unbind()
        if retained:
            one.retain_grad()
        (one * other).sum().backward()
print(session.last.outcome)
"""


def test_a_function_that_the_engine_binds_after_a_refusal_is_kept() -> None:
    """It does so once in a process."""
    assert in_subprocess(_REFUSED_FIRST).stdout == "structure_miss\n"


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a * b.exp()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        return grad * b.exp(), grad * a * b.exp()


def _packs(function: Callable[..., torch.Tensor], which: Callable[[Any], Any]) -> Program:
    def program() -> Sequence[torch.Tensor | None]:
        x = torch.randn(1, 3, 3, requires_grad=True)
        y = torch.randn(1, 3, 3, requires_grad=True)
        out = function(x.sin(), y.cos())
        which(out.grad_fn).register_hooks(lambda saved: saved.clone(), lambda packed: packed)
        return _grads(out.sum(), x, y)

    return program


def test_which_of_what_a_node_saved_was_packed() -> None:
    first = _packs(torch.bmm, lambda node: node._raw_saved_self)
    second = _packs(torch.bmm, lambda node: node._raw_saved_mat2)
    expect(_run(first, second), bypasses={"unsupported": 2})


def test_which_of_what_a_function_saved_was_packed() -> None:
    """Its structure is captured when it is met again, and then the engine's key says it."""
    first, second = [_packs(_Product.apply, lambda node, k=k: node._raw_saved_tensors[k]) for k in (0, 1)]
    expect(_run(first, first, second, first, second), structure_misses=2, hits=2, bypasses={"unsupported": 1})


def _wants(dtype: torch.dtype | None, how: str = "backward") -> Program:
    def program() -> Sequence[torch.Tensor | None]:
        leaf = torch.randn(4).bfloat16().requires_grad_()
        leaf.grad_dtype = dtype
        if how == "hooked":
            leaf.register_hook(lambda grad: grad / 3)
        found: list[torch.Tensor | None] = []
        for _ in range(2):
            loss = ((leaf * 3).float().sin() + leaf.float()).sum()
            if how == "grad":
                found += torch.autograd.grad(loss, [leaf])
            elif how == "edge":
                found += torch.autograd.grad(loss, [torch.autograd.graph.get_gradient_edge(leaf)])
            else:
                loss.backward()
                found.append(None if leaf.grad is None else leaf.grad.clone())
        return found

    return program


@pytest.mark.parametrize("how", ["backward", "hooked", "grad", "edge"])
def test_a_gradient_has_the_dtype_that_its_leaf_wants(how: str) -> None:
    programs = [_wants(dtype, how) for dtype in (torch.float32, None, torch.bfloat16, torch.float32)]
    if how in (
        "backward",
        "hooked",
    ):  # a second backward finds a gradient; where it may have any dtype, eager adds to it
        expect(_run(*programs), structure_misses=5, hits=2, bypasses={"unsupported": 1})
    else:
        expect(_run(*programs), structure_misses=3, hits=5)


def _changed_after_forward(dtype: torch.dtype, wanted: torch.dtype | None = None, more: bool = False) -> Program:
    """The leaf has another dtype than when its tape was made, as ``module.half()`` gives it one."""

    def program() -> Sequence[torch.Tensor | None]:
        leaf = torch.linspace(-1, 1, 4).requires_grad_()
        if wanted is not None:
            leaf.grad_dtype = wanted
        loss = (leaf.sin() * 1e6).sum()
        leaf.data = leaf.data.to(dtype)
        if more:
            leaf.register_post_accumulate_grad_hook(lambda leaf: None)
        loss.backward()
        return [leaf.grad]

    return program


@pytest.mark.parametrize("more", [False, True])
def test_a_leaf_whose_dtype_changes_after_its_forward(more: bool) -> None:
    """Its tape remembers: in float16 the gradient would be infinite."""
    half, single, double = torch.float16, torch.float32, torch.float64
    programs = [_changed_after_forward(dtype, None, more) for dtype in (half, single, half, double)]
    expect(_run(*programs), structure_misses=3, hits=1)
    programs = [_changed_after_forward(dtype, double, more) for dtype in (half, single, half)]
    expect(_run(*programs), structure_misses=2, hits=1)


_HALF, _SINGLE, _DOUBLE = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("wanted", "is_set_first", "becomes"),
    [
        (_HALF, True, _HALF),
        (_DOUBLE, True, _DOUBLE),
        (_DOUBLE, False, _HALF),
        (_HALF, False, _DOUBLE),
        (None, False, _DOUBLE),
    ],
)
def test_what_a_node_wants_is_asked_of_the_node(
    wanted: torch.dtype | None, is_set_first: bool, becomes: torch.dtype
) -> None:
    def program() -> Sequence[torch.Tensor | None]:
        leaf = torch.linspace(-1, 1, 4).requires_grad_()
        if is_set_first:
            leaf.grad_dtype = wanted
        loss = (leaf.sin() / 3).exp().sum()
        leaf.data = leaf.data.to(becomes)
        if not is_set_first:
            leaf.grad_dtype = wanted
        return _grads(loss, leaf)

    expect(_run(program, program), structure_misses=1, hits=1)


def test_a_dtype_set_on_what_is_no_leaf_any_more_is_left_to_eager() -> None:
    def program() -> Sequence[torch.Tensor | None]:
        leaf = torch.randn(4).bfloat16().requires_grad_()
        written = torch.zeros(4, dtype=torch.bfloat16)
        written.grad_dtype = torch.float32
        written.add_(leaf)
        return _grads((written.float() / 3).exp().sum(), leaf)

    expect(_run(program, program), bypasses={"unsupported": 2})


@pytest.mark.parametrize("other", [torch.bfloat16, None])
def test_a_hook_that_changes_the_grad_dtype_of_a_sum(other: torch.dtype | None) -> None:
    """``fully_shard`` does so from torch 2.15 on. In 16 bits the sum of these terms is another one."""

    def program() -> Sequence[torch.Tensor | None]:
        leaf = torch.tensor([1.0]).bfloat16().requires_grad_()
        leaf.grad_dtype = torch.float32
        terms = (leaf * 256).float() + (leaf * 1).float() + (leaf * 1).float()

        def hook(grad: torch.Tensor) -> None:
            leaf.grad_dtype = other

        terms.register_hook(hook)
        return _grads(terms.sum(), leaf)

    assert program()[0].item() in (256, 258)  # type: ignore[union-attr]
    expect(_run(program, program), bypasses={"unsupported": 2})


def test_a_hook_on_a_node_with_an_edge_to_nowhere_is_no_reason_to_refuse() -> None:
    """What such a node gives there is handed to the hook, and nobody has said what it should be."""
    x, constant = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    session = ca.enable(backend="eager", cache_dir=False)
    for _ in range(2):
        joined = torch.cat([x * 2, constant], 1)
        joined.grad_fn.register_hook(lambda given, got: None)  # type: ignore[union-attr]
        with session:
            assert torch.equal(torch.autograd.grad(joined.sum(), x)[0], torch.full((2, 3), 2.0))
    expect(session.stats(), structure_misses=1, hits=1)


class _HasAVariable(torch.autograd.Function):
    """Leaves have an attribute of this name, and this is none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.variable = torch.zeros(2, dtype=torch.bfloat16)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2


def test_what_a_function_calls_its_variable_is_no_leaf() -> None:
    def program() -> Sequence[torch.Tensor | None]:
        y = _HasAVariable.apply(torch.ones(3, requires_grad=True))
        return torch.autograd.grad(y.sin().sum(), [torch.autograd.graph.get_gradient_edge(y)], retain_graph=True)

    stats = _run(program, program)
    expect(stats, structure_misses=1, hits=1)


def test_who_wrote_into_a_part_is_told_beside_a_long_tape_that_is_not_asked_for() -> None:
    """With ``inputs=`` the engine's key has the nodes alone that lead there, however long the rest is."""

    def program(name: str, length: int) -> Program:
        def run() -> Sequence[torch.Tensor | None]:
            x = torch.full((4,), 0.3, requires_grad=True)
            whole = x * 1
            getattr(whole[:2], name)()
            rest = torch.ones((), requires_grad=True)
            for _ in range(length):
                rest = rest + 1
            return torch.autograd.grad(whole.sum() + rest, [x])

        return run

    stats = _run(program("sin_", 3), program("cos_", 10_050))
    assert (stats.structure_misses, stats.bypasses) == (1, {"view_write": 1})
