"""What people are told of misses while they train, ``on_miss``, ``assert_max_compiles``, and what happens at limits."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
import shadow_cache
from compiled_autograd.cache import graphs
from compiled_autograd.cache.graphs import GRAPHS
from shadow_cache import Miss

from .helpers import expect, in_subprocess

Loss = Callable[[torch.Tensor], torch.Tensor]


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3,)), requires_grad=True)


def _backward(session: ca.Session, loss: Loss, leaf: torch.Tensor | None = None) -> torch.Tensor:
    """A backward in the session, whose gradient is eager's."""
    leaf = _leaf() if leaf is None else leaf
    (wanted,) = torch.autograd.grad(loss(leaf).sum(), leaf)
    with session:
        loss(leaf).sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, wanted)
    return leaf


def _kinds(session: ca.Session) -> list[str]:
    assert session.last is not None
    return [reason.kind for reason in session.last.reasons]


# ---- the log ---------------------------------------------------------------------------------------------------------

_STEPS = """
import torch, compiled_autograd as ca
with ca.enable(backend="eager"):
    for power, rows in ((2, 3), (2, 3), (3, 3), (3, 4)):
        (torch.randn(rows, requires_grad=True) ** power).sum().backward()
"""


def test_the_log_has_a_line_for_each_miss() -> None:
    ran = in_subprocess(_STEPS, TORCH_LOGS="+compiled_autograd", COMPILED_AUTOGRAD_CACHE_DIR="false")
    assert ran.returncode == 0, ran.stderr
    lines = [line.partition("_miss: ")[2] for line in ran.stderr.splitlines() if "_miss: " in line]
    begins = [
        "first_seen at SumBackward0, 4 nodes, ",
        "node_attribute at #2 PowBackward0: saved exponent: 2 -> 3, ",
        "shape at saved self of #2 PowBackward0, dimension 0: 3 -> 4, ",
    ]
    assert len(lines) == 3 and all(line.startswith(begin) for line, begin in zip(lines, begins, strict=True)), lines
    assert all("[capture " in line and "compile " in line for line in lines)


def test_nothing_is_printed_without_being_asked() -> None:
    ran = in_subprocess(_STEPS, COMPILED_AUTOGRAD_CACHE_DIR="false")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


# ---- the same reason again and again ---------------------------------------------------------------------------------


