"""Functions that declare the dtype of their gradients (``ctx.set_output_grad_dtype``, since 2.14): another declaration
is another structure, and each is captured and hit. On an older torch nothing is declared, and all tapes are one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import compiled_autograd as ca
from compiled_autograd.engine.native_hits import NativeHits
from compiled_autograd.torch_api import grad_dtypes
from shadow_cache import Miss

from .both_walks import native_plans, walked  # noqa: F401 (a fixture)
from .helpers import assert_same, expect, in_subprocess
from .own_loops import extension  # noqa: F401

HAS = hasattr(torch.autograd.function.FunctionCtx, "set_output_grad_dtype")
SINGLE, DOUBLE, HALF = torch.float32, torch.float64, torch.bfloat16
UNDECLARED = "nothing"
Found = Sequence[Tensor | None]
Program = Callable[[Any], Found]
"""Takes what a function declares."""


def declare(ctx: Any, *declared: Any) -> None:
    """Declare, where this torch can and there is something to declare."""
    if HAS and UNDECLARED not in declared:
        ctx.set_output_grad_dtype(*declared)


def kinds(*declared: Any) -> int:
    """The number of structures of tapes that differ in these alone."""
    return len({HALF if each == UNDECLARED else each for each in declared}) if HAS else 1


class Narrow(Function):
    """Gives bfloat16; notes the dtypes of gradients that it is given."""

    seen: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, declared: Any) -> Tensor:
        declare(ctx, declared)
        return (x * 2).to(HALF)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        Narrow.seen.append(grad.dtype)
        return (grad * 1.001).to(SINGLE), None


@ca.traceable
class Traced(Function):
    """The same, to be traced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, declared: Any) -> Tensor:
        declare(ctx, declared)
        return (x * 2).to(HALF)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return (grad * 1.001).to(SINGLE), None


class Gives(Function):
    """Its gradient has a dtype of its own; None for none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        ctx.dtype = dtype
        return x.float() * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return None if ctx.dtype is None else (grad / 3).to(ctx.dtype), None


def leaf() -> Tensor:
    return torch.randn(4, 5, requires_grad=True)


def grads(loss: Tensor, *leaves: Tensor) -> Found:
    loss.backward()
    return [each.grad for each in leaves]


def once(declared: Any, function: Any = Narrow) -> Found:
    x, w = leaf(), leaf()
    return grads((function.apply(x.sin(), declared).float() * w).sum(), x, w)


def twice(declared: Any, function: Any = Narrow) -> Found:
    """The engine adds in the dtype that is wanted."""
    x, w = leaf(), leaf()
    y = function.apply(x.sin(), declared)
    return grads((y.float() * w).sum() + (y.float() * w * 0.37).sum() + (y.double() / 7).sum(), x, w)


def hooked(declared: Any) -> Found:
    x, w = leaf(), leaf()
    y = Narrow.apply(x.sin(), declared)
    y.register_hook(lambda grad: grad / 3)
    y.grad_fn.register_prehook(lambda got: (got[0] * 1.01,))
    return grads((y.float() * w).sum() + (y.float() * w * 0.37).sum(), x, w)


def made_anew(declared: Any) -> Found:
    class Narrow(Function):
        forward = staticmethod(globals()["Narrow"].forward)
        backward = staticmethod(globals()["Narrow"].backward)

    return once(declared, Narrow)


def recomputed(declared: Any) -> Found:
    x, w = leaf(), leaf()
    y = checkpoint(lambda x: Narrow.apply(x.sin(), declared).float() * w, x, use_reentrant=False)
    return grads(y.sum(), x, w)


def written_in_place(declared: Any) -> Found:
    """The node that wrote wants the tensor's own dtype."""
    x, w = leaf(), leaf()
    y = Narrow.apply(x.sin(), declared)
    y.mul_(1.5)
    y[0].neg_()
    return grads((y.float() * w).sum(), x, w)


