"""The settings of a session: their values, their environment variables, and the errors for wrong values."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from .backends.modes import DEFAULT, MODES, WITH_MODES, name_in
from .backends.torch_versions import is_tested
from .errors import InvalidSettingError, UnknownSettingError, warn_user
from .process_state import PROCESS

PREFIX = "COMPILED_AUTOGRAD_"
SWITCH = "COMPILED_AUTOGRAD"
"""The variable that turns all sessions of a process off (0), or runs every backward in a session (1)."""
NEW = "new"
"""The value of ``check`` that compares each compiled form with the real calls in its first runs."""
_EXTENSION: dict[str, tuple[bool | None, bool | None]] = {
    "auto": (None, None),
    "hits": (None, False),
    "all": (True, True),
    "off": (False, False),
}
"""For each value of ``extension``, the fields ``native`` and ``own_loop``."""
FORMER = ("native", "own_loop")
"""The settings until 0.3 that are now ``extension``. Remove them, and ``Settings.former``, in 0.4."""
_WORDS: dict[str, Any] = {"none": None, "true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a session. Sessions with equal settings share their compiled graphs. The fields that are
    arguments of ``enable`` have its defaults and types.

    Attributes:
        backend_in_mode: the backend's name in the registry, with a name for each mode of Inductor.
        check_every: interval, in runs, of comparisons with the real calls after the first runs; 0 for none.
        turned_off: True with ``COMPILED_AUTOGRAD=0``.
        former: ``native`` and ``own_loop`` as given by these former names; None if given by ``extension``.
        native: False if hits do without the extension. True builds it even with ``cache_dir=False``.
        own_loop: False if the engine runs all bypasses. True builds the extension for them, on any PyTorch.
        may_compile: False with ``COMPILED_AUTOGRAD=0``, and on an untested PyTorch unless ``untested_torch="try"``.
        key: the settings on which a compiled variant depends; policies (``on_*``) only decide when one is compiled.
    """

    backend: str | Callable[..., Any] = "inductor"
    dynamic: bool | None = None
    on_miss: Literal["compile", "background", "eager", "raise"] = "background"
    on_unsupported: Literal["eager", "raise"] = "eager"
    check: Literal["new"] | bool | int = "new"
    cache_dir: str | os.PathLike[str] | Literal[False] | None = None
    passes: Sequence[Callable[..., Any]] = ()
    tune: bool = True
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    extension: Literal["auto", "hits", "all", "off"] = "auto"
    progress: bool | None = None
    compile_budget: float | None = None
    untested_torch: Literal["eager", "try"] = "eager"
    summary: bool = False
    turned_off: bool = field(default=False, repr=False)
    former: tuple[bool | None, bool | None] | None = field(default=None, repr=False)
    native: bool | None = field(init=False, repr=False, compare=False)
    own_loop: bool | None = field(init=False, repr=False, compare=False)
    backend_in_mode: str | Callable[..., Any] = field(init=False, repr=False, compare=False)
    check_every: int = field(init=False, repr=False, compare=False)
    key: tuple[Any, ...] = field(init=False, repr=False, compare=False)
    may_compile: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        import torch  # lazy: the command line `shadow-cache` checks variables without it

        backend = self.backend if self.mode == DEFAULT else name_in(self.mode)
        native, own_loop = self.former or _EXTENSION[self.extension]
        derived = {
            "native": native,
            "own_loop": own_loop,
            "backend_in_mode": backend,
            "check_every": 0 if self.check == NEW else int(self.check),
            "may_compile": not self.turned_off and (is_tested(torch.__version__) or self.untested_torch == "try"),
            "key": (("backend", backend), ("passes", self.passes), ("dynamic", self.dynamic)),
        }
        for name, value in derived.items():  # computed once: hits read them
            object.__setattr__(self, name, value)

    @property
    def compiles(self) -> bool:
        """True if a backward that is not in the cache is compiled, at once or in the background."""
        return self.on_miss in ("compile", "background")

    def require_backend(self) -> None:
        """Look the backend up.

        Raises:
            UnknownBackendError: no backend has its name.
        """
        if isinstance(self.backend_in_mode, str):
            from .backends import get_backend  # lazily: this import may fail on an untested torch

            get_backend(self.backend_in_mode)

    @property
    def looks_away(self) -> bool:
        """True if some tapes may run on eager without a peek (``engine/session.py``); False if a bypass or a miss has
        to raise."""
        return self.on_miss != "raise" and self.on_unsupported != "raise"


