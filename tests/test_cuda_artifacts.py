"""Code for CUDA as artifacts, with stand-ins for the device: what is kept of Triton's kernels, and how they are run.

The binaries here are no code, and what launches them writes down how. Inductor's part is its own: its launchers, the
grid that they compute, and its copies of misaligned inputs. ``tests/test_gpu_machine.py`` has the same on a device.
"""

from __future__ import annotations

import dataclasses
import hashlib
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.runtime import triton_compat, triton_heuristics
from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel
from torch._inductor.utils import align_inputs_from_check_idxs, copy_misaligned_inputs
from torch.utils._ordered_set import OrderedSet

import backends
from backends import ArtifactError, artifacts
from backends.artifacts import CannotStoreError, Stored
from backends.inductor import environment
from backends.inductor.backend import InductorBackend
from backends.inductor.cuda import kernels as triton_kernels
from backends.inductor.cuda.capture import Device
from backends.inductor.cuda.direct import GENERATED_CODE, LAUNCHED_DIRECTLY, Direct
from backends.inductor.cuda.graphs import Replayed
from backends.inductor.cuda.kernels import Aligned, Launched, alignment_of, launch_of, load_launches
from backends.inductor.poison import run_poisoned
from backends.inductor.wrappers import store
from backends.parsing import parsed
from compiled_autograd.compiling import worker_process

from .helpers import in_subprocess, same_bits

WITH_MODULES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether the launcher gives the module that it loads, too."""


class Launcher:
    """Instead of ``torch._C._StaticCudaLauncher``: what is loaded, and how it is launched."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, bytes, int, int]] = []
        self.launched: list[Any] = []

    def _load_kernel(self, path: str, name: str, shared: int, device: int) -> tuple[int, ...]:
        self.loaded.append((name, Path(path).read_bytes(), shared, device))
        loaded = (len(self.loaded), 32, 0)
        return (1000, *loaded) if WITH_MODULES else loaded

    def _launch_kernel(self, function: int, *arguments: Any) -> None:
        self.launched.append((self.loaded[function - 1], *arguments))

    def _unload_kernel(self, module: int) -> None: ...


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Of a machine that seems to have a CUDA device."""
    found = Launcher()
    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", found, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", _allocate, raising=False)  # type: ignore[attr-defined]
    for name in ("_exchange_device", "_maybe_exchange_device", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: (9, 0))
    monkeypatch.setattr(triton_kernels, "_functions", {})
    return found


def _allocate(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


# ---- stand-ins ---------------------------------------------------------------------------------------------------


class _Config:
    def __init__(self, kwargs: dict[str, int], num_warps: int, num_stages: int) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


Config = _Config if triton_compat.Config is object else triton_compat.Config
"""Triton's, where that is installed."""


@dataclasses.dataclass
class Case:
    """A kernel: its parameters and their types, how its blocks are counted, and arguments for it."""

    grid: dict[str, Any]
    blocks: dict[str, int]
    arguments: dict[str, Any]
    unused: tuple[str, ...] = ()
    """Parameters that Triton has found to be constants."""
    for_launcher: tuple[str, ...] = ()
    """Parameters of the launcher alone."""


def _combo(**parts: Any) -> dict[str, Any]:
    meta = {"default_config": None, "num_kernels": 2, "min_blocks": 0, "no_x_dim_0": False, "no_x_dim_1": True, **parts}
    return {"grid_type": "SequentialComboKernelGrid", "combo_grid_meta": meta}


