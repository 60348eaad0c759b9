"""What a program calls: the session around its backwards, and its opposite."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

import torch

from .engine.session import Disabled, Session
from .errors import WrongUseError
from .process_state import PROCESS
from .settings import resolve
from .untested import ready_for

_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")


def _with_given(face: Callable[_P, Session]) -> Callable[_P, Session]:
    """Make a session of the settings that are given: others may be in the environment. ``face`` is the signature that
    ``help`` and completion show, and never runs."""

    @functools.wraps(face)
    def enable(*positional: Any, **given: Any) -> Session:
        if positional:
            raise WrongUseError(_without_its_name(positional[0]))
        resolved = resolve(given)
        resolved.require_backend()
        return Session(ready_for(resolved))

    return enable


def _without_its_name(value: Any) -> str:
    if isinstance(value, torch.nn.Module):
        return "enable() takes settings by name, and no model. Write `with enable():` around loss.backward()."
    if callable(value):
        return "enable() takes settings by name. To run a function's backwards compiled, write compile_step(function)."
    name = f"backend={value!r}" if isinstance(value, str) else "name=value"
    return f"enable() takes settings by name: write enable({name})."


@_with_given
def enable(
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default",
    dynamic: bool | None = None,
    on_miss: Literal["compile", "background", "eager", "raise"] = "compile",
    on_unsupported: Literal["eager", "raise"] = "eager",
    check: Literal["new"] | bool | int = "new",
    tune: bool = True,
    compile_budget: float | None = None,
    cache_dir: str | os.PathLike[str] | Literal[False] | None = None,
    native: bool | None = None,
    own_loop: bool | None = None,
    progress: bool | None = None,
    summary: bool = False,
    untested_torch: Literal["eager", "try"] = "eager",
    passes: Sequence[Callable[..., Any]] = (),
) -> Session:
    """Run every ``backward`` inside as a compiled graph.

    Args:
        backend: ``"inductor"`` (default), ``"eager"``, a name that ``torch._dynamo.list_backends()`` knows, the name of
            an entry point of the group ``compiled_autograd.backends``, or a function
            ``(GraphModule, example_inputs) -> callable``.
        mode: of ``"inductor"``, as ``torch.compile`` has it: ``"default"``; ``"reduce-overhead"``, with CUDA graphs;
            ``"max-autotune"``, which times several kernels for an operator and takes the fastest, with CUDA graphs;
            ``"max-autotune-no-cudagraphs"``. What each sets is ``torch._inductor.list_mode_options(mode)``. Results of
            CUDA graphs are copied, so that gradients are nobody else's memory.
        dynamic: None compiles for the shapes that it meets, and makes symbols of those dimensions that are seen to
            change, or that ``torch._dynamo.mark_dynamic`` marked; True of all of saved tensors but those of parameters,
            at once (a size that no saved tensor has is a number until it changes); False of none.
        on_miss: ``"compile"``; ``"background"`` compiles beside the training, and leaves what is not ready to eager
            (:meth:`Session.wait` waits for it); ``"eager"`` compiles nothing, and leaves to eager what is not in the
            cache; ``"raise"`` raises :class:`CacheMissError` then.
        on_unsupported: ``"eager"`` runs what cannot be captured on the eager engine, ``"raise"`` raises
            :class:`UnsupportedBackwardError`.
        check: whether what was compiled is compared with the real calls, run one by one on the same values:
            ``"new"`` in the first two runs of each form of it, with the right gradients and a warning where there is a
            difference, and without that form from then on; True then compares every backward with the eager engine's,
            and a number N every Nth of each variant, and a difference raises :class:`GradientMismatchError` once the
            right gradients are written; False never.
        tune: whether variants that have served for a while are timed against the eager engine, and the faster one
            goes on (not with deterministic algorithms, and on the CPU alone). Slower backwards count as the
            bypass ``not_worth_it``, timed ones as ``tuning``.
        compile_budget: seconds that the process may lose on compiling what does not come back; beyond these, what is
            new is left to eager (the bypass ``over_budget``) unless it has run there for as long as it is likely to
            take to compile it. None, the default, is 30 seconds, less the more did not come back, or 5 % of the time
            that the process has run, whichever is more; ``float("inf")`` has everything compiled.
        cache_dir: the folder in which compiled graphs outlive the process; None is the user's cache folder, False keeps
            them in memory.
        native: whether tapes that came several times are walked by an extension in C++, and not by the engine. Where
            there is a compiler, on Linux, it is compiled once, in the background, while the first tape is compiled:
            with None, the default, unless ``cache_dir`` is False; with True always; with False it is not used.
        own_loop: whether the extension runs what is left to eager, without the engine's queue. None, the default, where
            it is there, on a PyTorch that this was checked on; True on any, and have it built; False never.
        progress: whether a line says what is being compiled once a backward has waited for 2 seconds: None on a
            terminal and in a notebook, on the first rank; True also writes lines to pipes and files; False never.
        summary: whether :meth:`Session.summary` is printed to stderr when the process ends, if a backward ran.
        untested_torch: on a PyTorch that this version was not tested on, ``"eager"`` leaves every backward to the eager
            engine (the bypass ``untested_torch``); ``"try"`` compiles, if the selftest passes first, which runs once in
            a process. Elsewhere both mean nothing.
        passes: functions over the ATen graph of each region, in order; each gives a ``GraphModule``, or None where it
            changed the one it got.

    Each has an environment variable, ``COMPILED_AUTOGRAD_<NAME>``, but for ``passes``.

    Returns:
        A session, to be used as a context manager, once or again and again.

    Raises:
        WrongUseError: something was given without the name of its setting.
        UnknownSettingError, InvalidSettingError, UnknownBackendError: see there.
    """
    raise NotImplementedError


def disable() -> Disabled:
    """Inside, every ``backward`` runs on the eager engine, uncounted."""
    return Disabled()


@overload
def compile_step(function: _F) -> _F: ...
@overload
def compile_step(
    function: None = None,
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default",
    dynamic: bool | None = None,
    on_miss: Literal["compile", "background", "eager", "raise"] = "compile",
    on_unsupported: Literal["eager", "raise"] = "eager",
    check: Literal["new"] | bool | int = "new",
    tune: bool = True,
    compile_budget: float | None = None,
    cache_dir: str | os.PathLike[str] | Literal[False] | None = None,
    native: bool | None = None,
    own_loop: bool | None = None,
    progress: bool | None = None,
    summary: bool = False,
    untested_torch: Literal["eager", "try"] = "eager",
    passes: Sequence[Callable[..., Any]] = (),
) -> Callable[[_F], _F]: ...
def compile_step(function: Any = None, **settings: Any) -> Any:
    """Decorate a training step: every ``backward`` inside it runs as a compiled graph.

    Takes the settings of :func:`enable`. The decorated function has its session in the attribute ``session``.

    Raises:
        WrongUseError: what is decorated is a module, a class, or nothing that can be called.
        UnknownSettingError, InvalidSettingError, UnknownBackendError: as ``enable`` does.
    """
    if function is None:
        resolve(settings)  # what is wrong is an error in this line
        return functools.partial(compile_step, **settings)
    if wrong := _is_no_step(function):
        raise WrongUseError(f"compile_step decorates a function that calls backward(), and this is {wrong}.")
    session = enable(**settings)
    session.may_be_idle = True

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        with session:
            return function(*args, **kwargs)

    step.session = session  # type: ignore[attr-defined]
    return step


_FUNCTION = inspect.Parameter("function", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
compile_step.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [_FUNCTION, *inspect.signature(enable).parameters.values()]
)


def _is_no_step(function: Any) -> str:
    """Say why something is no training step, and what to write instead; empty where it may be one."""
    if isinstance(function, torch.nn.Module):
        return "a module, whose forward has none. Put it before the function of your loop that does:\n\n" + _EXAMPLE
    if isinstance(function, type):
        return "a class. Put it before the method of the class that does"
    if isinstance(function, str):
        return f"a text. Settings have names: write compile_step(backend={function!r})"
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        return "a generator or a coroutine, which runs after the call. Put `with enable():` around its backward()"
    return "" if callable(function) else f"of type {type(function).__name__}"


_EXAMPLE = """    @compiled_autograd.compile_step
    def step(x, y):
        loss = loss_of(model(x), y)
        loss.backward()

or write `with compiled_autograd.enable():` around loss.backward()"""


def reset() -> None:
    """Forget every graph in memory, compiled or captured. Sessions keep their counts, the store on disk its entries."""
    PROCESS.reset()