def asked(declared: Any) -> Found:
    """The function does not run: nothing but the edges to it says what it wants."""
    x, w = leaf(), leaf()
    y = Narrow.apply(x.sin(), declared)
    loss = (y.float() * w / 3).sum() + (y.float() * w * 0.37).sum()
    return torch.autograd.grad(loss, [y, w], retain_graph=True)


def asked_by_edge(declared: Any) -> Found:
    x, w = leaf(), leaf()
    y = Narrow.apply(x.sin(), declared)
    loss = (y.float() * w / 3).sum()
    edge = get_gradient_edge(y)
    return [*torch.autograd.grad(loss, [edge, w], retain_graph=True), *torch.autograd.grad(loss, [edge, x])]


def retained(declared: Any) -> Found:
    x, w = leaf(), leaf()
    y = Narrow.apply(x.sin(), declared)
    y.retain_grad()
    return [*grads((y.float() * w).sum(), x, w), y.grad]


def undefined(declared: Any) -> Found:
    """The engine's zeros have the dtype of the output, whatever is declared."""
    x = leaf()
    return grads(Gives.apply(Narrow.apply(x.sin(), declared), None).sum() + x.sum(), x)


def root(gradient: torch.dtype | None) -> Program:
    def program(declared: Any) -> Found:
        x = leaf()
        y = Narrow.apply(x.sin(), declared)
        y.backward(torch.ones_like(y, dtype=gradient) / 3)
        return [x.grad]

    return program


def run(program: Program, *turns: Any, **settings: Any) -> ca.Session:
    """Each on eager and compiled, with the same gradients, of the same dtypes in backward."""
    session = ca.enable(**{"backend": "eager", "cache_dir": False, "tune": False, **settings})
    for declared in turns:
        found = []
        for around in (ca.disable(), session):
            torch.manual_seed(0)
            Narrow.seen.clear()
            with around:
                found.append((program(declared), list(Narrow.seen)))
        assert found[1][1] == found[0][1]
        assert_same(found[1][0], found[0][0], bitwise=settings.get("backend", "eager") == "eager", low=True)
    return session


def refused(session: ca.Session) -> int:
    """The number of backwards that were left to eager as unsupported."""
    stats = session.stats()
    assert all(label.startswith("unsupported") for label in stats.bypasses)
    return sum(stats.bypasses.values())


TURNS = (UNDECLARED, SINGLE, None, DOUBLE, HALF, SINGLE, UNDECLARED, None)
PROGRAMS = [once, twice, hooked, made_anew, recomputed, written_in_place, undefined, asked, asked_by_edge, root(None)]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("first", [UNDECLARED, SINGLE, None])
def test_each_declaration_is_captured_and_hit(program: Program, first: Any) -> None:
    stats = run(program, first, *TURNS).stats()
    assert stats.bypasses == {} and stats.failures == 0
    backwards = 2 if program is asked_by_edge else 1
    assert stats.structure_misses <= kinds(*TURNS) * backwards
    assert stats.hits + stats.structure_misses == stats.backwards


@pytest.mark.parametrize("first", [UNDECLARED, SINGLE, None])
def test_retained_gradients_have_the_declared_dtype(first: Any) -> None:
    stats = run(retained, first, *TURNS).stats()
    expect(stats, structure_misses=kinds(*TURNS), hits=1 + len(TURNS) - kinds(*TURNS))


@pytest.mark.parametrize("gradient", [SINGLE, DOUBLE, HALF])
def test_backward_on_the_output_itself(gradient: torch.dtype) -> None:
    """The engine casts what it is given before the tape is walked."""
    stats = run(root(gradient), *TURNS, *TURNS).stats()
    expect(stats, structure_misses=kinds(*TURNS), hits=2 * len(TURNS) - kinds(*TURNS))


@pytest.mark.parametrize("program", [once, twice, asked, lambda declared: twice(declared, Traced)])
def test_with_inductor(program: Program) -> None:
    stats = run(program, UNDECLARED, SINGLE, None, UNDECLARED, SINGLE, None, backend="inductor").stats()
    assert stats.bypasses == {} and stats.failures == 0
    assert stats.structure_misses <= 2 * kinds(UNDECLARED, SINGLE, None)


