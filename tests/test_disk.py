"""Graphs that outlive their process: found by the next one, or a miss that says why; and never a wrong gradient."""

from __future__ import annotations

import errno
import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import backends
import compiled_autograd as ca
import shadow_cache
from compiled_autograd import ir
from compiled_autograd.cache import disk, environment_key
from compiled_autograd.cache.metadata import structure_of
from compiled_autograd.cache.variants import Variant
from compiled_autograd.capture.capture import OPS
from shadow_cache import Miss, MissEntry, StoreError

from .helpers import assert_same, expect, in_subprocess, mlp
from .stored import BACKWARDS, Backwards, found, grads, restart, sizes, static, wanted


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the store is. What is written need not outlast a loss of power here."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    yield tmp_path / "cache"
    ca.reset()


def _run(backwards: Backwards, folder: Any, **settings: Any) -> ca.Session:
    """In a session of its own, and with eager's gradients."""
    session = ca.enable(**{"backend": "eager", "cache_dir": folder, **settings})
    right = wanted(backwards)
    assert_same(found(backwards, session), right)
    return session


def _again(backwards: Backwards, folder: Any, **settings: Any) -> ca.Session:
    """The same in a new process, as far as what is in memory goes."""
    restart()
    return _run(backwards, folder, **settings)


def _reason(session: ca.Session) -> Any:
    assert session.last is not None and session.last.reasons
    return session.last.reasons[0]


def _variants(session: ca.Session) -> list[Variant]:
    return [variant for graph in session.graphs() for variant in graph.variants]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "files").rglob("*") if path.is_file())


def _entries(folder: Path) -> tuple[shadow_cache.Entry, ...]:
    with shadow_cache.open(folder) as store:
        return store.entries()


def _misses(folder: Path) -> tuple[MissEntry, ...]:
    with shadow_cache.open(folder) as store:
        return store.misses()


# ---- found ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKWARDS)
def test_the_next_process_finds_what_was_compiled(folder: Path, name: str) -> None:
    before = (session := _run(BACKWARDS[name], folder)).stats()
    assert before.compiles > 0 and not before.bypasses and not before.failures
    assert not any(variant.not_stored for variant in _variants(session))
    session = _again(BACKWARDS[name], folder)
    expect(session.stats(), hits=before.backwards, captures=before.captures, compiles=0)
    assert session.last is not None and session.last.reasons == ()
    assert {entry.loads for entry in _entries(folder)} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKWARDS)
def test_the_next_process_finds_what_inductor_compiled(folder: Path, name: str) -> None:
    right = wanted(BACKWARDS[name])
    for first in (True, False):
        restart()
        session = ca.enable(backend="inductor", cache_dir=folder)
        gradients = found(BACKWARDS[name], session)
        assert_same(gradients, right, bitwise=False, low="autocast" in name)
        stats = session.stats()
        assert not stats.bypasses and not stats.failures and (stats.compiles > 0) == first
        assert first or stats.hits == stats.backwards


_PROCESS = """
import warnings
import torch
import compiled_autograd as ca
from tests.stored import BACKWARDS, found, wanted
from tests.helpers import assert_same

warnings.simplefilter("error", UserWarning)
assert "torch._dynamo" not in __import__("sys").modules
session = ca.enable(backend={backend!r})
gradients = found(BACKWARDS[{name!r}], session)
print(session.stats(), [str(reason) for reason in session.last.reasons])
assert "torch._inductor" not in __import__("sys").modules or session.stats().compiles
assert_same(gradients, wanted(BACKWARDS[{name!r}]), bitwise={backend!r} == "eager")
"""


def _process(name: str, backend: str, folder: Path, **environment: str) -> str:
    result = in_subprocess(
        _PROCESS.format(name=name, backend=backend), COMPILED_AUTOGRAD_CACHE_DIR=str(folder), **environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_another_process_finds_it_by_the_environments_folder(folder: Path) -> None:
    assert "1 miss; 4 regions compiled" in _process("regions", "eager", folder)
    assert "1 backward: 1 hit; 0 regions compiled" in _process("regions", "eager", folder)
    (entry,) = _entries(folder)
    assert entry.loads == 1 and "tests/stored.py" in str(entry.source)


@pytest.mark.slow
def test_what_inductor_compiled_needs_no_compiler_and_no_folder_of_inductors(folder: Path, tmp_path: Path) -> None:
    for number, compiler in enumerate(({}, {"CXX": "/nonexistent", "PATH": "/nonexistent"})):
        empty = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"inductor{number}")}
        printed = _process("outputs", "inductor", folder, **empty, **compiler)
    assert "1 backward: 1 hit; 0 regions compiled" in printed and "[]" in printed
    assert not (tmp_path / "inductor1").exists()


