"""Sessions: what a user enables, and the account of what happened inside."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, overload

from shadow_cache import Bypass, Failure, Miss

from .background import BACKGROUND
from .forks import free_in_child
from .graphs import CompiledGraph
from .reporting import count_repeats, tell, warn_of
from .settings import Settings, resolve

HIT, SHAPE_MISS, STRUCTURE_MISS, BYPASS = "hit", "shape_miss", "structure_miss", "bypass"
_F = TypeVar("_F", bound=Callable[..., Any])
_RECORDING = free_in_child(threading.RLock())  # microseconds


@dataclass(slots=True)
class Stats:
    """Counts of one session. Every backward is one of hit, shape miss, structure miss and bypass.

    Attributes:
        backwards: how often a backward was asked for.
        captures: how often the engine reported a tape because it had not met its structure.
        bypasses: for each reason, how many backwards the eager engine ran.
        compiles: how many regions were compiled.
        compile_seconds: seconds spent lowering and compiling, the first run of each region included.
        loads: how many regions were found in the store on disk, where another process had compiled them.
        failures: how often something of ours failed and a slower way was taken, with the right result.
    """

    backwards: int = 0
    captures: int = 0
    hits: int = 0
    shape_misses: int = 0
    structure_misses: int = 0
    bypasses: dict[str, int] = field(default_factory=dict)
    compiles: int = 0
    compile_seconds: float = 0.0
    loads: int = 0
    failures: int = 0


@dataclass(slots=True)
class Outcome:
    """What became of one backward.

    Attributes:
        outcome: ``"hit"``, ``"shape_miss"``, ``"structure_miss"`` or ``"bypass"``.
        graph: the structure that ran; None for a bypass.
        reasons: why it was no hit, and what failed on the way.
        seconds: by stage: ``capture`` (the engine's walk, and its report where it missed), ``lower``, ``compile``,
            ``load`` (from the store on disk), ``prove`` (comparing with the real calls), ``run`` (everything after the
            capture, all of these included).
    """

    outcome: str
    graph: CompiledGraph | None = None
    reasons: tuple[Bypass | Miss | Failure, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)


class Session:
    """A context manager around ``backward``. It nests, can be entered again, and holds only in the thread it is in."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.last: Outcome | None = None
        self._stats = Stats()
        self._graphs: weakref.WeakValueDictionary[int, CompiledGraph] = weakref.WeakValueDictionary()
        self._missed: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Session:
        from .engine import install

        install()
        _stack().append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _leave(self)

    def stats(self) -> Stats:
        """A copy of the counts so far."""
        with _RECORDING:
            return replace(self._stats, bypasses=dict(self._stats.bypasses))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being compiled in the background.

        Args:
            timeout: seconds; None for as long as it takes.

        Returns:
            False where it took longer.
        """
        return BACKGROUND.wait(timeout)

    def graphs(self) -> list[CompiledGraph]:
        """The structures that this session captured or compiled, in the order in which it met them.

        Those that the process has let go of since are not among them, see :data:`graphs.MOST_STRUCTURES`.
        """
        return list(self._graphs.values())

    def record(self, outcome: Outcome, captured: bool = False, compiles: int = 0, loads: int = 0) -> None:
        """Count one backward."""
        failures = [reason for reason in outcome.reasons if isinstance(reason, Failure)]
        failed, kind = len(failures), outcome.outcome
        seconds = outcome.seconds.get("lower", 0.0) + outcome.seconds.get("compile", 0.0)
        label = outcome.reasons[0].label if kind == BYPASS and isinstance(outcome.reasons[0], Bypass) else ""
        with _RECORDING:
            stats = self._stats
            if label:
                stats.bypasses.setdefault(label, 0)
            # No call from here on: Ctrl-C finds all of a backward counted, or nothing of it.
            if kind == HIT:
                stats.hits += 1
            elif kind == SHAPE_MISS:
                stats.shape_misses += 1
            elif kind == STRUCTURE_MISS:
                stats.structure_misses += 1
            else:
                stats.bypasses[label] += 1
            stats.backwards += 1
            stats.captures += captured
            stats.compiles += compiles
            stats.loads += loads
            stats.failures += failed
            stats.compile_seconds += seconds
            self.last = outcome
            if outcome.graph is not None and (captured or outcome.outcome != HIT):
                self._graphs.setdefault(id(outcome.graph), outcome.graph)
        tell(outcome.outcome, outcome.reasons, outcome.seconds, compiles)
        if compiles:
            count_repeats(self._missed, outcome.reasons)
        for failure in failures:
            warn_of(failure)


class _Disabled:
    """Makes ``disable`` a context manager."""

    def __enter__(self) -> None:
        _stack().append(None)

    def __exit__(self, *exception: object) -> None:
        _leave(None)


_local = threading.local()


def _stack() -> list[Session | None]:
    stack = getattr(_local, "stack", None)
    if stack is None:
        stack = _local.stack = []
    return stack


def _leave(session: Session | None) -> None:
    """Take the innermost entry of ``session`` away, whatever was entered after it."""
    stack = _stack()
    position = max(index for index, entry in enumerate(stack) if entry is session)
    del stack[position]


def current() -> Session | None:
    """The session that the calling thread is in; None outside of any, and inside ``disable``."""
    stack = getattr(_local, "stack", None)
    return stack[-1] if stack else None


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
            change, or that ``torch._dynamo.mark_dynamic`` marked; True of all but those of parameters, at once; False
            of none.
        on_miss: ``"compile"``; ``"background"`` compiles beside the training, and leaves what is not ready to eager
            (:meth:`Session.wait` waits for it); ``"eager"`` compiles nothing, and leaves to eager what is not in the
            cache; ``"raise"`` raises :class:`CacheMissError` then.
        on_unsupported: ``"eager"`` runs what cannot be captured on the eager engine, ``"raise"`` raises
            :class:`UnsupportedBackwardError`.
        check: whether what was compiled is compared with the real calls, run one by one on the same values:
            ``"new"`` in the first two runs of each form of it, with the right gradients and a warning where there is a
            difference, and without that form from then on; True in every run and a number N in every Nth too, and
            then a difference raises :class:`GradientMismatchError` once the right gradients are written; False never.
        tune: whether variants that have served for a while are timed against the eager engine, and the faster one
            goes on (not with deterministic algorithms, and on the CPU alone). Timed and slower backwards count as
            bypasses, ``tuning`` and ``not_worth_it``. And whether tapes are left to eager where each is of another
            structure (``every_tape_new``).
        cache_dir: the folder in which compiled graphs outlive the process; None is the user's cache folder, False keeps
            them in memory.
        passes: functions over the ATen graph of each region, in order; each gives a ``GraphModule``, or None where it
            changed the one it got.

    Each has an environment variable, ``COMPILED_AUTOGRAD_<NAME>``, but for ``passes``.

    Returns:
        A session, to be used as a context manager, once or again and again.

    Raises:
        UnknownSettingError, InvalidSettingError, UnknownBackendError: see there.
    """
    resolved = resolve(settings)
    if isinstance(resolved.backend_in_mode, str):
        from backends import get_backend

        get_backend(resolved.backend_in_mode)
    return Session(resolved)


def disable() -> _Disabled:
    """Inside, every ``backward`` runs on the eager engine, uncounted."""
    return _Disabled()


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