def test_a_number_that_changes_at_each_step_is_warned_of_once() -> None:
    session = ca.enable(backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for power in range(2, 22):
            _backward(session, lambda x, power=power: x**power)  # type: ignore[misc]
    (warning,) = caught
    assert "8 backwards missed for the same reason" in str(warning.message)
    assert "#2 PowBackward0: saved exponent: " in str(warning.message)
    expect(session.stats(), structure_misses=20)


def test_each_size_compiled_anew_is_warned_of() -> None:
    session = ca.enable(backend="eager", dynamic=False)
    with pytest.warns(UserWarning, match="shape at saved result of #2 ExpBackward0, dimension 0.*dynamic=None"):
        for rows in range(2, 12):
            _backward(session, torch.exp, _leaf(rows))


def test_gradients_kept_at_every_other_step_are_two_structures() -> None:
    session = ca.enable(backend="eager")
    leaf = _leaf()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            leaf.grad = None
            for _ in range(2):
                with session:
                    leaf.exp().sum().backward()
    expect(session.stats(), structure_misses=2, hits=38, captures=2)


def test_what_is_left_to_eager_is_not_said_to_be_compiled() -> None:
    session = ca.enable(backend="eager", on_miss="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _backward(ca.enable(backend="eager"), torch.exp)
        for rows in range(4, 24):
            _backward(session, torch.exp, _leaf(rows))
    expect(session.stats(), bypasses={"on_miss": 20})


# ---- counting compiles -----------------------------------------------------------------------------------------------


def test_as_many_compiles_as_allowed() -> None:
    session = ca.enable(backend="eager")
    with shadow_cache.assert_max_compiles(1) as compiles:
        for _ in range(3):
            _backward(session, torch.exp)
    assert compiles.count == 1 and len(compiles.reasons) == 1
    with shadow_cache.assert_max_compiles(0):
        _backward(session, torch.exp)


def test_more_compiles_than_allowed() -> None:
    session = ca.enable(backend="eager")
    with pytest.raises(shadow_cache.TooManyCompilesError) as caught, shadow_cache.assert_max_compiles(1):
        _backward(session, torch.exp)
        _backward(session, torch.sin)
    assert caught.value.compiles == 2
    first, *lines = str(caught.value).splitlines()
    assert first == "2 regions were compiled, and at most 1 were allowed. The reasons:"
    assert lines[0].startswith("  first_seen at SumBackward0, 4 nodes, ")
    assert lines[1].startswith("  new_node at #2 SinBackward0: ExpBackward0 -> SinBackward0, ")


def test_counting_nests() -> None:
    session = ca.enable(backend="eager")
    with shadow_cache.assert_max_compiles(2) as outer:
        _backward(session, torch.exp)
        with shadow_cache.assert_max_compiles(1) as inner:
            _backward(session, torch.sin)
    assert (outer.count, inner.count) == (2, 1)
    none, one = shadow_cache.assert_max_compiles(0), shadow_cache.assert_max_compiles(1)
    with pytest.raises(shadow_cache.TooManyCompilesError, match="1 regions were compiled, and at most 0"), none, one:
        _backward(session, torch.cos)


def test_counting_counts_all_threads() -> None:
    def run() -> None:
        _backward(ca.enable(backend="eager"), torch.exp)

    with pytest.raises(shadow_cache.TooManyCompilesError, match="first_seen"), shadow_cache.assert_max_compiles(0):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()


def test_an_error_inside_is_raised_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"), shadow_cache.assert_max_compiles(0):
        _backward(ca.enable(backend="eager"), torch.exp)
        raise KeyError("mine")
    with shadow_cache.assert_max_compiles(0):  # who counted before counts no more
        pass


# ---- on_miss="eager" -------------------------------------------------------------------------------------------------


def test_a_structure_that_is_not_there_is_eager_s() -> None:
    session = ca.enable(backend="eager", on_miss="eager")
    for _ in range(3):
        _backward(session, torch.exp)
    expect(session.stats(), bypasses={"on_miss": 3}, compiles=0)
    assert len(GRAPHS) == 0
    assert session.last is not None and "capture" not in session.last.seconds, "its fingerprint should have told"
    _backward(ca.enable(backend="eager"), torch.exp)
    _backward(session, torch.exp)
    expect(session.stats(), bypasses={"on_miss": 3}, hits=1)


def test_a_structure_that_is_there_for_other_sizes_runs_call_by_call() -> None:
    session = ca.enable(backend="eager", on_miss="eager")
    _backward(ca.enable(backend="eager"), torch.exp)
    for _ in range(2):
        _backward(session, torch.exp, _leaf(5))
        assert session.last is not None and session.last.outcome == "bypass"
        assert _kinds(session) == ["on_miss", "shape"]
    expect(session.stats(), bypasses={"on_miss": 2}, compiles=0)
    _backward(session, torch.exp)
    expect(session.stats(), bypasses={"on_miss": 2}, hits=1)


def test_the_first_miss_says_how_the_structure_differs() -> None:
    session = ca.enable(backend="eager", on_miss="eager")
    _backward(ca.enable(backend="eager"), torch.exp)
    _backward(session, torch.sin)
    assert _kinds(session) == ["on_miss", "new_node"]


def test_a_tape_like_one_that_is_not_there_is_still_a_hit() -> None:
    """They have the same nodes, and differ in a constant, or in what a leaf has."""
    compiles, session = ca.enable(backend="eager"), ca.enable(backend="eager", on_miss="eager")
    _backward(compiles, lambda x: x**2)
    for _ in range(2):
        _backward(session, lambda x: x**3)
        _backward(session, lambda x: x**2)
    expect(session.stats(), hits=2, bypasses={"on_miss": 2})
    leaf = _leaf()
    for kept in (torch.zeros(3), None):
        leaf.grad = kept
        with session:
            (leaf**2).sum().backward()
    expect(session.stats(), hits=3, bypasses={"on_miss": 3})


def test_what_is_on_disk_is_not_a_miss(tmp_path: Path) -> None:
    first = ca.enable(backend="eager", cache_dir=tmp_path)
    _backward(first, torch.exp)
    assert first.stats().loads == 0
    for on_miss in ("eager", "raise"):
        ca.reset()
        session = ca.enable(backend="eager", cache_dir=tmp_path, on_miss=on_miss)
        _backward(session, torch.exp)
        _backward(session, torch.exp)
        expect(session.stats(), hits=2, compiles=0)
        assert session.stats().loads == 1


# ---- on_miss="raise" -------------------------------------------------------------------------------------------------


def test_a_miss_that_is_raised_leaves_everything_as_it_was() -> None:
    ran: list[str] = []
    session = ca.enable(backend="eager", on_miss="raise")
    leaf = _leaf()
    y = leaf.exp()
    y.register_hook(lambda grad: ran.append("tensor hook"))
    leaf.register_post_accumulate_grad_hook(lambda leaf: ran.append("leaf hook"))
    loss = y.sum()
    with (
        session,
        pytest.raises(ca.CacheMissError, match=r"first_seen.*No gradient was written.*tape is whole") as caught,
    ):
        loss.backward()
    assert leaf.grad is None and ran == []
    assert [reason.kind for reason in caught.value.reasons] == ["first_seen"]
    expect(session.stats(), bypasses={"on_miss": 1})
    with session, ca.disable():
        loss.backward()
    assert torch.equal(leaf.grad, y.detach()) and ran == ["tensor hook", "leaf hook"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("known", "loss", "kind"),
    [
        ((3,), torch.sin, "new_node"),
        ((4,), torch.exp, "shape"),
    ],
)
def test_what_is_raised_says_why(known: tuple[int, ...], loss: Loss, kind: str) -> None:
    _backward(ca.enable(backend="eager"), torch.exp, _leaf(*known))
    session = ca.enable(backend="eager", on_miss="raise")
    leaf = _leaf()
    value = loss(leaf).sum()
    for _ in range(2):  # the engine knows the structure at the second
        with session, pytest.raises(ca.CacheMissError) as caught:
            value.backward()
        assert [reason.kind for reason in caught.value.reasons] == [kind]
    value.backward()
    assert leaf.grad is not None


def test_hits_run_as_ever() -> None:
    _backward(ca.enable(backend="eager"), torch.exp)
    session = ca.enable(backend="eager", on_miss="raise")
    _backward(session, torch.exp)
    leaf = _leaf()
    loss = leaf.exp().sum()
    with session:
        loss.backward(retain_graph=True)
        leaf.grad = None
        loss.backward()
        leaf.grad = None
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert leaf.grad is None
    stats = session.stats()
    assert stats.hits == 3 and stats.backwards == 4


class Doubles(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Doubles.calls += 1
        assert ctx.saved_tensors[0].numel() == grad.numel()
        return 2 * grad


@pytest.mark.parametrize("on_miss", ["raise", "eager"])
@pytest.mark.parametrize("known", [False, True])
def test_users_code_runs_once(on_miss: str, known: bool) -> None:
    """Whatever is looked up before, and whether it is a hit, a miss of sizes or a miss of the structure."""
    ran: list[str] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        ran.append("unpack")
        return tensor

    def loss(leaf: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            y = leaf.exp()
        y.register_hook(lambda grad: ran.append("hook"))
        return Doubles.apply(y).sum()

    if known:
        with ca.enable(backend="eager"):
            loss(_leaf()).backward()
    session = ca.enable(backend="eager", on_miss=on_miss)
    for rows in (3, 4):
        ran.clear()
        Doubles.calls = 0
        leaf = _leaf(rows)
        value = loss(leaf)
        hit = known and rows == 3
        with session:
            if on_miss == "raise" and not hit:
                with pytest.raises(ca.CacheMissError):
                    value.backward()
                assert (ran, Doubles.calls, leaf.grad) == ([], 0, None)
                with ca.disable():
                    value.backward()
            else:
                value.backward()
        assert session.last is not None and session.last.outcome == ("hit" if hit else "bypass")
        assert (sorted(ran), Doubles.calls) == (["hook", "unpack"], 1)
        assert torch.equal(leaf.grad, 2 * leaf.detach().exp())  # type: ignore[arg-type]


def test_a_tape_with_retained_gradients_is_looked_up_too() -> None:
    def loss(leaf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = leaf.exp()
        y.retain_grad()
        return y, (y * y).sum()

    session = ca.enable(backend="eager", on_miss="raise")
    y, value = loss(_leaf())
    with session, pytest.raises(ca.CacheMissError):
        value.backward()
    assert y.grad is None
    value.backward()
    with ca.enable(backend="eager"):
        loss(_leaf())[1].backward()
    leaf = _leaf()
    y, value = loss(leaf)
    with session:
        value.backward()
    assert torch.equal(y.grad, 2 * y.detach())  # type: ignore[arg-type]
    assert torch.equal(leaf.grad, (2 * y * y).detach())  # type: ignore[arg-type]
    assert session.last is not None and session.last.outcome == "hit"


def test_a_guard_that_does_not_hold_is_found_too_late_and_says_so() -> None:
    compiles = ca.enable(backend="eager")
    for rows in (5, 6):
        _backward(compiles, lambda x: x.exp().mean(0), _leaf(rows, 2))
    session = ca.enable(backend="eager", on_miss="raise")
    leaf = _leaf(1, 2)
    loss = leaf.exp().mean(0).sum()
    with session, pytest.raises(ca.CacheMissError, match=r"guard.*Its gradients were computed"):
        loss.backward()
    assert torch.equal(leaf.grad, leaf.detach().exp())  # type: ignore[arg-type]


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_variant_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_VARIANTS", 2)
    session = ca.enable(backend="eager", dynamic=False)
    for rows in (3, 4, 3, 5):  # 3 was used after 4
        _backward(session, torch.exp, _leaf(rows))
    assert _kinds(session) == ["shape", "variant_limit"]
    (graph,) = session.graphs()
    assert len(graph.variants) == 2
    before = session.stats().compiles
    for rows in (3, 5):
        _backward(session, torch.exp, _leaf(rows))
    assert session.stats().compiles == before
    _backward(session, torch.exp, _leaf(4))
    assert session.stats().compiles == before + 1 and _kinds(session) == ["shape", "variant_limit"]


def test_the_least_recently_used_structures_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_STRUCTURES", 3)
    session = ca.enable(backend="eager")
    losses: list[Loss] = [torch.exp, torch.sin, torch.cos, torch.tanh]
    with pytest.warns(UserWarning, match="least recently used half"):
        for loss in losses:
            _backward(session, loss)
    assert len(GRAPHS) == 3
    for loss in (torch.sin, torch.cos, torch.tanh):
        _backward(session, loss)
        assert session.last is not None and session.last.outcome == "hit"
    _backward(session, torch.exp)
    assert _kinds(session) == ["evicted"] and session.last.outcome == "structure_miss"
    assert session.stats().compiles == 5


def test_what_went_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the session that compiled it goes on."""
    monkeypatch.setattr(graphs, "MAX_STRUCTURES", 2)
    session = ca.enable(backend="eager")
    _backward(session, torch.exp)
    (graph,) = GRAPHS
    (compiled,) = graph.regions[0].compiled_regions()
    gone = [weakref.ref(graph.tape.graph), weakref.ref(compiled.aten.graph_module())]
    del graph, compiled
    for loss in (torch.sin, torch.cos, torch.tanh):
        _backward(session, loss)
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert session.graphs() == list(GRAPHS)


def test_structures_of_too_many_nodes_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_NODES", 16)  # each tape has 3, and the root
    session = ca.enable(backend="eager")
    with pytest.warns(UserWarning, match="least recently used half"):
        for loss in (torch.exp, torch.sin, torch.cos, torch.tanh, torch.sigmoid):
            _backward(session, loss)
    assert [len(graph.tape.calls) for graph in GRAPHS] == [4, 4]
    for loss, outcome in ((torch.tanh, "hit"), (torch.exp, "structure_miss")):
        _backward(session, loss)
        assert session.last is not None and session.last.outcome == outcome
    assert _kinds(session) == ["evicted"]


def test_a_structure_of_too_many_nodes_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as no other one comes."""
    monkeypatch.setattr(graphs, "MAX_NODES", 2)
    session = ca.enable(backend="eager")
    for _ in range(3):
        _backward(session, torch.exp)
    expect(session.stats(), structure_misses=1, hits=2, captures=1)


def test_many_structures_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more than are kept, each coming back: always right, and never more than the limit."""
    monkeypatch.setattr(graphs, "MAX_STRUCTURES", 4)
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
    session = ca.enable(backend="eager")

    def loss(depth: int) -> Loss:
        def function(x: torch.Tensor) -> torch.Tensor:
            for layer in layers[:depth]:
                x = torch.tanh(layer(x))
            return x if depth % 2 else x.sin()

        return function

    for _ in range(3):
        for depth in (0, 1, 2, 3, 4):
            layers.zero_grad()
            _backward(session, loss(depth), _leaf(2, 3))
            assert len(GRAPHS) <= 4
    stats = session.stats()
    assert stats.backwards == 15 and not stats.bypasses and not stats.failures


# ---- counts ----------------------------------------------------------------------------------------------------------


def test_the_cost_of_a_miss_is_that_of_capture_and_compiling() -> None:
    session = ca.enable(backend="eager")
    _backward(session, torch.exp)
    assert session.last is not None
    (miss,) = session.last.reasons
    assert isinstance(miss, Miss)
    seconds = session.last.seconds
    assert miss.seconds == pytest.approx(seconds["capture"] + seconds["lower"] + seconds["compile"])
    assert session.stats().compile_seconds == pytest.approx(seconds["lower"] + seconds["compile"])


def test_what_is_loaded_is_counted(tmp_path: Path) -> None:
    def cut(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y.register_hook(lambda grad: grad)
        return y.sin()

    stats: list[Any] = []
    for _ in range(2):
        ca.reset()
        session = ca.enable(backend="eager", cache_dir=tmp_path)
        for _ in range(2):
            _backward(session, cut)
        stats.append(session.stats())
    assert (stats[0].compiles, stats[0].loads) == (2, 0)
    assert (stats[1].compiles, stats[1].loads) == (0, 2)
    expect(stats[1], hits=2, captures=1)
