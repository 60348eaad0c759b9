"""The nodes of a tape as a tree of modules, in which equal layers and equal stretches are told once.

Two layers are equal if they have the same numbered place in the same module, one behind the other, and nodes that agree
in number and in everything but their edges, lines and sequence numbers. The layers at the ends may have a few nodes of
their own more or less: what lies between two layers belongs to one of them, and the last has none behind it.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .nodes import TapeNode

_LONGEST_PERIOD = 64
_NOT_WORTH_IT = 8
"""To leave out so many nodes, or fewer, is not worth a line."""
_FEW = 4
"""The number of own nodes by which layers of one run may differ."""


@dataclass(slots=True)
class Module:
    """A module of the tree.

    Attributes:
        path: as ``named_modules`` has it.
        own: indices of its own nodes, in the engine's order.
        inner: the modules inside it, in the order in which the engine comes to them.
    """

    path: tuple[str, ...]
    own: list[int] = field(default_factory=list)
    inner: dict[str, Module] = field(default_factory=dict)

    def count(self) -> int:
        """Nodes, those of inner modules included."""
        return len(self.own) + sum(each.count() for each in self.inner.values())

    def indices(self) -> list[int]:
        """Of its nodes, those of inner modules included."""
        return [*self.own, *(index for each in self.inner.values() for index in each.indices())]


@dataclass(frozen=True, slots=True)
class Layers:
    """Equal modules, lowest number first; one alone is a run too."""

    modules: tuple[Module, ...]

    @property
    def name(self) -> str:
        """As in ``blocks.0 to blocks.11``."""
        first, last = (".".join(each.path) for each in (self.modules[0], self.modules[-1]))
        return first if first == last else f"{first} to {last}"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Nodes of a module that come one behind the other, ``times`` times alike; ``indices`` are those of the first."""

    indices: tuple[int, ...]
    times: int


def tree_of(nodes: Sequence[TapeNode]) -> Module:
    """The model, with the nodes that belong to no inner module as its own."""
    root = Module(())
    modules = {"": root}
    for index, node in enumerate(nodes):
        if node.module not in modules:
            modules[node.module] = _module_at(root, tuple(node.module.split(".")))
        modules[node.module].own.append(index)
    return root


def _module_at(root: Module, path: tuple[str, ...]) -> Module:
    module = root
    for end, name in enumerate(path, 1):
        module = module.inner.setdefault(name, Module(path[:end]))
    return module


def runs_of_layers(module: Module, nodes: Sequence[TapeNode]) -> list[Layers]:
    """The inner modules, equal layers together."""
    runs: list[list[Module]] = []
    last: tuple[Module, int] | None = None
    for name, inner in module.inner.items():
        number = number_of(name)
        if last is not None and number is not None and abs(number - last[1]) == 1 and _are_alike(inner, last[0], nodes):
            runs[-1].append(inner)
        else:
            runs.append([inner])
        last = None if number is None else (inner, number)
    return [Layers(tuple(sorted(run, key=lambda each: (len(each.path[-1]), each.path[-1])))) for run in runs]


def number_of(name: str) -> int | None:
    """The number that a module of a list has for a name; None of another name."""
    return int(name) if name.isascii() and name.isdigit() and len(name) < 10 else None


def _are_alike(one: Module, other: Module, nodes: Sequence[TapeNode]) -> bool:
    """Return whether two layers are told as one."""
    more, less = _own(one, nodes), _own(other, nodes)
    differ = (more - less).total() + (less - more).total()
    return differ <= (_FEW if one.inner else 0) and _inner(one, nodes) == _inner(other, nodes)


def _own(module: Module, nodes: Sequence[TapeNode]) -> Counter[str]:
    return Counter(str(looks_of(nodes[index])) for index in module.own)


def _inner(module: Module, nodes: Sequence[TapeNode]) -> Hashable:
    looks = ((name, *sorted(_own(each, nodes).items()), _inner(each, nodes)) for name, each in module.inner.items())
    return tuple(sorted(looks, key=str))


