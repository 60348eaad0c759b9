"""Finds the extension of this room, has it built where it is not there yet, loads it and checks it.

It is built once for each build of torch, Python, compiler and text of the sources, whose hash is in its name, in a
process of low priority (:mod:`build`): nobody waits for it. Private, tried on 2.11 to 2.13: the headers in
``torch/include``. The layouts of the classes there are compiled into the extension.
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
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from backends.inductor import straight_line

from . import build as building
from .self_check import why_wrong

BEING_BUILT = "it is not built yet"
_SOURCES = Path(__file__).parent
_HOST = Path(straight_line.__file__).parent / "host.h"
_MODULE = "compiled_autograd_native"
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_BETWEEN_BUILDS = 60.0
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
_LIBRARIES = ("torch_cpu", "torch_python", "c10")

Found = tuple[int, list[torch.Tensor], list[int], list[int | float], list[Any]]
"""What a tape holds: the number of the variant that serves or -1, tensors, sizes, scalars, users' objects."""


class HostedProgram(Protocol):
    """What a region was compiled to, with tensors of C++ as arguments and results; ``is_straight_line`` says whether it
    runs without Python."""

    is_straight_line: bool


class Taken(Protocol):
    """What a tape held that was taken; ``variant`` is the number of the one that serves, or -1."""

    variant: int

    def lists(self) -> tuple[list[torch.Tensor], list[int], list[int | float], list[Any]]:
        """Tensors, sizes, scalars, users' objects. It has nothing afterwards."""

    def run(
        self, program: HostedProgram, may_write: Callable[[], bool]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]] | None:
        """Run a program on the tensors, and give the leaves their gradients. It has nothing afterwards.

        Args:
            may_write: asked before anything is written; no other thread of Python comes in from then on.

        Returns:
            None; or where Python has to write, what the program gave, and the tensors, those that are leaves.
        """


class Plan(Protocol):
    """What was learnt of a tape. Methods give the reason where they refuse a tape, or where it is another."""

    nodes: int

    def compare(
        self, outputs: Sequence[Any], gradients: Sequence[Any], inputs: Sequence[Any] = (), captures: bool = False
    ) -> Found | str:
        """What a tape holds, if it is the one that was learnt."""

    def add_variant(
        self, outputs: Sequence[Any], gradients: Sequence[Any], inputs: Sequence[Any] = (), captures: bool = False
    ) -> Found | str:
        """The same; what the tape holds is a variant from then on."""

    def take(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[Any],
        keep_graph: bool,
        inputs: Sequence[Any] = (),
        captures: bool = False,
    ) -> Taken | str:
        """The same; unless it is to be kept, the tape is freed, as by the engine."""


Question = tuple[Any, str | None, Any]
"""What C++ asks as Python would: (object, name, answer), where the attribute is to be that very object; (function,
None, answer), where a call without arguments is to give something equal."""


class FastHit(Protocol):
    """A hit that Python has served, as C++ may serve it again."""


class FastPath(Protocol):
    """Called as ``run_backward``. What is none of its ``hits`` goes to Python; ``served`` is how many did not."""

    hits: list[FastHit]
    served: int

    def __call__(self, *arguments: Any, **named: Any) -> Any: ...

    def serve(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[Any],
        keep_graph: bool,
        started: float,
        is_timed: bool,
    ) -> Any:
        """The same for ``loss.backward()``, where Python has asked policies what they ask before.

        Args:
            started: when it was asked for, by ``time.perf_counter``.
            is_timed: Python times what is run.

        Returns:
            The variant that has run it, and the seconds that it took in all; else what :meth:`Module.fast_hit` was
            given as ``hand_over`` says of the tape, if that is taken; else None.
        """


