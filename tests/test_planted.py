"""Mistakes that compiled code had once are put back, each in the mechanism that was mended: all are found, and cost no
step.

Each program runs for some steps as it should, then with the mistake and without any comparison, which shows that the
mistake is one, and then with the mistake and compared: every gradient is eager's, one form of one region is said to be
wrong, and what runs instead serves all later steps.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import compiled_autograd as ca
from backends.inductor.straight_line import translation
from backends.inductor.straight_line.straight_line import GENERATED_CODE, PROGRAM
from backends.protocol import ONLY_FORM
from backends.versions import fuses_outer_loops_of_several_rows
from compiled_autograd import ir
from compiled_autograd.lowering import fake_tensors, lower, region_compiler, stored_regions
from compiled_autograd.steps.accumulate import own_copy
from compiled_autograd.torch_api.version_differences import multiplies_many_sizes
from shadow_cache import Failure

from .helpers import close
from .test_outer_loops import transposed_softmaxes, without_the_mending

Gradients = Sequence[torch.Tensor | None]
Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.filterwarnings("ignore")


def _without(patch: Patch, owner: Any, name: str, replaced: dict[str, str]) -> None:
    """Plant a function whose source has other text in some places."""
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in replaced.items():
        assert source.count(old) == 1, f"{name} has no {old!r} any more: plant this mistake another way"
        source = source.replace(old, new)
    namespace = dict(vars(sys.modules[function.__module__]))
    exec(source, namespace)
    patch.setattr(owner, name, namespace[name])


@dataclass(frozen=True)
class Mistake:
    """What is planted, and where it shows.

    Attributes:
        plant: puts the mistake back.
        run: a step's gradients; takes its number.
        form: what is found to be wrong.
        value: which result of which region, as people are told.
        steps: how many are run, and which of them finds it.
        found_at: see ``steps``.
    """

    plant: Callable[[Patch], None]
    run: Callable[[int], Gradients]
    form: str
    value: str
    found_at: int
    steps: int = 5
    backend: str = "inductor"
    stored: bool = False
    dynamic: bool | None = None


def _wrong(found: Gradients, wanted: Gradients) -> bool:
    return not all(map(close, found, wanted))


def _steps(mistake: Mistake, check: Any, folder: Path | None) -> tuple[ca.Session, list[bool], list[list[Failure]]]:
    ca.reset()
    settings = {"backend": mistake.backend, "dynamic": mistake.dynamic, "tune": False, "cache_dir": folder or False}
    session = ca.enable(check=check, **settings)
    wrong, failures = [], []
    for number in range(mistake.steps):
        wanted = mistake.run(number)
        try:
            with session:
                found = mistake.run(number)
        except RuntimeError:  # results that are no tensors of any place in memory
            if check is not False:
                raise
            wrong.append(True)
            failures.append([])
            continue
        assert session.last is not None
        wrong.append(_wrong(found, wanted))
        failures.append([each for each in session.last.reasons if isinstance(each, Failure)])
    return session, wrong, failures


def _is_found(mistake: Mistake, monkeypatch: Patch, tmp_path: Path) -> None:
    folder = tmp_path if mistake.stored else None
    if folder is not None:
        _, wrong, failures = _steps(mistake, "new", folder)
        assert not any(wrong) and not any(failures)
    mistake.plant(monkeypatch)
    _, wrong, failures = _steps(mistake, False, folder)
    assert any(wrong) and not any(failures), "the mistake is none"
    session, wrong, failures = _steps(mistake, "new", folder)
    assert not any(wrong)
    assert [len(each) for each in failures] == [int(number == mistake.found_at) for number in range(mistake.steps)]
    (failure,) = failures[mistake.found_at]
    assert failure.kind == "mismatch"
    assert failure.where.startswith(f"{mistake.value}, {mistake.form} of ")
    stats = session.stats()
    assert (stats.failures, stats.bypasses) == (1, {})
    assert session.last is not None and session.last.outcome == "hit"


# ---- straight-line programs ------------------------------------------------------------------------------------------

_WIDE = 640
"""Of a small factor BLAS may read all before it writes: how much that is differs from processor to processor."""
_WIDE_WEIGHTS = [torch.randn(_WIDE, _WIDE, generator=torch.Generator().manual_seed(seed)) / 40 for seed in range(3)]
_WEIGHTS = [torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) / 5 for seed in range(3)]


def _a_sum_into_a_factor(patch: Patch) -> None:
    _without(patch, translation.Translation, "_product", {"term.slot not in (left.slot, right.slot) and ": ""})


def _residual_layers(number: int) -> Gradients:
    torch.manual_seed(number)
    x = torch.randn(_WIDE, _WIDE, requires_grad=True)
    h = torch.tanh(x)
    for weight in _WIDE_WEIGHTS:
        h = h + h @ weight
    return torch.autograd.grad(h.sin().sum(), x)


def _one_program_for_all(patch: Patch) -> None:
    _without(patch, stored_regions.StoredRegions, "load", {"another(self.loaded[artifact])": "self.loaded[artifact]"})


class _Transposes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.t().contiguous().t()


def _same_code_for_other_strides(number: int) -> Gradients:
    torch.manual_seed(number)
    x = torch.randn(8, 8, requires_grad=True)
    y = _Transposes.apply(x @ _WEIGHTS[0]) @ _WEIGHTS[1]
    return torch.autograd.grad(y, x, torch.randn(8, 8))


# ---- what is traced --------------------------------------------------------------------------------------------------


def _places_are_baked(patch: Patch) -> None:
    replaced = {
        "extent(tensor) * tensor": "(tensor.storage_offset() + extent(tensor)) * tensor",
        "tensor.stride(), 0,": "tensor.stride(), tensor.storage_offset(),",
    }
    _without(patch, fake_tensors, "fake_of", replaced)
    patch.setattr(lower, "fake_of", fake_tensors.fake_of)
    patch.setattr(lower, "breaches", lambda graph: ())
    _without(patch, ir, "copy_slices_epilogue", {"result.storage_offset() + view_offset": "view_offset"})


_LARGE = torch.arange(4 * 36, dtype=torch.float32)


def _written_into_a_view(number: int) -> Gradients:
    torch.manual_seed(0)
    x, row = torch.randn(6, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    written = x.clone()
    written[0] = row
    place = (2, 2, 1, 0, 3)[number]
    return torch.autograd.grad(written, [x, row], _LARGE[place * 36 :][:36].view(6, 6))


def copied_into_strides_that_are_products(patch: Patch) -> None:
    """So a leaf's gradient is, in a trace."""
    leaves: dict[int, torch.Tensor] = {}
    fake = lower._Lowering._fake

    def remembered(self: lower._Lowering, leaf: torch.Tensor, *rest: Any) -> torch.Tensor:
        leaves[id(leaf)] = made = fake(self, leaf, *rest)
        return made

    patch.setattr(lower._Lowering, "_fake", remembered)
    patch.setattr(lower, "copy_laid_out_as", lambda grad, leaf: own_copy(grad, leaves.pop(id(leaf))))