_GRID = ("_grid_0", "_grid_1", "_grid_2")
CASES = {
    "one dimension": Case({"grid_type": "Grid1D"}, {"XBLOCK": 32}, {"in_ptr0": "x", "xnumel": 1001}),
    "a size that a call computes": Case({"grid_type": "Grid1D"}, {"XBLOCK": 32}, {"in_ptr0": "x", "xnumel": "n"}),
    "two dimensions": Case({"grid_type": "Grid2D"}, {"XBLOCK": 8, "YBLOCK": 4}, {"ynumel": 33, "xnumel": 9}),
    "many rows": Case(
        {"grid_type": "Grid2DWithYZOverflow"}, {"XBLOCK": 8, "YBLOCK": 1}, {"ynumel": 200000, "xnumel": 9}
    ),
    "as many rows as a call says": Case(
        {"grid_type": "Grid2DWithYZOverflow"}, {"XBLOCK": 8, "YBLOCK": 1}, {"ynumel": "n", "xnumel": 9}
    ),
    "three dimensions": Case(
        {"grid_type": "Grid3D"}, {"XBLOCK": 8, "YBLOCK": 4, "ZBLOCK": 2}, {"znumel": 5, "ynumel": 33, "xnumel": "n"}
    ),
    "a reduction": Case(
        {"grid_type": "Grid1D"}, {"XBLOCK": 1, "R0_BLOCK": 2048}, {"in_ptr0": "x", "xnumel": 40, "r0_numel": 9000}
    ),
    "a reduction in parts": Case(
        {"grid_type": "MixOrderReductionGrid"}, {"XBLOCK": 4, "RSPLIT_SIZE": 64}, {"xnumel": 4096, "r0_numel": 128}
    ),
    "a scan in parts": Case(
        {"grid_type": "SplitScanGrid"}, {"XBLOCK": 1, "R0_BLOCK": 256}, {"xnumel": 3, "r0_numel": 1000}
    ),
    "several kernels in one": Case(_combo(xnumel_0=100, xnumel_1=7), {"XBLOCK": 16}, {"in_ptr0": "x", "out_ptr1": "y"}),
    "several of which one has any size": Case(
        _combo(xnumel_0=None, xnumel_1=7), {"XBLOCK": 16}, {"in_ptr0": "x", "xnumel_0": "n"}
    ),
    "a template, whose caller counts blocks": Case(
        {"grid_type": "FixedGrid", "fixed_grid": _GRID, "extra_launcher_args": _GRID},
        {"BLOCK_M": 16},
        {"arg_A": "x", "out_ptr0": "y", "_grid_0": 8, "_grid_1": "n", "_grid_2": 1},
        for_launcher=_GRID,
    ),
    "a number and a parameter that is not used": Case(
        {"grid_type": "Grid1D"}, {"XBLOCK": 32}, {"in_ptr0": "x", "ks0": 5, "factor": 0.5, "xnumel": 64}, ("ks0",)
    ),
}
TYPES = {str: "O", int: "i", float: "d"}


def _kernel(case: Case, name: str, launcher: Launcher, folder: Path, **changes: Any) -> Any:
    """What Inductor has for a kernel that has run: the launcher is its own, made for a binary in ``folder``."""
    static = object.__new__(StaticallyLaunchedCudaKernel)
    path = folder / f"{name}.cubin"
    path.write_bytes(name.encode())
    names = [*(each for each in case.arguments if each not in case.for_launcher), *case.blocks]
    constants = [names.index(each) for each in (*case.unused, *case.blocks)]
    types = ["i" if value == "n" else TYPES[type(value)] for value in _used(case)]
    facts = {
        "C_impl": launcher,
        "name": name,
        "cubin_path": str(path),
        "cubin_raw": path.read_bytes(),
        "arg_names": names,
        "declared_constexprs": [names.index(each) for each in case.blocks],
        "full_constexprs": constants,
        "arg_tys": "".join(types),
        "hash": "ab" * 32,
        "num_warps": 4,
        "shared": 512,
        "has_global_scratch": True,
        "has_profile_scratch": False,
        "function": None,
        "module": None,
        # Since 2.14, and the size since 2.15.
        "device_agnostic": False,
        "functions": {},
        "modules": {},
        "tensordesc_meta": None,
        "tensordesc_arg_names": [],
        "_has_tensordesc": False,
        "global_scratch_size": 0,
        "global_scratch_align": 1,
    }
    vars(static).update(facts)
    meta = {"signature": dict.fromkeys(case.arguments, "*fp32"), "constants": dict(case.blocks), "device": 0}
    inductor_meta = {"kernel_name": name, **case.grid}
    config = Config(case.blocks, num_warps=4, num_stages=1)
    result = triton_heuristics.StaticTritonCompileResult(static, config, meta, inductor_meta)  # type: ignore[arg-type]
    made = result.make_launcher()
    static.cubin_raw = path.read_bytes()  # dropped once it is loaded; then it is in the folder of Inductor's cache
    return SimpleNamespace(**{"launchers": [made], "inductor_meta": inductor_meta, "triton_meta": meta, **changes})


def _used(case: Case) -> list[Any]:
    return [value for name, value in case.arguments.items() if name not in (*case.unused, *case.for_launcher)]


def _call(name: str, case: Case) -> str:
    return f"{name}.run({', '.join(map(str, case.arguments.values()))}, stream=stream0)"


# ---- launches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_kernel_is_launched_as_inductor_launches_it(name: str, launcher: Launcher, tmp_path: Path) -> None:
    case = CASES[name]
    kernel = _kernel(case, "kernel_0", launcher, tmp_path)
    launch, binary = launch_of("kernel_0", kernel, [parsed(_call("kernel_0", case))])
    assert (launch.entry, launch.shared, launch.device, launch.capability) == ("kernel_0", 512, 0, "9.0")
    assert binary == b"kernel_0" and launch.library == hashlib.sha256(binary).hexdigest()
    (loaded,) = load_launches({launch.library: binary}, {"kernel_0": launch}).values()
    assert launcher.loaded == [("kernel_0", binary, 512, 0)] * 2
    for number in (1, 33, 70000):
        values = {"n": number, "x": torch.empty(1), "y": torch.empty(1)}
        arguments = [values.get(each, each) if isinstance(each, str) else each for each in case.arguments.values()]
        kernel.launchers[0](*arguments, stream=7)
        loaded.run(*arguments, stream=7)
        theirs, ours = launcher.launched[-2:]
        assert theirs == ours and len(ours[-2]) == len(ours[-3]) == len(_used(case)) + 1
    depends_on_the_call = "n" in case.arguments.values() and not case.for_launcher
    assert ("//" in launch.source) == depends_on_the_call, "what is known is not computed at each launch"