def differences(layers: Layers, nodes: Sequence[TapeNode]) -> list[str]:
    """What layers have more or less than the one that is shown, a line for those with the same."""
    first = shown(layers)
    names = Counter(nodes[index].name for index in first.own)
    alike: dict[str, list[Module]] = {}
    for each in layers.modules:
        own = Counter(nodes[index].name for index in each.own)
        texts = [f"{count} {name} more" for name, count in (own - names).items()]
        texts += [f"{count} {name} less" for name, count in (names - own).items()]
        if texts:
            alike.setdefault(", ".join(texts), []).append(each)
    return [f"{Layers(tuple(modules)).name}: {text}" for text, modules in alike.items()]


def looks_of(node: TapeNode) -> Hashable:
    """What has to be the same of two nodes."""
    saved = tuple((each.name, each.shape, each.dtype, each.device, each.bytes, each.kind) for each in node.saved)
    parameter = node.parameter and node.parameter.rpartition(".")[2]
    return (node.name, parameter, len(node.edges), node.gradients, saved, node.hooks)


Part = Stretch | Layers


def parts_of(module: Module, nodes: Sequence[TapeNode]) -> list[Part]:
    """What a module consists of, in the order in which the engine comes to it."""
    parts: list[Part] = []
    at = 0
    for layers in runs_of_layers(module, nodes):
        entered = min(shown(layers).indices(), default=0)
        before = bisect.bisect(module.own, entered)
        parts += stretches(module.own[at:before], nodes)
        parts.append(layers)
        at = max(at, before)
    return parts + stretches(module.own[at:], nodes)


def shown(layers: Layers) -> Module:
    """The one of some equal layers that stands for all: the first that the engine comes to."""
    return min(layers.modules, key=lambda module: min(module.indices(), default=0))


def folded_names(nodes: Sequence[TapeNode]) -> dict[str, str]:
    """What each module is called where equal layers are one: ``blocks.{0 to 11}.mlp``; the model has no name."""
    names: dict[str, str] = {}
    _name(tree_of(nodes), "", nodes, names)
    return names


def _name(module: Module, name: str, nodes: Sequence[TapeNode], names: dict[str, str]) -> None:
    names[".".join(module.path)] = name
    for layers in runs_of_layers(module, nodes):
        first, last = layers.modules[0].path[-1], layers.modules[-1].path[-1]
        own = first if first == last else f"{{{first} to {last}}}"
        for each in layers.modules:
            _name(each, f"{name}.{own}" if name else own, nodes, names)


def stretches(indices: Sequence[int], nodes: Sequence[TapeNode]) -> list[Stretch]:
    """Nodes of a module, in which repetitions are told once: of a cell in a loop, of a chain."""
    numbers: dict[Hashable, int] = {}
    looks = [numbers.setdefault(looks_of(nodes[index]), len(numbers)) for index in indices]
    found: list[Stretch] = []
    single: list[int] = []
    at = 0
    while at < len(looks):
        period, times = _repetition(looks, at)
        if times == 1:
            single.append(indices[at])
        else:
            found += [Stretch(tuple(single), 1)] if single else []
            found.append(Stretch(tuple(indices[at : at + period]), times))
            single = []
        at += period * times
    return [*found, Stretch(tuple(single), 1)] if single else found


def _repetition(looks: Sequence[int], at: int) -> tuple[int, int]:
    """The period that repeats from here and saves most, and how often; (1, 1) where none saves enough."""
    best, saved = (1, 1), _NOT_WORTH_IT
    for period in range(1, min(_LONGEST_PERIOD, (len(looks) - at) // 2) + 1):
        if looks[at] != looks[at + period]:
            continue
        end = at + period
        while end < len(looks) and looks[end] == looks[end - period]:
            end += 1
        times = (end - at) // period
        if (times - 1) * period > saved:
            best, saved = (period, times), (times - 1) * period
    return best
