"""The settings of a session: their values, their environment variables, and the errors for the wrong ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from backends.modes import DEFAULT, MODES, WITH_MODES, name_in

from .errors import InvalidSettingError, UnknownSettingError

PREFIX = "COMPILED_AUTOGRAD_"
NEW = "new"
"""Of ``check``: each compiled form is compared with the real calls in its first runs."""
_WORDS: dict[str, Any] = {"none": None, "true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a session was asked to do. Two sessions with equal settings share their compiled graphs."""

    backend: str | Callable[..., Any] = "inductor"
    dynamic: bool | None = None
    on_miss: str = "compile"
    on_unsupported: str = "eager"
    check: bool | int | str = "new"
    cache_dir: str | os.PathLike[str] | bool | None = None
    passes: tuple[Callable[..., Any], ...] = ()
    tune: bool = True
    mode: str = DEFAULT

    @property
    def backend_in_mode(self) -> str | Callable[..., Any]:
        """The backend as the registry knows it: Inductor has a name for each mode."""
        return self.backend if self.mode == DEFAULT else name_in(self.mode)

    @property
    def check_every(self) -> int:
        """One run in this many is compared with the real calls, beside the first ones; 0 for none."""
        return 0 if self.check == NEW else int(self.check)

    @property
    def compiles(self) -> bool:
        """Whether what is not in the cache is compiled, now or in the background."""
        return self.on_miss in ("compile", "background")

    @property
    def key(self) -> tuple[Any, ...]:
        """What a compiled variant depends on; the policies (``on_*``) decide only when one is made."""
        return (("backend", self.backend_in_mode), ("passes", self.passes), ("dynamic", self.dynamic))


_NAMES = tuple(field.name for field in fields(Settings))
_FROM_ENVIRONMENT = tuple(name for name in _NAMES if name != "passes")


def resolve(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from keyword arguments, else from ``COMPILED_AUTOGRAD_<NAME>`` (where not empty), else the defaults.

    Raises:
        UnknownSettingError: a keyword, or a variable with our prefix, that names no setting.
        InvalidSettingError: a value that the setting cannot take, by itself or beside the others.
    """
    environ = os.environ if environ is None else environ
    for name in given:
        if name not in _NAMES:
            raise UnknownSettingError(name, _NAMES)
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable[len(PREFIX) :].lower()
        if name not in _FROM_ENVIRONMENT:
            raise UnknownSettingError(variable, (PREFIX + known.upper() for known in _FROM_ENVIRONMENT))
        if name not in given and text:
            values[name] = _check(name, _WORDS.get(text.lower(), text), variable)
    for name, value in given.items():
        values[name] = _check(name, value, "enable()")
    settings = Settings(**values)
    _check_mode(settings, "enable()" if "mode" in given else PREFIX + "MODE")
    return settings


def _check(name: str, value: Any, where: str) -> Any:
    return _CHECKS[name](value, where)


def _backend(value: Any, where: str) -> Any:
    if not isinstance(value, str) and not callable(value):
        raise InvalidSettingError("backend", value, "a name or a function (GraphModule, example_inputs)", where)
    return value


def _dynamic(value: Any, where: str) -> Any:
    if value is not None and not isinstance(value, bool):
        raise InvalidSettingError("dynamic", value, "None, True or False", where)
    return value


def _on_miss(value: Any, where: str) -> Any:
    allowed = ("compile", "background", "eager", "raise")
    if value not in allowed:
        raise InvalidSettingError("on_miss", value, "one of " + ", ".join(map(repr, allowed)), where)
    return value


def _on_unsupported(value: Any, where: str) -> Any:
    if value not in ("eager", "raise"):
        raise InvalidSettingError("on_unsupported", value, "'eager' or 'raise'", where)
    return value


def _check_setting(value: Any, where: str) -> Any:
    if isinstance(value, str) and value.isdecimal():  # of the environment
        value = int(value)
    if value == NEW or isinstance(value, bool) or (isinstance(value, int) and value > 0):
        return value
    allowed = (
        f"{NEW!r} (the first runs of what was compiled), True (every run), a number N > 0 (every Nth too) or False"
    )
    raise InvalidSettingError("check", value, allowed, where)


def _tune(value: Any, where: str) -> Any:
    if not isinstance(value, bool):
        raise InvalidSettingError("tune", value, "True or False", where)
    return value


def _mode(value: Any, where: str) -> Any:
    if value not in MODES:
        raise InvalidSettingError("mode", value, "one of " + ", ".join(map(repr, MODES)), where)
    return value


def _check_mode(settings: Settings, where: str) -> None:
    """Only one backend has modes."""
    if settings.mode != DEFAULT and settings.backend != WITH_MODES:
        allowed = f"{DEFAULT!r} with backend={settings.backend!r}"
        do = f"leave it out, or set backend={WITH_MODES!r}, which alone has modes"
        raise InvalidSettingError("mode", settings.mode, f"{allowed}: {do}", where)


def _cache_dir(value: Any, where: str) -> Any:
    if value is None or value is False:
        return value
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    raise InvalidSettingError("cache_dir", value, "a path, None or False", where)


def _passes(value: Any, where: str) -> Any:
    passes = tuple(value) if isinstance(value, (list, tuple)) else None
    if passes is None or not all(callable(each) for each in passes):
        raise InvalidSettingError("passes", value, "a list of functions over a GraphModule", where)
    return passes


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "backend": _backend,
    "dynamic": _dynamic,
    "on_miss": _on_miss,
    "on_unsupported": _on_unsupported,
    "check": _check_setting,
    "tune": _tune,
    "cache_dir": _cache_dir,
    "passes": _passes,
    "mode": _mode,
}
