"""The fast path serves what Python would serve, and nothing else: each question that it asks is asked here with another
answer, and what becomes of the backward is compared with what the way through Python makes of it."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_autograd as ca
from backends.versions import settings_belong_to_a_thread
from compiled_autograd.cache import graphs
from compiled_autograd.engine.cuda.streams import STREAMS
from compiled_autograd.engine.fast_path.arming import FAST_PATH
from compiled_autograd.engine.handles import KEPT
from compiled_autograd.engine.native_hits import NativeHits
from compiled_autograd.steps.run_context import RunReport
from compiled_autograd.threads.leaf_writes import LEAF_WRITES

from .both_walks import library_of, own_plans
from .helpers import assert_same, in_subprocess, mlp

Make = Callable[[int], torch.Tensor]
_UNTIL_FAST = 6
"""Backwards until the first that is served so: captured, met, learnt, proved twice, and run alone."""


@pytest.fixture
def hits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeHits]:
    yield own_plans(request.config, monkeypatch)
    ca.reset()


@pytest.fixture
def net() -> tuple[Make, list[torch.Tensor]]:
    model, x = mlp(depth=1), torch.randn(3, 8)
    return lambda step: (model(x + step) ** 2).mean(), list(model.parameters())


def _session(**settings: Any) -> ca.Session:
    return ca.enable(**{"backend": "inductor", "cache_dir": False, "tune": False, "extension": "auto", **settings})


def _step(around: Any, make: Make, leaves: list[torch.Tensor], step: int, **how: Any) -> list[torch.Tensor | None]:
    for leaf in leaves:
        leaf.grad = None
    loss = make(step)
    with around:
        loss.backward(**how)
    return [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


def _eager(make: Make, leaves: list[torch.Tensor], step: int, **how: Any) -> list[torch.Tensor | None]:
    return _step(ca.disable(), make, leaves, step, **how)


def _until_fast(session: ca.Session, make: Make, leaves: list[torch.Tensor]) -> None:
    for step in range(_UNTIL_FAST):
        _step(session, make, leaves, step)
    before = FAST_PATH.served
    assert_same(_step(session, make, leaves, 0), _eager(make, leaves, 0), bitwise=False)
    assert FAST_PATH.served == before + 1


def test_threads_that_find_the_extension_at_once_have_one_path(
    hits: NativeHits, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else hits would be given to one that nobody calls."""
    _session()
    engine: Any = Variable._execution_engine
    module, make = library_of(request.config).module(), FAST_PATH.make
    assert module is not None and make is not None
    monkeypatch.setattr(FAST_PATH, "_made", {})
    monkeypatch.setattr(FAST_PATH, "_path", None)
    monkeypatch.setitem(engine.__dict__, "run_backward", make(module))

    def made(found: Any) -> Any:
        FAST_PATH._made[found] = make(found)  # another thread makes one meanwhile
        return make(found)

    monkeypatch.setattr(FAST_PATH, "make", made)
    FAST_PATH.come_first(module)
    assert engine.run_backward is FAST_PATH._path is FAST_PATH._made[module]


def _counters(session: ca.Session) -> tuple[Any, ...]:
    (graph,) = session.graphs()
    stats, (variant,) = session.stats(), graph.variants
    assert session.last is not None
    return stats.backwards, stats.hits, graph.met, variant.hits, session.last.outcome, [*session.last.seconds]


def test_it_serves_and_counts_as_python_does(hits: NativeHits, net: tuple[Make, list[torch.Tensor]]) -> None:
    make, leaves = net
    session, served = _session(), FAST_PATH.served
    _until_fast(session, make, leaves)
    begun, met = FAST_PATH.served - served, hits.hits
    (graph,) = session.graphs()
    before, used, ran = _counters(session), graph.used, graph.variants[0].ran
    for step in range(10):
        assert_same(_step(session, make, leaves, step), _eager(make, leaves, step), bitwise=False)
    after = _counters(session)
    assert FAST_PATH.served - served == begun + 10 and hits.hits == met + 10
    assert [one - other for one, other in zip(after[:4], before[:4], strict=True)] == [10] * 4
    assert after[4:] == ("hit", ["capture", "run"])
    assert session.last is not None and session.last.graph is graph and min(session.last.seconds.values()) > 0
    assert graph.used > used and graph.used == graph.variants[0].used and graph.variants[0].ran > ran
    session.report(Path(os.devnull))


