"""Has the walk in C++ and the engine's own walk every tape of a test run, and compares what they find.

    TESTS_NATIVE=both python -m pytest     each tape that is known is walked by both
    TESTS_NATIVE=on python -m pytest       the walk in C++ serves hits

Otherwise no test but those of the room itself waits for the extension, and none uses it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_autograd as ca
from backends import get_backend
from compiled_autograd.diagnostics.bypass import OTHER_THREAD
from compiled_autograd.engine import backward, native_hits, seam
from compiled_autograd.engine.call import Call, HandedOver, Refused
from compiled_autograd.engine.native_hits import NativeHits
from compiled_autograd.native.library import BEING_BUILT, Library
from compiled_autograd.settings import Settings
from compiled_autograd.steps import accumulate
from compiled_autograd.steps.steps import AccumulateStep
from compiled_autograd.torch_api import attributes

MODE = os.environ.get("TESTS_NATIVE", "off")
_SECONDS_TO_BUILD = 600.0


def library_of(config: pytest.Config) -> Library:
    """Built once for all runs of the tests; skips where there can be none, unless the whole run is to be with it."""
    return library_in(folder_of_builds(config))


def folder_of_builds(config: pytest.Config) -> Path:
    """Where the extension is kept from one run of the tests to the next."""
    return Path(config.cache.mkdir("native")) / "builds"  # type: ignore[union-attr]


def own_plans(config: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> NativeHits:
    """Those of one test, with the extension."""
    hits = NativeHits()
    monkeypatch.setattr(Library, "LATEST", library_of(config))
    for module in (backward, seam):
        monkeypatch.setattr(module, "NATIVE_HITS", hits)
    return hits


@pytest.fixture(name="native")
def native_plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeHits]:
    """The same, for tests that import it."""
    yield own_plans(request.config, monkeypatch)
    ca.reset()


def walked(**settings: Any) -> ca.Session:
    """A session whose tapes are walked in C++ where they are known."""
    return ca.enable(**{"backend": "eager", "cache_dir": False, "tune": False, "extension": "auto", **settings})


@functools.cache
def library_in(folder: Path) -> Library:
    """The one in a folder, as soon as it is built, and loaded once; skips where there can be none."""
    library = Library(folder)
    deadline = time.monotonic() + _SECONDS_TO_BUILD
    while library.module() is None and library.reason == BEING_BUILT and time.monotonic() < deadline:
        time.sleep(0.1)
    if library.module() is None:
        without = pytest.skip if MODE == "off" else pytest.fail
        without(f"there is no extension here: {library.reason}")
    return library


def assert_same(found: Any, handover: Any) -> None:
    """Both found the same: tensors by identity, but those that are made anew whenever they are unpacked."""
    _, tensors, sizes, scalars, objects = found
    assert len(tensors) == len(handover.tensors)
    for one, other in zip(tensors, handover.tensors, strict=True):
        assert one is other or _unpacked_alike(one, other)
    assert (sizes, scalars) == (list(handover.sizes), list(handover.scalars))
    assert [*map(id, objects)] == [*map(id, handover.objects)]
    assert not handover.packed


def _unpacked_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    node, number = attributes.grad_fn(one), attributes.output_nr(one)
    same = node is not None and node is attributes.grad_fn(other) and number == attributes.output_nr(other)
    memory = (one.untyped_storage()._cdata, one.storage_offset(), one.stride(), one.shape, one.dtype, one._version)
    return same and memory == (
        other.untyped_storage()._cdata,
        other.storage_offset(),
        other.stride(),
        other.shape,
        other.dtype,
        other._version,
    )


class Both(NativeHits):
    """Never serves; compares what it would have served with what the engine gives.

    Attributes:
        unsure: tapes of which both found different things, since another thread wrote to a leaf meanwhile,
            or had all forgotten.
        forgot: how often all was forgotten: another thread may do so between the walks, and the engine captures anew.
    """

    compared = unsure = forgot = 0

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.library = library
        self._thread = threading.local()
        self._written: deque[tuple[int, set[int]]] = deque(maxlen=1000)

    def note(self, leaves: Iterable[torch.Tensor], thread: int | None = None) -> None:
        """A thread, the calling one if it is not named, is about to write to leaves."""
        self._written.append((threading.get_ident() if thread is None else thread, {*map(id, leaves)}))

    def forget(self) -> None:
        self.forgot += 1
        super().forget()

    def hand_over(self, call: Call, settings: Settings) -> HandedOver | None:
        self._wanted = max(self._wanted, 1)
        self._thread.found, forgot = None, self.forgot
        if not self._learnt or not native_hits._may_be_known(call, settings):
            return None
        bitwise = get_backend(settings.backend_in_mode).bitwise
        for each in self._learnt:
            graph = each.graph()
            if each.bitwise != bitwise or graph is None or graph.evicted:
                continue
            found = each.plan.add_variant(call.outputs, call.grads, call.inputs, not call.accumulate_grad)
            if not isinstance(found, str):
                self._thread.found = (graph, found, _gradients(found[1]), forgot)
                break
        return None

    def keep(self, plan: Any, call: Call, settings: Settings, given: object) -> None:
        found, self._thread.found = self._thread.found, None  # the backward is about to run, and to let go of it
        if found is None:
            super().keep(plan, call, settings, given)
            return
        if isinstance(given, Refused) and given.reason == OTHER_THREAD:
            return  # the walk in C++ need not have the tape for itself
        graph, what, gradients, forgot = found
        try:
            assert isinstance(given, HandedOver), given
            assert given.graph is graph and given.miss is None and not given.captured
            assert_same(what, given.handover)
        except AssertionError:
            if forgot == self.forgot and not self._others_wrote(what[1], gradients):
                raise
            Both.unsure += 1
        else:
            Both.compared += 1

    def _others_wrote(self, tensors: list[torch.Tensor], gradients: list[int]) -> bool:
        """Whether a ``.grad`` may have come or gone between the walks: it is another now, or another thread has had the
        leaf, which may have given a gradient and taken it away in that time."""
        me, leaves = threading.get_ident(), {*map(id, _leaves(tensors))}
        written = any(thread != me and not leaves.isdisjoint(each) for thread, each in [*self._written])
        return written or _gradients(tensors) != gradients


def _leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each for each in tensors if attributes.requires_grad(each) and attributes.grad_fn(each) is None]


def _gradients(tensors: list[torch.Tensor]) -> list[int]:
    """Those that the leaves have now."""
    return [id(attributes.grad(leaf)) for leaf in _leaves(tensors)]


def compare_everywhere(library: Library) -> Both:
    """From now on, in this process."""
    both = backward.NATIVE_HITS = seam.NATIVE_HITS = Both(library)
    write_all, accumulate_, give = accumulate._write_all, accumulate.accumulate, accumulate._give_through_node

    def write_and_note(step: AccumulateStep, slots: list[Any]) -> None:
        both.note(slots[leaf] for leaf in step.leaves)
        write_all(step, slots)

    def accumulate_and_note(leaves: Sequence[torch.Tensor], *given: Any) -> None:
        both.note(leaves)
        accumulate_(leaves, *given)

    def give_and_note(leaf: torch.Tensor, grad: torch.Tensor) -> None:
        both.note([leaf])
        give(leaf, grad)

    accumulate._write_all, accumulate.accumulate = write_and_note, accumulate_and_note
    accumulate._give_through_node = give_and_note
    return both


def tell() -> None:
    """How many tapes were compared."""
    unsure = f", and {Both.unsure} more to which another thread did something meanwhile" if Both.unsure else ""
    sys.stderr.write(f"\n{Both.compared} tapes were walked by both{unsure}\n")