def _products_stay_as_they_are(patch: Patch) -> None:
    copied_into_strides_that_are_products(patch)
    patch.setattr(lower, "multiplies_many_sizes", lambda: False)
    patch.setattr(region_compiler.aten, "verify", lambda graph_module: None)


def images_of_other_sizes(number: int) -> Gradients:
    torch.manual_seed(0)
    shape = ((3, 5, 4, 6), (2, 3, 7, 3), (6, 5, 2, 5), (4, 6, 5, 7), (2, 5, 4, 6))[number]
    x = torch.randn(shape).to(memory_format=torch.channels_last).requires_grad_()
    x.softmax(1).pow(2).sum().backward()
    return [x.grad]


def _nothing_is_said_of_memory(patch: Patch) -> None:
    """Some of PyTorch's functions fill what they allocated through a pointer, of which a trace sees nothing."""
    patch.setattr(lower, "_leave_opaque_what_is_forbidden", lambda graph_module, origins: None)
    patch.setattr(region_compiler.aten, "verify", lambda graph_module: None)
    whole = ir.OpaqueOp.__call__

    def call(self: ir.OpaqueOp, *args: Any) -> Any:
        results = whole(self, *args)
        unseen = "TanhBackward" in self.__name__ and isinstance(results[0], FakeTensor)
        return [torch.empty_like(results[0])] if unseen else results

    patch.setattr(ir.OpaqueOp, "__call__", call)


def _filled_through_a_pointer(number: int) -> Gradients:
    torch.manual_seed(number)
    x, gradient = torch.randn(6, 6, requires_grad=True), torch.randn(6, 6)
    y = x.exp().tanh().sin()
    used = [torch.full((6, 6), 1e3) for _ in range(64)]  # what is allocated next has no right values by chance
    del used
    return torch.autograd.grad(y, x, gradient)


