"""Parts of the selftest that run in a process of their own. They load the extension, have Inductor compile, use CUDA,
or write a store; the user's process would keep something of that.

All of their files are in a temporary folder. Each process writes its results there, a line for each part.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import torch

from ..compiling.worker_process import command
from ..engine.fast_path.arming import FAST_PATH
from ..engine.native_hits import NATIVE_HITS
from ..engine.session import HIT
from ..native.library import BEING_BUILT, Library, build_here, why_unsupported
from ..policies.own_loop import OWN_LOOPS, why_off
from ..process_state import PROCESS
from .checks import NOT_HERE, OFF, OK, WRONG, PartResult, Verdict, check_step, check_tape, measured, session_with
from .tapes import HERE, LEFT_TO_EAGER, SIZES, STEPS, TapeCase

_STEPS_TO_LEARN = 12
"""The number of steps in which the walk in C++ learns a tape, with some to spare."""
_WALKED = ("node hooks", "custom functions", "views and in-place writes")
"""The tapes that the walk in C++ has to know again."""
_STORED = {"eager": HERE["views and in-place writes"], "inductor": SIZES}
"""The backends whose code is stored, each with a tape."""


def start(folder: Path, name: str, parts: Iterable[str], native: Path | None) -> subprocess.Popen[bytes]:
    """Start a process that runs some parts.

    Args:
        folder: a temporary folder; the process writes the file ``name`` there.
        native: the folder in which the user's extension is; None where the settings turn the extension off.
    """
    arguments = repr((str(folder), name, list(parts), None if native is None else str(native)))
    with folder.joinpath(f"{name}.said").open("wb") as said:
        return subprocess.Popen(
            command(f"from compiled_autograd.selftest.apart import main; main(*{arguments})"),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env={**os.environ, **_inside(folder)},
            start_new_session=True,  # whoever started it ends it, with the compilers that it has started
        )


def _inside(folder: Path) -> dict[str, str]:
    """Variables that have other libraries put their files into the folder."""
    made = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "TMPDIR": "temporary"}
    for each in made.values():
        folder.joinpath(each).mkdir(exist_ok=True)
    return {variable: str(folder / each) for variable, each in made.items()}


def results(folder: Path, name: str, parts: Iterable[str], status: int | None) -> list[PartResult]:
    """Read the results that such a process has written; a part that is missing there is wrong.

    Args:
        status: how the process has ended; None: it took too long.
    """
    file = folder / name
    lines = file.read_bytes().splitlines() if file.exists() else []
    found = {each.name: each for each in (msgspec.json.decode(line, type=PartResult) for line in lines)}
    said = folder.joinpath(f"{name}.said").read_text(errors="replace").strip().splitlines()
    ended = "its process took too long" if status is None else f"its process ended with status {status}"
    reason = f"{ended}{f': {said[-1]}' if said else ''}"
    return [found.get(part) or PartResult(part, WRONG, 0.0, reason) for part in parts]


def main(folder: str, name: str, parts: Sequence[str], native: str | None) -> None:
    """Run some parts, and write what became of them."""
    with Path(folder, name).open("ab", buffering=0) as file:
        for part in parts:
            found = measured(part, _check(part, Path(folder), None if native is None else Path(native)))
            file.write(msgspec.json.encode(found) + b"\n")


def _check(part: str, folder: Path, native: Path | None) -> Callable[[], Verdict]:
    if part in HERE:
        return functools.partial(check_tape, HERE[part])
    if part in (EXTENSION, OWN_LOOP):
        return functools.partial(APART[part], folder, native)
    return functools.partial(APART[part], folder)


# ---- Inductor, the store, a second process ---------------------------------------------------------------------------


def _inductor(folder: Path) -> Verdict:
    missing = _why_no_compiler()
    if missing:
        return NOT_HERE, missing
    verdict = check_tape(SIZES, exact=False, backend="inductor", cache_dir=_cache(folder))
    if verdict[0] == OK:
        _is_stored(folder, "inductor").touch()
    return verdict


def _why_no_compiler() -> str:
    """Why Inductor cannot compile for the CPU; empty where it can."""
    from ..backends.inductor.backend import MissingCompilerError, require_cpp_compiler

    try:
        require_cpp_compiler()
    except MissingCompilerError as error:
        return str(error)
    return ""


def _store(folder: Path) -> Verdict:
    verdict = check_tape(_STORED["eager"], cache_dir=_cache(folder))
    if verdict[0] != OK:
        return verdict
    backends = [name for name in _STORED if name == "eager" or _is_stored(folder, name).exists()]
    code = f"from compiled_autograd.selftest.apart import again; again({str(folder)!r}, {backends!r})"
    ended = subprocess.run(command(code), capture_output=True, text=True, errors="replace", check=False)
    written = folder / "again"
    if ended.returncode or not written.exists():
        said = ended.stderr.strip().splitlines()
        return WRONG, f"the second process ended with status {ended.returncode}: {said[-1] if said else ''}"
    result, reason = msgspec.json.decode(written.read_bytes(), type=tuple[str, str])
    return result, reason and f"in a second process: {reason}"


def again(folder: str, backends: Sequence[str]) -> None:
    """In a second process: what the first one has stored is loaded, and nothing is compiled."""
    verdict = OK, ""
    for backend in backends:
        if verdict[0] == OK:
            verdict = _loaded(_STORED[backend], backend, _cache(Path(folder)))
    Path(folder, "again").write_bytes(msgspec.json.encode(verdict))


def _loaded(tape: TapeCase, backend: str, cache: Path) -> Verdict:
    session, known = session_with(backend=backend, cache_dir=cache), TapeCase(tape.run, ((HIT,),))
    for number in range(2):
        verdict = check_step(known, number, session, exact=backend == "eager")
        if verdict[0] != OK:
            return verdict
    stats = session.stats()
    if not stats.loads or stats.compiles:
        counts = f"{stats.loads} regions were loaded, {stats.compiles} compiled"
        return OFF, f"code of backend {backend} was not found in the store: {counts}"
    return OK, ""


def _cache(folder: Path) -> Path:
    return folder / "cache"


def _is_stored(folder: Path, backend: str) -> Path:
    """A file that is there once code of a backend was stored."""
    return folder / f"{backend}.stored"


# ---- CUDA ------------------------------------------------------------------------------------------------------------


def _cuda(folder: Path) -> Verdict:
    if not torch.cuda.is_available():
        return NOT_HERE, "there is no CUDA device"
    for backend in ("eager", "inductor"):
        PROCESS.reset()  # the tape may have run already, with another backend or on the CPU
        result, reason = check_tape(SIZES, exact=False, device="cuda", backend=backend)
        if result != OK:
            return result, f"with backend {backend}: {reason}"
    return OK, ""


# ---- the extension ---------------------------------------------------------------------------------------------------


def _extension(folder: Path, native: Path | None) -> Verdict:
    missing = _why_no_extension(folder, native)
    if missing is not None:
        return missing
    for name in _WALKED:
        session = session_with(extension="hits")
        before = NATIVE_HITS.hits + FAST_PATH.served
        for number in range(_STEPS_TO_LEARN):
            result, reason = check_step(HERE[name], number, session)
            if result != OK:
                return result, f"{name}, {reason}"
        if NATIVE_HITS.hits + FAST_PATH.served == before:
            return OFF, f"the extension did not know the tape of {name!r} again, and the engine walked it"
    return OK, ""


def _own_loop(folder: Path, native: Path | None) -> Verdict:
    missing = _why_no_extension(folder, native)
    if missing is not None:
        return NOT_HERE, "it needs the extension"
    session = session_with(extension="auto", on_miss="eager")
    off = why_off(session.settings)
    if off:
        return NOT_HERE, off
    session = session_with(extension="all", on_miss="eager")
    for number in range(STEPS):
        verdict = check_step(LEFT_TO_EAGER, number, session)
        if verdict[0] != OK:
            return verdict
    stats = session.stats()
    if stats.own_loop != stats.backwards:
        return OFF, f"the own loop ran {stats.own_loop} of {stats.backwards} backwards: {OWN_LOOPS.reason}"
    return OK, ""


def _why_no_extension(folder: Path, native: Path | None) -> Verdict | None:
    """Load the user's extension, or build one in the temporary folder. None where it is there."""
    missing = "extension='off' is set" if native is None else why_unsupported()
    if native is None or missing:
        return NOT_HERE, missing
    if NATIVE_HITS.library is None:
        library = Library(native)
        if library.module(build=False) is None and library.reason == BEING_BUILT:
            build_here(folder / "native")
            library = Library(folder / "native")
            library.module(build=False)
        NATIVE_HITS.library = library
    library = NATIVE_HITS.library
    return None if library.module(build=False) is not None else (OFF, library.reason)


STORE, INDUCTOR = "store and a second process", "backend inductor"
CUDA, EXTENSION, OWN_LOOP = "CUDA", "C++ extension", "own loop"
APART: dict[str, Callable[..., Verdict]] = {
    INDUCTOR: _inductor,
    CUDA: _cuda,
    STORE: _store,
    EXTENSION: _extension,
    OWN_LOOP: _own_loop,
}
"""The parts that run apart, in the order in which one process runs them."""
TOGETHER = ((EXTENSION, OWN_LOOP), (INDUCTOR, CUDA, STORE))
"""The parts that share a process."""
