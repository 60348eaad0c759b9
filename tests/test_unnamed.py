"""Names of parameters that are looked for long after their backward, or never: they are right, or not known."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import signal
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd as ca
import shadow_cache
from compiled_autograd import ir
from compiled_autograd.capture import parameter_names, unnamed
from compiled_autograd.capture.parameter_names import Trace

from .helpers import expect, mlp, switching_every
from .stored import restart

Names = list[str | None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the store is. What is written need not outlast a loss of power here."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    yield tmp_path / "cache"
    ca.reset()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each search of all living modules."""
    asked: list[int] = []
    search = parameter_names.all_parameter_names
    monkeypatch.setattr(parameter_names, "all_parameter_names", lambda: (asked.append(1), search())[1])
    return asked


def _step(model: nn.Module, session: ca.Session, rows: int = 4) -> None:
    model.zero_grad()
    with session:
        model(torch.randn(rows, 8)).square().mean().backward()


def _warm(folder: Path, model: nn.Module, steps: int = 1, **settings: Any) -> ca.Session:
    """Train a model in a process for which another one has compiled; nothing of it was asked for its name."""
    other = copy.deepcopy(model)
    _step(other, ca.enable(backend="eager", cache_dir=folder))
    del other
    restart()
    session = ca.enable(backend="eager", cache_dir=folder, **settings)
    for _ in range(steps):
        _step(model, session)
    return session


def _names(session: ca.Session) -> Names:
    return [call.parameter for call in session.graphs()[-1].tape.calls if call.name == "AccumulateGrad"]


def _named(model: nn.Module) -> set[str | None]:
    return {name for name, _ in model.named_parameters()}


# ---- when they are looked for ----------------------------------------------------------------------------------------


def test_what_the_store_serves_has_no_name_until_somebody_asks(folder: Path, searches: list[int]) -> None:
    model = mlp()
    session = _warm(folder, model, steps=60, tune=True)  # enough to be timed against eager
    stats = session.stats()
    assert stats.hits + stats.tuning + sum(stats.bypasses.values()) == 60 and stats.compiles == 0
    assert stats.bypasses.keys() <= {"not_worth_it"}
    assert len(searches) == 1  # of the process that compiled
    assert set(_names(session)) == _named(model) and len(searches) == 2
    graph = session.graphs()[0]
    assert "parameter=0.weight" in graph.readable() and "of Sequential" in graph.readable("regions")
    read = {node["parameter"] for _, node in graph.to_networkx().nodes(data=True)}
    assert read == {None, *_named(model)} and len(searches) == 2


def test_nothing_holds_on_to_a_model_or_to_its_memory(folder: Path) -> None:
    model = mlp()
    session = _warm(folder, model)
    kept: list[Any] = [weakref.ref(each) for each in (model, *model.parameters())]
    memory = [parameter_names.StorageWeakRef(each.untyped_storage()) for each in model.parameters()]
    del model
    gc.collect()
    assert not [each for each in kept if each() is not None]
    assert all(each.expired() for each in memory)
    assert set(_names(session)) == {None}


def test_parameters_can_be_swapped_before_somebody_asks(folder: Path) -> None:
    """Nothing refers to them, not even weakly. What holds other memory now is not said to be what it was."""
    model = mlp()
    session = _warm(folder, model)
    first = next(model.parameters())
    model.zero_grad()
    torch.utils.swap_tensors(first, nn.Parameter(torch.zeros_like(first)))
    assert set(_names(session)) == _named(model) - {"0.weight"} | {None}


def test_a_hook_that_asks_is_told(folder: Path, searches: list[int]) -> None:
    model = mlp()
    hooked = copy.deepcopy(model)
    told: list[Names] = []
    for each in (hooked, model):
        session = ca.enable(backend="eager", cache_dir=folder)
        out = each(torch.randn(4, 8))
        out.register_hook(lambda gradient, session=session: told.append([g.readable() for g in session.graphs()]))
        with session:
            out.sum().backward()
        restart()
    expect(session.stats(), hits=1, captures=1, compiles=0)
    assert "parameter=0.weight" in str(told[-1] or session.last.graph.readable())  # type: ignore[union-attr]


