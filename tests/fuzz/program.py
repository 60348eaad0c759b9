"""What a random tape is made of: plain data, drawn once, run as often as one likes, and printed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

SKIP = "skip"
"""An operator that hands on its first input: what the shrinker puts in place of others."""


@dataclass(frozen=True)
class Leaf:
    """A tensor that exists before the forward.

    Attributes:
        dims: a letter for each dimension (its size is the step's), or ``"1"``.
        layout: how it lies in memory, see ``values.LAYOUTS``.
        trained: whether it requires a gradient.
        hook: what is hooked onto it, see ``hooks``; 0 is nothing.
    """

    dims: str
    layout: str = "contiguous"
    trained: bool = True
    hook: int = 0


@dataclass(frozen=True)
class Operator:
    """One operator of a program; its result joins the pool, which begins with the leaves.

    Attributes:
        name: in ``operators.TABLE``.
        first, second: positions in the pool.
        salt: decides whatever else it draws, dimensions and layouts of its weights for example.
        hook: what is hooked onto its result.
        packed: saved tensors go through hooks of the user's.
    """

    name: str
    first: int
    second: int
    salt: int = 0
    hook: int = 0
    packed: int = 0


@dataclass(frozen=True)
class Program:
    """A program: a forward, a way to ask for gradients, and what happens from step to step.

    Attributes:
        seed: of all values.
        dtype: of the leaves.
        sizes: for each step, the size of each letter.
        outputs: positions in the pool that gradients are asked of.
        mode: how, see ``backward.MODES``.
        gradient: the layout of ``gradient=`` arguments.
        grads: what becomes of ``.grad`` between steps: none, keep, zero, given.
        hold: the program holds its intermediate results during the backward.
        cousin: an operator whose salt is another one in every second run of the program; -1 for none.
        again: in memory alone, or forgotten and loaded from a folder: memory, reload, process.
        threads: how many run it at once.
        dynamic: the setting.
    """

    seed: int
    leaves: tuple[Leaf, ...]
    operators: tuple[Operator, ...]
    outputs: tuple[int, ...]
    sizes: tuple[tuple[tuple[str, int], ...], ...]
    dtype: str = "float64"
    mode: str = "sum"
    gradient: str = "contiguous"
    grads: str = "none"
    hold: bool = True
    cousin: int = -1
    again: str = "memory"
    threads: int = 1
    dynamic: bool | None = None

    def replace(self, **changes: Any) -> Program:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def varied(self) -> Program:
        """The cousin: the same program but for one operator's salt."""
        operators = list(self.operators)
        operators[self.cousin] = dataclasses.replace(operators[self.cousin], salt=operators[self.cousin].salt + 1)
        return self.replace(operators=tuple(operators))

    def to_json(self) -> str:
        """As text, for ``--program``."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))


def from_json(text: str) -> Program:
    """What ``to_json`` gave."""
    values = json.loads(text)
    values["leaves"] = tuple(Leaf(**each) for each in values["leaves"])
    values["operators"] = tuple(Operator(**each) for each in values["operators"])
    values["outputs"] = tuple(values["outputs"])
    values["sizes"] = tuple(tuple((name, size) for name, size in step) for step in values["sizes"])
    return Program(**values)


def describe(program: Program) -> str:
    """The program, a line for each part, those that do nothing left out."""
    plain = Program(0, (), (), (), ())
    settings = [
        f"{field.name}={getattr(program, field.name)!r}"
        for field in dataclasses.fields(program)
        if field.name not in ("leaves", "operators", "outputs", "sizes")
        and getattr(program, field.name) != getattr(plain, field.name)
    ]
    lines = ["Program " + ", ".join(settings)]
    lines += [f"  sizes {' | '.join(' '.join(f'{name}={size}' for name, size in step) for step in program.sizes)}"]
    for index, leaf in enumerate(program.leaves):
        more = ("" if leaf.trained else ", frozen") + (f", hook {leaf.hook}" if leaf.hook else "")
        lines.append(f"  v{index} = leaf({', '.join(leaf.dims)}; {leaf.layout}{more})")
    names = {index: f"v{index}" for index in range(len(program.leaves))}
    for index, operator in enumerate(program.operators, len(program.leaves)):
        if operator.name == SKIP:
            names[index] = names[operator.first]
            continue
        names[index] = f"v{index}"
        more = (f", hook {operator.hook}" if operator.hook else "") + (", packed" if operator.packed else "")
        given = f"{names[operator.first]}, {names[operator.second]}"
        lines.append(f"  v{index} = {operator.name}({given}; salt {operator.salt}{more})")
    lines.append(f"  {program.mode} of {', '.join(names[index] for index in program.outputs)}")
    return "\n".join(lines)
