"""The tape graph: its text form, its rules, its keys, its networkx view, and what it knows of where it came from."""

from __future__ import annotations

import gc
import operator
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import networkx as nx
import pytest
import torch
from torch import fx, nn

import compiled_autograd as ca
from compiled_autograd import ir
from compiled_autograd.cache.graphs import CompiledGraph
from compiled_autograd.capture import parameter_names, tape
from compiled_autograd.engine import seam
from compiled_autograd.errors import IllegalGraphError
from compiled_autograd.ir.nan_checks import with_nan_checks

from .helpers import in_subprocess, mlp, switching_every

GOLDEN = Path(__file__).parent / "golden"


def _captured(loss: torch.Tensor) -> CompiledGraph:
    with ca.enable(backend="eager") as session:
        loss.backward()
    assert session.last is not None and session.last.graph is not None
    return session.last.graph


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.save_for_backward(x)
        return x[:2] * 1, x[2:] * 1

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return torch.cat([first, second]) + 0 * x


def _linear() -> torch.Tensor:
    return nn.Linear(3, 2)(torch.ones(4, 3)).sigmoid().sum()


def _shared() -> torch.Tensor:
    x = torch.ones(2, 2, requires_grad=True)
    return (x @ x + x.sin()).sum()


def _view() -> torch.Tensor:
    x = torch.ones(4, requires_grad=True)
    y = x * 2
    y[1:3].exp_()
    return y.sum()


def _function() -> torch.Tensor:
    x = torch.ones(4, requires_grad=True)
    return _Halves.apply(x.exp())[0].sum()


def _mlp() -> torch.Tensor:
    return mlp()(torch.ones(4, 8)).square().mean()


def _attention() -> torch.Tensor:
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)
    return module(x, x, x)[0].sum()


def _convolution() -> torch.Tensor:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    return module(torch.randn(2, 1, 4, 4)).square().sum()


def _loop() -> torch.Tensor:
    x = torch.ones(4, requires_grad=True)
    state = x
    for _ in range(5):
        state = (state * x).sin()
    return state.sum()


TAPES: list[Callable[[], torch.Tensor]] = [_linear, _shared, _view, _function, _mlp, _attention, _convolution, _loop]


# ---- text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [_linear, _shared, _view, _function])
def test_golden_text(make: Callable[[], torch.Tensor]) -> None:
    """The text form is part of the public face: a change of it must be meant. To accept one, delete the file."""
    module_kept_alive = make()
    text = _captured(module_kept_alive).readable()
    file = GOLDEN / f"tape{make.__name__}.txt"
    if not file.exists():
        file.write_text(text)
        pytest.fail(f"{file.name} was missing and has been written; read it, then run again")
    assert text == file.read_text()


@pytest.mark.parametrize("make", TAPES)
def test_the_text_is_the_same_at_each_capture(make: Callable[[], torch.Tensor]) -> None:
    texts = []
    for _ in range(2):
        ca.reset()
        texts.append(_captured(make()).readable())
    assert texts[0] == texts[1]
    assert "0x" not in texts[0] and "Backward" in texts[0]