def test_graphs_that_were_found_can_be_looked_at(folder: Path) -> None:
    for name in ("regions", "constants", "sizes"):
        first = _run(BACKWARDS[name], folder)
        made = [[graph.code for graph in each.aten] for each in first.graphs()]
        again = _again(BACKWARDS[name], folder)
        assert len(again.graphs()) == len(made)
        for graph, codes in zip(again.graphs(), made, strict=True):
            assert len(graph.aten) == len(codes) > 0 and all(aten.graph.nodes for aten in graph.aten)
            assert graph.readable() and "variants" in repr(graph)


_OF_A_SUBCLASS = """
import torch, compiled_autograd as ca

class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, grad): return grad * 2

class Mine(torch.Tensor): pass

session = ca.enable(backend="eager")
x, y = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
for _ in range(4):
    x.grad = None
    loss = Doubles.apply(Doubles.apply(x * y).sin()).sum()
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    with session:
        loss.as_subclass(Mine).backward()
    assert torch.equal(x.grad, expected)
print(session.stats().hits)
"""


@pytest.mark.slow
def test_small_regions_are_found_where_no_function_is_overridden(folder: Path) -> None:
    """As in the backward of a loss of a subclass: what traces the stored text could not, and the user got its error."""
    outcomes = [in_subprocess(_OF_A_SUBCLASS, COMPILED_AUTOGRAD_CACHE_DIR=str(folder)) for _ in range(2)]
    assert [each.stdout.strip() for each in outcomes] == ["3", "4"], outcomes[1].stderr[-2000:]


def test_two_sessions_have_two_folders(folder: Path) -> None:
    other = folder.with_name("other")
    expect(_run(static, folder).stats(), structure_misses=1, compiles=1)
    expect(_again(static, other).stats(), structure_misses=1, compiles=1)
    expect(_again(static, folder).stats(), hits=1, compiles=0)
    assert [len(_entries(each)) for each in (folder, other)] == [1, 1]


def test_false_keeps_to_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_cache, "open", None)
    expect(_run(static, False).stats(), structure_misses=1, compiles=1)


def test_none_is_the_default_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_cache, "default_dir", lambda: folder)
    monkeypatch.delenv("COMPILED_AUTOGRAD_CACHE_DIR")
    for session in (_run(static, None), ca.enable(backend="eager")):
        restart()
        found(static, session)
    assert len(_entries(folder)) == 1 and session.stats().hits == 1


def test_a_variant_that_another_process_added_is_found(folder: Path) -> None:
    _run(lambda around: sizes(around, [4]), folder, dynamic=False)
    other = _again(lambda around: sizes(around, [5]), folder, dynamic=False)
    expect(other.stats(), structure_misses=1, compiles=1)
    miss = _reason(other)
    assert (miss.kind, miss.old, miss.new) == ("shape", "4", "5") and "dimension 0" in miss.where
    session = _again(lambda around: sizes(around, [5, 4, 5]), folder, dynamic=False)
    expect(session.stats(), hits=3, compiles=0)
    assert len(_entries(folder)) == 2


def test_a_variant_in_memory_does_not_hide_those_in_the_store(folder: Path) -> None:
    _run(lambda around: sizes(around, [4, 5]), folder, dynamic=False)
    restart()
    session = _run(lambda around: sizes(around, [6, 5, 4, 6]), folder, dynamic=False)
    expect(session.stats(), structure_misses=1, hits=3, compiles=1)