# ---- the state of the process and the thread -------------------------------------------------------------------------


class _Looks(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextmanager
def _set(change: Callable[[Any], object], to: Any, back: Any) -> Iterator[None]:
    change(to)
    try:
        yield
    finally:
        change(back)


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _inductor_setting() -> AbstractContextManager[Any]:
    from torch._inductor import config

    return config.patch(max_fusion_size=config.max_fusion_size + 1)


def _others_are_on() -> AbstractContextManager[Any]:
    from torch._dynamo import compiled_autograd

    return compiled_autograd._enable(lambda graph: graph)


@contextmanager
def _others_have_captured() -> Iterator[None]:
    x = torch.randn(2, requires_grad=True)
    with ca.disable(), _others_are_on():
        (x * 2).sum().backward()
    yield


def _tracing() -> AbstractContextManager[Any]:
    from torch._guards import TracingContext, tracing

    return tracing(TracingContext(None))


@contextmanager
def _streams() -> Iterator[None]:
    with _attribute(STREAMS, "reason", lambda outputs: None), _attribute(STREAMS, "in_use", True):
        yield


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "anomaly mode": lambda: torch.autograd.detect_anomaly(),
    "anomaly mode, no NaNs": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "compiling": lambda: _attribute(torch.compiler, "_is_compiling_flag", True),
    "default dtype": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "deterministic, warns": lambda: _set(lambda on: torch.use_deterministic_algorithms(on, warn_only=on), True, False),
    "dispatch mode": _Looks,
    "dual level": torch.autograd.forward_ad.dual_level,
    "inductor setting": _inductor_setting,
    "inference mode": torch.inference_mode,
    "matmul precision": lambda: _set(torch.set_float32_matmul_precision, "medium", "highest"),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "must forget": lambda: _attribute(KEPT, "must_forget", True),
    "no fill": lambda: _attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "others are on": _others_are_on,
    "others have captured": _others_have_captured,
    "profiler": torch.profiler.profile,
    "streams": _streams,
    "threads": lambda: _set(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    "tracing": _tracing,
}
if not settings_belong_to_a_thread():
    del STATES["inductor setting"]  # which nobody looks at then


_FORGETTING = ("must forget", "others have captured", "others are on")
"""After these all is learnt anew."""


_LIKE_OTHERS = {
    "anomaly mode, no NaNs",
    "default dtype",
    "deterministic, warns",
    "inductor setting",
    "mkldnn",
    "no fill",
}


@pytest.mark.parametrize(
    "state", [pytest.param(each, marks=pytest.mark.slow if each in _LIKE_OTHERS else ()) for each in STATES]
)
def test_another_state_goes_through_python(hits: NativeHits, net: tuple[Make, list[torch.Tensor]], state: str) -> None:
    """And ends as it does there. When the state is as it was, it is served again: by the second backward, since what
    compiles sets some of Inductor's settings meanwhile, of which Python asks the first time."""
    make, leaves = net
    session = _session()
    if state == "matmul precision":  # once it was set, it is not unset again
        torch.set_float32_matmul_precision("highest")
    _until_fast(session, make, leaves)
    found = []
    for forgets in (False, True):
        if forgets:
            FAST_PATH.forget()
        other, loss, served = _session(), make(0), FAST_PATH.served
        for leaf in leaves:
            leaf.grad = None
        with other, STATES[state]():
            loss.backward()
        assert FAST_PATH.served == served and other.last is not None
        found.append((other.last.outcome == "bypass", other.stats().bypasses, other.stats().backwards))
        assert_same([leaf.grad for leaf in leaves], _eager(make, leaves, 0), bitwise=False, low=state == "autocast")
        for step in range(2):
            served = FAST_PATH.served
            assert_same(_step(_session(), make, leaves, step), _eager(make, leaves, step), bitwise=False)
        if not forgets and state not in _FORGETTING:
            assert FAST_PATH.served == served + 1
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "settings", [{"check": True}, {"extension": "off"}, {"on_miss": "raise"}, {"on_miss": "eager"}], ids=str
)
def test_other_settings_are_not_served(
    hits: NativeHits, net: tuple[Make, list[torch.Tensor]], settings: dict[str, Any]
) -> None:
    make, leaves = net
    _until_fast(_session(), make, leaves)
    served, session = FAST_PATH.served, _session(**settings)
    for step in range(4):
        assert_same(_step(session, make, leaves, step), _eager(make, leaves, step), bitwise=False)
    assert FAST_PATH.served == served and session.stats().hits == 4