def test_a_grid_is_a_number_only_where_all_calls_agree(launcher: Launcher, tmp_path: Path) -> None:
    case = CASES["one dimension"]
    kernel = _kernel(case, "kernel_0", launcher, tmp_path)
    for code, known in (
        ("kernel_0.run(x, 64, stream=s)\nkernel_0.run(y, 64, stream=s)", True),
        ("kernel_0.run(x, 64, stream=s)\nkernel_0.run(y, 65, stream=s)", False),
        ("kernel_0.run(x, n, stream=s)", False),
        ("kernel_0.run(*x, stream=s)", False),
        ("kernel_0.run(x, 64, stream=s)\nf(kernel_0)", False),
        ("kernel_0.run(x, xnumel=64, stream=s)", False),
        ("kernel_0.run(x, True, stream=s)", False),
        ("", False),
    ):
        launch, _ = launch_of("kernel_0", kernel, [parsed(code)])
        assert ("//" not in launch.source) == known, code


def _spoilt(static: bool = False, **changes: Any) -> Any:
    """Changes one thing of a kernel, or of its binary."""

    def spoil(kernel: Any) -> Any:
        owner = kernel.launchers[0].__globals__["runner"].__self__ if static else kernel
        vars(owner).update(changes)
        return kernel

    return spoil


def _of_triton(kernel: Any) -> Any:
    """As Triton launches what torch's own launcher cannot: cooperative launches, hooks, tensor maps, several CTAs."""
    kernel.launchers[0].__globals__["runner"] = lambda *arguments: None
    return kernel


def _other_code(kernel: Any) -> Any:
    def launcher(in_ptr0: Any, xnumel: int, stream: int) -> None:
        runner(1, 1, 1, stream, in_ptr0, xnumel)  # noqa: F821

    kernel.launchers[0].__code__ = launcher.__code__
    return kernel


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda kernel: None, "of type NoneType, not a kernel that Triton compiled"),
        (lambda kernel: kernel.launchers[0], "of type function, not a kernel that Triton compiled"),
        (_spoilt(launchers=[]), "has not run yet: which of its 0 forms"),
        (_spoilt(launchers=[1, 2]), "has not run yet: which of its 2 forms"),
        (_spoilt(launchers=[1]), "has not run yet|launched by a int"),
        (_spoilt(inductor_meta={"grid_type": "Grid1D", "coordinate_descent_tuning": True}), "still to be tuned"),
        (_spoilt(inductor_meta={"grid_type": "Grid2D"}), "a launcher of a form that is not known"),
        (_spoilt(triton_meta={"device": None}), "compiled for None, not for one device"),
        (_spoilt(static=True, full_constexprs=[]), "a launcher of a form that is not known"),
        (_spoilt(static=True, arg_tys="Oii"), "takes 3 values and is given 2"),
        (_spoilt(static=True, cubin_raw=None), "cannot be read"),
        (_spoilt(static=True, global_scratch_size=128), "needs scratch memory at each launch"),
        (_spoilt(static=True, _has_tensordesc=True), "takes tensor maps"),
        (_spoilt(static=True, device_agnostic=True), "belongs to no one device"),
        (_of_triton, "launched by Triton, not by torch's own launcher"),
        (_other_code, "a launcher of a form that is not known"),
    ],
)
def test_what_is_not_understood_is_not_stored(
    spoil: Any, why: str, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "none"))
    kernel = spoil(_kernel(CASES["one dimension"], "kernel_0", launcher, tmp_path))
    with pytest.raises(CannotStoreError, match=rf"its kernel kernel_0.*({why})|kernel_0 .*({why})"):
        launch_of("kernel_0", kernel, [])