class Module(Protocol):
    """The extension."""

    built_for: str

    def fast_hit(
        self,
        plan: Plan,
        program: HostedProgram,
        shapes: int,
        settings: Any,
        structure: weakref.ref[Any],
        variant: weakref.ref[Any],
        tunes: bool,
        questions: tuple[Sequence[Question], Sequence[Question], Sequence[Question]],
        hand_over: Callable[[Taken], Any],
        may_write: Callable[[], bool],
        write: Callable[[list[torch.Tensor | None], list[torch.Tensor | None]], None],
        counter: Any,
    ) -> FastHit:
        """A hit that Python is serving, in this thread and state.

        Args:
            shapes: the number that the plan has for them.
            tunes: a hit at which the variant may be timed is left to Python.
            questions: those of policies, which are not asked where Python has; those asked before the tape is walked;
                and those asked once it is taken.
            hand_over: what it is in Python, where Python has to go on.
            may_write, write: of :meth:`Taken.run`: what is asked, and what is done with what it gives.
            counter: counts hits in its attribute of that name.
        """

    def fast_path(
        self,
        fallback: Callable[..., Any],
        resume: Callable[..., Any],
        interrupted: Callable[..., None],
        thread: Any,
        uses: Iterator[int],
    ) -> FastPath:
        """What serves them.

        Args:
            fallback: the way through Python.
            resume: the same once the tape is taken: (session, arguments, named arguments, when it was asked for,
                hand_over, taken).
            interrupted: told of a backward that was ended before anything ran: (session, when, error).
            thread: what is a thread's own, with ``here``.
            uses: numbers of uses, by which it is known what was used least recently.
        """

    def in_own_loop(
        self, outputs: Sequence[Any], gradients: Sequence[Any], keep_graph: bool, least_nodes: int
    ) -> tuple[torch.Tensor, torch.Tensor] | str:
        """A number and its gradient. The backward of the number on the eager engine is that of the outputs, run without
        the engine's queue; it can be run once. The reason where the engine is to run it itself, as it is where the tape
        has fewer nodes than ``least_nodes``."""

    def node_in_own_loop(self) -> Any:
        """The node that runs, where the innermost backward of the calling thread is such a one; else None."""

    def learn(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[Any],
        order_shows: bool,
        inputs: Sequence[Any] = (),
        captures: bool = False,
    ) -> Plan | str:
        """Learn a tape, or the reason why not.

        Args:
            outputs, gradients, inputs: as ``run_backward`` has them; no inputs are all leaves.
            order_shows: a tape whose nodes were made in another order is another.
            captures: the gradients of inputs are asked for, and not added to theirs.
        """

    def program(self, function: Any, arguments: Sequence[int], gives: Sequence[int]) -> HostedProgram:
        """What a region was compiled to, as a step has it.

        Args:
            function: takes a list of arguments, which it empties, and gives a sequence of results.
            arguments: which of a handover's tensors it takes.
            gives: for each leaf the number of its tensor, that of its result, and 1 where it can keep that.
        """

    def move_aside(self, outputs: Sequence[Any]) -> object | None:
        """Keep the hooks of DDP's reducer on the leaves of a tape from refusing a walk, until what this gives is put
        back or gone. None where there are none, or something is there that is not known; then nothing was changed."""

    def put_back(self, moved: object) -> list[torch.Tensor]:
        """Have them refuse again; gives the leaves."""

    def tape_of_hooks(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """A number whose backward, on the eager engine, calls these hooks of the leaves, in their order. A second
        backward calls what they have queued for the end of a backward."""

    def has_queued(self, number: torch.Tensor) -> bool:
        """Whether they have queued something."""

    def unlike(self, wanted: list[torch.Tensor | None], found: list[torch.Tensor | None], relative: float) -> list[int]:
        """Of which pairs of two lists it cannot be told here that no value of the one is further from that of the other
        than ``relative`` times the root mean square: by their number. It can be for plain floats on the CPU alone."""


class Library:
    """The extension as it is or will be in a folder.

    Attributes:
        reason: why it is not there; empty where it is.
    """

    def __init__(self, folder: Path) -> None:
        self.reason = BEING_BUILT
        self._folder = folder
        self._name = ""
        self._module: Module | None = None
        self._looked = self._began = -math.inf

    def module(self, build: bool = True) -> Module | None:
        """The extension; None where it is not there, or not yet. Never waits.

        Args:
            build: have it built where it is not there.
        """
        if self.reason != BEING_BUILT:
            return self._module
        now = time.monotonic()
        if now - self._looked >= _SECONDS_BETWEEN_LOOKS:
            self._looked = now
            try:
                self.reason = why_unsupported() or self._look(now, begins=build)
            except (OSError, ImportError) as error:
                self.reason = str(error)
        return self._module

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
            self._module = module
        return wrong


def why_unsupported() -> str:
    """Why there can be no extension here; empty where there can."""
    if sys.platform != "linux":
        return f"it was not tried on {sys.platform}"
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
    """What is in there is run as code: nobody else may be able to write it. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is no folder that is this user's alone: chmod 700, or remove it")


def _begin_build(target: Path, name: str) -> None:
    """The process that is waited for ends at once; the compiler runs in one that is no child of this one."""
    root = Path(torch.__file__).parent
    command = [str(_compiler()), *_FLAGS, f'-DNATIVE_BUILT_FOR="{name}"', str(_SOURCES / "all.cpp")]
    command += [f"-isystem{root / 'include'}", f"-isystem{sysconfig.get_path('include')}", f"-L{root / 'lib'}"]
    command += [f"-l{library}" for library in _LIBRARIES]
    subprocess.run(
        [sys.executable, "-I", "-S", str(Path(building.__file__)), str(target), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not meant for it
        check=False,
    )