def test_a_guard_that_fails_adds_a_region_to_what_is_stored(folder: Path) -> None:
    """Sizes of one are never symbols: the dynamic variant's guard fails, and one more region is compiled."""

    def some(*batches: int) -> Backwards:
        return lambda around: sizes(around, batches)

    expect(_run(some(4, 5), folder).stats(), structure_misses=1, shape_misses=1, compiles=2)
    dynamic = next(entry for entry in _entries(folder) if entry.dynamic)
    assert len(dynamic.regions) == 1 and dynamic.guards
    session = _again(some(6, 1), folder)
    expect(session.stats(), hits=1, shape_misses=1, compiles=1)
    assert _reason(session).kind == "guard"
    assert sorted(len(entry.regions) for entry in _entries(folder)) == [1, 2]
    expect(_again(some(7, 1, 4, 9, 1), folder).stats(), hits=5, compiles=0)
    # Who does not come to need a region that is stored does not lose it by storing another.
    expect(_again(some(0), folder).stats(), shape_misses=1, compiles=1)
    assert sorted(len(entry.regions) for entry in _entries(folder)) == [1, 3]
    expect(_again(some(7, 1, 0, 4), folder).stats(), hits=4, compiles=0)


def test_what_another_process_removed_meanwhile_costs_nothing(folder: Path) -> None:
    """A dynamic variant was loaded, its files went, and then its guard fails and it is stored again."""
    _run(lambda around: sizes(around, [4, 5]), folder)
    restart()
    session = ca.enable(backend="eager", cache_dir=folder)

    def batches(around: Callable[[], Any]) -> Any:
        result = sizes(around, [6])
        with shadow_cache.open(folder) as store:
            store.remove([entry.id for entry in store.entries()])
        return result + sizes(around, [1, 7])

    right = wanted(lambda around: sizes(around, [6]) + sizes(around, [1, 7]))
    assert_same(found(batches, session), right)
    expect(session.stats(), hits=2, shape_misses=1, compiles=1)
    assert len(_entries(folder)) == 1
    session = _again(lambda around: sizes(around, [1, 7]), folder)
    assert session.stats().compiles == 1 and session.stats().bypasses == {}


def test_a_call_that_cannot_be_traced_is_not_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    whole = ir.OpaqueOp.__call__

    def call(self: ir.OpaqueOp, *args: Any) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor

        if "GeluBackward" in self.__name__ and any(isinstance(each, FakeTensor) for each in args[0]):
            tried.append(self.__name__)
            raise NotImplementedError("needs the data")
        return whole(self, *args)

    monkeypatch.setattr(ir.OpaqueOp, "__call__", call)
    before = _run(static, folder).stats()
    assert before.compiles == 3 and len(tried) == 2
    expect(_again(static, folder).stats(), hits=1, compiles=0)
    assert len(tried) == 2


def test_threads_that_come_at_once_find_it(folder: Path) -> None:
    """Some may load what another is loading, and keep it twice; none compiles."""
    right = wanted(_sines)
    _run(_sines, folder)
    restart()
    session = ca.enable(backend="eager", cache_dir=folder)
    together, results = threading.Barrier(4), []

    def work() -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(3, generator=generator).requires_grad_()
        loss = x.sin().exp().sum()
        together.wait()
        with session:
            results.append(torch.autograd.grad(loss, x))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for result in results:
        assert_same(result, right)
    stats = session.stats()
    assert len(results) == stats.backwards == 4 and stats.compiles == 0 and stats.failures == 0
    assert stats.hits + stats.bypasses.get("other_thread_in_backward", 0) == 4 and stats.hits


_FORK = """
import os
from pathlib import Path
from tests.helpers import expect
from tests.test_disk import BACKWARDS, _again, _run, static

folder = Path(os.environ["FOLDER"])
_run(static, folder)
pid = os.fork()
if pid == 0:
    try:
        expect(_again(static, folder).stats(), hits=1, compiles=0)
        expect(_run(BACKWARDS["outputs"], folder).stats(), structure_misses=1, compiles=1)
        os._exit(0)
    finally:
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
expect(_run(static, folder).stats(), hits=1)
expect(_run(BACKWARDS["outputs"], folder).stats(), hits=1, compiles=0)
"""


@pytest.mark.slow
def test_a_child_by_fork_finds_and_adds(folder: Path) -> None:
    result = in_subprocess(_FORK, FOLDER=str(folder), OMP_NUM_THREADS="1")  # OpenMP's threads do not outlive a fork
    assert result.returncode == 0, result.stderr


# ---- not found -----------------------------------------------------------------------------------------------------


def _dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)


