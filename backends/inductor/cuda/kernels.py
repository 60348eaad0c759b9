"""Kernels for CUDA, which Inductor made with Triton (torch 2.13): from launchers to binaries, and back.

Neither Inductor nor Triton is imported to load them: torch has a launcher of its own, in C++, that takes the binary
which Triton compiled (``torch/csrc/inductor/static_launcher/cuda.cpp``). What Inductor's launchers do around it, the
grid above all, is Python code of a few lines; it is generated here once more, and must be what Inductor's own is.
"""

from __future__ import annotations

import ast
import hashlib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...artifacts import ArtifactError, CannotStoreError, Launch
from ...protocol import Compiled
from ..kernels import LOADING, private_folder, write_library
from .one_graph import extent

_ALIGNING = "align_inputs_from_check_idxs.<locals>.run"
"""The function that Inductor puts around generated code (``_inductor/utils.py``) to copy inputs that kernels cannot
read."""
_ALIGNMENT = 16
"""``ALIGNMENT`` in the same file: at what multiples of bytes kernels take the memory of their tensors to begin."""
_NOT_LAUNCHED = {
    "global_scratch_size": "needs scratch memory at each launch",  # since 2.15
    "_has_tensordesc": "takes tensor maps",  # since 2.14
    "device_agnostic": "belongs to no one device",  # since 2.14
}
"""Attributes of kernels that our launches refuse, with the reason: ``StaticallyLaunchedTritonKernel.run`` does more for
such kernels (``_inductor/runtime/static_triton_launcher.py``), and no GPU has shown yet that our launches could."""
_functions: dict[tuple[str, str, int], int] = {}
"""The driver's handles of what this process has loaded, by binary, name and device. None is ever unloaded."""


class Launched:
    """Replaces Inductor's ``CachingAutotuner`` in loaded code, which only calls its ``run``."""

    __slots__ = ("run",)

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run


class Aligned:
    """Calls generated code with inputs that lie where its kernels read; copies those that do not, as Inductor does.

    Attributes:
        compiled: the function ``call`` of generated code.
        checked: which inputs are looked at. Kernels make no difference for the others, or they are on the CPU.
    """

    def __init__(self, compiled: Compiled, checked: Sequence[int]) -> None:
        self.compiled = compiled
        self.checked = tuple(checked)

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        """Run it. The arguments are emptied, as :data:`Compiled` has it."""
        for index in self.checked:
            tensor = arguments[index]
            if tensor.data_ptr() % _ALIGNMENT:
                arguments[index] = _copy(tensor)
        return self.compiled(arguments)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """With the same strides, gaps and repetitions (``clone_preserve_strides`` in ``_inductor/utils.py``)."""
    whole = torch.as_strided(tensor, (extent(tensor),), (1,)).clone()
    return torch.as_strided(whole, tensor.shape, tensor.stride())


def alignment_of(call: Any) -> tuple[Any, list[int], list[int]]:
    """Return the code inside Inductor's copying of inputs, the inputs that it checks, and those that the code writes
    into, so that they are copied back. Code without copying is returned unchanged."""
    if getattr(call, "__qualname__", "") != _ALIGNING:
        return call, [], []
    cells = dict(zip(call.__code__.co_freevars, (cell.cell_contents for cell in call.__closure__), strict=True))
    if cells.keys() != {"inputs_to_check", "model", "mutated_input_idxs"}:
        return call, [], []  # nothing that is known: whoever asks finds no generated code there
    return cells["model"], [*cells["inputs_to_check"]], sorted(cells["mutated_input_idxs"])


# ---- storing -----------------------------------------------------------------------------------------------------