def test_a_miss_in_a_process_that_hit_first_is_stored_with_names(folder: Path) -> None:
    """Also where the model of the hit has died unasked: those of the next one are looked for."""
    session = _warm(folder, mlp(), dynamic=False)
    gc.collect()
    model = mlp()
    _step(model, session, rows=5)
    assert session.last is not None and session.last.outcome == "shape_miss"
    assert "PowBackward0 after 4, dimension 0" in str(session.last.reasons[0])
    assert set(_names(session)) == _named(model)
    with shadow_cache.open(folder) as store:
        (identity,) = {entry.structure for entry in store.entries()}
        assert {entry.module for entry in store.entries()} == {"Sequential"}
        stored = store.structure(identity)
    assert stored is not None
    assert {call.parameter for call in stored.calls if call.name == "AccumulateGrad"} == _named(model)


def test_names_are_no_part_of_what_is_found(folder: Path) -> None:
    """The store of a process whose modules have other names serves this one."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    model = Other()
    texts = []
    for each in (model.layers, model):
        session = ca.enable(backend="eager", cache_dir=folder)
        _step(each, session)
        tape = session.graphs()[0].tape
        if each is model:
            expect(session.stats(), hits=1, captures=1, compiles=0)
        before = tape.structure()
        assert set(_names(session)) == {f"layers.{name}" for name in _named(model.layers)}
        texts.append((hash(tuple(map(tuple, before))), before == tape.structure(), ir.encode_keys(before)))
        restart()
    assert texts[0] == texts[1] and texts[0][1]


def test_a_tape_in_another_order_has_its_names() -> None:
    model, leaf = nn.Linear(3, 2), ir.TapeCall(1, "AccumulateGrad")
    unnamed.name_leaves([leaf], [model.weight])
    other = leaf.made_at(7)
    unnamed.let_go_of_the_unnamed()
    third = other.made_at(8)
    assert [each.parameter for each in (third, leaf, other)] == ["weight"] * 3
    assert (leaf.module, other.sequence, third.sequence) == ("Linear", 7, 8)
    assert leaf.look_up is other.look_up is third.look_up is None


def test_modes_and_subclasses_of_the_users_are_not_asked() -> None:
    asked: list[Any] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(function)
            return function(*args, **(kwargs or {}))

    model, leaf = nn.Linear(3, 2), ir.TapeCall(1, "AccumulateGrad")
    unnamed.name_leaves([leaf], [model.weight])
    with Mode():
        unnamed.let_go_of_the_unnamed()
        assert leaf.parameter == "weight"
    assert not asked


def test_a_trace_is_of_no_use_elsewhere() -> None:
    trace = Trace(nn.Parameter(torch.ones(2)))
    assert copy.deepcopy([trace])[0] is trace
    with pytest.raises(TypeError):
        pickle.dumps(trace)


def test_what_leaves_no_trace_is_looked_for_at_once() -> None:
    class Sub(nn.Parameter):
        pass

    model = nn.Linear(2, 2)
    model.weight = Sub(torch.ones(2, 2))
    leaf = ir.TapeCall(1, "AccumulateGrad")
    unnamed.name_leaves([leaf], [model.weight])
    unnamed.let_go_of_the_unnamed()
    weight = weakref.ref(model.weight)
    del model
    gc.collect()
    assert weight() is None and leaf.parameter == "weight"


# ---- what the names of modules are -----------------------------------------------------------------------------------


def test_modules_that_change_places_change_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parameters = list(model.parameters())
    assert _now(parameters) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    model[0], model[1] = model[1], model[0]
    assert _now(parameters) == ["1.weight", "1.bias", "0.weight", "0.bias"]


def test_a_part_that_outlives_its_model_has_a_name_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    part = model[1]
    assert _now([part.weight]) == ["1.weight"]
    del model
    gc.collect()
    assert _now([part.weight]) == ["weight"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_have_names_again_and_again() -> None:
    """Theirs are no dictionaries."""
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    with ca.enable(backend="eager") as session:
        for make in (torch.sum, torch.exp):
            make(model(torch.ones(1, 2))).sum().backward()
    assert session.stats().bypasses == {}
    assert "1.weight" in _names(session)


def _now(parameters: list[torch.Tensor]) -> Names:
    found = parameter_names.parameter_names_of(parameters)
    return [found[id(each)].name if id(each) in found else None for each in parameters]


# ---- any program -----------------------------------------------------------------------------------------------------


class _Program:
    """Makes, moves, replaces and drops parameters at random, each with a number in its name, and asks for the names of
    tapes that were made on the way. It has its own list of what is alive."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.numbers = iter(range(1_000_000))
        self.models: list[nn.Module] = []
        self.tapes: list[tuple[list[int], list[Any], list[ir.TapeCall]]] = []
        self.ids: dict[int, int] = {}
        self.memory: dict[int, Any] = {}
        """By their numbers, which memory they have, and what of it. One that was made of just that of one that is gone
        is that one, renamed."""
        self.found = self.renamed = self.not_known = self.in_the_place_of_another = 0

    def living(self) -> list[nn.Module]:
        return [module for model in self.models for module in model.modules()]

    def parameters(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        return [(each, *item) for each in self.living() for item in each._parameters.items() if item[1] is not None]

    def add(self, module: nn.Module, data: torch.Tensor, memory: Any) -> None:
        number = next(self.numbers)
        self.memory[number] = memory, _layout(data)
        parameter = nn.Parameter(data)
        self.ids[number] = id(parameter)
        module.register_parameter(f"p{number}", parameter)

    def some(self) -> tuple[nn.Module, str, nn.Parameter]:
        return self.rng.choice(self.parameters())

    def new_model(self) -> None:
        model = nn.Module()
        for name in range(self.rng.randrange(1, 4)):
            model.add_module(f"m{name}", nn.Module())
        flat, shared = torch.zeros(40), object()
        for module in model.modules():
            for _ in range(self.rng.randrange(1, 3)):
                start, is_own = self.rng.randrange(0, 36), self.rng.random() < 0.6
                data = torch.zeros(4) if is_own else flat[start : start + 4]
                self.add(module, data, object() if is_own else shared)
        self.models.append(model)

    def drop_model(self) -> None:
        if len(self.models) > 1:
            self.models.pop(self.rng.randrange(len(self.models)))

    def drop(self) -> None:
        module, name, _ = self.some()
        del module._parameters[name]
        del _

    def replace(self) -> None:
        """Its memory goes with it, or stays with what comes in its place, in another layout too."""
        module, name, parameter = self.some()
        data = parameter.data
        kept = self.rng.choice([data, parameter.detach(), data[:2], data.as_strided(data.shape, [0]), None])
        memory = object() if kept is None else self.memory[int(name[1:])][0]
        del module._parameters[name], parameter, data
        self.add(module, torch.zeros(4) if kept is None else kept, memory)

    def give_other_memory(self) -> None:
        (_, name, parameter), (_, other, giver) = self.some(), self.some()
        is_new = self.rng.random() < 0.5
        parameter.data = torch.zeros(4) if is_new else giver.data
        memory = object() if is_new else self.memory[int(other[1:])][0]
        self.memory[int(name[1:])] = memory, _layout(parameter)

    def swap(self) -> None:
        (_, one, first), (_, other, second) = self.some(), self.some()
        if first is not second:
            torch.utils.swap_tensors(first, second)
            numbers = int(one[1:]), int(other[1:])
            self.memory.update(zip(numbers, [self.memory[number] for number in reversed(numbers)], strict=True))

    def move(self) -> None:
        module, name, parameter = self.some()
        del module._parameters[name]
        self.rng.choice(self.living()).register_parameter(name, parameter)

    def move_modules(self) -> None:
        model = self.rng.choice(self.models)
        names = list(model._modules)
        if names:
            one, other = self.rng.choice(names), self.rng.choice(names)
            inside = model._modules
            inside[one], inside[other] = inside[other], inside[one]

    def wrap(self) -> None:
        index = self.rng.randrange(len(self.models))
        outer = nn.Module()
        outer.add_module("inner", self.models[index])
        self.models[index] = outer

    def tape(self) -> None:
        chosen = [self.some() for _ in range(self.rng.randrange(1, 5))]
        chosen = list({name: each for each in chosen for name in (each[1],)}.values())
        calls = [ir.TapeCall(number, "AccumulateGrad") for number in range(len(chosen))]
        unnamed.name_leaves(calls, [parameter for _, _, parameter in chosen])
        unnamed.let_go_of_the_unnamed()
        numbers = [int(name[1:]) for _, name, _ in chosen]
        self.tapes.append((numbers, [self.memory[number] for number in numbers], calls))

    def ask(self) -> None:
        if not self.tapes:
            return
        numbers, memories, calls = self.tapes.pop(self.rng.randrange(len(self.tapes)))
        alive = {int(name[1:]): parameter for _, name, parameter in self.parameters()}
        ids = set(map(id, alive.values()))
        for number, memory, call in zip(numbers, memories, calls, strict=True):
            waited = call.look_up is not None
            if number not in alive and self.ids[number] in ids:
                self.in_the_place_of_another += 1
            name = call.parameter
            if name is None:
                assert number not in alive or self.memory[number] != memory, f"p{number} is there"
                self.not_known += 1
                continue
            told = int(name.rpartition("p")[2])
            assert told == number or (number not in alive and self.memory[told] == memory)
            if waited:
                assert told in alive
                self.found += told == number
                self.renamed += told != number

    def run(self, steps: int) -> None:
        likely: list[tuple[int, Callable[[], None]]] = [
            *((1, each) for each in (self.new_model, self.drop_model, self.swap, self.wrap, self.give_other_memory)),
            *((2, each) for each in (self.drop, self.move, self.move_modules)),
            *((6, each) for each in (self.replace, self.tape, self.ask)),
        ]
        for _ in range(steps):
            if not self.parameters():
                self.new_model()
            self.rng.choices([each for _, each in likely], [weight for weight, _ in likely])[0]()


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def test_no_name_is_that_of_another_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    found = renamed = not_known = in_the_place_of_another = 0
    for seed in range(30):
        program = _Program(seed)
        monkeypatch.setattr(parameter_names, "_living_modules", program.living)
        program.run(400)
        found += program.found
        renamed += program.renamed
        not_known += program.not_known
        in_the_place_of_another += program.in_the_place_of_another
        parameter_names._search.found.clear()
        parameter_names._search.in_no_module.clear()
    assert min(found, not_known, in_the_place_of_another) > 100 and renamed > 10


def test_a_search_goes_on_while_another_finds_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of what was found was not made in one go: ``gc`` may run at each tuple, and other threads then."""
    model = mlp()
    (name, *_) = parameter_names.parameter_names_of([*model.parameters()]).values()
    found = parameter_names._search.found
    found.update(dict.fromkeys(range(100), name))

    def finds(phase: str, info: dict[str, int]) -> None:
        found[len(found)] = name

    monkeypatch.setattr(parameter_names, "_living_modules", list)
    threshold, before = gc.get_threshold(), len(found)
    gc.callbacks.append(finds)
    gc.set_threshold(1)
    try:
        parameter_names._searched()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(finds)
    assert len(found) > before and parameter_names._search.found.items() >= dict.fromkeys(range(100), name).items()
    ca.reset()


def test_nothing_of_a_dict_that_users_have_made_is_run() -> None:
    """DeepSpeed puts one in the place of a module's parameters that gathers those that are asked for."""
    asked: list[str] = []

    class Gathers(OrderedDict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            asked.append(name)
            raise AttributeError(name)

        __missing__ = __getitem__

        def items(self) -> Any:
            return [self[""]]

        values = keys = items

    model, other = (torch.nn.Sequential(torch.nn.Linear(3, 3)) for _ in range(2))
    leaves = list(model.parameters())
    for each in (model[0], other[0]):
        object.__setattr__(each, "_parameters", Gathers(each._parameters))
    found = parameter_names.parameter_names_of(leaves)
    assert [found[id(each)].name for each in leaves] == ["0.weight", "0.bias"]
    assert [found[id(each)].parameter() for each in leaves] == leaves
    dict.pop(model[0].__dict__["_parameters"], "weight")
    assert found[id(leaves[0])].parameter() is None and not asked


def test_names_follow_the_order_of_a_dict_that_was_reordered() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    modules = OrderedDict(model._modules)
    modules.move_to_end("0")
    object.__setattr__(model, "_modules", modules)
    found = parameter_names.parameter_names_of([*model.parameters()])
    assert [each.name for each in found.values()] == [name for name, _ in model.named_parameters()]


def test_a_module_that_is_half_made_has_no_names() -> None:
    """Another thread is about to make it, and its parent has it already."""
    model, half = mlp(), torch.nn.Linear(3, 3)
    model.append(half)
    del half.__dict__["_modules"]
    (name, *_) = parameter_names.parameter_names_of([*model[0].parameters()]).values()
    assert name.name == "0.weight"


class _Raises(dict[Any, Any]):
    def fails(self, *_: Any) -> Any:
        raise AssertionError("it was run")

    items = values = keys = copy = get = __iter__ = __getitem__ = __missing__ = __len__ = __contains__ = fails


class _Map(Mapping[str, Any]):
    __getitem__ = __iter__ = __len__ = _Raises.fails


class _Key(str):
    __hash__ = __eq__ = _Raises.fails  # type: ignore[assignment]

    @classmethod
    def in_a_dict(cls) -> Any:
        """It was hashed as it could be."""
        cls.__hash__ = str.__hash__  # type: ignore[method-assign]
        found = OrderedDict({cls("odd"): 1, "weight": torch.nn.Parameter(torch.ones(1))})
        cls.__hash__ = _Raises.fails  # type: ignore[assignment, method-assign]
        return found


def _popped() -> Any:
    found = OrderedDict(a=torch.nn.Parameter(torch.ones(1)), b=None)
    dict.pop(found, "b")
    return found


_ODD: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "a list": lambda: [1],
    "not such": lambda: {"a": object(), "b": "c", "weight": None},
    "other keys": lambda: {1: torch.nn.Linear(2, 2), None: torch.nn.Parameter(torch.ones(1))},
    "keys with code": _Key.in_a_dict,
    "a mapping": _Map,
    "a dict with code": lambda: _Raises(a=torch.nn.Linear(2, 2)),
    "changed by methods of dict": _popped,
}


@pytest.mark.parametrize("kind", ["_modules", "_parameters", "_buffers"])
@pytest.mark.parametrize("odd", [*_ODD, "nothing"])
def test_what_a_module_may_have_besides_is_passed_over(kind: str, odd: str) -> None:
    """It may be anybody's: a backward of another model, which has written its gradients by then, raised its error."""
    model, others = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)), torch.nn.Linear(3, 3)
    plain = torch.nn.Linear(3, 3)
    for each in (model, others):
        if odd == "nothing":
            del each.__dict__[kind]
        else:
            each.__dict__[kind] = _ODD[odd]()
    x = torch.ones(1, 3)
    with ca.enable(backend="eager") as session:
        plain(x).sum().backward()
    expect(session.stats(), structure_misses=1, captures=1)
    assert session.last is not None and session.last.graph is not None
    assert [call.parameter for call in session.last.graph.tape.calls if call.parameter] == ["weight", "bias"]
    assert {node.parameter for node in ca.inspect(plain(x).sum()).nodes} == {None, "weight", "bias"}
    if kind != "_modules":
        names = {node.parameter for node in ca.inspect(model[1](model[0](x)).sum()).nodes}
        assert names == {None, "0.weight", "0.bias", "1.weight", "1.bias"}


