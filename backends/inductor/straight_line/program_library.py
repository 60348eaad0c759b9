"""Compiles ``straight_line.cpp`` once in a process, while something else goes on.

It includes none of PyTorch's headers and is the same for every graph, so it need not wait for one, and takes a second.
"""

from __future__ import annotations

import functools
import importlib.machinery
import logging
import os
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..kernels import ENTRY, kernel_in, tell_libraries
from .translation import MakeProgram

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("straight_line.cpp")
_FLAGS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-shared",
    *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()),
)


class Library(NamedTuple):
    """The function that makes programs, and the bytes of its shared library."""

    make_program: MakeProgram
    content: bytes


@functools.cache
def begin() -> Future[Library | None]:
    """Begin, once in a process. Returns at once; None is what comes where it cannot be compiled."""
    pool = ThreadPoolExecutor(1, "program_library")
    future = pool.submit(_compiled)
    pool.shutdown(wait=False)
    return future


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=begin.cache_clear)  # the thread is the parent's


def _compiled() -> Library | None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if sys.platform == "win32":
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="straight-line-") as folder:
            path = Path(folder) / f"{ENTRY}{importlib.machinery.EXTENSION_SUFFIXES[-1]}"
            include = f"-I{sysconfig.get_path('include')}"
            command = [get_cpp_compiler(), *_FLAGS, include, str(_SOURCE), "-o", str(path)]
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
            tell_libraries()
            return Library(kernel_in(str(path), "straight_line.", ENTRY), path.read_bytes())
    except (InvalidCxxCompiler, OSError, ImportError, subprocess.CalledProcessError) as error:
        what = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        _log.debug("generated code runs as Python: %s", what)
        return None