_OTHERS: dict[str, tuple[str, str, Callable[[pytest.MonkeyPatch], None]]] = {
    "threads": (
        "ambient_state",
        "threads",
        lambda monkeypatch: monkeypatch.setattr(torch, "get_num_threads", lambda: 77),
    ),
    "default dtype": ("ambient_state", "default_dtype", _dtype),
    "package": (
        "environment",
        "package",
        lambda monkeypatch: monkeypatch.setattr(environment_key, "versions", _other_version("package")),
    ),
    "torch": (
        "environment",
        "torch",
        lambda monkeypatch: monkeypatch.setattr(environment_key, "versions", _other_version("torch")),
    ),
    "machine": (
        "environment",
        "machine",
        lambda monkeypatch: monkeypatch.setattr(
            type(backends.get_backend("eager")), "environment", lambda self: {"machine": "another"}
        ),
    ),
}
_right_versions = environment_key.versions


def _other_version(name: str) -> Callable[[], dict[str, str]]:
    return lambda: {**_right_versions(), name: "another"}


@pytest.mark.parametrize("name", _OTHERS)
def test_another_state_is_a_miss_that_says_what_differs(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, where, change = _OTHERS[name]
    _run(static, folder)
    with monkeypatch.context() as patch:
        change(patch)
        session = _again(static, folder)
        expect(session.stats(), structure_misses=1, compiles=1)
        miss = _reason(session)
        assert (miss.kind, miss.where) == (kind, where) and miss.old != miss.new
        expect(_again(static, folder).stats(), hits=1, compiles=0)
    expect(_again(static, folder).stats(), hits=1, compiles=0)
    assert len(_entries(folder)) == 2 and _misses(folder)[0].miss.kind == kind


def test_autocast_that_is_on_is_another_state(folder: Path) -> None:
    _run(static, folder)
    restart()
    session = ca.enable(backend="eager", cache_dir=folder)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert found(BACKWARDS["outputs"], session)  # another structure: its products are of 16 bits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(found(_sines, session), wanted(_sines))
    restart()
    session = _run(_sines, folder)
    assert (_reason(session).kind, _reason(session).where) == ("ambient_state", "autocast")


def _sines(around: Callable[[], Any]) -> Any:
    x = torch.randn(3, requires_grad=True)
    with around():
        return list(torch.autograd.grad(x.sin().exp().sum(), x))


def test_other_settings_are_a_miss_that_says_what_differs(folder: Path) -> None:
    _run(static, folder)
    session = _again(static, folder, dynamic=False)
    expect(session.stats(), structure_misses=1, compiles=1)
    assert (_reason(session).kind, _reason(session).where) == ("backend_or_settings", "dynamic")
    session = _run(static, folder, dynamic=True)
    assert (_reason(session).kind, _reason(session).where) == ("backend_or_settings", "dynamic")


def test_the_nearest_entry_is_the_one_that_is_told_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One was made by another torch; one for another batch. The second is nearer."""
    with monkeypatch.context() as patch:
        patch.setattr(environment_key, "versions", _other_version("torch"))
        _run(static, folder)
    _again(lambda around: sizes(around, [9]), folder)
    miss = _reason(_again(static, folder))
    assert (miss.kind, miss.old, miss.new) == ("shape", "9", "4")


def test_a_structure_that_is_new_is_told_by_the_nearest_stored(folder: Path) -> None:
    def other(around: Callable[[], Any]) -> Any:
        model = mlp()
        with around():
            model(torch.randn(4, 8)).tanh().mean().backward()
        return grads(model)

    assert _reason(_run(static, folder)).kind == "first_seen"
    miss = _reason(_again(other, folder))
    assert (miss.kind, miss.old, miss.new) == ("new_node", "PowBackward0", "TanhBackward0")
    assert [each.miss.kind for each in _misses(folder)] == ["new_node", "first_seen"]


def test_a_structure_that_an_older_version_stored_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a structure has no record to be compared with; it stays, and the reason says so."""
    with monkeypatch.context() as patch:
        patch.setattr(disk, "structure_of", lambda *given: msgspec.structs.replace(structure_of(*given), record=b""))
        _run(static, folder)
    miss = _reason(_again(lambda around: _sines(around), folder))
    assert (miss.kind, miss.hint) == (
        "first_seen",
        "the cache has only structures of another version, which are not compared",
    )
    with shadow_cache.open(folder) as store:
        assert len(store.entries()) == 2


def test_another_order_of_execution_is_another_structure(folder: Path) -> None:
    """In one process the first order serves both; the store keeps them apart."""

    def branches(swapped: bool) -> Backwards:
        def backwards(around: Callable[[], Any]) -> Any:
            x, y = (torch.randn(5, requires_grad=True) for _ in range(2))
            if swapped:
                right = y.cos()
                left = x.sin()
            else:
                left = x.sin()
                right = y.cos()
            with around():
                return list(torch.autograd.grad((left + right).sum(), [x, y]))

        return backwards

    _run(branches(False), folder)
    session = _again(branches(True), folder)
    expect(session.stats(), structure_misses=1, compiles=1)
    assert "order" in _reason(session).where
    assert len({entry.structure for entry in _entries(folder)}) == 2
    for swapped in (True, False):
        expect(_again(branches(swapped), folder).stats(), hits=1, compiles=0)


def test_other_strides_are_a_miss(folder: Path) -> None:
    def backwards(turned: bool) -> Backwards:
        def work(around: Callable[[], Any]) -> Any:
            x = torch.randn(4, 4, requires_grad=True)
            other = torch.randn(4, 4)
            with around():
                return list(torch.autograd.grad((x * (other.t() if turned else other)).sum(), x))

        return work

    _run(backwards(False), folder)
    session = _again(backwards(True), folder)
    expect(session.stats(), structure_misses=1, compiles=1)
    assert _reason(session).kind == "layout"
    expect(_again(backwards(True), folder).stats(), hits=1, compiles=0)


class _Gives(torch.autograd.Function):
    """Hands on what ``made`` makes of the gradient."""

    made: Callable[[torch.Tensor], Any]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Gives.made(grad)


def _given(around: Callable[[], Any]) -> Any:
    x = torch.randn(3, 4, requires_grad=True)
    y = _Gives.apply(x.exp()) * torch.randn(3, 4) + x.sin()
    with around():
        return list(torch.autograd.grad(y.sum(), x))


def test_what_a_function_hands_on_is_looked_at_in_each_process(folder: Path) -> None:
    """The same tape, but other strides, another dtype or None from a function of Python."""
    kinds: list[Callable[[torch.Tensor], Any]] = [
        lambda grad: grad.contiguous(),
        lambda grad: grad.t().contiguous().t(),
        lambda grad: None,
    ]
    for compiles in (True, False):
        for made in kinds:
            _Gives.made = staticmethod(made)  # type: ignore[assignment]
            session = _again(_given, folder)
            stats = session.stats()
            assert (stats.compiles > 0) == compiles and stats.backwards == 1 and not stats.failures
            assert session.last is not None and bool(session.last.reasons) == (not stats.hits)  # each miss says why
            assert compiles or stats.hits == 1


# ---- not stored ----------------------------------------------------------------------------------------------------


class _Subclass(torch.Tensor):
    """A tensor that is not plain."""


def _with_subclass(around: Callable[[], Any]) -> Any:
    x = torch.randn(3, requires_grad=True)
    y = (x.sin() * torch.randn(3).as_subclass(_Subclass)).sum()
    with around():
        return [each.as_subclass(torch.Tensor) for each in torch.autograd.grad(y, x)]


def _compiled_forward(around: Callable[[], Any]) -> Any:
    model = mlp()
    forward = torch.compile(model, backend="aot_eager")
    with around():
        forward(torch.randn(4, 8)).sum().backward()
    return grads(model)


@pytest.mark.parametrize(
    ("why", "backwards", "settings"),
    [
        ("passes are functions", static, {"passes": [lambda graph_module: None]}),
        ("the backend is a function", static, {"backend": lambda graph_module, example_inputs: graph_module.forward}),
        ("says nothing of how to store", static, {"backend": "aot_eager"}),
        ("torch.compile compiled", _compiled_forward, {"backend": "eager"}),
        ("kind that is not stored", _with_subclass, {"backend": "eager"}),
    ],
)
def test_what_may_be_another_thing_in_another_process_is_not_stored(
    folder: Path, why: str, backwards: Backwards, settings: dict[str, Any]
) -> None:
    for _ in range(2):
        session = _again(backwards, folder, **settings)
        stats = session.stats()
        assert stats.structure_misses == 1 and stats.compiles > 0 and not stats.bypasses
        (variant,) = _variants(session)
        assert why in variant.not_stored and variant.entry is None
    assert _entries(folder) == ()
    torch._dynamo.reset()


def test_functions_of_users_cpp_are_not_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(static, False)
    name = next(name for name in OPS if name.startswith("GeluBackward"))
    monkeypatch.setattr(OPS[name], "custom", True)
    for _ in range(2):
        session = _again(static, folder)
        expect(session.stats(), structure_misses=1, compiles=1)
        (variant,) = _variants(session)
        assert "C++ extension" in variant.not_stored and name in variant.not_stored
    assert _entries(folder) == ()


def test_a_subclass_that_a_function_hands_on_is_no_part_of_what_is_stored(folder: Path) -> None:
    """The calls that see it run as they are; for another kind of tensor they are not compiled either."""

    def backwards(around: Callable[[], Any]) -> Any:
        return [each.as_subclass(torch.Tensor) for each in _given(around)]

    for made in (lambda grad: grad.as_subclass(_Subclass), torch.clone, lambda grad: grad.as_subclass(_Subclass)):
        _Gives.made = staticmethod(made)  # type: ignore[assignment]
        session = _again(backwards, folder)
        assert not session.stats().bypasses and not session.stats().failures
    assert session.last is not None and session.last.outcome == "hit"
    kind = (_Subclass, (3, 4), (4, 1))
    assert [
        environment_key.is_repeatable(each) for each in ((kind,), (object(),), ((torch.Tensor, (3,)), None, 3))
    ] == [
        *(False, False),
        True,
    ]


def test_a_backend_that_cannot_save_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.eager import EagerBackend

    monkeypatch.setattr(EagerBackend, "save", lambda self, compiled: None)
    monkeypatch.setattr(EagerBackend, "why_not_saved", lambda self, compiled: "not today")
    (variant,) = _variants(_run(static, folder))
    assert variant.not_stored == "not today" and _entries(folder) == ()


def test_a_mistake_of_ours_while_storing_costs_no_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.eager import EagerBackend

    def save(self: Any, compiled: Any) -> bytes:
        raise KeyError("ours")

    monkeypatch.setattr(EagerBackend, "save", save)
    with pytest.warns(UserWarning, match="KeyError: 'ours'"):
        session = _run(static, folder)
    expect(session.stats(), structure_misses=1, compiles=1, failures=1)


# ---- damage --------------------------------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


_DAMAGE: dict[str, Callable[[Path], Any]] = {
    "flipped": _flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": Path.unlink,
    "another": lambda path: path.write_bytes(b"print('not what was stored')"),
}


@pytest.mark.parametrize("name", _DAMAGE)
@pytest.mark.parametrize("which", [0, 1])
def test_damage_to_a_file_is_a_miss_and_mends_itself(folder: Path, name: str, which: int) -> None:
    _run(static, folder)
    path = _files(folder)[which]
    _DAMAGE[name](path)
    session = _again(static, folder)
    expect(session.stats(), shape_misses=1, compiles=1)
    assert _reason(session).kind == "corrupt" and "stored" in str(_reason(session))
    expect(_again(static, folder).stats(), hits=1, compiles=0)
    with shadow_cache.open(folder) as store:
        assert store.verify() == ()
        assert {each.miss.kind for each in store.misses()} == {"corrupt", "first_seen"}


def test_damage_to_a_row_is_a_miss_and_mends_itself(folder: Path) -> None:
    import sqlite3

    _run(static, folder)
    ca.reset()
    with sqlite3.connect(folder / "index" / "index.db") as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(entries)")]
        record = next(name for name in columns if name in ("record", "data", "entry", "body"))
        connection.execute(f"UPDATE entries SET {record} = zeroblob(10)")
    connection.close()
    session = _again(static, folder)
    expect(session.stats(), structure_misses=1, compiles=1)
    assert _reason(session).kind == "corrupt"
    expect(_again(static, folder).stats(), hits=1, compiles=0)


def test_damage_to_the_index_is_a_miss_and_mends_itself(folder: Path) -> None:
    _run(static, folder)
    ca.reset()
    for path in (folder / "index").iterdir():
        path.write_bytes(b"x" * path.stat().st_size)
    session = _again(static, folder)
    expect(session.stats(), structure_misses=1, compiles=1)
    assert _reason(session).kind == "corrupt" and "index" in _reason(session).where
    expect(_again(static, folder).stats(), hits=1, compiles=0)


def test_a_folder_that_was_removed_is_made_anew(folder: Path) -> None:
    import shutil

    _run(static, folder)
    shutil.rmtree(folder)
    expect(_run(static, folder).stats(), hits=1)  # from memory
    expect(_run(BACKWARDS["outputs"], folder).stats(), structure_misses=1, compiles=1)
    expect(_again(BACKWARDS["outputs"], folder).stats(), hits=1, compiles=0)


def test_an_entry_with_a_plan_that_cannot_be_read_is_a_miss(folder: Path) -> None:
    import msgspec

    _run(static, folder)
    with shadow_cache.open(folder) as store:
        (entry,) = store.entries()
        structure = store.structure(entry.structure)
        assert structure is not None
        files = {name: store.read(name) for each in entry.regions for name in (each.artifact, each.lowered)}
        store.add(structure, msgspec.structs.replace(entry, record=b"nonsense"), files)
    session = _again(static, folder)
    expect(session.stats(), structure_misses=1, compiles=1)
    assert _reason(session).kind == "corrupt"
    expect(_again(static, folder).stats(), hits=1, compiles=0)


# ---- folders that cannot be used -----------------------------------------------------------------------------------


def _open_to_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("not a folder")


def _newer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3

    shadow_cache.open(folder).close()
    with sqlite3.connect(folder / "index" / "index.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def _full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shadow_cache.store.folder import Folder

    def full(self: Folder, target: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Folder, "_replace", full)


def _not_writable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK and access(path, mode))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_open_to_others, "run: chmod 700 {}\n"),
        (_a_file, "it is no folder"),
        (_newer, "reads schemas up to"),
        (_full, "no space left"),
        (_not_writable, "the cache in {} cannot be used: this process may not write there"),
    ],
)
def test_without_a_usable_folder_there_is_one_warning_and_memory(
    folder: Path, spoil: Callable[..., None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(folder, monkeypatch)
    session = ca.enable(backend="eager", cache_dir=folder)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for backwards in (static, BACKWARDS["outputs"], static):
            assert_same(found(backwards, session), wanted(backwards))
    expect(session.stats(), structure_misses=2, hits=1, compiles=2)
    (warning,) = [str(each.message) for each in given if "compiled_autograd" in str(each.message)]
    assert str(folder) in warning and "memory" in warning and said.format(folder) in f"{warning}\n"
    assert ".." not in warning and "create=True" not in warning and f"{folder}." not in warning
    assert all(variant.entry is None and variant.not_stored for variant in _variants(session)) or spoil is not _full


def test_a_full_disk_does_not_keep_what_is_stored_from_being_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(static, folder)
    restart()
    with monkeypatch.context() as patch:
        _full(folder, patch)
        with pytest.warns(UserWarning, match="no space left"):
            expect(_run(BACKWARDS["outputs"], folder).stats(), structure_misses=1, compiles=1)
        expect(_run(static, folder).stats(), hits=1, compiles=0)


def test_a_folder_that_can_only_be_read_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(static, folder)
    restart()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK and access(path, mode))
    names = {path for path in folder.rglob("*") if path.is_file()}
    before = {path: path.stat().st_mtime_ns for path in names}
    expect(_run(static, folder).stats(), hits=1, compiles=0)
    with pytest.warns(UserWarning, match="may only read"):
        session = _run(BACKWARDS["outputs"], folder)
    expect(session.stats(), structure_misses=1, compiles=1)
    assert "may only read" in _variants(session)[0].not_stored
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = _run(BACKWARDS["regions"], folder)
        expect(session.stats(), structure_misses=1, compiles=4)
        assert _variants(session)[0].not_stored
    restart()
    expect(_run(static, folder).stats(), hits=1, compiles=0)
    assert {path: path.stat().st_mtime_ns for path in names} == before
    added = {path.name for path in folder.rglob("*") if path.is_file()} - {path.name for path in names}
    assert added <= {"index.db-shm", "index.db-wal"}  # sqlite's own: the folder can be written in truth


def test_a_store_that_fails_later_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shadow_cache.store import Store

    _run(static, folder)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise StoreError("the disk is gone")

    for name in ("find", "add", "read", "record", "loaded", "summaries", "misses"):
        restart()
        with monkeypatch.context() as patch:
            patch.setattr(Store, name, fails)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for backwards in (static, BACKWARDS["outputs"], static):
                    _run(backwards, folder)


# ---- policies ------------------------------------------------------------------------------------------------------


def test_on_miss_eager_takes_what_is_stored_and_compiles_nothing(folder: Path) -> None:
    session = _run(static, folder, on_miss="eager")
    expect(session.stats(), bypasses={"on_miss": 1}, compiles=0)
    assert _entries(folder) == ()
    _again(static, folder)
    for _ in range(2):
        session = _again(lambda around: [*static(around), *BACKWARDS["outputs"](around)], folder, on_miss="eager")
        expect(session.stats(), hits=1, bypasses={"on_miss": 1}, compiles=0)
    session = _again(lambda around: sizes(around, [9, 4, 9]), folder, on_miss="eager")
    expect(session.stats(), hits=1, bypasses={"on_miss": 2}, compiles=0)
    assert len(_entries(folder)) == 1


def test_on_miss_raise_takes_what_is_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> ca.CacheMissError:
        restart()
        session = ca.enable(backend="eager", cache_dir=folder, on_miss="raise")
        with pytest.raises(ca.CacheMissError) as raised:
            found(static, session)
        expect(session.stats(), bypasses={"on_miss": 1}, compiles=0)
        return raised.value

    assert "first_seen" in str(raises())
    _again(static, folder)
    expect(_again(static, folder, on_miss="raise").stats(), hits=1, compiles=0)
    with monkeypatch.context() as patch:
        patch.setattr(environment_key, "versions", _other_version("torch"))
        assert "environment at torch" in str(raises())
    expect(_again(static, folder, on_miss="raise").stats(), hits=1, compiles=0)


def test_what_is_over_the_size_limit_goes_and_comes_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shadow_cache.open
    monkeypatch.setattr(shadow_cache, "open", lambda path=None, **given: whole(path, max_size=4000, **given))
    _run(static, folder)
    _run(BACKWARDS["regions"], folder)
    (entry,) = _entries(folder)
    assert sum(path.stat().st_size for path in _files(folder)) == entry.size
    session = _again(static, folder)
    expect(session.stats(), structure_misses=1, compiles=1)
    assert _reason(session).kind == "evicted" and "max_size" in _reason(session).hint
    expect(_again(static, folder).stats(), hits=1, compiles=0)


# ---- memory --------------------------------------------------------------------------------------------------------


def test_nothing_of_a_steps_tensors_is_kept_alive(folder: Path) -> None:
    for _ in range(2):
        restart()
        alive: list[weakref.ref[torch.Tensor]] = []

        def backwards(around: Callable[[], Any], alive: list[Any] = alive) -> Any:
            model = nn.Linear(7, 3)
            x = torch.randn(5, 7)
            y = model(x).tanh()
            alive.extend(map(weakref.ref, (x, y, *model.parameters())))
            with around():
                y.square().sum().backward()
            alive.extend(weakref.ref(each.grad) for each in model.parameters())
            return []

        found(backwards, ca.enable(backend="eager", cache_dir=folder))
        gc.collect()
        assert alive and not any(each() is not None for each in alive)


def test_every_miss_is_a_record_in_the_store(folder: Path) -> None:
    _run(sizes, folder)
    recorded = _misses(folder)
    assert [each.miss.kind for each in recorded] == ["shape", "first_seen"]
    assert all(each.entry is not None and "tests/stored.py" in each.name for each in recorded)
    assert {each.entry for each in recorded} == {entry.id for entry in _entries(folder)}
    assert all(isinstance(each.miss, Miss) and each.miss.seconds > 0 for each in recorded)


# ---- folders with odd names ------------------------------------------------------------------------------------------


def test_a_folder_whose_name_is_no_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/cache \xff %41?#")
    for _ in range(2):
        restart()
        session = _run(BACKWARDS["static"], name)
    expect(session.stats(), shape_misses=session.stats().shape_misses, hits=session.stats().hits, captures=1)
    assert session.stats().compiles == 0 < session.stats().loads
    assert Path(name, "index").exists() and len(_entries(Path(name))) > 0


@pytest.mark.parametrize("name", ["a\0b", "~nosuchuser/cache"])
def test_a_folder_that_cannot_be_is_no_reason_to_lose_a_backward(tmp_path: Path, name: str) -> None:
    """It is looked for when the tape has been released."""
    leaf = torch.ones(3, requires_grad=True)
    session = ca.enable(backend="eager", tune=False, cache_dir=name)
    with pytest.warns(UserWarning, match="graphs are kept only in memory"), session:
        (leaf * 2).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [2.0] * 3
    expect(session.stats(), structure_misses=1, captures=1)