class _Part(str, Enum):
    FIRST, SECOND = "first", "second"


class _SaysOtherwise(torch.nn.Linear):
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise AssertionError("it was run")


def test_names_may_be_of_any_kind_of_string() -> None:
    model, other = torch.nn.ModuleDict({each: torch.nn.Linear(2, 2) for each in _Part}), torch.nn.Linear(2, 2)
    other.__class__ = _SaysOtherwise
    assert [each.name for each in parameter_names.parameter_names_of([*model.parameters()]).values()] == [
        "first.weight",
        "first.bias",
        "second.weight",
        "second.bias",
    ]
    first = parameter_names.all_parameter_names()[id(model[_Part.FIRST].weight)]
    assert first.parameter() is model[_Part.FIRST].weight
    model[_Part.FIRST] = torch.nn.Linear(2, 2)
    assert first.parameter() is model[_Part.FIRST].weight


def test_a_dict_that_changes_while_it_is_read() -> None:
    """Whatever makes tuples has ``gc`` run what other threads, or finalizers, do."""
    model = torch.nn.Linear(3, 3)
    ordered = OrderedDict(model._parameters | {str(number): None for number in range(50)})
    object.__setattr__(model, "_parameters", ordered)

    def change(phase: str, _: Any) -> None:
        if phase == "stop":
            ordered["other"] = ordered.pop("other", None)

    held, threshold = [*zip(range(5000), range(5000), strict=True)], gc.get_threshold()  # Python has none left to reuse
    gc.callbacks.append(change)
    gc.set_threshold(1)
    try:
        found = parameter_names.all_parameter_names()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(change)
    assert held and [found[id(each)].name for each in model.parameters()] == ["weight", "bias"]