@functools.lru_cache(1024)
def _the_one(settings: Settings) -> Settings:
    """Return the first of equal settings: hits compare settings by identity."""
    return settings


PROCESS.register(_the_one, reset=_the_one.cache_clear)

_NAMES = tuple(each.name for each in fields(Settings) if each.init and each.name not in ("turned_off", "former"))
FROM_ENVIRONMENT = tuple(name for name in _NAMES if name != "passes")
"""The settings that an environment variable can set."""


def resolve(
    given: Mapping[str, Any], environ: Mapping[str, str] | None = None, options: Collection[str] = ()
) -> Settings:
    """Return the settings: from keyword arguments, else from ``COMPILED_AUTOGRAD_<NAME>`` (if not empty), else the
    defaults.

    Args:
        options: names of the settings whose variables were given as options of the command line. Errors and warnings
            name the options.

    Raises:
        UnknownSettingError: a keyword, or a variable with this prefix, names no setting.
        InvalidSettingError: a value is invalid, by itself or in combination with another setting.
    """
    environ = os.environ if environ is None else environ
    for name in given:
        if name not in (*_NAMES, *FORMER):
            raise UnknownSettingError(name, _NAMES)
    values = of_environment(environ, overridden_by(given))
    for name, value in given.items():
        values[name] = _check(name, value, "enable()")
    values.setdefault("on_miss", "compile" if _has_one_core() else "background")
    if former := {name: values.pop(name) for name in FORMER if name in values}:
        sources = {name: _source(name, given, options) for name in former}
        values.update(_of_former(former, "extension" in values, sources))
    settings = _the_one(Settings(**values, turned_off=switch(environ) is False))
    if settings.mode != DEFAULT and settings.backend != WITH_MODES:
        do = f"remove it, or set backend={WITH_MODES!r}, the only backend with modes"
        allowed = f"{DEFAULT!r} with backend={settings.backend!r}: {do}"
        raise InvalidSettingError("mode", settings.mode, allowed, _source("mode", given, options))
    return settings


def _has_one_core() -> bool:
    """Return whether a compile in the background would take the training's only core."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) == 1
    return os.cpu_count() == 1


def _source(name: str, given: Mapping[str, Any], options: Collection[str]) -> str:
    if name in given:
        return "enable()"
    return f"--{name.replace('_', '-')}" if name in options else PREFIX + name.upper()


def of_environment(environ: Mapping[str, str], overridden: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of the settings in ``COMPILED_AUTOGRAD_<NAME>``, without those that are ``overridden``.

    Raises:
        UnknownSettingError, InvalidSettingError: as :func:`resolve`.
    """
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable[len(PREFIX) :].lower()
        if name not in (*FROM_ENVIRONMENT, *FORMER):
            raise UnknownSettingError(variable, (PREFIX + known.upper() for known in FROM_ENVIRONMENT))
        if name not in overridden and text:
            values[name] = parse(name, text, variable)
    return values


def overridden_by(names: Collection[str]) -> set[str]:
    """Return the settings whose variables do not count where ``names`` are given: these, and other names for them."""
    former = FORMER if "extension" in names else ()
    return {*names, *former, *("extension" for each in FORMER if each in names)}


def _of_former(former: Mapping[str, Any], is_given: bool, sources: Mapping[str, str]) -> dict[str, Any]:
    """Return ``extension`` for settings given by their former names, and warn at the line that called ``enable``."""
    if is_given:
        name = next(iter(former))
        allowed = "a former name of extension, and extension is set too: remove one of them"
        raise InvalidSettingError(name, former[name], allowed, sources[name])
    native, own_loop = pair = former.get("native"), former.get("own_loop")
    word = "off" if native is False else "hits" if own_loop is False else "all" if native or own_loop else "auto"
    shown = {name: name if where == "enable()" else where for name, where in sources.items()}
    old = ", ".join(f"{shown[name]}={value}" for name, value in former.items())
    new = f"extension={word!r} (COMPILED_AUTOGRAD_EXTENSION={word}, --extension {word})"
    text = f"compiled_autograd: {old} is now {new}. The old name goes with the release after 0.3.0."
    warn_user(text, DeprecationWarning)
    return {"extension": word, "former": None if word == "off" or pair == _EXTENSION[word] else pair}


