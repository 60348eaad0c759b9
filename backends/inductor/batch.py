"""Compiles the kernels of a region together (torch 2.13).

As many files are made as Inductor compiles at once, for reading the headers takes longer than most kernels do. In a
file are its kernels as Inductor would compile them, one after the other, each in a namespace of its own. A kernel that
this process has compiled before is not compiled again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .environment import inductor_settings
from .kernels import ENTRY, Kernel, kernel_in
from .workarounds.instead import Instead

_log = logging.getLogger(__name__)
_INCLUDED = ("Python.h", "sstream", "cstdlib", "cerrno")
_HEADERS = ("#define PY_SSIZE_T_CLEAN", *(f"#include <{header}>" for header in _INCLUDED))
"""The includes of Inductor's bindings, which must come before any namespace."""


@dataclass(frozen=True)
class _Source:
    """A kernel as Inductor generates it: the types of its arguments, and its code, with a function named ``kernel``.

    ``settings`` are Inductor's, on which the compiler's flags depend.
    """

    argument_types: tuple[str, ...]
    code: str
    settings: str = ""

    def includes(self) -> list[str]:
        """The lines that must stand outside of any namespace."""
        return [line for line in self.code.splitlines() if line.startswith("#include")]

    def as_entry(self, entry: str) -> str:
        """The code under another name, with what Python needs to call it."""
        from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

        arguments = ", ".join(
            f"parse_arg<{kind.replace('const ', '')}>(args, {index})" for index, kind in enumerate(self.argument_types)
        )
        bindings = Cache.suffix_template.format(
            arg_len=len(self.argument_types),
            call_entry_func=f"{entry}({arguments}); Py_RETURN_NONE;",
            entry_func=entry,
            extra_parse_arg="",
        )
        body = "\n".join(line for line in self.code.splitlines() if not line.startswith("#include"))
        return f"namespace of_{entry} {{\n#define {ENTRY} {entry}\n{body}\n#undef {ENTRY}\n{bindings}\n}}\n"


class _Batch:
    """The kernels of one region, compiled at the first request for one of them."""

    def __init__(self) -> None:
        self._settings = inductor_settings()
        self._waiting: list[_Source] = []

    def add(self, argument_types: Sequence[str], code: str) -> Any:
        """Return Inductor's object for a kernel that is being compiled."""
        from torch._inductor.codecache import LambdaFuture

        source = _Source(tuple(argument_types), code, self._settings)
        self._waiting.append(source)
        return LambdaFuture(lambda: self._result(source))

    def _result(self, source: _Source) -> Kernel:
        if self._waiting:
            sources, self._waiting = dict.fromkeys(self._waiting), []
            _known.update(_compile([each for each in sources if not _is_known(each)]))
        return _known[source]


_known: dict[_Source, Kernel] = {}
"""All kernels that this process has compiled in batches."""


def _is_known(source: _Source) -> bool:
    """Return whether a kernel was compiled, and its library still exists for the store to read."""
    return source in _known and Path(_known[source].__self__.__file__).exists()  # type: ignore[attr-defined]


class _Thread(threading.local):
    batch: _Batch | None = None


_thread = _Thread()


def _cpp_pybinding(alone: Callable[..., Any], compiler: Any, argtypes: list[str], source_code: str) -> Any:
    from torch._inductor.async_compile import get_compile_threads

    if _thread.batch is None or get_compile_threads() <= 1:  # with one thread, Inductor waits for nothing
        return alone(compiler, argtypes, source_code)
    return _thread.batch.add(argtypes, source_code)


_INSTEAD = Instead("torch._inductor.async_compile:AsyncCompile", "cpp_pybinding", _cpp_pybinding)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Inside, in this thread, Inductor's kernels for the CPU are compiled together."""
    outer, _thread.batch = _thread.batch, _Batch()
    try:
        with _INSTEAD.inside():
            yield
    finally:
        _thread.batch = outer


def _compile(sources: Sequence[_Source]) -> dict[_Source, Kernel]:
    from torch._inductor.async_compile import get_compile_threads
    from torch._inductor.exc import CppCompileError

    files = _shares(sources, get_compile_threads())
    compiled: dict[_Source, Kernel] = {}
    results = _start_all(files)
    for share, result in zip(files, results, strict=True):
        try:
            compiled.update(result())
        except CppCompileError as error:
            if len(share) == 1:
                raise
            _log.debug("%d kernels could not be compiled together, and are compiled one by one: %s", len(share), error)
            for alone in _start_all([[source] for source in share]):
                compiled.update(alone())
    return compiled


def _shares(sources: Sequence[_Source], count: int) -> list[list[_Source]]:
    """At most ``count`` lists of kernels whose codes are about as long."""
    shares: list[list[_Source]] = [[] for _ in range(min(count, len(sources)))]
    for source in sorted(sources, key=lambda each: -len(each.code)):
        min(shares, key=lambda share: sum(len(each.code) for each in share)).append(source)
    return shares


def _start_all(files: Sequence[Sequence[_Source]]) -> list[Callable[[], dict[_Source, Kernel]]]:
    """Begin to compile each file."""
    from torch._inductor import config

    with config.patch(cpp_cache_precompile_headers=config.cpp_cache_precompile_headers and _headers_pay()):
        return [_start(sources) for sources in files]


def _start(sources: Sequence[_Source]) -> Callable[[], dict[_Source, Kernel]]:
    """Begin to compile one file, and return a function that waits for its kernels."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    if len(sources) == 1:
        (source,) = sources
        kernel = Cache.load_pybinding_async(source.argument_types, source.code, submit_fn=AsyncCompile.submit)
        return lambda: {source: kernel()}
    entries = [ENTRY, *(f"{ENTRY}_{index}" for index in range(1, len(sources)))]
    headers = [*dict.fromkeys(line for source in sources for line in source.includes()), *_HEADERS]
    parts = [source.as_entry(entry) for source, entry in zip(sources, entries, strict=True)]
    result = Cache.load_async("\n".join([*headers, *parts]), "cpu", submit_fn=AsyncCompile.submit)

    def kernels() -> dict[_Source, Kernel]:
        module = result()
        prefix = module.__name__.removesuffix(ENTRY)
        return {
            source: getattr(module, entry) if entry == ENTRY else kernel_in(str(module.__file__), prefix, entry)
            for source, entry in zip(sources, entries, strict=True)
        }

    return kernels


def _headers_pay() -> bool:
    """Return whether headers should be compiled ahead: if it was done before, or this process compiles a second time.

    Inductor compiles them before the first file, and keeps them for all processes. That takes longer than it saves on
    the first files.
    """
    from torch._inductor.codecache import _HEADER_DIR

    return bool(_known) or any(Path(_HEADER_DIR).glob("*.gch"))
