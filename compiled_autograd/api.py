"""The public functions: ``enable``, ``disable``, ``compile_step`` and ``reset``."""

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
    """Return a function that makes a session from the given settings and those in the environment. ``face`` is the
    signature for ``help`` and completion; its body never runs."""

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
        return "enable() takes settings by name. To compile the backwards of a function, write compile_step(function)."
    name = f"backend={value!r}" if isinstance(value, str) else "name=value"
    return f"enable() takes settings by name: write enable({name})."


@_with_given
def enable(
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default",
    dynamic: bool | None = None,
    on_miss: Literal["compile", "background", "eager", "raise"] = "background",
    on_unsupported: Literal["eager", "raise"] = "eager",
    check: Literal["new"] | bool | int = "new",
    tune: bool = True,
    compile_budget: float | None = None,
    cache_dir: str | os.PathLike[str] | Literal[False] | None = None,
    extension: Literal["auto", "hits", "all", "off"] = "auto",
    progress: bool | None = None,
    summary: bool = False,
    untested_torch: Literal["eager", "try"] = "eager",
    passes: Sequence[Callable[..., Any]] = (),
) -> Session:
    """Run every ``backward`` inside as a compiled graph.

    Args:
        backend: the compiler of backwards. ``"inductor"`` (default), ``"eager"``, a name that
            ``torch._dynamo.list_backends()`` knows, the name of an entry point of the group
            ``compiled_autograd.backends``, or a function ``(GraphModule, example_inputs) -> callable``.
        mode: the mode of the backend ``"inductor"``, as in ``torch.compile``. ``"default"``; ``"reduce-overhead"``,
            with CUDA graphs; ``"max-autotune"``, which times several kernels per operator and uses the fastest, with
            CUDA graphs; ``"max-autotune-no-cudagraphs"``. ``torch._inductor.list_mode_options(mode)`` lists the options
            of a mode. Results of CUDA graphs are not copied: a graph does not run again while anything refers to its
            results.
        dynamic: which sizes are symbols. None: dimensions that have changed, or that ``torch._dynamo.mark_dynamic``
            marked. True: all dimensions of saved tensors except parameters, from the start (a size that no saved tensor
            has is a number until it changes). False: none.
        on_miss: the treatment of backwards that are not in the cache. ``"background"``, the default, runs them on
            eager until they are worth a compile (bypass ``not_yet``), and while they are compiled in the background
            (bypass ``compiling``; :meth:`Session.wait` waits for it). ``"compile"``, the default on a single core,
            compiles at once, and the step waits. ``"eager"`` compiles nothing, and runs them on eager. ``"raise"``
            raises :class:`CacheMissError`.
        on_unsupported: the treatment of backwards that cannot be captured. ``"eager"`` runs them on the eager engine,
            ``"raise"`` raises :class:`UnsupportedBackwardError`.
        check: when to compare compiled code with the real calls, run one by one on the same values. ``"new"``: in the
            first two runs of each compiled form. A difference gives a warning and the right gradients, and the form is
            dropped. True: additionally compares every backward with the eager engine's; a number N: every Nth backward
            of each variant. A difference then raises :class:`GradientMismatchError`, after the right gradients were
            written. False: never.
        tune: whether to time variants against the eager engine after some hits, and use the faster of the two. On the
            CPU and on CUDA, and not with deterministic algorithms. Backwards that are faster on eager count as the
            bypass ``not_worth_it``, timed ones as ``tuning``.
        compile_budget: maximum seconds that the process may lose on compiling tapes that do not repeat; a quarter of
            the seconds of compiles in the background counts. When the budget is spent, new tapes run on eager (the
            bypass ``over_budget``). None, the default: 30 seconds and 5 % of the time since this package was
            imported. ``float("inf")``: no limit, and every new tape is compiled at once.
        cache_dir: the folder of compiled graphs that outlive the process. None: the user's cache folder. False: memory
            only.
        extension: what the C++ extension does in place of the engine. ``"hits"``: walks the tapes of hits. ``"all"``:
            also runs eager backwards without the engine's ready queue (the own loop), on any PyTorch; builds the
            extension also if ``cache_dir`` is False, and warns if that is not possible. ``"auto"``, the default: as
            ``"all"``, but the own loop only on a PyTorch on which it was tested, and nothing is built if ``cache_dir``
            is False. ``"off"``: nothing. The extension needs Linux and a C++ compiler. It is built once, in the
            background, while the first tape is compiled.
        progress: whether a line shows what is being compiled, once a backward has waited for 2 seconds. None: on a
            terminal and in a notebook, on the first rank. True: also as lines in pipes and files. False: never.
        summary: whether to print :meth:`Session.summary` to stderr when the process ends, if a backward ran.
        untested_torch: the treatment of backwards on a PyTorch on which this version was not tested. ``"eager"`` runs
            them on the eager engine (the bypass ``untested_torch``). ``"try"`` compiles them if the selftest passes;
            the selftest runs once per process.
        passes: functions over the ATen graph of each region, in order. Each returns a ``GraphModule``, or None if it
            changed its argument in place.

    Each setting except ``passes`` has an environment variable, ``COMPILED_AUTOGRAD_<NAME>``.

    Returns:
        A session, a context manager that can be entered repeatedly.

    Raises:
        WrongUseError: a value was given without the name of its setting.
        UnknownSettingError, InvalidSettingError, UnknownBackendError: see these classes.
    """
    raise NotImplementedError