def test_a_binary_is_found_where_inductor_left_it(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / triton_hash_to_path_key("ab" * 32)
    folder.mkdir(parents=True)
    (folder / "kernel_0.cubin").write_bytes(b"what Triton compiled")
    kernel = _spoilt(static=True, cubin_raw=None)(_kernel(CASES["one dimension"], "kernel_0", launcher, tmp_path))
    assert launch_of("kernel_0", kernel, [])[1] == b"what Triton compiled"


# ---- whole regions -----------------------------------------------------------------------------------------------

SOURCE = """
import torch
import triton
from math import inf, nan
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
from torch._C import _cuda_getCurrentRawStream as get_raw_stream
from torch._C._dynamo.guards import assert_size_stride
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
async_compile = AsyncCompile()

triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''source''', device_str='cuda')
triton_red_fused_1 = async_compile.triton('triton_red_fused_1', '''source''', device_str='cuda')

async_compile.wait(globals())
del async_compile

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        x_1, s_1 = args
        args.clear()
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((4, 4), (4, 1), torch.float32)
            extern_kernels.mm(x_1, x_1, out=buf0)
            workspace_0 = empty_strided_cuda((16, ), (1, ), torch.float32)
            stream0 = get_raw_stream(0)
            triton_poi_fused_0.run(x_1, s_1.item(), workspace_0, 16, stream=stream0)
            del s_1
            buf1 = workspace_0[0 * 4 : 4 * 4].view(4, 4).sum(dim=0)
            triton_red_fused_1.run(buf0, 4, 4, stream=stream0)
            del workspace_0
        return (x_1, buf0, reinterpret_tensor(buf1, (2, 2), (2, 1), 0), )

runner = Runner(partitions=[])
call = runner.call

if __name__ == "__main__":
    print(call)
"""


@pytest.fixture
def region(launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, dict[str, Any]]]:
    """What Inductor would give for a CUDA device, and the namespace of its code."""
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.select_algorithm import extern_kernels

    pointwise = Case({"grid_type": "Grid1D"}, {"XBLOCK": 8}, {"in_ptr0": "x", "s": 0.5, "out_ptr0": "y", "xnumel": 16})
    reduction = Case(
        {"grid_type": "Grid1D"}, {"XBLOCK": 1, "R0_BLOCK": 8}, {"in_ptr0": "x", "xnumel": 4, "r0_numel": 4}
    )
    kernels = {
        name: _kernel(case, name, launcher, tmp_path)
        for name, case in (("triton_poi_fused_0", pointwise), ("triton_red_fused_1", reduction))
    }
    for kernel in kernels.values():
        kernel.run = kernel.launchers[0]
    runnable = SOURCE.replace("import triton\n", "").replace("AsyncCompile()", "Compiler()")
    compiler = SimpleNamespace(triton=lambda name, *_, **__: kernels[name], wait=lambda names: None)
    runnable = runnable.replace("from torch._inductor.async_compile import AsyncCompile\n", "")
    runnable = runnable.replace("from torch._inductor.select_algorithm import extern_kernels\n", "")
    namespace = {"Compiler": lambda: compiler, "extern_kernels": extern_kernels}
    exec(runnable, namespace)
    compiled = object.__new__(CompiledFxGraph)
    compiled.compiled_fn_runner = None
    compiled.device_types, compiled.device_idxs = OrderedSet(["cpu", "cuda"]), OrderedSet([0])
    compiled.source_code, compiled.constants = SOURCE, {}  # type: ignore[assignment]
    compiled.frozen_param_names = compiled.torchbind_constants = compiled.opaque_value_type_classes = {}
    call: Any = namespace["call"]
    compiled.current_callable = align_inputs_from_check_idxs(call, [0], OrderedSet())
    yield compiled, namespace


def _inputs(offset: int = 0) -> list[Any]:
    torch.manual_seed(0)
    return [torch.randn(16 + offset)[offset:].view(4, 4), torch.tensor(0.5, dtype=torch.float64)]


