"""Compiled kernels for the CPU, which Inductor made (torch 2.13): from functions to shared libraries, and back.

Inductor's own loader runs the compiler to know a library's name. Here it is the hash of its bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.machinery
import importlib.util
import itertools
import os
import re
import shutil
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..artifacts import ArtifactError, CannotStoreError

Kernel = Callable[..., Any]
KernelId = tuple[str, str]
"""The place of a kernel: the SHA-256 of its library, and its name there."""
ENTRY = "kernel"
"""The function in a library, and what ``PyInit_`` is followed by: ``CppPythonBindingsCodeCache.entry_function``. A
library with more of them has a number behind the others, see :mod:`backends.batch`."""
_ENTRY_FORM = re.compile(rf"{ENTRY}(_\d+)?")
_loaded: dict[KernelId, Kernel] = {}
_addresses: dict[tuple[str, str], int] = {}
"""By file and name, of what this process has loaded: the file may be gone by now."""
LOADING = threading.RLock()  # held over a fork, which waits for what is being loaded: milliseconds
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=LOADING.acquire, after_in_parent=LOADING.release, after_in_child=LOADING.release)


def library_of(name: str, kernel: Any) -> tuple[bytes, str]:
    """The shared library that a kernel lies in, and its name there.

    Raises:
        CannotStoreError: it is no compiled function for the CPU, or its file is gone.
    """
    module = getattr(kernel, "__self__", None)
    path = getattr(module, "__file__", None)
    entry = getattr(kernel, "__name__", "")
    if not isinstance(kernel, types.BuiltinFunctionType) or not _ENTRY_FORM.fullmatch(entry) or path is None:
        raise CannotStoreError(
            f"its kernel {name} is of type {type(kernel).__name__}, not a compiled function for the CPU"
        )
    try:
        return Path(path).read_bytes(), entry
    except OSError as error:
        raise CannotStoreError(f"the file of its kernel {name} cannot be read ({error})") from error


def load_kernels(libraries: Mapping[str, bytes], wanted: Iterable[KernelId]) -> dict[KernelId, Kernel]:
    """Kernels of libraries, which come by their SHA-256. One that this process has loaded before is not loaded again.

    The libraries are written into a new folder that only this user can enter, and deleted once they are loaded: no
    other process can change what is loaded, and none finds a file there that it did not write.

    Raises:
        ArtifactError: a library is not what its hash says, or cannot be loaded on this machine.
    """
    with LOADING:
        missing = sorted({*itertools.filterfalse(_loaded.__contains__, wanted)})
        if missing:
            tell_libraries()
            # Inductor asks the system for AMX registers when it looks for a processor's vectors; without that, a kernel
            # that uses them dies. Where there are none, this does nothing.
            torch.cpu._init_amx()
            with private_folder() as folder:
                for digest in {digest for digest, _ in missing}:
                    write_library(folder, digest, libraries[digest])
                for digest, entry in missing:
                    _loaded[digest, entry] = _load(folder, digest, entry)
        return {kernel_id: _loaded[kernel_id] for kernel_id in wanted}


def tell_libraries() -> None:
    """Leave for ``PyInit_kernel`` where the function lies that reads a tensor's address.

    It is the same for the life of the process, and Inductor leaves it there too.
    """
    address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)


@contextlib.contextmanager
def private_folder() -> Any:
    """A new folder that only this user can enter, for as long as it takes to load what is in it."""
    folder = tempfile.mkdtemp(prefix="compiled-region-")  # mode 0700
    try:
        yield Path(folder)
    finally:
        # No TemporaryDirectory: a child that is forked meanwhile would remove that when it ends. The memory that was
        # mapped stays. Windows refuses to delete a library that is loaded: then it stays too.
        shutil.rmtree(folder, ignore_errors=True)


def _path(folder: Path, digest: str) -> Path:
    return folder / f"{digest}{importlib.machinery.EXTENSION_SUFFIXES[-1]}"


def write_library(folder: Path, digest: str, data: bytes) -> Path:
    """Write it where :func:`load_kernels` says.

    Raises:
        ArtifactError: it is not what its hash says.
    """
    if hashlib.sha256(data).hexdigest() != digest:
        raise ArtifactError(f"its library {digest[:16]} has other content than its name says")
    path = _path(folder, digest)
    path.write_bytes(data)
    path.chmod(0o700)
    return path


def _load(folder: Path, digest: str, entry: str) -> Kernel:
    # The system's loader keeps one library for a path, and Python for a path and a name: both contain the hash.
    path = _path(folder, digest)
    try:
        return kernel_in(str(path), f"compiled_region_{digest}.", entry)
    except (ImportError, OSError, AttributeError) as error:
        hint = f" (if {folder.parent} is mounted noexec, set TMPDIR to a folder that is not)"
        raise ArtifactError(f"its library {digest[:16]} cannot be loaded: {error}{hint}") from error


def kernel_in(path: str, prefix: str, entry: str) -> Kernel:
    """A function of a library, each of which is a module of its own to Python.

    Raises:
        ImportError, OSError, AttributeError: it cannot be loaded, or has no such function.
    """
    spec = importlib.util.spec_from_file_location(f"{prefix}{entry}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"Python on {sys.platform} knows no way to load {Path(path).name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = getattr(module, entry)
    address_of(kernel)
    return kernel


def address_of(kernel: Any) -> int | None:
    """Return the address of the function that a kernel calls with the addresses of its arguments; None for other
    objects."""
    path, entry = getattr(getattr(kernel, "__self__", None), "__file__", None), getattr(kernel, "__name__", "")
    if not isinstance(kernel, types.BuiltinFunctionType) or not _ENTRY_FORM.fullmatch(entry) or path is None:
        return None
    if (path, entry) not in _addresses:
        try:
            _addresses[path, entry] = address_in(ctypes.CDLL(path), entry)  # it is loaded already
        except (OSError, AttributeError):  # the file is gone, or it is no kernel
            return None
    return _addresses[path, entry] or None


def address_in(library: ctypes.CDLL, name: str) -> int:
    """Return the address of a function of a shared library.

    Raises:
        AttributeError: it has none of this name.
    """
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
