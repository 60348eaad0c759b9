"""Hits of tapes that were walked in C++ leave what eager leaves, and are counted like others."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
from compiled_autograd.capture.capture import Capture
from compiled_autograd.engine import backward, seam
from compiled_autograd.engine.native_hits import NativeHits
from compiled_autograd.settings import resolve

from .both_walks import Both, library_of, native_plans, walked  # noqa: F401 (a fixture)
from .helpers import another_walks, assert_same, expect, mlp

LEARNT_AFTER = 3
"""Backwards until a tape is known: it is captured, met again, and learnt."""


def _steps(session: Any, make: Callable[[int], torch.Tensor], leaves: list[torch.Tensor], steps: range) -> list[Any]:
    """Gradients of all leaves, step by step."""
    found = []
    for step in steps:
        for leaf in leaves:
            leaf.grad = None
        loss = make(step)
        with session:
            loss.backward()
        found += [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    return found


def _compare(
    native: NativeHits, make: Callable[[int], torch.Tensor], leaves: list[torch.Tensor], steps: int = 8, **more: Any
) -> ca.Session:
    """All but the first backwards are walked in C++."""
    wanted = _steps(contextlib.nullcontext(), make, leaves, range(steps))
    session = walked(**more)
    assert_same(_steps(session, make, leaves, range(steps)), wanted)
    assert native.hits == steps - LEARNT_AFTER
    expect(session.stats(), structure_misses=1, hits=steps - 1, captures=1)
    return session


# ---- what is learnt --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "meanwhile"),
    [((True, False), (False, True)), ((False, False), (True, True)), ((True, True), (False, False))],
)
def test_a_plan_is_of_the_tape_that_the_engine_has_walked(
    native: NativeHits, monkeypatch: pytest.MonkeyPatch, before: tuple[bool, ...], meanwhile: tuple[bool, ...]
) -> None:
    """Another thread gives to a leaf, or takes its gradient, once the plan is made and before the engine walks."""
    leaves = [torch.ones(3, requires_grad=True) for _ in range(2)]
    original, learnt = native.learn, []

    def have(which: tuple[bool, ...]) -> None:
        for leaf, has in zip(leaves, which, strict=True):
            leaf.grad = torch.zeros(3) if has else None

    def learn(*arguments: Any) -> Any:
        plan = original(*arguments)
        if plan is not None and not learnt:
            learnt.append(plan)
            have(meanwhile)
        return plan

    def step(session: ca.Session) -> None:
        with session:
            sum(leaf * (2 + number) for number, leaf in enumerate(leaves)).sum().backward()  # type: ignore[union-attr]
        assert [leaf.grad.tolist() for leaf in leaves] == [[2.0] * 3, [3.0] * 3]  # type: ignore[union-attr]

    session = walked()
    for which in (meanwhile, before):
        have(which)
        step(session)
    monkeypatch.setattr(native, "learn", learn)
    for _ in range(8):
        have(before)
        step(session)
    stats = session.stats()
    assert learnt and native.hits and not stats.failures and stats.captures == 2


# ---- what they leave -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_gradients_and_counts(native: NativeHits, backend: str) -> None:
    model, x = mlp(), torch.randn(3, 8)
    leaves = list(model.parameters())
    wanted = _steps(contextlib.nullcontext(), lambda step: (model(x + step) ** 2).mean(), leaves, range(6))
    session = walked(backend=backend)
    found = _steps(session, lambda step: (model(x + step) ** 2).mean(), leaves, range(6))
    if backend == "eager":
        assert_same(found, wanted)
    else:
        torch.testing.assert_close(found, wanted)
    assert native.hits == 6 - LEARNT_AFTER
    expect(session.stats(), structure_misses=1, hits=5, captures=1, compiles=1)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * ctx.factor + 0 * x, None


def test_python_functions_and_hooks_of_this_very_tape(native: NativeHits) -> None:
    """Each tape has its own ``ctx`` and its own closure; they see this step's values."""
    x, seen = torch.randn(4, requires_grad=True), []

    def make(step: int) -> torch.Tensor:
        y = _Scaled.apply(x, 2.0)
        y.register_hook(lambda grad: seen.append((step, grad.tolist())) or grad * 2)
        return (y * (step + 1)).sum()

    _compare(native, make, [x])
    assert seen[:8] == seen[8:] and [step for step, _ in seen[8:]] == [*range(8)]


