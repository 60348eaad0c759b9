"""Fold the nodes of a tape into a tree of modules. Equal layers and repeated stretches of nodes appear once.

Two layers are equal if they are successive numbered children of one module, and their nodes agree in number and in
everything but edges, source lines and sequence numbers. Layers may differ by a few own nodes: nodes between two layers
belong to one of the two, and the last layer has no such nodes after it.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .nodes import TapeNode

_LONGEST_PERIOD = 64
_NOT_WORTH_IT = 8
"""A repetition is folded only if it hides more nodes than this."""
_FEW = 4
"""Maximum difference of own nodes between equal layers."""


@dataclass(slots=True)
class Module:
    """A module of the tree.

    Attributes:
        path: the names of ``named_modules``, from the outermost module on.
        own: indices of the module's own nodes, in the engine's order.
        inner: the child modules by name, in the order in which the engine reaches them.
    """

    path: tuple[str, ...]
    own: list[int] = field(default_factory=list)
    inner: dict[str, Module] = field(default_factory=dict)

    def count(self) -> int:
        """Return the number of nodes, including those of inner modules."""
        return len(self.own) + sum(each.count() for each in self.inner.values())

    def indices(self) -> list[int]:
        """Return the indices of the nodes, including those of inner modules."""
        return [*self.own, *(index for each in self.inner.values() for index in each.indices())]


@dataclass(frozen=True, slots=True)
class Layers:
    """A run of one or more equal modules, lowest number first."""

    modules: tuple[Module, ...]

    @property
    def name(self) -> str:
        """The name of the run: ``blocks.0 to blocks.11``."""
        first, last = (".".join(each.path) for each in (self.modules[0], self.modules[-1]))
        return first if first == last else f"{first} to {last}"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Successive nodes of a module that repeat ``times`` times; ``indices`` are those of the first repetition."""

    indices: tuple[int, ...]
    times: int


def tree_of(nodes: Sequence[TapeNode]) -> Module:
    """Return the tree of modules. The root is the model; its own nodes belong to no inner module."""
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
    """Return the inner modules as runs of equal layers."""
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
    """Return the number in the name of a list's module; None for other names."""
    return int(name) if name.isascii() and name.isdigit() and len(name) < 10 else None


def _are_alike(one: Module, other: Module, nodes: Sequence[TapeNode]) -> bool:
    """Return whether two layers are shown as one."""
    more, less = _own(one, nodes), _own(other, nodes)
    differ = (more - less).total() + (less - more).total()
    return differ <= (_FEW if one.inner else 0) and _inner(one, nodes) == _inner(other, nodes)


def _own(module: Module, nodes: Sequence[TapeNode]) -> Counter[str]:
    return Counter(str(looks_of(nodes[index])) for index in module.own)


def _inner(module: Module, nodes: Sequence[TapeNode]) -> Hashable:
    looks = ((name, *sorted(_own(each, nodes).items()), _inner(each, nodes)) for name, each in module.inner.items())
    return tuple(sorted(looks, key=str))


def differences(layers: Layers, nodes: Sequence[TapeNode]) -> list[str]:
    """Return the differences of layers from the one that is shown, a line for each set of layers that differ alike."""
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
    """Return the properties in which equal nodes agree."""
    saved = tuple((each.name, each.shape, each.dtype, each.device, each.bytes, each.kind) for each in node.saved)
    parameter = node.parameter and node.parameter.rpartition(".")[2]
    return (node.name, parameter, len(node.edges), node.gradients, saved, node.hooks)


Part = Stretch | Layers


def parts_of(module: Module, nodes: Sequence[TapeNode]) -> list[Part]:
    """Return the parts of a module, in the order in which the engine reaches them."""
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
    """Return the layer that represents a run of equal layers: the first that the engine reaches."""
    return min(layers.modules, key=lambda module: min(module.indices(), default=0))


def folded_names(nodes: Sequence[TapeNode]) -> dict[str, str]:
    """Return the name of each module with equal layers folded: ``blocks.{0 to 11}.mlp``; empty for the model."""
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
    """Fold repetitions in the nodes of a module, such as those of a cell in a loop, or of a chain."""
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
    """Return the period that hides most nodes from here on, and its repetitions; (1, 1) if none hides enough."""
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