def test_equal_settings_are_the_same(hits: NativeHits, net: tuple[Make, list[torch.Tensor]]) -> None:
    make, leaves = net
    _until_fast(_session(), make, leaves)
    served = FAST_PATH.served
    for step in range(4):
        session = _session()
        _step(session, make, leaves, step)
        assert (session.stats().hits, session.stats().backwards) == (1, 1)
    assert FAST_PATH.served == served + 4


# ---- tapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tapes_and_shapes_that_take_turns(hits: NativeHits) -> None:
    first, second = mlp(depth=1), nn.Sequential(mlp(depth=1), nn.Tanh())
    inputs = [torch.randn(rows, 8) for rows in (3, 5)]
    leaves = [*first.parameters(), *second.parameters()]

    def make(step: int) -> torch.Tensor:
        return ((first, second)[step % 2](inputs[step // 2 % 2] + step) ** 2).mean()

    session = _session(dynamic=False)
    for step in range(40):
        served = FAST_PATH.served
        assert_same(_step(session, make, leaves, step), _eager(make, leaves, step), bitwise=False)
        assert step < 30 or FAST_PATH.served == served + 1, step
    assert (session.stats().captures, session.stats().bypasses) == (2, {})


def test_tapes_that_are_kept_or_gone(hits: NativeHits, net: tuple[Make, list[torch.Tensor]]) -> None:
    make, leaves = net
    session = _session()
    _until_fast(session, make, leaves)
    served, loss = FAST_PATH.served, make(1)
    for leaf in leaves:
        leaf.grad = None
    with session:
        loss.backward(retain_graph=True)
        loss.backward(torch.tensor(2.0))
        assert FAST_PATH.served == served + 2 - 1, "leaves that have gradients are another structure"
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    found = [leaf.grad for leaf in leaves]
    wanted = [None if each is None else 3 * each for each in _eager(make, leaves, 1)]
    assert_same(found, wanted, bitwise=False)


def test_a_saved_tensor_that_was_changed_in_place_is_eagers_error(hits: NativeHits) -> None:
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    session = _session()

    def make(step: int) -> torch.Tensor:
        hidden = (x @ weight).exp()
        loss = hidden.sum()
        if step < 0:
            hidden.add_(1)
        return loss

    _until_fast(session, make, [weight])
    served = FAST_PATH.served
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _step(session, make, [weight], -1)
    assert FAST_PATH.served == served
    assert_same(_step(session, make, [weight], 1), _eager(make, [weight], 1), bitwise=False)
    assert FAST_PATH.served == served + 1


def test_a_backward_inside_another(hits: NativeHits, net: tuple[Make, list[torch.Tensor]]) -> None:
    make, leaves = net
    session, outer = _session(), torch.randn(3, requires_grad=True)
    _until_fast(session, make, leaves)
    served, inner = FAST_PATH.served, []
    loss = (outer * 2).sum()

    def hook(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            inner.append(_step(contextlib.nullcontext(), make, leaves, 2))

    loss.register_hook(hook)
    with session:
        loss.backward()
    assert_same(inner[0], _eager(make, leaves, 2), bitwise=False)
    assert FAST_PATH.served == served and session.stats().bypasses == {}


# ---- once the tape is taken ------------------------------------------------------------------------------------------


def test_what_it_does_not_run_python_goes_on_with(hits: NativeHits, net: tuple[Make, list[torch.Tensor]]) -> None:
    make, leaves = net
    session = _session()
    _until_fast(session, make, leaves)
    served, counted = FAST_PATH.served, _counters(session)
    session.graphs()[0].variants[0].program.region_compiler.finished.append(RunReport())
    assert_same(_step(session, make, leaves, 1), _eager(make, leaves, 1), bitwise=False)
    assert FAST_PATH.served == served
    assert [one - other for one, other in zip(_counters(session)[:4], counted[:4], strict=True)] == [1] * 4
    assert_same(_step(session, make, leaves, 2), _eager(make, leaves, 2), bitwise=False)
    assert FAST_PATH.served == served + 1


class Asks:
    """Whether leaves may be written, or an error: in the place of ``LEAF_WRITES.none_needed``."""

    error: type[BaseException] | None = None

    def __init__(self) -> None:
        self.right = LEAF_WRITES.none_needed

    def __call__(self) -> bool:
        if self.error is not None:
            raise self.error("here")
        return self.right()


def error_in_its_middle(
    net: tuple[Make, list[torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    state: Callable[[ca.Session, torch.Tensor], AbstractContextManager[Any]] | None = None,
) -> None:
    """It is counted once, as the hit that it was to be."""
    make, leaves = net
    session, asks = _session(), Asks()
    monkeypatch.setattr(LEAF_WRITES, "none_needed", asks)
    _until_fast(session, make, leaves)
    before, served, asks.error = session.stats(), FAST_PATH.served, error
    with contextlib.nullcontext() if state is None else state(session, make(1)), pytest.raises(error, match="here"):
        _step(session, make, leaves, 1)
    asks.error, after = None, session.stats()
    assert (after.backwards, after.hits, after.bypasses) == (before.backwards + 1, before.hits + 1, {})
    assert FAST_PATH.served == served + 1 and torch.is_grad_enabled()
    assert_same(_step(session, make, leaves, 1), _eager(make, leaves, 1), bitwise=False)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError])
def test_an_error_in_its_middle(
    hits: NativeHits,
    net: tuple[Make, list[torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    error_in_its_middle(net, monkeypatch, error)


def test_plans_that_are_forgotten_meanwhile(
    hits: NativeHits, net: tuple[Make, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, leaves = net
    session, asked, forgets = _session(), LEAF_WRITES.none_needed, False

    def ask() -> bool:
        if forgets:
            hits.forget()
            graphs.GRAPHS.clear()
            gc.collect()
        return asked()

    monkeypatch.setattr(LEAF_WRITES, "none_needed", ask)
    _until_fast(session, make, leaves)
    forgets, served = True, FAST_PATH.served
    assert_same(_step(session, make, leaves, 1), _eager(make, leaves, 1), bitwise=False)
    assert FAST_PATH.served == served + 1 and not FAST_PATH._handed
    forgets = False
    assert_same(_step(session, make, leaves, 2), _eager(make, leaves, 2), bitwise=False)
    assert FAST_PATH.served == served + 1


# ---- what it keeps ---------------------------------------------------------------------------------------------------


def test_it_keeps_nothing_alive(hits: NativeHits, net: tuple[Make, list[torch.Tensor]]) -> None:
    make, leaves = net
    session = _session()
    _until_fast(session, make, leaves)
    (graph,) = session.graphs()
    variant, owner, ended = weakref.ref(graph.variants[0]), weakref.ref(session), weakref.ref(graph)
    assert FAST_PATH._handed
    graph.evict()
    gc.collect()
    assert variant() is None and not FAST_PATH._handed
    ca.reset()
    del session, graph
    gc.collect()
    assert owner() is None and ended() is None


# ---- all of it at once -----------------------------------------------------------------------------------------------


def _train(seed: int, steps: int, session: Callable[[], ca.Session]) -> int:
    """Random nets, shapes, states, gradients that are there or not, kept tapes; each step beside eager's. How many ran
    so."""
    chance, served = random.Random(seed), FAST_PATH.served
    nets = [nn.Sequential(nn.Linear(6, 6, bias=chance.random() < 0.5), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2)]
    leaves = [leaf for net in nets for leaf in net.parameters()]
    inputs = [torch.randn(rows, 6) for rows in (2, 4)]
    inputs.append(torch.randn(6, 4).t())
    left_out = (*_FORGETTING, "matmul precision", "threads", "profiler")
    names = [None] * 40 + [each for each in STATES if each not in left_out]
    for _ in range(steps):
        which, x, layout = chance.randrange(2), chance.choice(inputs), chance.choice(["new", "new", "added", "strided"])
        name, keeps, scale = chance.choice(names), chance.random() < 0.2, chance.choice([1.0, 2.0])

        def run(around: Any) -> list[torch.Tensor | None]:
            for index, leaf in enumerate(leaves):
                leaf.grad = None if layout == "new" else torch.full_like(leaf, 0.5)  # noqa: B023
                if layout == "strided" and leaf.dim() == 2:  # noqa: B023
                    leaf.grad = torch.full(leaf.shape[::-1], float(index)).t()
            loss = (nets[which](x) ** 2).sum()  # noqa: B023
            with around, contextlib.nullcontext() if name is None else STATES[name]():  # noqa: B023
                loss.backward(torch.tensor(scale), retain_graph=keeps)  # noqa: B023
                if keeps:  # noqa: B023
                    loss.backward(torch.tensor(scale))  # noqa: B023
            return [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]

        found, wanted = run(session()), run(ca.disable())
        assert_same(found, wanted, bitwise=False, low=name == "autocast")
    return FAST_PATH.served - served


@pytest.mark.parametrize(
    ("seed", "steps"), [(2, 30), *(pytest.param(each, 120, marks=pytest.mark.slow) for each in range(3))]
)
def test_random_trainings(hits: NativeHits, seed: int, steps: int) -> None:
    assert _train(seed, steps, _session) > 0


@pytest.mark.slow
def test_many_random_trainings(hits: NativeHits) -> None:
    for seed in range(100, 160):
        _train(seed, 150, lambda: _session(dynamic=False))


def test_threads(hits: NativeHits, net: tuple[Make, list[torch.Tensor]]) -> None:
    """Each has sessions of its own, and a model of its own of one structure."""
    make, leaves = net
    _until_fast(_session(), make, leaves)
    errors: list[BaseException] = []
    sessions = [_session() for _ in range(4)]
    served = FAST_PATH.served

    def train(index: int) -> None:
        try:
            torch.manual_seed(index)
            model, x = mlp(depth=1), torch.randn(3, 8)
            own = list(model.parameters())
            for step in range(150):
                loss = (model(x + step / 150) ** 2).mean()  # far from 1, sums are rounded by more than is compared with
                wanted = torch.autograd.grad(loss, own, retain_graph=True)
                for leaf in own:
                    leaf.grad = None
                with sessions[index]:
                    loss.backward()
                torch.testing.assert_close([leaf.grad for leaf in own], [*wanted])
        except BaseException as error:  # noqa: BLE001  the test raises it
            errors.append(error)

    threads = [threading.Thread(target=train, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    stats = [session.stats() for session in sessions]
    assert all(each.backwards == 150 and not each.failures for each in stats)
    assert FAST_PATH.served - served > 300


_SECOND_PROCESS = """
import os, sys, time, torch, compiled_autograd as ca
from compiled_autograd.engine.fast_path.arming import FAST_PATH
from compiled_autograd.engine import backward
from tests.both_walks import library_in
from pathlib import Path
store, builds = os.environ["STORE"], os.environ["BUILDS"]
backward.NATIVE_HITS.library = library_in(Path(builds))
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
session = ca.enable(cache_dir=store, tune=False, extension="auto")

def train(steps):
    for step in range(steps):
        net.zero_grad()
        loss = net(torch.ones(2, 5) * step).sum()
        wanted = torch.autograd.grad(loss, [*net.parameters()], retain_graph=True)
        with session:
            loss.backward()
        torch.testing.assert_close([each.grad for each in net.parameters()], [*wanted])

train(20)
served = FAST_PATH.served
child = os.fork()
train(5)
assert FAST_PATH.served == served + 5
if child:
    assert os.waitpid(child, 0)[1] == 0
    print(session.stats().compiles, session.stats().loads, served)
else:
    os._exit(0)
"""


@pytest.mark.slow
def test_other_processes(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """What the store has is served, and so it is in a forked child."""
    library_of(request.config)
    builds = Path(request.config.cache.mkdir("native")) / "builds"  # type: ignore[union-attr]
    for compiles, loads in ((1, 0), (0, 1)):
        ended = in_subprocess(_SECOND_PROCESS, STORE=str(tmp_path / "store"), BUILDS=str(builds))
        found = [int(each) for each in ended.stdout.split()[-3:]]
        assert found[:2] == [compiles, loads] and found[2] > 8, ended.stdout
