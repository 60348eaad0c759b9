"""``dir``, ``env``, ``completion``: the folder of the cache, the environment, and completion for the shell."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    in environment variables. The exit code is 1 if one of these variables is wrong.

    \b
    Examples:
      shadow-cache env
      shadow-cache env --format json
    """
    settings, wrong = _settings()
    found = dict(_environment(view, settings, wrong))
    view.out(found, (f"{name}={value}" for name, value in found.items()), lambda: render.pairs(found.items(), ""))
    if wrong:
        view.fail()


def _settings() -> tuple[dict[str, Any], str]:
    """Return the settings in environment variables, or the error for the first wrong one."""
    from ...errors import CompiledAutogradError  # lazy, both: for this verb alone
    from ...settings import of_environment

    try:
        return of_environment(os.environ), ""
    except CompiledAutogradError as error:
        return {}, str(error)


def _environment(view: View, settings: dict[str, Any], wrong: str) -> Iterator[tuple[str, str]]:
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
    may_compile = torch_versions.is_tested(version) or settings.get("untested_torch") == "try"
    yield "torch support", _support(version, may_compile)
    extension = wrong or (_extension(view.path / "native", version, settings) if may_compile else _NOT_TESTED)
    yield "extension", extension
    yield "own loop", extension if wrong or not may_compile else _own_loop(extension, version, settings)
    yield "cache", str(view.path)
    yield "cache size", render.size(view.store.stats().size) if view.is_store else "nothing is stored"
    yield from ((f"torch: {name}", text) for name, text in torch_versions.described(version))
    yield from (
        (name, value)
        for name, value in sorted(os.environ.items())
        if name == "COMPILED_AUTOGRAD" or name.startswith("COMPILED_AUTOGRAD_")
    )


def _support(torch: str, may_compile: bool) -> str:
    """Say in words whether this package compiles on the installed torch."""
    tested = f"tested on torch{torch_versions.TESTED_TORCH}"
    if torch_versions.is_tested(torch):
        return tested
    if may_compile:
        return f"{tested}, not on this one: backwards are compiled if python -m compiled_autograd selftest passes"
    return (
        f"{tested}, not on this one: every backward runs on eager (bypass untested_torch). Install a tested torch "
        "or a newer compiled-autograd, or set untested_torch='try'"
    )


def _extension(folder: Path, torch: str, settings: dict[str, Any]) -> str:
    """Say in words whether the extension is built. Its file's name begins with the version of torch."""
    if settings.get("extension") == "off":
        return "off: COMPILED_AUTOGRAD_EXTENSION=off"
    if any(folder.glob(f"torch-{torch}-*.so")):
        return f"built for torch {torch}"
    failed = next(folder.glob(f"torch-{torch}-*.failed"), None)
    return (
        f"{_NOT_BUILT}; built in the background at the first compile, or after a thousand eager backwards"
        if failed is None
        else f"{_NOT_BUILT}: the build failed, see {failed}"
    )


def _own_loop(extension: str, torch: str, settings: dict[str, Any]) -> str:
    """Say in words whether the extension runs eager backwards, without settings of a session."""
    for name in ("extension", "own_loop", "native"):  # the last two: former names, until 0.4
        if settings.get(name) in ("hits", "off", False):
            variable = f"COMPILED_AUTOGRAD_{name.upper()}"
            return f"off: {variable}={os.environ[variable]}"
    is_asked_for = settings.get("extension") == "all" or settings.get("own_loop")
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