def test_accumulation_and_views(native: NativeHits) -> None:
    x, row = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)

    def make(step: int) -> torch.Tensor:
        written = x * (step + 1)
        written[1] = row * 2
        return (written * x).sum()

    _compare(native, make, [x, row])


def test_other_shapes_and_other_state(native: NativeHits) -> None:
    w = torch.randn(4, 4, requires_grad=True)
    sizes = [3, 3, 3, 3, 5, 6, 7, 3, 6, 3]

    def make(step: int) -> torch.Tensor:
        return (torch.full((sizes[step], 4), step + 1.0) @ w).sin().sum()

    wanted = _steps(contextlib.nullcontext(), make, [w], range(len(sizes)))
    session = walked()
    assert_same(_steps(session, make, [w], range(len(sizes))), wanted)
    stats = session.stats()
    assert (stats.captures, stats.structure_misses, stats.failures) == (1, 1, 0) and stats.shape_misses <= 2
    assert native.hits == len(sizes) - LEARNT_AFTER, "a shape miss is walked in C++ too"
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(_steps(session, make, [w], range(2)), wanted[:2])
    finally:
        torch.use_deterministic_algorithms(False)
    assert session.stats().shape_misses == stats.shape_misses + 1, "another ambient state is another variant"


def test_other_backends_share_plans_and_no_variants(native: NativeHits) -> None:
    model, x = mlp(), torch.randn(3, 8)
    make = lambda step: (model(x + step) ** 2).mean()  # noqa: E731
    _compare(native, make, list(model.parameters()))
    other = walked(backend="inductor")
    _steps(other, make, list(model.parameters()), range(4))
    expect(other.stats(), shape_misses=1, hits=3, compiles=1)


# ---- the tape --------------------------------------------------------------------------------------------------------


def test_a_tape_is_freed_or_kept_as_by_the_engine(native: NativeHits) -> None:
    x = torch.randn(4, requires_grad=True)
    session, held = walked(), []
    for step in range(8):
        y = x.sin()
        product = y * y
        held.append(weakref.ref(product.exp().detach()))
        loss = product.exp().sum()
        with session:
            loss.backward(retain_graph=step % 2 == 0)
            if step % 2 == 0:
                loss.backward()
            before = native.hits
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
            assert native.hits == before
        node = product.grad_fn
        assert node is not None
        with pytest.raises(RuntimeError, match="after they have already been freed"):
            _ = node._saved_self
    assert native.hits >= 6


def test_what_was_saved_is_let_go_of(native: NativeHits) -> None:
    x, session = torch.randn(4, requires_grad=True), walked()
    for step in range(6):
        factor = torch.randn(4)
        gone = weakref.ref(factor)
        loss = (x * factor).sum()
        del factor
        x.grad = None
        with session:
            loss.backward()
        gc.collect()
        assert gone() is None, f"step {step}"
    assert native.hits == 6 - LEARNT_AFTER


def test_a_saved_tensor_that_was_changed_is_an_error_in_eagers_words(native: NativeHits) -> None:
    x, session = torch.randn(4, requires_grad=True), walked()
    for step in range(6):
        factor = torch.randn(4)
        loss = (x * factor).sum()
        x.grad = None
        if step == 5:
            factor.add_(1)
            with session, pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            break
        with session:
            loss.backward()
    assert native.hits == 5 - LEARNT_AFTER


def test_an_error_of_a_hook_is_the_users(native: NativeHits) -> None:
    x, session = torch.randn(4, requires_grad=True), walked()
    for step in range(7):
        y = x * 2

        def hook(grad: torch.Tensor, at: int = step) -> None:
            if at == 5:
                raise ValueError("of the user")

        y.register_hook(hook)
        x.grad = None
        with session, pytest.raises(ValueError, match="of the user") if step == 5 else contextlib.nullcontext():
            y.sum().backward()
        assert (x.grad is None) == (step == 5)
    assert native.hits == 7 - LEARNT_AFTER


# ---- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradients_of_inputs(native: NativeHits, backend: str) -> None:
    """Of leaves and of what lies inside the tape, one of them twice, one that the tape does not know."""
    x, y, z = (torch.randn(3, 4, requires_grad=True) for _ in range(3))

    def ask(step: int) -> Any:
        inside = (x * (step + 1)).sin()
        loss = (inside @ y.T).exp().sum() + y.cos().sum()
        found = torch.autograd.grad(loss, [inside, y, z, inside], allow_unused=True, retain_graph=True)
        again = torch.autograd.grad(loss, [y, x])
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, [y])
        return *found, *again

    session = walked(backend=backend)
    for step in range(8):
        wanted = ask(step)
        with session:
            found = ask(step)
        assert found[2] is wanted[2] is None
        assert_same([*found], [*wanted], bitwise=backend == "eager")
    stats = session.stats()
    assert (stats.hits, stats.captures, *stats.bypasses.values()) == (14, 2, 8), "the third was freed by the second"
    assert native.hits >= 6, "of 10, as tapes that are freed are tried too"