def launch_of(name: str, kernel: Any, code: Iterable[ast.AST]) -> tuple[Launch, bytes]:
    """How a kernel is launched, and its binary.

    Args:
        name: what the code calls it.
        kernel: Inductor's ``CachingAutotuner`` of it, once it has run.
        code: all that calls it.

    Raises:
        CannotStoreError: it has not run yet, or is launched in another way than torch's own launcher does.
    """
    launcher = _launcher(name, kernel)
    static = _static(name, launcher)
    device = kernel.triton_meta.get("device")
    if type(device) is not int:
        raise CannotStoreError(f"its kernel {name} was compiled for {device!r}, not for one device")
    parameters = [*launcher.__code__.co_varnames[: launcher.__code__.co_argcount]]
    passed = [each for index, each in enumerate(static.arg_names) if index not in static.full_constexprs]
    grid = _grid(kernel.inductor_meta, launcher.config)
    _check_launcher(name, launcher, parameters, passed, grid)
    if len(passed) != len(static.arg_tys):
        raise CannotStoreError(f"its kernel {name} takes {len(static.arg_tys)} values and is given {len(passed)}")
    scratch = sum((static.has_global_scratch, static.has_profile_scratch))  # pointers to no memory
    values = ", ".join([*passed, *["None"] * scratch])
    lines, numbers = _folded(grid, _numbers_given(name, parameters, code))
    fixed = f"{static.num_warps}, {static.shared}, {static.arg_tys + 'O' * scratch!r}"
    call = f"_launch(_function, {', '.join(numbers)}, {fixed}, ({values}{',' if values else ''}), stream)"
    binary = _binary(name, static, device)
    launch = Launch(
        library=hashlib.sha256(binary).hexdigest(),
        entry=static.name,
        shared=static.shared,
        device=device,
        capability=capability_of(device),
        source="\n    ".join([f"def run({', '.join(parameters)}):", *lines, call]) + "\n",
    )
    return launch, binary


def _launcher(name: str, kernel: Any) -> Any:
    """Return the one launcher that a kernel keeps after its run."""
    launchers = getattr(kernel, "launchers", None)
    if not isinstance(launchers, list) or not isinstance(getattr(kernel, "inductor_meta", None), dict):
        raise CannotStoreError(
            f"its kernel {name} is of type {type(kernel).__name__}, not a kernel that Triton compiled"
        )
    if len(launchers) != 1:
        raise CannotStoreError(f"its kernel {name} has not run yet: which of its {len(launchers)} forms is the fastest")
    found, config = launchers[0], getattr(launchers[0], "config", None)
    tuned = kernel.inductor_meta.get("coordinate_descent_tuning") and not getattr(config, "found_by_coordesc", False)
    if tuned:
        raise CannotStoreError(f"its kernel {name} has not run yet: its form is still to be tuned")
    if not isinstance(found, types.FunctionType) or config is None:
        raise CannotStoreError(f"its kernel {name} is launched by a {type(found).__name__}, not by generated code")
    return found


def _static(name: str, launcher: Any) -> Any:
    """Return the object that launches a kernel in the end."""
    static: Any = getattr(launcher.__globals__.get("runner"), "__self__", None)
    if type(static).__name__ != "StaticallyLaunchedCudaKernel":
        raise CannotStoreError(f"its kernel {name} is launched by Triton, not by torch's own launcher")
    for attribute, what in _NOT_LAUNCHED.items():
        if getattr(static, attribute, None):
            raise CannotStoreError(f"its kernel {name} {what}, and is launched by Inductor alone")
    return static


def _grid(meta: Mapping[str, Any], config: Any) -> tuple[list[str], list[str]]:
    """Return the numbers of blocks in each direction, as in Inductor's launcher: statements, and expressions."""
    from torch._inductor.runtime.triton_heuristics import GridExpr

    grid = GridExpr.from_meta(meta, config)  # type: ignore[arg-type]
    return [*grid.prefix], [str(each) for each in (grid.x_grid, grid.y_grid, grid.z_grid)]


def _check_launcher(
    name: str, launcher: Any, parameters: Sequence[str], passed: Sequence[str], grid: tuple[list[str], list[str]]
) -> None:
    """Check that Inductor's launcher does just this (``CompileResult._gen_launcher_code``); its text is not kept."""
    lines, numbers = grid
    names = [f"grid_{index}" for index in range(3)]
    body = [*lines, *(f"{each} = {number}" for each, number in zip(names, numbers, strict=True))]
    body.append(f"runner({', '.join([*names, 'stream', *passed])})")
    namespace: dict[str, Any] = {}
    exec("\n    ".join([f"def launcher({', '.join(parameters)}):", *body]), namespace)
    ours, theirs = namespace["launcher"].__code__, launcher.__code__
    parts = ("co_code", "co_consts", "co_names", "co_varnames", "co_argcount", "co_flags")
    if any(getattr(ours, part) != getattr(theirs, part) for part in parts) or parameters[-1:] != ["stream"]:
        raise CannotStoreError(f"its kernel {name} has a launcher of a form that is not known")


