"""What a program calls: the session around its backwards, and its opposite."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

from .engine.session import Disabled, Session
from .process_state import PROCESS
from .settings import resolve
from .untested import ready_for

_F = TypeVar("_F", bound=Callable[..., Any])


def enable(**settings: Any) -> Session:
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
            goes on (not with deterministic algorithms, and on the CPU alone). Timed and slower backwards count as
            bypasses, ``tuning`` and ``not_worth_it``.
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
        untested_torch: on a PyTorch that this version was not tested on, ``"eager"`` leaves every backward to the eager
            engine (the bypass ``untested_torch``); ``"try"`` compiles, if the selftest passes first, which runs once in
            a process. Elsewhere both mean nothing.
        passes: functions over the ATen graph of each region, in order; each gives a ``GraphModule``, or None where it
            changed the one it got.

    Each has an environment variable, ``COMPILED_AUTOGRAD_<NAME>``, but for ``passes``.

    Returns:
        A session, to be used as a context manager, once or again and again.

    Raises:
        UnknownSettingError, InvalidSettingError, UnknownBackendError: see there.
    """
    resolved = resolve(settings)
    resolved.require_backend()
    return Session(ready_for(resolved))


def disable() -> Disabled:
    """Inside, every ``backward`` runs on the eager engine, uncounted."""
    return Disabled()


@overload
def compile_step(function: _F) -> _F: ...
@overload
def compile_step(**settings: Any) -> Callable[[_F], _F]: ...
def compile_step(function: Any = None, **settings: Any) -> Any:
    """Decorate a training step: every ``backward`` inside it runs as a compiled graph.

    Takes the settings of :func:`enable`. The decorated function has its session in the attribute ``session``.
    """
    if function is None:
        return functools.partial(compile_step, **settings)
    session = enable(**settings)

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        with session:
            return function(*args, **kwargs)

    step.session = session  # type: ignore[attr-defined]
    return step


def reset() -> None:
    """Forget every graph in memory, compiled or captured. Sessions keep their counts, the store on disk its entries."""
    PROCESS.reset()
