"""Conditions of a stored entry beside its tape and its shapes: settings, ambient state, versions, machine."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import ir
from ..backends import Storing, get_backend
from ..diagnostics.variant_misses import state_hint, text_of_part
from ..guards.ambient import INDUCTOR_SETTINGS, Ambient
from ..settings import Settings
from ..shadow_cache import Entry, Miss
from ..versions import VERSION

State = tuple[dict[str, str], dict[str, str], dict[str, str]]
_KINDS = ("backend_or_settings", "ambient_state", "environment")
_SOURCE = frozenset({".py", ".pyi", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".json", ".toml"})


def state_of(settings: Settings, ambient_state: Ambient) -> State:
    """Settings, ambient state and environment, as named parts. The backend is a :class:`Storing` one."""
    backend = get_backend(settings.backend_in_mode)
    assert isinstance(backend, Storing)
    environment = {**versions(), **backend.environment()}
    chosen = {"backend": str(settings.backend_in_mode), "dynamic": str(settings.dynamic)}
    ambient = {name: text_of_part(name, value) for name, value in ambient_state if name != INDUCTOR_SETTINGS}
    return chosen, ambient, environment


def differences(entry: Entry, state: State) -> list[Miss]:
    """Return a miss for each part of the state that differs from an entry's."""
    found = []
    for kind, old, new in zip(_KINDS, (entry.settings, entry.ambient, entry.environment), state, strict=True):
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                texts = old.get(name, "nothing"), new.get(name, "nothing")
                found.append(Miss(kind, name, *texts, hint=state_hint(kind, name)))
    return found


def why_not_stored(tape: ir.TapeGraph, settings: Settings) -> str:
    """Return why compiled code of a graph may depend on more than an entry's key; empty if it does not."""
    if settings.passes:
        return "passes are functions, which may be others in another process"
    if not isinstance(settings.backend, str):
        return "the backend is a function, which may be another in another process"
    if not isinstance(get_backend(settings.backend_in_mode), Storing):
        return f"backend {settings.backend!r} says nothing of how to store what it makes"
    for node in tape.graph.nodes:
        if isinstance(node.target, ir.AOTBackward):
            return "the tape has the backward of a forward that torch.compile compiled"
        if isinstance(node.target, ir.TracedBackward):
            return "the tape has a function marked as traceable, which may be another in another process"
        if isinstance(node.target, ir.OpaqueOp) and node.target.custom:
            return f"{node.target!r} is of a C++ extension or a front end, and may be another in another process"
    return ""


def is_repeatable(kind: Any) -> bool:
    """Return whether the text of a step's value identifies its kind in another process."""
    if isinstance(kind, tuple):
        if kind and isinstance(kind[0], type):  # a tensor, as kind_of_value has it
            return kind[0] in ir.PLAIN_TENSORS
        return all(map(is_repeatable, kind))
    return kind is None or isinstance(kind, (bool, int, float, str))


@functools.cache
def versions() -> Mapping[str, str]:
    """Return the versions of this package (every byte of its source), torch and Python."""
    return {
        "package": f"{VERSION} {digest_of_source([Path(__file__).parents[1]])[:12]}",
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": f"{platform.python_implementation()} {platform.python_version()} {sysconfig.get_config_var('SOABI')}",
    }


def digest_of_source(roots: Sequence[Path]) -> str:
    """Hash the names and contents of all source files in some folders, subfolders included."""
    digest = hashlib.sha256()
    for number, root in enumerate(roots):
        for name, path in sorted(_source_files(str(root))):
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123  in a first step: a path of each costs as much
                content = file.read()
            digest.update(f"{number} {name} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _source_files(folder: str, above: str = "") -> Iterator[tuple[str, str]]:
    """The names of source files below a folder, with slashes, and where they are."""
    try:
        found = os.scandir(folder)
    except PermissionError:
        return
    with found:
        entries = [*found]
    for entry in entries:
        if entry.is_dir():
            yield from _source_files(entry.path, f"{above}{entry.name}/")
        elif os.path.splitext(entry.name)[1] in _SOURCE and entry.is_file():  # noqa: PTH122  likewise
            yield f"{above}{entry.name}", entry.path