def test_an_input_that_is_not_used(native: NativeHits) -> None:
    x, z, session = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True), walked()
    for _ in range(8):
        loss = x.sin().sum()
        with session, pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(loss, [x, z])
    assert session.stats().hits == 7 and native.hits == 8 - LEARNT_AFTER


def test_leaves_that_alone_are_to_get_gradients(native: NativeHits) -> None:
    x, y, seen = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True), []
    y.register_hook(seen.append)
    session = walked()
    for step in range(8):
        x.grad = None
        with session:
            torch.autograd.backward((x * y * step).sum(), inputs=[x])
        assert_same([x.grad], [y.detach() * step])
    assert y.grad is None and not seen
    assert native.hits == 8 - LEARNT_AFTER


def test_other_inputs_are_another_tape(native: NativeHits) -> None:
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    session = walked()

    def ask(*inputs: torch.Tensor, captures: bool = True) -> Any:
        loss = (x * y).sum()
        if captures:
            return torch.autograd.grad(loss, inputs)
        x.grad = y.grad = None
        torch.autograd.backward(loss, inputs=inputs or None)
        return x.grad, y.grad

    ways = [((x,), True), ((y,), True), ((x, y), True), ((y, x), True), ((x,), False), ((), False), ((x, x), True)]
    for _ in range(12):
        for inputs, captures in ways:
            wanted = ask(*inputs, captures=captures)
            with session:
                found = ask(*inputs, captures=captures)
            for one, other in zip(found, wanted, strict=True):
                assert (one is None and other is None) or torch.equal(one, other)
    assert session.stats().captures == len(ways) and session.stats().hits == 11 * len(ways)
    assert native.hits > 6 * len(ways)


def test_many_tapes_in_turn(native: NativeHits) -> None:
    """More than a tape is compared with: each is found as the one that came next before."""
    x, session, count = torch.randn(3, requires_grad=True), walked(), 20
    for _ in range(30):
        for length in range(1, count + 1):
            x.grad, y = None, x
            for _ in range(length):
                y = y.sin()
            with session:
                y.sum().backward()
    before = native.hits
    for _ in range(3):
        for length in range(1, count + 1):
            x.grad, y = None, x
            for _ in range(length):
                y = y.sin()
            with session:
                y.sum().backward()
    assert native.hits == before + 3 * count


def test_what_leads_to_no_input_may_lead_to_one_in_another_tape(native: NativeHits) -> None:
    """There the engine would not even look where no input lies."""
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    session = walked()
    for step in range(12):
        other = x if step > 8 else y
        with session:
            (found,) = torch.autograd.grad((x.sin() + other.cos()).sum(), [x])
        assert_same([found], [x.detach().cos() - (x.detach().sin() if step > 8 else 0)])
    assert native.hits == 9 - LEARNT_AFTER


# ---- what stays with the engine --------------------------------------------------------------------------------------


def test_what_no_plan_serves_takes_the_way_through_the_engine(native: NativeHits) -> None:
    x, session = torch.randn(4, requires_grad=True), walked()
    for _ in range(6):
        x.grad = torch.zeros(4)
        with session:
            y = x * 3
            y.retain_grad()
            y.sum().backward()
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed):
                z = x.exp()
            z.sum().backward()
    assert native.hits == 0
    stats = session.stats()
    assert stats.captures == 2 and stats.hits == 10 and stats.bypasses == {}