@pytest.mark.parametrize("program", [once, twice])
def test_marked_functions(program: Any) -> None:
    stats = run(lambda declared: program(declared, Traced), *TURNS, backend="aot_eager").stats()
    expect(stats, structure_misses=kinds(*TURNS), hits=len(TURNS) - kinds(*TURNS))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_forwards_around_it(backend: str) -> None:
    """The engine reports no casts after a compiled forward's backward; AOTAutograd's own function declares nothing."""
    inner = torch.compile(lambda x: x.sin() * 2, backend="aot_eager")

    def program(declared: Any) -> Found:
        x, w = leaf(), leaf()
        y = inner(Narrow.apply(inner(x), declared))
        return grads((y.float() * w).sum(), x, w)

    stats = run(program, *TURNS, backend=backend).stats()
    expect(stats, structure_misses=kinds(*TURNS), hits=len(TURNS) - kinds(*TURNS))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_leaf_of_a_compiled_forward_wants_a_dtype(backend: str) -> None:
    """The engine reports no cast there either, and it refuses a ``.grad`` of another dtype."""
    inner = torch.compile(lambda x: x.sin() * 2, backend="aot_eager")

    def program(declared: Any) -> Found:
        x = torch.randn(4, 5, dtype=HALF, requires_grad=True)
        if declared != UNDECLARED:
            x.grad_dtype = declared
        return grads((inner(x).float() / 3).exp().sum(), x)

    expect(run(program, *TURNS, backend=backend).stats(), structure_misses=4, hits=len(TURNS) - 4)


def test_behind_a_compiled_forward_with_a_subclass_a_cast_is_left_to_eager() -> None:
    """AOTAutograd's function has other arguments there than the tensors whose gradients it computes."""
    inner = torch.compile(lambda x, w: (x * w).sin(), backend="aot_eager")

    def program(declared: Any) -> Found:
        x, w = torch.randn(4, requires_grad=True), TwoTensor(torch.randn(4), torch.randn(4)).requires_grad_()
        if declared != UNDECLARED:
            x.grad_dtype = declared
        return grads(inner(x, w).sum(), x)

    assert refused(run(program, UNDECLARED, HALF, UNDECLARED, HALF)) == 2


def test_traced_by_a_compiled_forward() -> None:
    compiled = torch.compile(lambda x, w: Narrow.apply(x.sin(), SINGLE).float() * w, backend="aot_eager")

    def program(declared: Any) -> Found:
        x, w = leaf(), leaf()
        return grads(compiled(x, w).sum(), x, w)

    expect(run(program, SINGLE, SINGLE).stats(), structure_misses=1, hits=1)


