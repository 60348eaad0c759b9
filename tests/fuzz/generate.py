"""A program from a seed."""

from __future__ import annotations

import random

from . import functions, operators_nn, operators_views  # noqa: F401 (they enter their operators into the table)
from .backward import MODES
from .hooks import ON_LEAVES, ON_RESULTS
from .operators import TABLE
from .program import Leaf, Operator, Program
from .values import LAYOUTS

_SIZES = (0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9, 16, 17)
_PRODUCTS = ("residual", "several_products", "linear", "pointwise", "square", "binary", "laid_out", "softmax")
"""Of these are programs with products so large that libraries cut them into blocks."""
_SHAPES = ("a", "ab", "ab", "ab", "ab", "aa", "bb", "abc", "abc", "abcd", "abcd", "a1b", "1ab", "abcde", "1b", "")


def generate(seed: int, backend: str = "eager") -> Program:
    """The program of a seed: smaller for a backend whose compiling takes seconds."""
    draw = random.Random(f"{seed} {backend}")
    slow = backend != "eager"
    dtypes = {"float64": 12, "float32": 4} if slow else {"float64": 10, "float32": 5, "complex128": 3, "bfloat16": 1}
    if slow and draw.random() < 0.08:
        dtypes = {"complex128": 1}
    dtype = _weighted(draw, dtypes)
    again = _weighted(draw, {"memory": 6, "reload": 6} if slow else {"memory": 70, "reload": 28, "process": 2})
    threads = 2 if draw.random() < (0.04 if slow else 0.08) else 1
    wide = draw.random() < (0.15 if slow else 0.03)
    leaves = _leaves(draw, "ab" if wide else draw.choice(_SHAPES))
    most = 6 if slow else 9
    operators = _operators(draw, len(leaves), draw.randint(2 if slow else 1, 5 if wide else most), dtype, wide)
    count = len(leaves) + len(operators)
    steps = 6 if slow else draw.choice((4, 4, 5))
    outputs = [count - 1]
    while draw.random() < 0.35:
        outputs.append(draw.randrange(count))
    return Program(
        seed=seed,
        dtype=dtype,
        leaves=leaves,
        operators=operators,
        outputs=tuple(dict.fromkeys(outputs)),
        sizes=_wide(draw, steps) if wide else _sizes(draw, steps, slow),
        mode=_weighted(draw, MODES),
        gradient=draw.choice((*LAYOUTS, "sliced", "row", "row", "alternating", "alternating")),
        grads=_weighted(draw, {"none": 5, "keep": 3, "zero": 1, "given": 1}),
        hold=draw.random() < 0.6,
        cousin=draw.randrange(len(operators)) if draw.random() < 0.1 else -1,
        again="memory" if threads > 1 else again,
        threads=threads,
        dynamic=_weighted(draw, {None: 8, False: 1, True: 1}),
    )


def _weighted(draw: random.Random, weights: dict) -> object:  # type: ignore[type-arg]
    return draw.choices(list(weights), list(weights.values()))[0]


def _leaves(draw: random.Random, shape: str) -> tuple[Leaf, ...]:
    made = []
    for index in range(draw.choice((1, 2, 2, 3))):
        dims = shape if index == 0 or draw.random() < 0.6 else _broadcast(draw, shape)
        layout = draw.choice(LAYOUTS) if draw.random() < 0.55 else "contiguous"
        hook = draw.randrange(ON_LEAVES) if draw.random() < 0.3 else 0
        made.append(Leaf(dims, layout, index == 0 or draw.random() < 0.75, hook))
    return tuple(made)


def _broadcast(draw: random.Random, shape: str) -> str:
    kept = shape[draw.randint(0, len(shape)) :]
    return "".join("1" if draw.random() < 0.3 else dim for dim in kept)


def _operators(draw: random.Random, leaves: int, count: int, dtype: str, wide: bool) -> tuple[Operator, ...]:
    names = [name for name, (_, _, complex_too) in TABLE.items() if complex_too or not dtype.startswith("complex")]
    names = [name for name in names if not wide or name in _PRODUCTS]
    weights = [TABLE[name][1] * (3 if wide and name == "residual" else 1) for name in names]
    made = []
    for index in range(leaves, leaves + count):
        recent = index - 1 - min(int(draw.expovariate(1.0)), index - 1)
        first = draw.choice((index - 1, recent))
        hook = draw.randrange(1, ON_RESULTS) if draw.random() < 0.2 else 0
        packed = draw.choice((1, 2, 3)) if draw.random() < 0.06 else 0
        name = draw.choices(names, weights)[0]
        made.append(Operator(name, first, draw.randrange(index), draw.randrange(1000), hook, packed))
    return tuple(made)


def _wide(draw: random.Random, steps: int) -> tuple[tuple[tuple[str, int], ...], ...]:
    sizes = (("a", draw.choice((16, 32, 64))), ("b", draw.choice((256, 300, 400))))
    return (sizes,) * steps


def _sizes(draw: random.Random, steps: int, slow: bool) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Most sizes stay as they are; of those that change, each takes three values and comes back to them."""
    letters = "abcde"
    fixed = {letter: draw.choice(_SIZES) for letter in letters}
    if draw.random() < 0.05:
        fixed["b"] = draw.choice((64, 100, 128))
    if draw.random() < 0.9:
        fixed = {letter: max(size, 1) for letter, size in fixed.items()}
    changing = draw.choices((0, 1, 2, 3), (65, 20, 10, 5) if not slow else (70, 15, 10, 5))[0]
    values = {letter: [draw.choice(_SIZES[1:]) for _ in range(4)] for letter in draw.sample(letters[:3], changing)}
    made = []
    for step in range(steps + (2 if values else 0)):
        now = {letter: values[letter][step % 4] if letter in values else fixed[letter] for letter in letters}
        made.append(tuple(sorted(now.items())))
    return tuple(made)