@pytest.mark.parametrize("gradient", [torch.full((3,), 2.0).double(), torch.full((2, 3), 1.0)], ids=["dtype", "shape"])
def test_a_gradient_is_converted_once_and_by_the_engine(native: NativeHits, gradient: torch.Tensor) -> None:
    """Not by each try, with the GIL held: on a GPU that may wait for all that is in its stream."""

    def step(session: Any, depth: int, given: torch.Tensor) -> torch.Tensor:
        x = torch.ones(3, requires_grad=True)
        result = x
        for _ in range(depth):
            result = result.sin()
        with session:
            result.backward(given)
        assert x.grad is not None
        return x.grad

    session = walked()
    for depth in (1, 2, 3):
        for _ in range(8):
            step(session, depth, torch.ones(3))
    served = native.hits
    assert served > 8
    if gradient.shape != (3,):
        for engine in (session, ca.disable()):
            with pytest.raises(RuntimeError, match=r"Mismatch in shape|invalid gradient"):
                step(engine, 3, gradient)
        return
    found = []
    for engine in (ca.disable(), session):
        with torch.profiler.profile() as profiled:
            found.append(step(engine, 3, gradient))
        assert sum(each.count for each in profiled.key_averages() if each.key == "aten::_to_copy") == 1
    assert_same([found[1]], [found[0]])
    assert native.hits == served


def test_what_cannot_be_learnt_is_not_tried_for_ever(native: NativeHits) -> None:
    x, session = torch.randn(4, requires_grad=True), walked()
    learnt, tried = native.learn, []
    native.learn = lambda *given: tried.append(learnt(*given)) or tried[-1]  # type: ignore[method-assign, func-returns-value]
    for _ in range(20):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed):
            loss = x.exp().sum()
        x.grad = None
        with session:
            loss.backward()
    assert [each for each in tried if each is not None] == ["saved-tensor hooks"] * 3
    assert session.stats().hits == 19


def test_false_is_none_of_it(native: NativeHits) -> None:
    x, session = torch.randn(4, requires_grad=True), walked(extension="off")
    _steps(session, lambda step: (x * step).sum(), [x], range(6))
    assert native.hits == 0 and session.stats().hits == 5


