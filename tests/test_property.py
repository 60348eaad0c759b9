"""Random tapes: whatever is drawn, all that a program can observe is as under eager. See ``tests/fuzz``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from backends.inductor import on_cpu

from .fuzz.backward import MODES
from .fuzz.execute import Record, State, forward, run_step
from .fuzz.generate import generate
from .fuzz.known import IGNORED, WITHOUT
from .fuzz.operators import TABLE
from .fuzz.program import SKIP, Leaf, Operator, Program, describe, from_json
from .fuzz.runner import Settings, check, told
from .fuzz.shrink import shrink
from .fuzz.values import LAYOUTS, LEFT_OUT, lay_out, plain, share_memory

_EAGER, _AT_ONCE = 135, 15
_SHORT = (15, 30)
_INDUCTOR = (20, 10_013)
_INDUCTOR_LONGER = (3, 8, 10_038)


@pytest.fixture(autouse=True)
def without_what_is_known() -> Iterator[None]:
    """What is in ``known.py`` would hide the rest; compiled code is looked at itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    LEFT_OUT.update(WITHOUT)
    yield
    LEFT_OUT.clear()
    torch.set_num_threads(threads)


def _run(seeds: range | tuple[int, ...], settings: Settings) -> Counter[str]:
    """Check these programs; the account of all their backwards."""
    account: Counter[str] = Counter()
    for seed in seeds:
        program = generate(seed, settings.backend)
        verdict = check(program, settings)
        findings = told(verdict, IGNORED)
        words = "\n".join(map(str, findings))
        assert not findings, f"seed {seed} (python -m tests.fuzz --replay {seed}):\n{words}\n{describe(program)}"
        account.update(verdict.backwards)
        account["loads"] += verdict.loads
    return account


@pytest.mark.parametrize(
    "first",
    [pytest.param(each, marks=() if each in _SHORT else pytest.mark.slow) for each in range(0, _EAGER, _AT_ONCE)],
)
def test_random_tapes(first: int) -> None:
    """Bit for bit. Most are captured once and then hits, and some come from the store."""
    account = _run(range(first, first + _AT_ONCE), Settings("eager", process=False))
    assert account["hit"] > account["structure_miss"] > 0
    assert account["bypass"] < account["hit"]


@pytest.mark.parametrize(
    "seed", [*_INDUCTOR, *(pytest.param(each, marks=pytest.mark.slow) for each in _INDUCTOR_LONGER)]
)
def test_random_tapes_with_inductor(seed: int) -> None:
    account = _run((seed,), Settings("inductor"))
    assert account["hit"]