def _seen(launched: list[Any]) -> list[Any]:
    """Launches, with what tells of a tensor where it lies and what it is."""

    def tell(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.shape, value.stride(), value.data_ptr() % 16
        return value

    return [(*each[:-2], tuple(map(tell, each[-2])), each[-1]) for each in launched]


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_a_loaded_region_runs_as_the_one_that_was_stored(offset: int, region: Any, launcher: Launcher) -> None:
    compiled, _ = region
    data = InductorBackend().save(compiled)
    assert data is not None, InductorBackend().why_not_saved(compiled)
    loaded = InductorBackend().load(data)
    results = []
    for call in (compiled.current_callable, loaded):
        launcher.launched.clear()
        given = _inputs(offset)
        results.append((call(given), _seen(launcher.launched)))
        assert given == []
    (theirs, launched), (ours, again) = results
    assert launched == again and len(launched) == 2
    for one, other in zip(theirs[:2], ours[:2], strict=True):
        assert same_bits(one, other) and one.data_ptr() % 16 == other.data_ptr() % 16 == 0
    stored = artifacts.from_bytes(data, "inductor")
    assert stored.aligned == [0] and stored.kernels == {} and len(stored.libraries) == 2
    assert "triton_poi_fused_0.run" in stored.source and "async_compile" not in stored.source
    assert backends.protocol.source_of(loaded) == stored.source


def test_a_binary_is_loaded_once_in_a_process(region: Any, launcher: Launcher) -> None:
    data = InductorBackend().save(region[0])
    assert data is not None
    before = len(launcher.loaded)
    for _ in range(3):
        InductorBackend().load(data)
    assert len(launcher.loaded) == before + 2


_IN_A_BARE_PROCESS = """
import sys
from pathlib import Path
import torch
launched = []
class Launcher:
    def _load_kernel(path, name, shared, device):
        assert Path(path).read_bytes() == name.encode()
        return 1, 2, 3
    _launch_kernel = lambda *arguments: launched.append(arguments)
torch._C._StaticCudaLauncher = Launcher
torch._C._cuda_getCurrentRawStream = lambda device: 7
torch._C._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = torch.cuda.set_device = lambda device: 0
torch.cuda.init, torch.cuda.device_count, torch.cuda.get_device_capability = lambda: None, lambda: 1, lambda d: (9, 0)
import backends
call = backends.get_backend("inductor").load(Path(PATH).read_bytes())
call([torch.ones(4, 4), torch.tensor(0.5, dtype=torch.float64)])
assert len(launched) == 2
found = sorted(each for each in sys.modules if each in ("triton", "torch._inductor", "torch._dynamo", "sympy"))
assert not found, found
"""


def test_a_new_process_imports_neither_triton_nor_inductor(region: Any, tmp_path: Path) -> None:
    data = InductorBackend().save(region[0])
    assert data is not None
    (tmp_path / "artifact").write_bytes(data)
    done = in_subprocess(_IN_A_BARE_PROCESS.replace("PATH", repr(str(tmp_path / "artifact"))), TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("compiled-region-*")), "binaries were left behind"


def _with(**changes: Any) -> Any:
    return lambda compiled, namespace: vars(compiled).update(changes)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_with(device_types={"cpu", "xpu"}), "code for xpu, and only code for the CPU and CUDA"),
        (_with(device_idxs={0, 1}), r"several devices: \[0, 1\]"),
        (_with(current_callable=lambda inputs: inputs), "around its generated code"),
        (_with(source_code=SOURCE.replace("stream0 = get", "triton; stream0 = get")), "imports triton, which may"),
        (_with(source_code=SOURCE.replace("async_compile.triton(", "async_compile.cutlass(")), "made by cutlass"),
        (lambda compiled, namespace: namespace["triton_poi_fused_0"].launchers.clear(), "has not run yet"),
        (lambda compiled, namespace: namespace["runner"].partitions.append(print), "around the parts of its"),
    ],
)
def test_regions_that_are_not_stored(spoil: Any, why: str, region: Any) -> None:
    spoil(*region)
    with pytest.raises(CannotStoreError, match=why):
        InductorBackend().stored(region[0])
    assert InductorBackend().save(region[0]) is None


def test_code_that_writes_into_its_inputs_is_not_stored(region: Any) -> None:
    compiled, namespace = region
    compiled.current_callable = align_inputs_from_check_idxs(namespace["call"], [0], OrderedSet([0]))
    assert "writes into its inputs [0]" in str(InductorBackend().why_not_saved(compiled))


# ---- on a device -------------------------------------------------------------------------------------------------

aten = torch.ops.aten
Shapes = list[tuple[Any, ...]]
SIZE = "n"
"""In a shape: a size that changes."""
ON_A_DEVICE: dict[str, tuple[Any, Shapes]] = {
    "over elements": (lambda x, y: [aten.sin.default(x) * y + 1], [(1000, 33), (1000, 33)]),
    "transposed": (
        lambda x, y: [aten.clone.default(aten.t.default(x), memory_format=torch.contiguous_format) + y * 2],
        [(1000, 700), (700, 1000)],
    ),
    "over long rows": (lambda x: [aten.sum.dim_IntList(aten.sin.default(x), [1])], [(512, 9000)]),
    "over short rows": (lambda x: [aten._softmax.default(x, -1, False)], [(512, 128)]),
    "over columns": (lambda x: [aten.sum.dim_IntList(x, [0]), aten.sum.dim_IntList(x * x, [0])], [(1 << 15, 64)]),
    "over all": (lambda x: [aten.sum.default(aten.sin.default(x))], [(1 << 20,)]),
    "a scan": (lambda x: [aten.cumsum.default(x, 1)], [(8, 100000)]),
    "a number on the CPU, a product": (lambda x, s: [x * s, aten.mm.default(x, x)], [(100, 100), ()]),
    "several at once": (lambda *xs: [*aten._foreach_mul.Scalar([*xs], 2.0)], [(10 * i + 5, 7) for i in range(8)]),
    "any size": (
        lambda n, x, y: [aten.sum.dim_IntList(aten.sin.default(x) + y, [0]), aten.exp.default(x) / n, x + 1],
        [(SIZE, 640), (SIZE, 640)],
    ),
}