class _NotBuilt:
    """In the place of the library: whether it was to be built, each time it was asked."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        self.loaded = None

    def module(self, build: bool) -> None:
        self.asked.append(build)


@pytest.mark.parametrize(
    ("settings", "builds"),
    [
        ({"extension": "all"}, True),
        ({"extension": "auto", "cache_dir": "a folder"}, True),
        ({"extension": "auto", "cache_dir": False}, False),
    ],
    ids=["asked for", "by default", "without a folder"],
)
def test_when_it_is_built(
    native: NativeHits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any], builds: bool
) -> None:
    if settings.get("cache_dir"):
        settings = settings | {"cache_dir": tmp_path}
    library = _NotBuilt()
    native.library = library  # type: ignore[assignment]
    x = torch.randn(4, requires_grad=True)
    session = walked(on_miss="compile", **settings)
    _steps(session, lambda step: (x * step).sum(), [x], range(8))
    expect(session.stats(), structure_misses=1, hits=7, captures=1)
    # The first hit owes a try, and each later one asks before the tape is walked.
    assert library.asked == [builds] * 6


def test_by_default_it_serves_where_it_is_built(native: NativeHits) -> None:
    x = torch.randn(4, requires_grad=True)
    _steps(walked(extension="auto"), lambda step: (x * step).sum(), [x], range(8))
    assert native.hits == 8 - LEARNT_AFTER


def test_it_lies_in_the_folder_of_the_cache(native: NativeHits, tmp_path: Path) -> None:
    native.library = None
    assert native.module(resolve({"cache_dir": tmp_path, "extension": "auto"}), build=False) is None
    assert not (tmp_path / "native").exists(), "nothing is built yet"
    assert native.module(resolve({"cache_dir": tmp_path / "other", "extension": "all"})) is None
    assert native.library is not None and native.library._folder == tmp_path / "native", "the first that asked"


def test_a_reset_forgets(native: NativeHits) -> None:
    x = torch.randn(4, requires_grad=True)
    make = lambda step: (x * step).sum()  # noqa: E731
    _compare(native, make, [x])
    ca.reset()
    session = walked()
    _steps(session, make, [x], range(5))
    expect(session.stats(), structure_misses=1, hits=4, captures=1)
    assert native.hits == 8 - LEARNT_AFTER + 5 - LEARNT_AFTER


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_threads_hit_at_once(native: NativeHits) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            w = torch.randn(6, 6, generator=generator).requires_grad_()
            for step in range(40):
                x = torch.randn(3, 6, generator=generator)
                loss, again = (x @ w).tanh().sum(), (x @ w).tanh().sum()
                with ca.disable():
                    again.backward()
                wanted, w.grad = w.grad, None
                with session:
                    loss.backward()
                assert torch.equal(w.grad, wanted), step
                w.grad = None
        except BaseException as error:  # noqa: BLE001  told below
            errors.append(error)

    session = walked()
    work(4)  # else all of them may be through before one has compiled
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert native.hits > 50


def test_two_threads_on_one_tape(native: NativeHits) -> None:
    """One of them in the eager engine: both get all gradients, as with the engine alone."""
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(20)])
    session, x = walked(), torch.randn(8, 32)
    for _ in range(4):
        with session:
            model(x).sum().backward()
    for _ in range(30):
        model.zero_grad()
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        wanted = [parameter.grad * 3 for parameter in model.parameters()]  # type: ignore[operator]
        errors: list[BaseException] = []

        def eager(loss: torch.Tensor = loss, errors: list[BaseException] = errors) -> None:
            try:
                loss.backward(retain_graph=True)
            except BaseException as error:  # noqa: BLE001  told below
                errors.append(error)

        thread = threading.Thread(target=eager)
        thread.start()
        with session:
            loss.backward(retain_graph=True)
        thread.join()
        assert not errors
        for parameter, want in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, want)


# ---- the comparison of both walks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "between", ["nothing", "another thread takes a gradient", "another thread gives one and takes it", "the walk errs"]
)
def test_what_both_walks_find_is_compared_unless_another_thread_wrote(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    class Disturbed(Both):
        def hand_over(self, call: Any, settings: Any) -> None:
            super().hand_over(call, settings)
            found = getattr(self._thread, "found", None)
            if found is None or between == "nothing":
                return
            if between == "the walk errs":
                found[1][2].append(17)
            elif between == "another thread takes a gradient":
                leaf.grad = None
            else:
                self.note([leaf], thread=-1)
                found[1][1].append(torch.ones(1))

    both = Disturbed(library_of(request.config))
    for module in (backward, seam):
        monkeypatch.setattr(module, "NATIVE_HITS", both)
    for name in ("compared", "unsure"):
        monkeypatch.setattr(Both, name, 0)
    leaf = torch.ones(4, requires_grad=True)
    session = walked()

    def step() -> None:
        leaf.grad = torch.ones(4)
        with session:
            (leaf * 2).sum().backward()

    for _ in range(LEARNT_AFTER - 1):
        step()
    if between == "the walk errs":
        with pytest.raises(AssertionError):
            step()
    else:
        step()
        assert leaf.grad is not None and leaf.grad.tolist() == [2.0 if between.endswith("a gradient") else 3.0] * 4
    assert (Both.compared, Both.unsure) == (between == "nothing", between.startswith("another"))
    ca.reset()


def test_sizes_that_a_capture_has_put_symbols_for_are_not_read(
    native: NativeHits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of a leaf belongs to all tapes, and has them while that of another thread is captured."""
    leaf = torch.ones(4, 3, requires_grad=True)
    _compare(native, lambda step: (leaf * 2).sum(), [leaf])
    (learnt,) = native._learnt
    tape, gradient, answers = (leaf * 2).sum(), torch.ones(()), []
    right = Capture.validate_outputs

    def validate_outputs(self: Capture, *args: Any) -> Any:
        answers.append(learnt.plan.compare([tape], [gradient]))
        return right(self, *args)

    with monkeypatch.context() as planted, walked():
        planted.setattr(Capture, "validate_outputs", validate_outputs)
        (leaf.exp() * 3).sum().backward()
    assert "the engine walks for another thread" in answers
    leaf.grad = None
    assert isinstance(learnt.plan.compare([tape], [gradient]), tuple), "else it is the same tape"


@pytest.mark.parametrize("learnt", [False, True])
def test_no_tape_is_walked_in_cpp_while_another_thread_has_the_seam(native: NativeHits, learnt: bool) -> None:
    leaf = torch.ones(4, 3, requires_grad=True)
    session = walked()
    _steps(session, lambda step: (leaf * 2).sum(), [leaf], range(LEARNT_AFTER + 2 if learnt else LEARNT_AFTER - 1))
    hits, learnt_before = native.hits, [*native._learnt]
    ours = threading.Thread(target=_steps, args=(session, lambda step: (leaf * 2).sum(), [leaf], range(1)))
    with another_walks():
        ours.start()
        ours.join(0.2)
        assert ours.is_alive() and native.hits == hits and native._learnt == learnt_before
    ours.join(20)
    assert leaf.grad is not None and leaf.grad.tolist() == [[2.0] * 3] * 4
    assert native.hits == hits, "the engine walked for it"