@pytest.mark.parametrize(
    "first", [10_300, *(pytest.param(each, marks=pytest.mark.slow) for each in range(10_302, 10_350, 12))]
)
def test_random_tapes_with_sums_of_aten(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sums over rows of any size are called that Inductor would fuse."""
    monkeypatch.setattr(on_cpu, "LEAST_SUMMED", 1)
    length = 2 if first == 10_300 else 12
    assert _run(range(first, first + length), Settings("inductor"))["hit"]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 13_000, 500))
def test_many_random_tapes(first: int) -> None:
    account = _run(range(first, first + 500), Settings("eager"))
    assert account["loads"]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 10_300, 50))
def test_many_random_tapes_with_inductor(first: int) -> None:
    assert _run(range(first, first + 50), Settings("inductor"))["loads"]


def test_programs_draw_everything_there_is() -> None:
    """Of each operator, layout and way to ask for gradients some program makes use, and most of it can be run."""
    programs = [generate(seed) for seed in range(400)]
    assert {operator.name for program in programs for operator in program.operators} == set(TABLE)
    assert {leaf.layout for program in programs for leaf in program.leaves} == set(LAYOUTS)
    assert {program.mode for program in programs} == set(MODES)
    assert {program.again for program in programs} == {"memory", "reload", "process"}
    assert {program.threads for program in programs} == {1, 2}
    asked = [program for program in programs[:100] if _asks_for_something(program)]
    assert len(asked) > 85


def _asks_for_something(program: Program) -> bool:
    pool = forward(State(program), 0)
    return any(pool[index].grad_fn is not None for index in program.outputs)


def test_a_program_is_that_of_its_seed() -> None:
    for seed in range(50):
        program = generate(seed)
        assert program == generate(seed) == from_json(program.to_json())
        assert describe(program).startswith("Program")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_same_values(layout: str) -> None:
    LEFT_OUT.clear()
    for shape in ((), (3,), (0, 2), (2, 3), (2, 3, 4, 5), (2, 1, 4, 3, 2)):
        for dtype in (torch.float64, torch.complex128):
            value = plain(shape, dtype, "seed")
            found = lay_out(value, layout)
            wanted = value[:1].expand(shape) if layout == "expanded" and shape else value
            assert torch.equal(found, wanted) and found.dtype == dtype
    made = lay_out(plain((4, 4), torch.float64, 0), layout)
    assert layout in ("contiguous", "channels_last", "conjugate") or not (
        made.is_contiguous() and not made.storage_offset() and not made.is_neg()
    )


def test_sharing_is_of_elements() -> None:
    whole = torch.zeros(4, 4)
    assert share_memory(whole, whole[1]) and share_memory(whole.t(), whole[:, 2])
    assert not share_memory(whole[:, 0], whole[:, 1]) and not share_memory(whole, whole.clone())


_PROGRAM = Program(
    seed=5,
    leaves=(Leaf("ab"), Leaf("ab")),
    operators=(Operator("pointwise", 0, 1, 3), Operator("residual", 2, 1, 7), Operator("square", 3, 0)),
    outputs=(4,),
    sizes=((("a", 3), ("b", 4)),) * 4,
    mode="gradient",
)


def _planted(
    change: Callable[[int, list[torch.Tensor], list[torch.Tensor]], Any], check: bool | None = False
) -> Settings:
    """Settings with a backend that does something wrong at its n-th run, which no proof of its code looks at first."""

    def backend(module: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
        runs = count()

        def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
            outputs = module(*inputs)
            change(next(runs), outputs, list(inputs))
            return outputs

        return run

    return Settings(backend, check=check, bitwise=True)


def _kinds(settings: Settings, program: Program = _PROGRAM) -> set[str]:
    return {finding.kind for finding in told(check(program, settings), IGNORED)}


def test_planted_mistakes_are_found() -> None:
    """The last bit of one value, at a late run; an input that is written to; memory that nothing wrote."""
    assert _kinds(_planted(lambda run, outputs, inputs: None)) == set()

    def last_bit(run: int, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        if run == 3:
            value = outputs[0].view(-1)[-1:]
            value.copy_(torch.nextafter(value, torch.full_like(value, 1e9)))

    def writes(run: int, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        inputs[-1].mul_(2)

    def uninitialised(run: int, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        outputs[0] = torch.empty_like(outputs[0])

    def undefined(run: int, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        outputs[0] = None  # type: ignore[call-overload]

    assert "values" in _kinds(_planted(last_bit))
    assert "damage" in _kinds(_planted(writes))
    assert "values" in _kinds(_planted(uninitialised))
    assert "definedness" in _kinds(_planted(undefined))
    # Code that proves itself is caught at its first run: gradients are eager's, and the failure is told.
    assert _kinds(_planted(uninitialised, check=None)) == {"failure mismatch"}
    assert _kinds(_planted(undefined, check=None)) == {"failure mismatch"}
    assert _kinds(_planted(writes, check=None)) == {"error"}


def test_a_failing_program_is_made_smaller() -> None:
    program = generate(16).replace(again="reload", grads="keep")
    names = [operator.name for operator in program.operators]
    least = shrink(program, lambda less: any(each.name == names[1] for each in less.operators), seconds=20)
    assert [operator.name for operator in least.operators if operator.name != SKIP] == [names[1]]
    assert (least.again, least.grads, len(least.sizes), len(least.outputs)) == ("memory", "none", 1, 1)


def test_two_tapes_apart_by_an_operator_and_by_nothing() -> None:
    """What two steps have in common says whether the second one has to be a hit."""
    states = State(_PROGRAM), State(_PROGRAM.replace(operators=_PROGRAM.operators[:1], outputs=(2,)))
    first, again = (run_step(states[0], step, ca.disable(), True) for step in (0, 1))
    other = run_step(states[1], 0, ca.disable(), True)
    assert first.tape == again.tape != other.tape
    assert isinstance(first.grads["v0"], Record) and not first.damage and not first.error
