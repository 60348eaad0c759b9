"""FSDP2 over twenty steps in two processes: gradients bit for bit eager's, and its communication in eager's order.

What a rank communicates, and what of users' code runs between, is written down as it is called, from the first forward
to the last backward, on eager and compiled.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import distributed
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

import compiled_autograd as ca
from compiled_autograd.engine.native_hits import NATIVE_HITS

from .fsdp_forms import EVENTS, FORMS, OF_FOUR, STEPS, Blocks, Event, FSDPState, changing_sizes, shared_out, sizes
from .helpers import expect
from .pair import Pair, RankFailedError
from .test_ddp import builds as builds
from .test_ddp import extension
from .test_ddp_ranks import four as four
from .test_distributed import Branches, Case, Run, _same, branch_used_in_turn, own_batch, train

COLLECTIVES = {
    "all_gather_into_tensor": "gather",  # by these two FSDP2 had its way in older versions, and FSDP1 has it
    "reduce_scatter_tensor": "scatter",
    "all_gather_single": "gather",
    "reduce_scatter_single": "scatter",
    "all_reduce": "reduce",
}


# ---- training ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _written_down() -> Iterator[None]:
    """What is communicated, and the end of each backward, is an event."""
    EVENTS.clear()
    with pytest.MonkeyPatch.context() as patch:
        for name, event in COLLECTIVES.items():
            if real := getattr(distributed, name, None):
                patch.setattr(distributed, name, partial(_noted, event, real))
        ends = FSDPState._root_post_backward_final_callback

        def end(state: FSDPState) -> None:
            EVENTS.append(("end of backward", 0))
            ends(state)

        patch.setattr(FSDPState, "_root_post_backward_final_callback", end)
        yield


def _noted(event: str, real: Callable[..., Any], *args: Any, **how: Any) -> Any:
    tensor = args[0] if args else next(how[name] for name in ("output_tensor", "output", "tensor") if name in how)
    EVENTS.append((event, tensor.numel()))
    return real(*args, **how)


@dataclass
class Followed:
    """A training on one rank."""

    run: Run
    events: list[Event]
    stats: ca.Stats
    native: int
    """How many tapes the extension walked."""


def follow(rank: int, case: Case, compiles: tuple[int, ...], builds: Path | None = None, **settings: Any) -> Followed:
    """Train, compiled on some ranks; with the extension where it is given."""
    warnings.simplefilter("ignore")
    before = NATIVE_HITS.hits
    with _written_down(), extension(builds) if builds else contextlib.nullcontext():
        session = ca.enable(**{"backend": case.backend, "tune": False, **settings})
        run = train(case, rank, session if rank in compiles else None)
        return Followed(run, list(EVENTS), session.stats(), NATIVE_HITS.hits - before)


def compare(
    pair: Pair,
    case: Case,
    compiles: tuple[int, ...] = (0, 1),
    builds: Path | None = None,
    low: bool = False,
    **settings: Any,
) -> list[Followed]:
    """With eager, on each rank: all gradients, all parameters, all events."""
    wanted = pair.run(follow, case, (), seconds=120.0)
    found = pair.run(partial(follow, **settings), case, compiles, builds, seconds=300.0)
    for one, other in zip(found, wanted, strict=True):
        for some, others in ((one.run.grads, other.run.grads), (one.run.weights, other.run.weights)):
            _same(some, others, bitwise=case.backend == "eager", low=low)
        assert one.events == other.events
    return found


QUICK = ("plain",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FORMS]
)
def test_every_form_is_bit_for_bit_eagers_and_in_its_order(pair: Pair, name: str) -> None:
    case = FORMS[name]
    beside = "mixed" in name and not hasattr(FSDPParamGroup, "_set_unsharded_grad_dtypes")  # of sums, up to 2.14
    misses = 1 if case.batches == 1 or beside else 2  # with .grad and without
    for each in compare(pair, case):
        expect(each.stats, structure_misses=misses, hits=STEPS * case.batches - misses, captures=misses)
        assert each.stats.compiles > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks(four: Pair, name: str) -> None:
    case = OF_FOUR[name]
    for each in compare(four, case, tuple(range(4))):
        expect(each.stats, structure_misses=case.batches, hits=(STEPS - 1) * case.batches)


def test_the_order_of_a_step(pair: Pair) -> None:
    """What is asked for ahead is on its way before what needs it is computed, and users' code comes where it did."""
    forward = [("gather", size) for size in (8, 108, 208, 340, 84)]  # of the root, and of each layer
    last_two = [("gather", 84), ("gather", 340), ("scatter", 42), ("gather", 208), ("scatter", 170)]
    first_two = [("gather", 108), ("hook", 1), ("scatter", 104), ("scatter", 54)]
    wanted = [*forward, *last_two, *first_two, ("end of backward", 0), ("scatter", 4)]
    for each in pair.run(follow, FORMS["plain"], (0, 1)):
        assert each.events[: len(wanted)] == wanted


