"""Workarounds for faults of PyTorch are for the versions that need them: without one these are wrong, others right.

A test that fails here with "does not need it" says that a workaround has outlived a version: give the version to the
function that says which ones need it (``backends/versions.py``, ``torch_api/version_differences.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.codegen import wrapper

import compiled_autograd as ca
from backends import versions
from backends.inductor import backend as inductor
from backends.inductor.workarounds import sizes_of_tensors
from backends.inductor.workarounds.instead import Instead
from compiled_autograd.lowering import lower
from compiled_autograd.torch_api import version_differences

from . import test_complex_scatters, test_frontend, test_outer_loops, test_planted, test_rounding
from .helpers import same_bits

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class _Workaround:
    """A workaround.

    Attributes:
        is_needed: by this version of PyTorch.
        without: takes it away.
        is_right: whether a program that it is for gives what eager gives, with the same means.
    """

    is_needed: bool
    without: Callable[[Patch], None]
    is_right: Callable[[], bool]


def _nothing(*given: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _outer_loops_are_right() -> bool:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("Inductor makes no tiles on this processor")
    return test_outer_loops.error_of(test_outer_loops.transposed_softmaxes) < 1e-5


def _two_casts_are_left() -> bool:
    return test_rounding.casts_kept(inductor.all_casts_kept()) == 2


def _complex_scatters_are_right() -> bool:
    programs = test_complex_scatters.PROGRAMS
    for program in programs[:1] + programs[2:]:  # the second one is no program of 2.11, and right without it
        try:
            test_complex_scatters.test_writes_into_complex_tensors_are_done(program)
        except (AssertionError, RuntimeError):
            return False
    return True


def _sizes_of_tensors_have_values() -> bool:
    session = ca.enable(backend="inductor", cache_dir=False, tune=False)
    for size in (5, 7, 9, 11):
        x, y = torch.randn(2, size)
        test_frontend.equal(test_frontend.multiply(session, x, y), y, x)
    return session.stats().failures == 0


def _products_of_sizes_can_be_run() -> bool:
    session = ca.enable(backend="eager", cache_dir=False, tune=False)
    with pytest.MonkeyPatch.context() as patch:
        test_planted.copied_into_strides_that_are_products(patch)
        for number in range(4):
            wanted = test_planted.images_of_other_sizes(number)
            with session:
                found = test_planted.images_of_other_sizes(number)
            assert all(map(same_bits, found, wanted))
    return session.stats().failures == 0


_WORKAROUNDS = {
    "outer loops": _Workaround(
        versions.fuses_outer_loops_of_several_rows(), test_outer_loops.without_the_mending, _outer_loops_are_right
    ),
    "narrowing casts": _Workaround(
        versions.leaves_out_casts(),
        lambda patch: patch.setattr(inductor, "all_casts_kept", _nothing),
        _two_casts_are_left,
    ),
    "complex scatters": _Workaround(
        True, lambda patch: patch.setattr(inductor, "keep_complex_scatters", _nothing), _complex_scatters_are_right
    ),
    "sizes of tensors": _Workaround(
        versions.reads_sizes_where_it_asserts_them(),
        lambda patch: patch.setattr(inductor, "sizes_read_from_tensors", _nothing),
        _sizes_of_tensors_have_values,
    ),
    "products of many sizes": _Workaround(
        version_differences.multiplies_many_sizes(),
        lambda patch: patch.setattr(lower, "multiplies_many_sizes", lambda: False),
        _products_of_sizes_can_be_run,
    ),
}


def test_graphs_that_are_compiled_at_once_leave_other_code_alone(monkeypatch: Patch) -> None:
    """The one that began first ends first."""
    seen: list[bool] = []
    monkeypatch.setattr(wrapper.PythonWrapperCodegen, "codegen_inputs", lambda self: seen.append(config.size_asserts))
    monkeypatch.setattr(sizes_of_tensors, "reads_sizes_where_it_asserts_them", lambda: True)
    again = Instead(sizes_of_tensors._INSTEAD.owner, "codegen_inputs", sizes_of_tensors._INSTEAD.ours)
    monkeypatch.setattr(sizes_of_tensors, "_INSTEAD", again)
    first, second = (contextlib.ExitStack() for _ in range(2))
    with config.patch(size_asserts=False):
        for each in (first, second):
            each.enter_context(sizes_of_tensors.sizes_read_from_tensors())
            wrapper.PythonWrapperCodegen.codegen_inputs(None)  # type: ignore[arg-type]
        for each in (first, second):
            each.close()
            wrapper.PythonWrapperCodegen.codegen_inputs(None)  # type: ignore[arg-type]
    assert seen == [True, True, True, False]


@pytest.mark.parametrize("name", _WORKAROUNDS)
def test_with_it_all_is_right(name: str) -> None:
    assert _WORKAROUNDS[name].is_right()


@pytest.mark.parametrize("name", _WORKAROUNDS)
def test_it_is_for_the_versions_that_need_it(name: str, monkeypatch: Patch) -> None:
    workaround = _WORKAROUNDS[name]
    workaround.without(monkeypatch)
    right = workaround.is_right()
    if workaround.is_needed:
        assert not right, f"torch {torch.__version__} does not need it"
    else:
        assert right, f"torch {torch.__version__} needs it"