class Several(Function):
    """Outputs of several kinds, of which one is no tensor and one is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, declared: Any) -> Any:
        declare(ctx, *declared)
        index = torch.arange(3)
        ctx.mark_non_differentiable(index)
        return x.to(HALF), x.to(HALF) * 2, index, "text"

    @staticmethod
    def backward(ctx: Any, *got: Any) -> Any:
        Narrow.seen.append([each.dtype for each in got[:2]])
        return sum(each.float() for each in got[:2]), None


def test_each_output_has_its_own() -> None:
    def program(declared: Any) -> Found:
        x, w = leaf(), leaf()
        one, other, *_ = Several.apply(x.sin(), declared)
        return grads((one.float() * w).sum() + (one.float() * w / 3).sum() + (other.float() * w).sum(), x, w)

    turns = [(SINGLE, None), (None, SINGLE), (SINGLE, SINGLE), (HALF, HALF)]
    every = [(*each, None, None) for each in turns]
    expect(run(program, *every, *every).stats(), structure_misses=4 if HAS else 1, hits=4 if HAS else 7)


def test_declaring_twice_is_the_users_error() -> None:
    class Twice(Narrow):
        @staticmethod
        def forward(ctx: Any, x: Tensor, declared: Any) -> Tensor:
            declare(ctx, SINGLE)
            declare(ctx, declared)
            return x.to(HALF)

    if not HAS:
        run(lambda declared: once(declared, Twice), SINGLE)
        return
    with pytest.raises(RuntimeError, match="can only be called once"), ca.enable(backend="eager"):
        once(DOUBLE, Twice)


# ---- sums where any dtype is taken -----------------------------------------------------------------------------------


def _of_dtypes(*dtypes: torch.dtype) -> Program:
    def program(declared: Any) -> Found:
        x = leaf()
        y = Narrow.apply(x.sin(), declared)
        return grads(sum(Gives.apply(y, dtype).sum() for dtype in dtypes), x)  # type: ignore[arg-type]

    return program


@pytest.mark.parametrize("dtypes", [(SINGLE, HALF), (HALF, SINGLE), (DOUBLE, HALF, SINGLE), (SINGLE, SINGLE)])
def test_terms_that_may_differ_in_dtype_are_left_to_eager(dtypes: Sequence[torch.dtype]) -> None:
    """The sum has the dtype of the first term where the engine adds in place, and it does so where that term is held by
    nothing else."""
    expect(run(_of_dtypes(*dtypes), SINGLE, SINGLE).stats(), structure_misses=1, hits=1)
    assert refused(run(_of_dtypes(*dtypes), None, None)) == (2 if HAS else 0)


def test_a_leaf_that_takes_terms_of_any_dtype_is_left_to_eager() -> None:
    def program(declared: Any) -> Found:
        x = leaf()
        x.grad_dtype = declared
        return grads((Gives.apply(x, SINGLE) * leaf()).sum() + (Gives.apply(x, HALF) * leaf()).sum(), x)

    assert refused(run(program, None, None)) == 2


def test_built_in_terms_that_may_differ_are_left_to_eager() -> None:
    def program(declared: Any) -> Found:
        x, w = leaf(), leaf()
        y = Narrow.apply(x.sin(), declared)
        return grads((y * w).sum() + y.float().sum(), x, w)

    expect(run(program, SINGLE, SINGLE).stats(), structure_misses=1, hits=1)
    assert refused(run(program, None, None)) == (2 if HAS else 0)


def test_built_in_terms_of_one_kind_are_captured() -> None:
    def program(*others: Tensor) -> Program:
        def run(declared: Any) -> Found:
            x = leaf()
            y = Narrow.apply(x.sin(), declared)
            return grads(sum((y * each).sum() for each in others), x)  # type: ignore[arg-type]

        return run

    single = torch.randn(4, 5)
    expect(run(program(single, single + 1, single + 2), None, None).stats(), structure_misses=1, hits=1)
    assert refused(run(program(single, single.double()), None, None)) == (2 if HAS else 0)


# ---- everything that keeps a tape ------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [once, twice, made_anew, asked, root(DOUBLE), root(None)])
def test_walked_in_cpp(program: Program, native: NativeHits) -> None:
    for declared in TURNS[:4]:
        run(program, *[declared] * 6, extension="auto")
    run(program, *TURNS, *TURNS, extension="auto")
    assert native.hits > 0 or program not in (once, twice, asked)


@pytest.mark.parametrize("program", [once, twice, hooked, written_in_place])
@pytest.mark.usefixtures("extension")
def test_in_the_own_loop(program: Program) -> None:
    stats = run(program, *TURNS, on_miss="eager", extension="all").stats()
    assert stats.own_loop == len(TURNS)


_CHILD = """
from tests.test_output_grad_dtypes import *
stats = run(twice, *{turns}, backend={backend!r}, cache_dir={folder!r}).stats()
print(stats.bypasses, stats.failures, stats.compiles, stats.loads > 0)
"""


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_next_process_finds_each_in_the_store(backend: str, tmp_path: Path) -> None:
    outputs = []
    for turns in ("(UNDECLARED, SINGLE)", "(SINGLE, UNDECLARED, SINGLE)"):
        code = _CHILD.format(backend=backend, folder=str(tmp_path), turns=turns)
        done = in_subprocess(code)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.split())
    assert outputs[0][:2] == outputs[1][:2] == ["{}", "0"]
    assert outputs[1][3] == "True" and (outputs[1][2] == "0" or backend == "eager")


_BEFORE_IMPORT = """
import torch
class Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, declared):
        if declared and hasattr(ctx, "set_output_grad_dtype"):
            ctx.set_output_grad_dtype(torch.float32)
        return x.to(torch.bfloat16)
    @staticmethod
    def backward(ctx, grad):
        seen.append(str(grad.dtype))
        return grad.float(), None