def switch(environ: Mapping[str, str]) -> bool | None:
    """Return True with ``COMPILED_AUTOGRAD=1``, False with ``COMPILED_AUTOGRAD=0``, None if the variable is not set or
    empty.

    Raises:
        InvalidSettingError: the variable has another value.
    """
    text = environ.get(SWITCH, "")
    value = _WORDS.get(text.lower(), text) if text else None
    if value is None or isinstance(value, bool):
        return value
    allowed = "1 (every backward runs in a session) or 0 (no session compiles)"
    raise InvalidSettingError(SWITCH, text, allowed, "the environment")


def parse(name: str, text: str, where: str) -> Any:
    """Parse the value of a setting from an environment variable or the command line.

    Raises:
        InvalidSettingError: the value is invalid; the message begins with ``where``.
    """
    return _check(name, _of_text(name, text), where)


def allowed(name: str) -> str:
    """Return the valid values of a setting, in words."""
    return _ALLOWED[name]


def _of_text(name: str, text: str) -> Any:
    """Convert the text of an environment variable: to a number, None, a bool, or the text itself."""
    if name == "compile_budget":
        with contextlib.suppress(ValueError):
            return float(text)
    value = _WORDS.get(text.lower(), text)
    return int(text) if name == "check" and value is text and text.isdecimal() else value


def _check(name: str, value: Any, where: str) -> Any:
    kind, allowed = _KINDS.get(name, _HINTS[name]), _ALLOWED[name]
    try:
        return kind(value) if inspect.isfunction(kind) else msgspec.convert(value, kind)
    except (TypeError, msgspec.ValidationError):
        raise InvalidSettingError(name, value, allowed, where) from None


def _seconds(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, (bool, str, bytes, bytearray)):
        raise TypeError
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        raise TypeError from None
    if not seconds >= 0:
        raise TypeError
    return seconds


def _backend(value: Any) -> Any:
    if isinstance(value, str) or callable(value):
        return value
    raise TypeError


def _cache_dir(value: Any) -> Any:
    if value is None or value is False:
        return value
    path = os.fspath(value)
    if isinstance(path, str):
        return path
    raise TypeError


def _passes(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and all(map(callable, value)):
        return tuple(value)
    raise TypeError


_HINTS = get_type_hints(Settings)
_KINDS: dict[str, Any] = {
    "backend": _backend,
    "check": Literal["new"] | bool | Annotated[int, msgspec.Meta(gt=0)],
    "cache_dir": _cache_dir,
    "passes": _passes,
    "compile_budget": _seconds,
}
"""Stricter checks than the type hint, by setting: a type, or a function that raises ``TypeError`` for wrong values."""
_BOOL, _BOOL_OR_NONE = "True or False", "None, True or False"
_ALLOWED = {
    "backend": "a name, or in Python a function (GraphModule, example_inputs)",
    "dynamic": _BOOL_OR_NONE,
    "on_miss": "one of 'compile', 'background', 'eager', 'raise'",
    "on_unsupported": "'eager' or 'raise'",
    "check": f"{NEW!r} (first runs of compiled code), True (every run), a number N > 0 (also every Nth run) or False",
    "cache_dir": "a path, None or False",
    "passes": "a list of functions over a GraphModule",
    "tune": _BOOL,
    "mode": "one of " + ", ".join(map(repr, MODES)),
    "extension": "one of " + ", ".join(map(repr, _EXTENSION)),
    "progress": _BOOL_OR_NONE,
    **dict.fromkeys(FORMER, _BOOL_OR_NONE),
    "untested_torch": "'eager' or 'try'",
    "compile_budget": "None or a number of seconds, 0 or more; inf is no limit",
    "summary": _BOOL,
}
"""The valid values of each setting, in words."""