def _bits_are_ignored(patch: Patch) -> None:
    patch.setattr(lower, "has_bit", lambda value: False)


def _negative_factor(number: int) -> Gradients:
    torch.manual_seed(number)
    x = torch.randn(5, requires_grad=True)
    factor = torch.randn(5, dtype=torch.complex64).conj().imag
    return torch.autograd.grad((factor * x).sin().sum(), x)


# ---- the generated code, and what is made of it ----------------------------------------------------------------------


def _another_regions_code(patch: Patch) -> None:
    right = stored_regions.StoredRegions.load
    first: list[str] = []

    def load(self: stored_regions.StoredRegions, backend: Any, artifact: str) -> Any:
        first.append(artifact)
        return right(self, backend, first[0])

    patch.setattr(stored_regions.StoredRegions, "load", load)


class _HandsOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 1


def _two_regions_alike(number: int) -> Gradients:
    torch.manual_seed(number)
    x = torch.randn(6, 6, requires_grad=True)
    return torch.autograd.grad(_HandsOn.apply(x.cos()).sin(), x, torch.randn(6, 6))


def _one_region(number: int) -> Gradients:
    torch.manual_seed(number)
    x = torch.randn(6, 6, requires_grad=True)
    return torch.autograd.grad(x.cos().sin(), x, torch.randn(6, 6), allow_unused=True)


def _a_result_is_left_out(patch: Patch) -> None:
    right = region_compiler.lower

    def lowered(*args: Any) -> lower.Lowered:
        found = right(*args)
        found.wiring = msgspec.structs.replace(found.wiring, values=(), apart=())
        return found

    patch.setattr(region_compiler, "lower", lowered)


def _transposed_softmaxes(number: int) -> Gradients:
    return [transposed_softmaxes()]


_MISTAKES = {
    "a sum computed into its own factor": Mistake(
        _a_sum_into_a_factor, _residual_layers, PROGRAM, "gradient 0 from #9 TanhBackward0", found_at=0
    ),
    "one program for regions with other strides": Mistake(
        _one_program_for_all,
        _same_code_for_other_strides,
        PROGRAM,
        "gradient 0 from #3 MmBackward0",
        found_at=1,
        stored=True,
    ),
    "places counted from where memory begins": Mistake(
        _places_are_baked, _written_into_a_view, GENERATED_CODE, "gradient 1 from #1 CopySlices", found_at=0
    ),
    "products of three sizes": Mistake(
        _products_stay_as_they_are,
        images_of_other_sizes,
        ONLY_FORM,
        "gradient 0 from #3 SoftmaxBackward0",
        found_at=1,
        backend="eager",
    ),
    "memory that nothing was written to": Mistake(
        _nothing_is_said_of_memory,
        _filled_through_a_pointer,
        ONLY_FORM,
        "gradient 0 from #3 ExpBackward0",
        found_at=0,
        backend="eager",
    ),
    "the negative bit": Mistake(
        _bits_are_ignored, _negative_factor, GENERATED_CODE, "gradient 1 from #3 MulBackward0", found_at=0
    ),
    "outer loops of several rows": Mistake(
        without_the_mending, _transposed_softmaxes, GENERATED_CODE, "the result of #5 SoftmaxBackward0", found_at=0
    ),
    "the code of another region": Mistake(
        _another_regions_code,
        _two_regions_alike,
        GENERATED_CODE,
        "gradient 0 from #3 CosBackward0",
        found_at=0,
        stored=True,
    ),
    "a result that is undefined": Mistake(
        _a_result_is_left_out, _one_region, GENERATED_CODE, "gradient 0 from #2 CosBackward0", found_at=0
    ),
}


if torch.__version__ < "2.13":
    # Inductor makes right code of the same graph then, whatever the places are counted from.
    del _MISTAKES["places counted from where memory begins"]
# Of versions that make these right by themselves: see tests/test_workarounds.py.
if not fuses_outer_loops_of_several_rows():
    del _MISTAKES["outer loops of several rows"]
if not multiplies_many_sizes():
    del _MISTAKES["products of three sizes"]


@pytest.mark.parametrize("name", _MISTAKES)
def test_a_mistake_that_comes_back_is_found(name: str, monkeypatch: Patch, tmp_path: Path) -> None:
    _is_found(_MISTAKES[name], monkeypatch, tmp_path)