class _Preempted(OrderedDict[str, Any]):
    """A signal comes while it is read."""

    def keys(self, *_: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return super().keys()


@pytest.mark.parametrize(
    ("name", "preempted"), [("OrderedDict", _Preempted), ("itertools", SimpleNamespace(chain=_Preempted().keys))]
)
def test_what_a_handler_raises_is_no_change_of_a_dict(
    name: str, preempted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for one, and the handler's error was lost: a ``RuntimeError`` is what Python raises then."""

    def handler(number: int, frame: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise RuntimeError("time is up")

    model = torch.nn.Linear(3, 3)
    object.__setattr__(model, "_parameters", _Preempted(model._parameters))
    monkeypatch.setattr(parameter_names, name, preempted)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match="time is up"):
            parameter_names.parts(model, "_parameters")
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_threads_that_ask_at_once_are_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [mlp(depth=3) for _ in range(40)]
    living = [module for model in models for module in model.modules()]
    monkeypatch.setattr(parameter_names, "_living_modules", lambda: living)
    tapes: list[list[ir.TapeCall]] = []
    wrong: list[Any] = []
    waiting = threading.Barrier(4)

    def ask(numbers: list[int]) -> None:
        try:
            waiting.wait(60)
            for number in numbers:
                names = [call.parameter for call in tapes[number]]
                if names != [name for name, _ in models[number].named_parameters()]:
                    wrong.append((number, names))
        except BaseException as error:  # noqa: BLE001  shown below
            wrong.append(error)

    orders = [random.Random(seed).sample(range(len(models)), len(models)) for seed in range(4)]
    threads = [threading.Thread(target=ask, args=(order,)) for order in orders]
    for number, model in enumerate(models):
        parameters = list(model.parameters())
        tapes.append([ir.TapeCall(index, "AccumulateGrad") for index in range(len(parameters))])
        unnamed.name_leaves(tapes[-1], parameters)
        if number == len(models) // 2:
            unnamed.let_go_of_the_unnamed()
    with switching_every(1e-5):
        for thread in threads:
            thread.start()
        unnamed.let_go_of_the_unnamed()
        for thread in threads:
            thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