@pytest.mark.slow
def test_another_order_is_seen(pair: Pair) -> None:
    """What is asked for two layers ahead comes sooner than by default, with the same gradients."""
    ahead, plain = (pair.run(follow, FORMS[name], ())[0] for name in ("backward_prefetch", "plain"))
    _same(ahead.run.grads, plain.run.grads)
    assert ahead.events != plain.events and sorted(ahead.events) == sorted(plain.events)


# ---- ways to run ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("alone", [0, 1])
def test_one_rank_alone_is_compiled(pair: Pair, alone: int) -> None:
    """Gloo matches what ranks communicate by order alone."""
    found = compare(pair, FORMS["no_sync"], (alone,))
    assert [each.stats.backwards for each in found] == [0 if rank != alone else 3 * STEPS for rank in range(2)]
    expect(found[alone].stats, structure_misses=2, hits=3 * STEPS - 2)


def test_one_rank_misses_while_the_other_hits(pair: Pair) -> None:
    case = replace(FORMS["plain"], inputs=changing_sizes)
    hits, misses = compare(pair, case, dynamic=False)
    expect(hits.stats, structure_misses=1, hits=STEPS - 1)
    expect(misses.stats, structure_misses=1, shape_misses=3, hits=STEPS - 4)


@pytest.mark.slow
def test_sizes_that_change(pair: Pair) -> None:
    for each in compare(pair, replace(FORMS["checkpoint"], inputs=sizes)):
        expect(each.stats, structure_misses=1, shape_misses=1, hits=STEPS - 2)


def test_a_branch_that_is_used_in_turn(pair: Pair) -> None:
    case = replace(FORMS["plain"], build=Branches, inputs=branch_used_in_turn)
    for each in compare(pair, case):
        expect(each.stats, structure_misses=2, hits=STEPS - 2)


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("checkpoint", "no_sync"))]
)
def test_hits_that_the_extension_walks(pair: Pair, builds: Path, name: str) -> None:
    case = FORMS[name]
    misses = 2 if case.batches > 1 else 1
    for each in compare(pair, case, builds=builds):
        expect(each.stats, structure_misses=misses, hits=STEPS * case.batches - misses)
        assert (each.native > STEPS // 2) == (name != "checkpoint")  # whose tensors are unpacked when they are needed


@pytest.mark.slow
def test_every_run_compared_with_the_real_calls(pair: Pair) -> None:
    """What is computed a second time communicates nothing."""
    for each in compare(pair, FORMS["no_sync"], check=True):
        expect(each.stats, structure_misses=2, hits=3 * STEPS - 2)


@pytest.mark.slow
def test_a_second_start_finds_it_in_the_store(pair: Pair, tmp_path: Path) -> None:
    (first, _), (second, other) = (compare(pair, FORMS["plain"], cache_dir=tmp_path / "store") for _ in range(2))
    assert first.stats.backwards == STEPS and first.stats.structure_misses <= 1  # the other rank may have been sooner
    for each in (second, other):
        expect(each.stats, hits=STEPS, compiles=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "no_sync", "mixed_precision", "checkpoint", "set_reshard_after_backward"])
def test_inductor_is_close_and_in_eagers_order(pair: Pair, name: str) -> None:
    case = replace(FORMS[name], backend="inductor")
    misses = 2 if case.batches > 1 else 1
    for each in compare(pair, case, low=name == "mixed_precision"):
        expect(each.stats, structure_misses=misses, hits=STEPS * case.batches - misses)


def _dies(rank: int) -> None:
    """In a hook, between what both communicate in a backward that hits."""
    session = ca.enable(backend="eager", tune=False)
    model = shared_out(Blocks())
    for step in range(4):
        out = model(*own_batch(step, rank))
        if (rank, step) == (1, 3):
            out.register_hook(lambda grad: os._exit(1))
        with session:
            out.square().mean().backward()


def test_a_rank_that_dies_is_an_error_of_the_other(pair: Pair) -> None:
    with pytest.raises(RankFailedError, match=r"(?s)rank 0.*RuntimeError.*[Cc]onnection.*rank 1: died"):
        pair.run(_dies, seconds=20.0)
