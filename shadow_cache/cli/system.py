"""``dir``, ``env``, ``completion``: the folder of the cache, the environment, and completion for the shell."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import rich_click as click
from click.shell_completion import get_completion_class

from ...backends import torch_versions
from . import render
from .base import Verb, View, with_format

_PACKAGES = ("torch", "compiled-autograd", "msgspec", "rich-click")
_NOT_BUILT = "not built"
_NOT_TESTED = "off: this torch was not tested"


@click.command(cls=Verb, name="dir")
@with_format
def dir_(view: View) -> None:
    """Print the folder of the cache.

    Prints one path, even if the folder does not exist yet.

    \b
    Examples:
      shadow-cache dir
      du -sh "$(shadow-cache dir)"
    """
    path = str(view.path)
    view.out(path, [path], lambda: [path])


@click.command(cls=Verb)
@with_format
def env(view: View) -> None:
    """Print the environment, for bug reports.

    Prints the versions of Python, torch and this package, and whether this package was tested on this torch. Then
    prints the platform, the C++ compiler, and whether the C++ extension is built and runs eager backwards. Then prints
    the folder and size of the cache, the differences between torch releases that concern this package, and the settings
    in environment variables.

    \b
    Examples:
      shadow-cache env
      shadow-cache env --format json
    """
    found = dict(_environment(view))
    view.out(found, (f"{name}={value}" for name, value in found.items()), lambda: render.pairs(found.items(), ""))


def _environment(view: View) -> Iterator[tuple[str, str]]:
    from importlib import metadata  # 12 ms, for this verb alone

    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    for package in _PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            yield package, "not installed"
    yield "platform", platform.platform()
    yield "machine", f"{platform.machine()}, {os.cpu_count()} cores"
    yield "compiler", _compiler()
    version = metadata.version("torch")
    yield "torch support", _support(version)
    extension = _extension(view.path / "native", version)
    yield "extension", extension
    yield "own loop", _own_loop(extension, version)
    yield "cache", str(view.path)
    yield "cache size", render.size(view.store.stats().size) if view.is_store else "nothing is stored"
    yield from ((f"torch: {name}", text) for name, text in torch_versions.described(version))
    yield from (
        (name, value)
        for name, value in sorted(os.environ.items())
        if name == "COMPILED_AUTOGRAD" or name.startswith("COMPILED_AUTOGRAD_")
    )


def _support(torch: str) -> str:
    """Say in words whether this package compiles on the installed torch."""
    tested = f"tested on torch{torch_versions.TESTED_TORCH}"
    if torch_versions.is_tested(torch):
        return tested
    if _may_compile(torch):
        return f"{tested}, not on this one: backwards are compiled if python -m compiled_autograd selftest passes"
    return (
        f"{tested}, not on this one: every backward runs on eager (bypass untested_torch). Install a tested torch "
        "or a newer compiled-autograd, or set untested_torch='try'"
    )


def _may_compile(torch: str) -> bool:
    return torch_versions.is_tested(torch) or os.environ.get("COMPILED_AUTOGRAD_UNTESTED_TORCH") == "try"


def _extension(folder: Path, torch: str) -> str:
    """Say in words whether the extension is built. Its file's name begins with the version of torch."""
    if not _may_compile(torch):
        return _NOT_TESTED
    if os.environ.get("COMPILED_AUTOGRAD_EXTENSION", "").lower() == "off":
        return "off: COMPILED_AUTOGRAD_EXTENSION=off"
    if any(folder.glob(f"torch-{torch}-*.so")):
        return f"built for torch {torch}"
    failed = next(folder.glob(f"torch-{torch}-*.failed"), None)
    return (
        f"{_NOT_BUILT}; built in the background at the first compile, or after a thousand eager backwards"
        if failed is None
        else f"{_NOT_BUILT}: the build failed, see {failed}"
    )


def _own_loop(extension: str, torch: str) -> str:
    """Say in words whether the extension runs eager backwards, without settings of a session."""
    if extension == _NOT_TESTED:
        return extension
    names = ("EXTENSION", "OWN_LOOP", "NATIVE")  # the last two: former names, until 0.4
    given = {name: os.environ.get(f"COMPILED_AUTOGRAD_{name}", "").lower() for name in names}
    for name, value in given.items():
        if value in ("hits", "off", "false", "0"):
            return f"off: COMPILED_AUTOGRAD_{name}={value}"
    is_asked_for = given["EXTENSION"] == "all" or given["OWN_LOOP"] in ("true", "1")
    if not is_asked_for and not torch_versions.runs_own_loop(torch):
        return f"off: it was not tested on torch {torch}"
    if extension.startswith(_NOT_BUILT):
        return "off: the extension is not built"
    return "on, once small tapes gave the same results as the engine; session.own_loop has the state"


def _compiler() -> str:
    """Return the first line of ``--version`` of the C++ compiler that Inductor would use."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++")):
        path = shutil.which(name)
        if path is not None:
            said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            return said.splitlines()[0] if said else path
    return "none found; backend inductor needs g++ or clang++, or the compiler that CXX names"


@click.command(cls=Verb)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script with which the shell completes commands, options and ids.

    Prints shell code. Run this code at each start of the shell.

    \b
    Examples:
      eval "$(shadow-cache completion bash)"                                        in ~/.bashrc
      eval "$(shadow-cache completion zsh)"                                         in ~/.zshrc
      shadow-cache completion fish > ~/.config/fish/completions/shadow-cache.fish
    """
    completer = get_completion_class(shell)
    assert completer is not None  # click has one for each of the choices
    sys.stdout.write(completer(ctx.find_root().command, {}, "shadow-cache", "_SHADOW_CACHE_COMPLETE").source())
