"""Finds the extension of this room, has it built where it is not there yet, loads it and checks it.

It is built once for each build of torch, Python, compiler and text of the sources, whose hash is in its name, in a
process of low priority (:mod:`build`), for which only :meth:`Library.built` waits. Private, tried on 2.11 to 2.15: the
headers in ``torch/include``. The layouts of the classes there are compiled into the extension.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..backends.inductor import straight_line
from ..backends.signal_handlers import raise_what_a_handler_raised
from . import build as building
from .interface import Module
from .self_check import why_wrong

BEING_BUILT = "it is not built yet"
_SOURCES = Path(__file__).parent
_HOST = Path(straight_line.__file__).parent / "host.h"
_MODULE = "compiled_autograd_native"
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_BETWEEN_BUILDS = 60.0
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
_LIBRARIES = ("torch_cpu", "torch_python", "c10")


class Library:
    """The extension as it is or will be in a folder.

    Attributes:
        LATEST: the library that this process uses; None before it was looked for.
        reason: why it does not exist; empty if it does.
    """

    LATEST: ClassVar[Library | None] = None

    def __init__(self, folder: Path) -> None:
        self.reason = BEING_BUILT
        self._folder = folder
        self._name = ""
        self.loaded: Module | None = None
        self._looked = self._began = -math.inf

    def module(self, build: bool = True) -> Module | None:
        """The extension; None where it is not there, or not yet. Never waits.

        Args:
            build: have it built where it is not there.
        """
        if self.reason != BEING_BUILT:
            return self.loaded
        now = time.monotonic()
        if now - self._looked >= _SECONDS_BETWEEN_LOOKS:
            self._looked = now
            try:
                self.reason = why_unsupported() or self._look(now, begins=build)
            except (OSError, ImportError) as error:
                raise_what_a_handler_raised(error)  # a TimeoutError is an OSError
                self.reason = str(error)
        return self.loaded

    def built(self) -> Module | None:
        """The extension, built first where it is not there, here or by a process that builds it already."""
        if self.module(build=False) is None and self.reason == BEING_BUILT:
            try:
                build_here(self._folder)
            except OSError as error:
                raise_what_a_handler_raised(error)
                self.reason = str(error)
            self._looked = -math.inf
        return self.module(build=False)

    def _look(self, now: float, begins: bool) -> str:
        """Load it where it is built, else begin to build it. Gives the reason why it is not there."""
        if not self._name:
            if not begins and not self._folder.exists():
                return BEING_BUILT
            _make_private(self._folder)
            self._name = name_of_build()
        target = self._folder / f"{self._name}.so"
        failed = target.with_suffix(building.FAILED)
        if target.exists():
            return self._load(target)
        if failed.exists():
            return f"the compiler failed, as {failed} says"
        if begins and now - self._began >= _SECONDS_BETWEEN_BUILDS:  # again, where whoever built it was ended
            self._began = now
            _begin_build(target, self._name)
        return BEING_BUILT

    def _load(self, target: Path) -> str:
        spec = importlib.util.spec_from_file_location(_MODULE, target)
        assert spec is not None and spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if module.built_for != self._name:
            return f"{target} was built for something else"
        wrong = why_wrong(module)
        if not wrong:
            self.loaded = module
        return wrong


def why_unsupported() -> str:
    """Return why no extension is possible here; empty if it is."""
    if sys.platform != "linux":
        return f"it was not tested on {sys.platform}"
    return why_no_compiler()


def why_no_compiler() -> str:
    """Return why C++ cannot be built here; empty if it can."""
    return "" if _compiler() else "there is no C++ compiler: set CXX, or install g++"


def name_of_build() -> str:
    """The version of torch, which ``shadow-cache env`` reads, and a hash of all that the extension depends on."""
    compiler = _compiler()
    assert compiler is not None
    status = Path(compiler).resolve().stat()
    parts = [torch.__version__, str(torch.version.git_version), str(sysconfig.get_config_var("SOABI")), *_FLAGS]
    parts += [compiler, str(status.st_size), str(status.st_mtime_ns)]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sorted(_SOURCES.rglob("*")):
        if source.suffix in (".h", ".cpp"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update(_HOST.read_bytes())
    return f"torch-{torch.__version__}-{digest.hexdigest()[:32]}"


def _compiler() -> str | None:
    found = (shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name)
    return next(filter(None, found), None)


def _make_private(folder: Path) -> None:
    """Make a folder private: it has code that is run, so no other user may write it. Raises OSError."""
    for each in (folder.parent, folder):  # the first is the store's, which refuses a folder that others can read
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is no folder that only this user can access; run chmod 700, or remove it")


def build_here(folder: Path) -> None:
    """Build the extension in a folder and wait for it: the compiler is a child of this process. Raises OSError."""
    _make_private(folder)
    name = name_of_build()
    building.build(folder / f"{name}.so", _command(name), waits=True)


def _command(name: str) -> list[str]:
    root = Path(torch.__file__).parent
    command = [str(_compiler()), *_FLAGS, f'-DNATIVE_BUILT_FOR="{name}"', str(_SOURCES / "all.cpp")]
    command += [f"-isystem{root / 'include'}", f"-isystem{sysconfig.get_path('include')}", f"-L{root / 'lib'}"]
    return [*command, *(f"-l{library}" for library in _LIBRARIES)]


def _begin_build(target: Path, name: str) -> None:
    """Begin a build. The process that is waited for ends at once. The compiler runs in a process that is no child of
    this one."""
    subprocess.run(
        [sys.executable, "-I", "-S", str(Path(building.__file__)), str(target), *_command(name)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not meant for it
        check=False,
    )