def _compiled_for_a_device(name: str) -> Any:
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    function, shapes = ON_A_DEVICE[name]
    env, source = ShapeEnv(), ConstantSource("s0")
    size = env.create_symintnode(env.create_symbol(300, source, DimDynamic.DYNAMIC), hint=300, source=source)
    backend = InductorBackend()
    with FakeTensorMode(shape_env=env):
        examples: list[Any] = [size] if any(SIZE in shape for shape in shapes) else []
        for shape in shapes:
            sizes = [size if each == SIZE else each for each in shape]
            where = ("cuda:0", torch.float32) if shape else ("cpu", torch.float64)
            examples.append(torch.empty(sizes, device=where[0], dtype=where[1]))
        graph = make_fx(function, dict(backend.decompositions()), tracing_mode="real")(*examples)
    return backend.compile(graph, examples)


def _on_a_device(name: str, rows: int, offset: int) -> list[Any]:
    torch.manual_seed(rows)
    _, shapes = ON_A_DEVICE[name]
    found: list[Any] = [rows] if any(SIZE in shape for shape in shapes) else []
    for shape in shapes:
        sizes = torch.Size([rows if each == SIZE else each for each in shape])
        if shape:
            found.append(torch.randn(sizes.numel() + offset, device="cuda:0")[offset:].view(sizes))
        else:
            found.append(torch.tensor(0.3, dtype=torch.float64))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_DEVICE)
def test_on_a_device_the_bits_are_the_same(name: str, cuda: str) -> None:
    torch.zeros(1, device=cuda)
    compiled = _compiled_for_a_device(name)
    with torch.no_grad():
        compiled(_on_a_device(name, 300, 0))  # which finds the fastest forms
        data = InductorBackend().save(compiled)
        assert data is not None, InductorBackend().why_not_saved(compiled)
        assert artifacts.from_bytes(data, "inductor").launches
        triton_kernels._functions.clear()
        loaded = InductorBackend().load(data)
        for rows in (300, 77, 1) if "any" in name else (300,):
            for offset in (0, 1, 2):
                wanted = compiled(_on_a_device(name, rows, offset))
                given = _on_a_device(name, rows, offset)
                found = loaded(given)
                assert given == [] and len(found) == len(wanted)
                for one, other in zip(found, wanted, strict=True):
                    assert one.stride() == other.stride()
                    _assert_same(one, other, bitwise=name != "a scan")
        with torch.cuda.stream(torch.cuda.Stream()):
            again = loaded(_on_a_device(name, 300, 0))
        torch.cuda.synchronize()
        first = loaded(_on_a_device(name, 300, 0))
        for one, other in zip(again, first, strict=True):
            _assert_same(one, other, bitwise=name != "a scan")


def _assert_same(found: torch.Tensor, wanted: torch.Tensor, bitwise: bool) -> None:
    """The blocks of a scan add up what others have got so far, which is another sum each time."""
    rounding = 0.0 if bitwise else 1e-6 * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=rounding)


# ---- what cannot be used -----------------------------------------------------------------------------------------


def _stored(region: Any) -> Stored:
    return InductorBackend().stored(region[0])


def test_a_binary_that_does_not_fit_is_refused(region: Any, launcher: Launcher) -> None:
    stored = _stored(region)
    stored.libraries[next(iter(stored.libraries))] = b"other"
    before = len(launcher.loaded)
    with pytest.raises(ArtifactError, match="other content than its name says"):
        InductorBackend().loaded(stored)
    assert len(launcher.loaded) == before and not triton_kernels._functions


def test_damaged_bytes_are_refused(region: Any) -> None:
    data = InductorBackend().save(region[0])
    assert data is not None
    for position in (len(data) // 2, len(data) - 1):
        with pytest.raises(ArtifactError, match="damaged"):
            InductorBackend().load(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])