# ---- rules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", TAPES)
def test_every_graph_is_legal_before_and_after_it_is_put_in_order(
    make: Callable[[], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    in_order = seam.in_engine_order

    def targets_of(tape: ir.TapeGraph) -> list[str]:
        return sorted(str(node.target) for node in tape.graph.nodes if ir.PART_OF_SUM not in node.meta)

    def checking(tape: ir.TapeGraph) -> ir.TapeGraph:
        ir.verify(tape.graph)
        targets = targets_of(tape)  # its nodes are moved
        ordered = in_order(tape)
        ir.verify(ordered.graph)
        checked.append("both")
        assert targets == targets_of(ordered)
        return ordered

    monkeypatch.setattr(seam, "in_engine_order", checking)
    ir.verify(_captured(make()).tape.graph)
    assert checked == ["both"]


def _op(name: str = "Mul") -> ir.OpaqueOp:
    return ir.OpaqueOp(name, lambda grads, *saved: list(grads))


class _Maker:
    """Builds tape graphs by hand."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.tensor, self.size, self.scalar, self.object = map(self.placeholder, ("input", "size", "scalar", "object"))

    def placeholder(self, kind: str) -> fx.Node:
        node = self.graph.placeholder(f"{kind}_0")
        node.meta["lifted"] = ir.Lifted(kind, 0)
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["call"] = 0
        return node


_ILLEGAL: list[tuple[Callable[[_Maker], Any], str]] = [
    (lambda m: m.call(torch.add, m.tensor, m.tensor), "is not in the vocabulary"),
    (lambda m: m.call(_op()), "takes 2 arguments, got 0"),
    (lambda m: m.call(_op(), m.tensor), "argument 0 is a tensor .*allowed: list"),
    (lambda m: m.call(_op(), [m.tensor], m.object), "argument 1 is a object"),
    (lambda m: m.call(ir.sum_gradients, m.tensor, m.size), "argument 1 is a size .*allowed: none or tensor"),
    (lambda m: m.call(ir.sum_gradients, [m.tensor]), "argument 0 is a list"),
    (lambda m: m.call(ir.accumulate_grad, m.tensor, m.tensor), "takes 3 arguments, got 2"),
    (lambda m: m.call(ir.accumulate_grad, None, None, m.tensor), "argument 0 is a none .*allowed: tensor"),
    (lambda m: m.call(ir.accumulate_grad, m.tensor, None, 3.0), "argument 2 is a constant"),
    (lambda m: m.call(ir.accumulate_grad, m.tensor, None, m.tensor, None), "argument 3 is a none .*allowed: nothing"),
    (lambda m: m.call(ir.call_backward, m.tensor, [], [], [], m.tensor), "argument 0 is a tensor .*allowed: object"),
    (lambda m: m.call(ir.call_backward, m.object, m.tensor, [], []), "argument 1 is a tensor .*allowed: list"),
    (lambda m: m.call(ir.call_backward, m.object, [], [], [], m.size), "argument 4 is a size"),
    (lambda m: m.call(ir.check_nan, m.tensor, 0), "argument 0 is a tensor .*allowed: list"),
    (lambda m: m.call(ir.zeros, m.tensor, {}), "argument 0 is a tensor .*allowed: list"),
    (lambda m: m.call(ir.zeros, [2], m.tensor), "argument 1 is a tensor .*allowed: constant"),
    (lambda m: m.call(operator.getitem, m.tensor, 0), "argument 0 is a tensor .*allowed: list"),
    (lambda m: m.call(operator.getitem, m.call(_op(), [m.tensor]), m.size), "argument 1 is a size"),
    (lambda m: m.call(operator.add, m.tensor, 1), "argument 0 is a tensor .*allowed: constant or size"),
    (lambda m: m.call(operator.mul, m.size, m.scalar), "argument 1 is a scalar"),
    (lambda m: m.call(ir.copy_slices_prologue, [m.tensor], [2], [1], [0], [2], [1], 0), "argument 3 is a list"),
    (lambda m: m.call(ir.copy_slices_epilogue, [True], None, [None], [2], [1], 0, 0), "argument 1 is a none"),
    (lambda m: m.call(ir.tensor_hook, m.tensor, m.tensor), "argument 0 is a tensor .*allowed: object"),
    (lambda m: m.call(ir.pre_hook, m.object, m.tensor), "argument 1 is a tensor .*allowed: list"),
    (lambda m: m.call(ir.unpack_hook, m.object, m.tensor), "argument 1 is a tensor .*allowed: packed"),
    (lambda m: m.call(_op(), m.call(ir.post_accumulate_hook, m.object, m.tensor)), "argument 0 is a nothing"),
    (lambda m: m.placeholder("weight"), "placeholder 'weight_0' is none of input, size, scalar, object"),
    (lambda m: m.graph.placeholder("input_1"), "placeholder 'input_1' is none of input, size, scalar, object"),
    (lambda m: m.graph.call_method("add", (m.tensor, m.tensor)), "has no 'call_method' nodes"),
    (lambda m: m.graph.call_function(ir.sum_gradients, (m.tensor,)), "does not say which node of the tape"),
]


@pytest.mark.parametrize(("build", "says"), _ILLEGAL)
def test_each_rule_is_checked(build: Callable[[_Maker], Any], says: str) -> None:
    maker = _Maker()
    broken = build(maker)
    maker.graph.output([])
    with pytest.raises(IllegalGraphError, match=says) as raised:
        ir.verify(maker.graph)
    if broken.op == "call_function":
        assert broken.name in str(raised.value)


def test_a_legal_graph_made_by_hand() -> None:
    maker = _Maker()
    results = maker.call(_op(), [maker.tensor, None], maker.size, maker.scalar, 3, None)
    total = maker.call(ir.sum_gradients, maker.call(operator.getitem, results, 0), None, maker.tensor)
    maker.call(ir.accumulate_grad, maker.tensor, None, total)
    maker.call(ir.zeros, [maker.call(operator.mul, maker.size, 2)], {"dtype": torch.float32})
    given = maker.call(ir.call_backward, maker.object, [maker.tensor, None], [True], [True, False], total, None)
    maker.graph.output([maker.call(operator.getitem, given, 0)])
    assert ir.verify(maker.graph) is None


def _name(target: Any) -> str:
    return getattr(target, "__name__", str(target))


@pytest.mark.parametrize("target", sorted(ir.RULES, key=_name), ids=_name)  # in one order in all processes
def test_the_table_is_complete(target: Any) -> None:
    rule = ir.RULES[target]
    kinds = {"tensor", "none", "size", "scalar", "object", "list", "constant", "packed"}
    assert all(taken <= kinds for taken in rule.takes)
    assert rule.gives in kinds | {"nothing"}


@pytest.mark.parametrize("make", [_linear, _shared, _view])
def test_nan_checks_follow_what_each_node_gives_in_the_end(make: Callable[[], torch.Tensor]) -> None:
    tape = _captured(make()).tape
    before = tape.readable()
    checked = with_nan_checks(tape)
    ir.verify(checked.graph)
    assert tape.readable() == before and "check_nan" not in before
    checks = checked.graph.find_nodes(op="call_function", target=ir.check_nan)
    assert [check.prev for check in checks] == [check.args[0] for check in checks]
    giving = {node.meta["call"] for node in tape.graph.nodes if ir.is_validation(node)}
    assert [check.args[1] for check in checks] == [check.meta["call"] for check in checks]
    assert {check.args[1] for check in checks} == giving and len(checks) == len(giving)
    assert "%1 = check_nan(%0, 0)" in checked.readable()


def test_a_value_used_before_it_is_made_is_illegal() -> None:
    maker = _Maker()
    first = maker.call(ir.sum_gradients, maker.tensor)
    second = maker.call(ir.sum_gradients, maker.tensor)
    first.args = (second,)
    maker.graph.output([first])
    with pytest.raises(RuntimeError, match="before it has been defined"):
        ir.verify(maker.graph)


# ---- sums ----------------------------------------------------------------------------------------------------------


def test_a_sum_skips_what_is_undefined() -> None:
    a, b = torch.randn(3), torch.randn(3)
    assert ir.sum_gradients() is None and ir.sum_gradients(None, None) is None
    assert ir.sum_gradients(None, a, None) is a
    assert torch.equal(ir.sum_gradients(a, None, b), a + b)  # type: ignore[arg-type]


def test_a_sum_of_sparse_and_dense_is_dense() -> None:
    dense, sparse = torch.randn(3), torch.tensor([0.0, 2.0, 0.0]).to_sparse()
    for terms in ((dense, sparse), (sparse, dense)):
        total = ir.sum_gradients(*terms)
        assert total is not None and total.layout is torch.strided
        assert torch.equal(total, dense + torch.tensor([0.0, 2.0, 0.0]))


# ---- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", TAPES)
def test_equal_tapes_have_equal_keys(make: Callable[[], torch.Tensor]) -> None:
    keys = []
    for _ in range(2):
        ca.reset()
        keys.append(_captured(make()).tape.structure())
    assert keys[0] == keys[1]
    assert all(isinstance(key[0], str) for key in keys[0])
    assert ir.decode_keys(ir.encode_keys(keys[0])) == keys[0]


def test_constants_that_python_takes_for_equal_are_told_apart() -> None:
    values = [1, True, 1.0, 0, False, 0.0, -0.0, None, "None", "1", [1], [True], float("inf")]
    assert len({ir.argument_of(value, {}) for value in values}) == len(values)
    assert ir.argument_of(float("nan"), {}) == ir.argument_of(float("nan"), {})


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([["Mul", ["call", 1]]]), b"\x91" * 100_000])
def test_keys_of_another_version_are_not_read(data: bytes) -> None:
    assert ir.decode_keys(data) is None


def test_shapes_and_values_are_no_part_of_the_key() -> None:
    keys = []
    for size, scale in ((3, 2.0), (5, 3.0)):
        ca.reset()
        x = torch.randn(size, requires_grad=True)
        keys.append(_captured((x * scale).exp().sum()).tape.structure())
    assert keys[0] == keys[1]


def _variations() -> dict[str, torch.Tensor]:
    x = torch.randn(2, 2, requires_grad=True)
    z = torch.randn(2, 2, requires_grad=True)
    double = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    with_grad = torch.randn(2, 2, requires_grad=True)
    with_grad.grad = torch.zeros(2, 2)
    return {
        "sin": x.sin().sum(),
        "cos": x.cos().sum(),
        "one more node": x.sin().neg().sum(),
        "another dtype": double.sin().sum(),
        "a .grad": with_grad.sin().sum(),
        "two leaves": (x.sin() + z).sum(),
        "one leaf twice": (x.sin() + x).sum(),
        "one branch twice": (x.sin() + x.sin()).sum(),
        "sides swapped": (z + x.sin()).sum(),
        "softmax over 0": x.softmax(0).sum(),
        "softmax over 1": x.softmax(1).sum(),
        "no sum": x.sin()[0, 0],
        "mean": x.sin().mean(),
    }


def test_different_tapes_have_different_keys() -> None:
    keys = {}
    for name, loss in _variations().items():
        ca.reset()
        keys[name] = tuple(_captured(loss).tape.structure())
    names = list(keys)
    same = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if keys[a] == keys[b]]
    allowed = [("softmax over 0", "softmax over 1"), ("two leaves", "sides swapped")]  # a lifted number; a mirror
    assert [pair for pair in same if pair not in allowed] == []


def test_backward_and_grad_have_different_keys() -> None:
    x = torch.randn(3, requires_grad=True)
    with ca.enable(backend="eager") as session:
        x.sin().sum().backward()
        first = session.last
        torch.autograd.grad(x.sin().sum(), x)
    assert first is not None and first.graph is not None and session.last is not None and session.last.graph is not None
    assert first.graph is not session.last.graph
    assert first.graph.tape.accumulates and not session.last.graph.tape.accumulates


_SIN_AND_SUM = ["SinBackward0", "SumBackward0"]


# ---- networkx, and where it came from --------------------------------------------------------------------------------


def test_to_networkx_has_the_tapes_nodes_and_edges() -> None:
    x = torch.randn(3, requires_grad=True)
    loss = (x.sin() * x.cos()).sum()
    view = ca.inspect(loss)
    graph = _captured(loss).to_networkx()
    assert nx.is_directed_acyclic_graph(graph)
    names = nx.get_node_attributes(graph, "name")
    assert sorted(names.values()) == ["AccumulateGrad", "CosBackward0", "GraphRoot", "MulBackward0", *_SIN_AND_SUM]
    by_name = {name: number for number, name in names.items()}
    edges = {(names[a], names[b]) for a, b in graph.edges}
    assert ("SumBackward0", "MulBackward0") in edges and ("MulBackward0", "SinBackward0") in edges
    assert nx.has_path(graph, by_name["SumBackward0"], by_name["AccumulateGrad"])
    read = view.to_networkx()
    assert {(read.nodes[a]["name"], read.nodes[b]["name"]) for a, b in read.edges} <= edges


@pytest.mark.parametrize("ways", [8, 12])
def test_to_networkx_has_the_edges_of_a_sum(ways: int) -> None:
    x = torch.randn(3, requires_grad=True) * 1
    loss = sum((x * number).cos().sum() for number in range(ways))
    assert isinstance(loss, torch.Tensor)
    read = {(a + 1, b + 1) for a, b in ca.inspect(loss).to_networkx().edges}
    assert set(_captured(loss).to_networkx().edges) == read | {(0, 1)}


def test_parameters_and_sequence_numbers_are_known() -> None:
    model = mlp()
    graph = _captured(model(torch.randn(2, 8)).sum())
    found = {call.parameter for call in graph.tape.calls if call.name == "AccumulateGrad"}
    assert found == {name for name, _ in model.named_parameters()}
    assert "parameter=0.weight" in graph.readable()
    assert all(call.sequence is not None for call in graph.tape.calls[1:])


def test_parameters_are_named_from_the_outermost_module() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

    outer = Outer()
    graph = _captured(outer.inner(torch.randn(2, 8)).sum())
    found = {call.parameter for call in graph.tape.calls if call.name == "AccumulateGrad"}
    assert found == {name for name, _ in outer.named_parameters()}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_source_lines_are_known_where_anomaly_mode_recorded_them() -> None:
    with torch.autograd.detect_anomaly(check_nan=False):
        x = torch.randn(3, requires_grad=True)
        y = x.sin()
        loss = y.sum()
        graph = _captured(loss)
    (call,) = [call for call in graph.tape.calls if call.name == "SinBackward0"]
    assert call.source is not None and "test_ir.py:" in call.source and call.source.endswith("in " + _here())
    line = int(call.source.split(":")[1].split()[0])
    assert "x.sin()" in Path(__file__).read_text().splitlines()[line - 1]
    assert f"SinBackward0 at {call.source}" in graph.readable()


def _here() -> str:
    return "test_source_lines_are_known_where_anomaly_mode_recorded_them"


def test_living_modules_are_searched_once_for_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture of a model whose names are known, or without parameters, searches nothing."""
    searched: list[int] = []
    parameter_names._search.in_no_module.clear()  # one of another test may have lain where the weight lies now
    search = parameter_names.all_parameter_names
    monkeypatch.setattr(parameter_names, "all_parameter_names", lambda: (searched.append(1), search())[1])
    model = nn.Linear(2, 2)
    captured = [_captured(model(torch.ones(1, 2)).sum()), _captured(model(torch.ones(1, 2)).exp().sum())]
    for each in captured:
        assert {call.parameter for call in each.tape.calls} == {None, "weight", "bias"}
    _captured(torch.ones(2, requires_grad=True).sin().sum())
    assert len(searched) == 1


def test_a_search_of_living_modules_lets_other_threads_make_tuples() -> None:
    """Which raise SystemError where somebody else refers to one that is being made, as a list of all objects does."""
    model, errors, ended = nn.Linear(2, 2), [], threading.Event()

    def make() -> None:
        try:
            while not ended.is_set():
                assert len(tuple(each for each in range(3))) == 3
        except BaseException as error:  # noqa: BLE001  shown below
            errors.append(error)

    thread = threading.Thread(target=make)
    with switching_every(1e-5):
        thread.start()
        try:
            for _ in range(20):
                found = parameter_names.all_parameter_names()
        finally:
            ended.set()
            thread.join()
    assert not errors and gc.isenabled()
    assert {found[id(each)].name for each in model.parameters()} == {"weight", "bias"}
    before = sys.getrefcount(model)
    parameter_names.all_parameter_names()
    assert sys.getrefcount(model) == before


_HOOKED = """
import sys
from torch import nn
from compiled_autograd.capture import parameter_names
model, heard = nn.Linear(2, 2), []
parameter_names.all_parameter_names()
sys.addaudithook(lambda event, _: heard.append(event) if event.startswith("gc.") else None)
names = parameter_names.all_parameter_names()
assert {names[id(each)].name for each in model.parameters()} == {"weight", "bias"}
print(heard)
"""


def test_no_hook_runs_while_all_objects_are_held() -> None:
    """An audit hook is Python, which lets other threads run; so it may come before the first object, and not after."""
    done = in_subprocess(_HOOKED)
    assert (done.returncode, done.stdout) == (0, "['gc.get_objects']\n"), done.stderr


def test_a_search_that_takes_long_is_not_made_for_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_names, "_SLOW_SEARCH_SECONDS", 0.0)
    monkeypatch.setattr(parameter_names, "_SEARCH_TIME_SHARE", 1e-6)
    monkeypatch.setattr(parameter_names._search, "next", 0.0)
    models = [nn.Linear(2, 2) for _ in range(2)]
    leaves = [list(model.parameters()) for model in models]
    assert [sorted(_names(each).values()) for each in leaves] == [["bias", "weight"], []]
    assert sorted(place.name for place in parameter_names.parameter_names_of(leaves[0]).values()) == ["bias", "weight"]
    monkeypatch.setattr(parameter_names._search, "next", 0.0)
    assert sorted(place.name for place in parameter_names.parameter_names_of(leaves[1]).values()) == ["bias", "weight"]


def test_parameters_can_be_swapped_after_they_were_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """``swap_tensors`` refuses a tensor that anything refers to weakly."""
    monkeypatch.setattr(parameter_names._search, "next", 0.0)
    model, lone = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    captured = _captured((model(torch.ones(1, 2)) * lone).sum())
    assert {call.parameter for call in captured.tape.calls} == {None, "weight", "bias"}
    del captured
    for tensor in (*model.parameters(), lone):
        torch.utils.swap_tensors(tensor, nn.Parameter(torch.zeros_like(tensor)))


def test_names_follow_what_the_module_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_names._search, "next", 0.0)
    model = nn.Linear(2, 2)
    weight = model.weight
    assert _names([weight]) == {id(weight): "weight"}
    model.weight = nn.Parameter(torch.ones(2, 2))
    assert _names([weight, model.weight]) == {id(model.weight): "weight"}


def _names(leaves: list[torch.Tensor]) -> dict[int, str]:
    return {key: place.name for key, place in parameter_names.parameter_names_of(leaves).items()}


def test_a_long_tape_is_not_read_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed after that, it would overflow the stack (2.13); it has no names then, and runs in the walk's order."""
    monkeypatch.setattr(tape, "MAX_NODES_READ", 6)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    x = torch.randn(2, 3)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    monkeypatch.setattr(tape, "walk", None)
    with ca.enable(backend="eager") as session:
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
    assert (session.stats().structure_misses, session.stats().hits) == (1, 1)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True) if p.grad is not None)
    assert session.last is not None and session.last.graph is not None
    assert {call.parameter for call in session.last.graph.tape.calls} == {None}
    assert len(tape.first_nodes([model(x).sum()])) == 7
    assert tape.fingerprint([model(x).sum()]) == tape.fingerprint([model(x).sum()])