def _numbers_given(name: str, parameters: Sequence[str], code: Iterable[ast.AST]) -> dict[str, int]:
    """Parameters that have the same number wherever the kernel is called."""
    nodes = [node for tree in code for node in ast.walk(tree)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{name}.run"]
    seen = sum(isinstance(node, ast.Name) and node.id == name for node in nodes)
    plain = [[each.value if isinstance(each, ast.Constant) else None for each in call.args] for call in calls]
    if seen != len(calls) or any(len(each) != len(parameters) - 1 for each in plain):
        return {}  # it is given to something else, or called in another way
    columns = zip(parameters, zip(*plain, strict=True), strict=False)
    return {each: column[0] for each, column in columns if type(column[0]) is int and len({*column}) == 1}


def _folded(grid: tuple[list[str], list[str]], given: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """The grid as numbers where it depends on nothing else."""
    lines, numbers = grid
    scope: dict[str, Any] = dict(given)
    try:
        exec("\n".join(lines), scope)
        return [], [str(eval(number, scope)) for number in numbers]
    except (NameError, ZeroDivisionError):  # a size that a call computes; no rows, for which Inductor fails too
        return lines, numbers


def _binary(name: str, static: Any, device: int) -> bytes:
    """Return Triton's binary. Inductor drops it after loading, but leaves it in the folder of its cache."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    if isinstance(static.cubin_raw, bytes):
        return static.cubin_raw
    path = Path(triton_cache_dir(device)) / triton_hash_to_path_key(static.hash) / f"{static.name}.cubin"
    try:
        return path.read_bytes()
    except OSError as error:
        raise CannotStoreError(f"the file of its kernel {name} cannot be read ({error})") from error


def capability_of(device: int) -> str:
    """Return the capability that a device's binaries are compiled for: ``9.0``."""
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


# ---- loading -----------------------------------------------------------------------------------------------------


def load_launches(libraries: Mapping[str, bytes], launches: Mapping[str, Launch]) -> dict[str, Launched]:
    """Kernels by name. A binary that this process has loaded on a device is not loaded there again.

    Raises:
        ArtifactError: a binary is not what its hash says, or this machine has no such device.
    """
    if not launches:
        return {}
    launcher = getattr(torch._C, "_StaticCudaLauncher", None)
    if launcher is None:
        raise ArtifactError("it has kernels for CUDA, and this build of torch launches none")
    try:
        torch.cuda.init()
        _check_devices(launches.values())
        with LOADING:
            missing = _missing(launches.values())
            if missing:
                _load(libraries, missing, launcher)
    except (AssertionError, RuntimeError, OSError) as error:  # the first is what a build without CUDA raises
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"its kernels for CUDA cannot be loaded ({type(error).__name__}: {error})") from error
    return {
        name: launched(launch.source, _functions[_key(launch)], launcher._launch_kernel)
        for name, launch in launches.items()
    }


def _missing(launches: Iterable[Launch]) -> list[Launch]:
    return [each for each in launches if _key(each) not in _functions]


def launched_here(launches: Mapping[str, Launch], kernels: Mapping[str, Any]) -> dict[str, Launched]:
    """Return the launches of kernels that this process has compiled and run. They stay loaded while they are
    referenced."""
    if not launches:
        return {}
    launch = torch._C._StaticCudaLauncher._launch_kernel
    functions = {name: _static(name, _launcher(name, kernels[name])).function for name in launches}
    return {name: launched(each.source, functions[name], launch) for name, each in launches.items()}


def launched(source: str, function: int, launch: Callable[..., None]) -> Launched:
    """Return a kernel that the code of a :class:`Launch` launches, by the driver's handle."""
    namespace: dict[str, Any] = {"_function": function, "_launch": launch}
    exec(compile(source, "<the launch of a stored kernel>", "exec"), namespace)
    return Launched(namespace["run"])


def _key(launch: Launch) -> tuple[str, str, int]:
    return launch.library, launch.entry, launch.device


def _check_devices(launches: Iterable[Launch]) -> None:
    for device, wanted in {(launch.device, launch.capability) for launch in launches}:
        count = torch.cuda.device_count()
        if device >= count:
            raise ArtifactError(f"it has kernels for cuda:{device}, and there are {count} devices")
        if (found := capability_of(device)) != wanted:
            raise ArtifactError(f"it has kernels for capability {wanted}, and cuda:{device} has {found}")


def _load(libraries: Mapping[str, bytes], launches: Sequence[Launch], launcher: Any) -> None:
    """Load binaries. The driver has read a file once it is loaded."""
    with private_folder() as folder:
        paths = {digest: write_library(folder, digest, libraries[digest]) for digest in {e.library for e in launches}}
        for launch in launches:
            with torch.cuda.device(launch.device):
                loaded = launcher._load_kernel(str(paths[launch.library]), launch.entry, launch.shared, launch.device)
            # The function, its registers and its spills; 2.13 gives the module before these, whose memory stays for as
            # long as it is not unloaded.
            _functions[_key(launch)] = loaded[-3]