def test_another_machine_is_refused(region: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = _stored(region)

    def fails(*arguments: Any) -> None:
        raise RuntimeError("no kernel image is available")

    for owner, name, value, why in (
        (torch.cuda, "get_device_capability", lambda device=0: (8, 0), "capability 9.0, and cuda:0 has 8.0"),
        (torch.cuda, "device_count", lambda: 0, "cuda:0, and there are 0 devices"),
        (torch.cuda, "init", fails, "no kernel image"),
        (torch._C, "_StaticCudaLauncher", None, "launches none"),
        (torch._C, "_StaticCudaLauncher", SimpleNamespace(_load_kernel=fails), "RuntimeError: no kernel image"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ArtifactError, match=why):
            patch.setattr(owner, name, value)
            InductorBackend().loaded(stored)


# ---- alignment ---------------------------------------------------------------------------------------------------


def _tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(64, dtype=torch.float32)
    assert base.data_ptr() % 16 == 0
    return {
        "aligned": base[4:20].view(4, 4),
        "off by one": base[1:17].view(4, 4),
        "transposed": base[1:17].view(4, 4).t(),
        "with gaps": base[1:33].view(4, 8)[:, ::2],
        "expanded": base[3:7].expand(5, 4),
        "empty": base[1:1],
        "a number": base[5],
        "bytes": torch.arange(32, dtype=torch.uint8)[3:12].view(3, 3),
    }


def test_misaligned_inputs_are_copied_as_inductor_copies_them() -> None:
    tensors = [*_tensors().values(), torch.arange(9.0)[1:]]
    checked = range(len(tensors) - 1)
    theirs = [*tensors]
    copy_misaligned_inputs(theirs, [*checked])  # type: ignore[arg-type]
    ours = Aligned(lambda arguments: [*arguments], checked)([*tensors])
    for before, their, our in zip(tensors, theirs, ours, strict=True):
        assert same_bits(their, our) and their.stride() == our.stride()
        assert (their is before) == (our is before)
        assert our.data_ptr() % 16 == 0 or before is tensors[-1], "what is not checked stays"
        assert their.untyped_storage().nbytes() == our.untyped_storage().nbytes()


def test_what_lies_around_generated_code_is_seen() -> None:
    def call(arguments: list[Any]) -> None: ...

    assert alignment_of(align_inputs_from_check_idxs(call, [2, 3], OrderedSet())) == (call, [2, 3], [])
    assert alignment_of(align_inputs_from_check_idxs(call, [2, 3], OrderedSet([3]))) == (call, [2, 3], [3])
    assert alignment_of(align_inputs_from_check_idxs(call, [], OrderedSet())) == (call, [], [])
    assert alignment_of(call) == (call, [], [])


# ---- the key -----------------------------------------------------------------------------------------------------


def _in_use(patch: pytest.MonkeyPatch, *names: str, version: str | None = "13.0") -> None:
    """As if CUDA were in use, with these devices."""

    def properties(index: int) -> Any:
        return SimpleNamespace(name=names[index], major=9, minor=0, multi_processor_count=132)

    patch.setattr(torch.version, "cuda", version)
    patch.setattr(torch.cuda, "is_initialized", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: len(names))
    patch.setattr(torch.cuda, "get_device_properties", properties)


def test_devices_are_part_of_the_environment_where_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    without = environment.environment()
    assert not any(name.startswith("cuda") for name in without)
    seen = []
    for names in (["H100"], ["H100", "H100"], ["H100", "L4"], ["L4", "H100"]):
        with monkeypatch.context() as patch:
            _in_use(patch, *names)
            found = environment.environment()
        assert {name: value for name, value in found.items() if name in without} == without
        assert sorted(found.keys() - without.keys()) == ["cuda", "cuda_devices", "cuda_driver", "cuda_triton"]
        assert all(type(value) is str and value for value in found.values())
        seen.append(found["cuda_devices"])
    assert seen[0] == seen[1] == "H100, 9.0, 132 processors" and len({*seen}) == 3
    with monkeypatch.context() as patch:
        _in_use(patch, "MI300", version=None)
        assert environment.environment() == without


def test_the_process_that_compiles_in_the_background_need_not_use_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    without = environment.environment()
    _in_use(monkeypatch, "H100")
    assert worker_process._without_cuda(environment.environment()) == without


def test_launched_kernels_have_nothing_but_run() -> None:
    assert Launched(print).run is print and Launched.__slots__ == ("run",)


def test_the_code_without_kernels_asks_for_no_device(tmp_path: Path) -> None:
    """As on a machine without CUDA: nothing there is asked, nothing begins."""
    assert load_launches({}, {}) == {}
    source = "import torch\ndef call(args):\n    return [torch.ops.aten.sin.default(*args)]\n"
    stored = store(source, {}, {})
    assert (stored.launches, stored.aligned) == ({}, [])


# ---- in the process that has compiled it ---------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_from_its_second_run_on_its_kernels_are_launched_directly(offset: int, region: Any, launcher: Launcher) -> None:
    """As another process would launch them, on the functions that are loaded here."""
    compiled, _ = region
    backend, before = InductorBackend(), len(launcher.loaded)
    direct, results = Direct(compiled.current_callable, lambda _: backend._launched_directly(compiled)), []
    for form in (GENERATED_CODE, LAUNCHED_DIRECTLY, LAUNCHED_DIRECTLY):
        launcher.launched.clear()
        given = _inputs(offset)
        assert direct.form_for(given) == form
        results.append((direct(given), _seen(launcher.launched)))
        assert given == []
    (theirs, launched), *others = results
    for ours, again in others:
        assert launched == again and len(launched) == 2
        for one, other in zip(theirs[:2], ours[:2], strict=True):
            assert same_bits(one, other) and one.data_ptr() % 16 == other.data_ptr() % 16 == 0
    assert len(launcher.loaded) == before and direct.why_not == ""


def test_directly_launched_code_is_left_to_a_profiler_and_can_be_dropped(
    region: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def code(arguments: list[Any]) -> Sequence[Any]:
        arguments.clear()
        return ("generated",)

    def directly(arguments: list[Any]) -> Sequence[Any]:
        arguments.clear()
        return ("directly",)

    made: list[Any] = []
    direct = Direct(code, lambda compiled: made.append(compiled) or directly)
    assert [*direct([1])] == ["generated"] and not made and direct.direct is None
    assert [*direct([1])] == ["directly"] and made == [code]
    monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    assert [*direct([1])] == ["generated"]
    monkeypatch.undo()
    assert [*direct([1])] == ["directly"] and not direct.drop(GENERATED_CODE)
    assert direct.drop(LAUNCHED_DIRECTLY) and [*direct([1])] == ["generated"] and made == [code]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (artifacts.CannotStoreError("a kernel that Triton launches"), "a kernel that Triton launches"),
        (RuntimeError("the driver says no"), "RuntimeError: the driver says no"),
    ],
)
def test_code_that_cannot_be_launched_directly_is_launched_by_inductor(error: Exception, why: str, region: Any) -> None:
    compiled, _ = region
    made: list[Any] = []

    def refuse(_: Any) -> Any:
        made.append(1)
        raise error

    direct = Direct(compiled.current_callable, refuse)
    assert not direct.is_last(GENERATED_CODE)  # it has not run
    for _ in range(3):
        assert direct.form_for(_inputs()) == GENERATED_CODE
        direct(_inputs())
    assert direct.why_not == why and len(made) == 1 and direct.is_last(GENERATED_CODE)


def test_what_was_not_proved_is_not_the_last_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a profiler looks on for as long as generated code is proved, the other form is proved later."""
    direct = Direct(list, lambda _: tuple)
    direct([1])
    monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    assert direct.form_for([1]) == GENERATED_CODE and not direct.is_last(GENERATED_CODE)
    monkeypatch.undo()
    assert direct.form_for([1]) == LAUNCHED_DIRECTLY and direct.is_last(LAUNCHED_DIRECTLY)


def test_what_a_handler_raises_while_the_other_form_is_made_comes_out() -> None:
    """It is no reason to have no other form."""

    def make(_: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)
        raise AssertionError("not reached")

    def handler(number: int, frame: Any) -> None:
        raise TimeoutError("the user's limit")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        direct = Direct(list, make)
        direct([1])
        with pytest.raises(TimeoutError, match="the user's limit"):
            direct([1])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert direct.why_not == "it has not run yet"


def test_a_form_that_was_dropped_stays_so_while_another_thread_makes_it() -> None:
    """Two threads may make it at once."""
    made: list[Any] = []

    def make(_: Any) -> Any:
        if not made:  # the other thread makes it, runs it, and finds it wrong
            made.append(tuple)
            assert [*direct([1])] == [1] and direct.drop(LAUNCHED_DIRECTLY)
        return tuple

    direct = Direct(list, make)
    direct([1])
    assert direct.form_for([1]) == GENERATED_CODE and direct.direct is None and direct.why_not == "it was dropped"


def test_a_first_run_that_failed_settles_nothing() -> None:
    fails = [True]

    def code(arguments: list[Any]) -> Sequence[Any]:
        if fails.pop():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ("generated",)

    direct = Direct(code, lambda _: lambda arguments: ("directly",))
    with pytest.raises(torch.OutOfMemoryError):
        direct([1])
    fails.append(False)
    assert [*direct([1])] == ["generated"] and [*direct([1])] == ["directly"]


def test_forms_of_the_code_are_forms_of_a_region_with_graphs(launcher: Launcher) -> None:
    """Each of them is proved, poisoned and dropped by itself."""
    ran: list[str] = []

    def code(arguments: list[Any], what: str) -> list[Any]:
        ran.append(what)
        return [arguments.pop() + 1]

    direct = Direct(lambda each: code(each, "generated"), lambda _: lambda each: code(each, "directly"))
    replayed = Replayed(direct, Device(0))
    replayed.why_not = "it is not looked for"
    forms = []
    for _ in range(3):
        arguments = [torch.ones(2)]
        forms.append(backends.protocol.form_for(replayed, arguments))
        run_poisoned(replayed, arguments, forms[-1])
        assert backends.protocol.form_that_ran(replayed, "") == forms[-1]
    assert forms == [GENERATED_CODE, LAUNCHED_DIRECTLY, LAUNCHED_DIRECTLY]
    assert ran == ["generated", "directly", "directly"]
    assert backends.protocol.is_last(replayed, LAUNCHED_DIRECTLY) and not backends.protocol.is_last(replayed, "other")
    assert backends.protocol.drop(replayed, LAUNCHED_DIRECTLY)
    assert backends.protocol.form_for(replayed, [torch.ones(2)]) == GENERATED_CODE
    assert not backends.protocol.drop(replayed, GENERATED_CODE)


def test_directly_launched_code_is_stored_as_what_it_was_made_of(region: Any) -> None:
    compiled, _ = region
    backend = InductorBackend()
    assert backend.save(Direct(compiled, backend._launched_directly)) == backend.save(compiled)