def disable() -> Disabled:
    """Return a context manager inside which every ``backward`` runs on the eager engine, uncounted."""
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
    on_miss: Literal["compile", "background", "eager", "raise"] = "background",
    on_unsupported: Literal["eager", "raise"] = "eager",
    check: Literal["new"] | bool | int = "new",
    tune: bool = True,
    compile_budget: float | None = None,
    cache_dir: str | os.PathLike[str] | Literal[False] | None = None,
    extension: Literal["auto", "hits", "all", "off"] = "auto",
    progress: bool | None = None,
    summary: bool = False,
    untested_torch: Literal["eager", "try"] = "eager",
    passes: Sequence[Callable[..., Any]] = (),
) -> Callable[[_F], _F]: ...
def compile_step(function: Any = None, **settings: Any) -> Any:
    """Decorate a training step: every ``backward`` inside it runs as a compiled graph.

    Takes the settings of :func:`enable`. The attribute ``session`` of the decorated function is its session.

    Raises:
        WrongUseError: the decorated object is a module, a class, or not callable.
        UnknownSettingError, InvalidSettingError, UnknownBackendError: see :func:`enable`.
    """
    if function is None:
        resolve(settings)  # a wrong setting raises in the decorator's own line
        return functools.partial(compile_step, **settings)
    if wrong := _is_no_step(function):
        raise WrongUseError(f"compile_step decorates a function that calls backward(); this is {wrong}.")
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
    """Return in words why an object is no training step, and what to write instead; empty if it may be one."""
    if isinstance(function, torch.nn.Module):
        return "a module, whose forward has no backward(). Decorate the function of your loop:\n\n" + _EXAMPLE
    if isinstance(function, type):
        return "a class. Decorate the method that calls backward()"
    if isinstance(function, str):
        return f"a string. Settings have names: write compile_step(backend={function!r})"
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        return "a generator or a coroutine, which runs after the call. Put `with enable():` around its backward()"
    return "" if callable(function) else f"of type {type(function).__name__}"


_EXAMPLE = """    @compiled_autograd.compile_step
    def step(x, y):
        loss = loss_of(model(x), y)
        loss.backward()

or write `with compiled_autograd.enable():` around loss.backward()"""


def reset() -> None:
    """Drop all captured and compiled graphs in memory. Sessions keep their counts; the store on disk is unchanged."""
    PROCESS.reset()