seen = []
losses = [Narrow.apply(torch.ones(3, requires_grad=True), each).float().sum() for each in (False, True) * 3]
for each in losses[:2]:
    each.backward()
import compiled_autograd as ca
with ca.enable(backend="eager") as session:
    for each in losses[2:]:
        each.backward()
assert seen[:2] * 3 == seen, seen
print(session.stats().structure_misses, session.stats().hits)
"""


def test_forwards_that_ran_before_the_import() -> None:
    done = in_subprocess(_BEFORE_IMPORT)
    assert done.stdout.split() == (["2", "2"] if HAS else ["1", "3"]), done.stderr


def test_another_declaration_is_explained_in_words() -> None:
    session = ca.enable(backend="eager", cache_dir=False)
    for declared in (UNDECLARED, SINGLE, None):
        with session:
            once(declared)
        assert session.last is not None
        if HAS and declared != UNDECLARED:
            (miss,) = session.last.reasons
            texts = {SINGLE: "float32", None: "any dtype"}
            assert isinstance(miss, Miss) and (miss.kind, miss.old, miss.new) == ("dtype", "bfloat16", texts[declared])
            assert miss.where.endswith("the required dtype")


def test_a_tape_that_is_inspected_shows_it() -> None:
    shown = [str(node.gradients[0]) for node in ca.inspect(Narrow.apply(leaf().sin(), SINGLE)).nodes]
    assert shown == ["f32[4,5]" if HAS else "bf16[4,5]", "f32[4,5]", "f32[4,5]"]


def test_a_reproduction_runs_as_the_backward_did(tmp_path: Path) -> None:
    for declared in (SINGLE, None):
        session = run(twice, declared, declared)
        assert session.last is not None and session.last.graph is not None
        session.last.graph.save(tmp_path / "declared.zip")
        assert ca.load(tmp_path / "declared.zip").compare("eager").is_rounding


# ---- what a node wants, on any version -------------------------------------------------------------------------------


class Dirty(Function):
    """Writes into its first argument: of that, it takes over what the gradient is to be."""

    @staticmethod
    def forward(ctx: Any, written: Tensor, x: Tensor) -> Tensor:
        ctx.mark_dirty(written)
        return written.add_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        Narrow.seen.append(grad.dtype)
        return None, grad


def test_a_dtype_set_before_a_function_wrote_is_told_apart() -> None:
    def program(declared: Any) -> Found:
        x, written = leaf(), torch.zeros(4, 5, dtype=HALF)
        if declared != UNDECLARED:
            written.grad_dtype = declared
        return grads((Dirty.apply(written, x.to(HALF)).float() / 3).exp().sum(), x)

    stats = run(program, *TURNS).stats()
    assert stats.bypasses == {} and stats.structure_misses in (1, 4)


def test_where_it_cannot_be_read_such_tapes_are_left_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_dtypes, "_place", lambda: None)
    assert refused(run(once, UNDECLARED, SINGLE)) == 2


def test_what_is_read_is_what_a_leaf_says() -> None:
    one = torch.zeros(3, requires_grad=True)
    node = get_gradient_edge(one).node
    for dtype, number in ((torch.float16, 5), (DOUBLE, 7), (None, None), (torch.complex64, 9), (HALF, 15)):
        one.grad_dtype = dtype
        assert grad_dtypes.grad_dtypes(node) == (number,)
