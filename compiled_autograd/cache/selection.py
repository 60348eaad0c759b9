"""Selects the variant that serves a backward, in memory or in the store on disk, or makes one; and says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..backends.signal_handlers import raise_what_a_handler_raised
from ..diagnostics.bypass import ON_MISS
from ..guards.ambient import Ambient
from ..settings import Settings
from ..shadow_cache import Bypass, Failure, Miss
from .graphs import CompiledGraph
from .stores import disk_for
from .variants import Handover, Variant


@dataclass(slots=True)
class Selection:
    """The code that serves a backward.

    Attributes:
        variant: None if the tape graph's calls run one by one.
        reasons: the reasons why the backward is no hit; empty for a hit.
        new_structure: neither this process nor the store knew the structure.
        bypassed: nothing serves, and nothing may be compiled.
        failures: parts of this package that failed on the way.
    """

    variant: Variant | None = None
    reasons: list[Bypass | Miss | Failure] = field(default_factory=list)
    new_structure: bool = False
    bypassed: bool = False
    failures: list[Failure] = field(default_factory=list)


def find_variant(
    settings: Settings, graph: CompiledGraph, ambient_state: Ambient, handover: Handover
) -> tuple[Variant | None, Miss | None]:
    """Return the variant for a backward, from memory or from the store; or None, and why stored variants do not fit."""
    variant = graph.find(settings.key, ambient_state, handover)
    disk = None if variant is not None else disk_for(settings)
    return (variant, None) if disk is None else disk.find(graph, settings, ambient_state, handover)


def select(
    settings: Settings,
    graph: CompiledGraph,
    ambient_state: Ambient,
    handover: Handover,
    miss: Miss | None,
    refuse: Callable[[], Bypass | None],
) -> Selection:
    """Find what serves a backward, else make it.

    Args:
        miss: how the structure differs from those that this process knew before; None where it knew it.
        refuse: asked where something would have to be compiled; gives why that may not be, else None.
    """
    variant, other = find_variant(settings, graph, ambient_state, handover)
    if variant is not None:
        if variant.entry is None:
            return Selection(variant, [] if miss is None else [miss], miss is not None)
        return Selection(variant)
    selection = Selection(new_structure=miss is not None)
    if miss is not None:
        selection.reasons = [other or _nearest_stored(settings, graph, handover, miss, selection.failures)]
    elif other is not None and (not graph.variants or other.kind == "corrupt"):
        selection.reasons = [other]  # it says more than what this process can compare with
    refused = refuse() if settings.compiles else ON_MISS
    if refused is None:
        _add(selection, settings, graph, ambient_state, handover)
        return selection
    why = selection.reasons or graph.explain(settings, ambient_state, handover)
    selection.bypassed, selection.reasons = True, [refused, *why]
    return selection


def _add(
    selection: Selection, settings: Settings, graph: CompiledGraph, ambient_state: Ambient, handover: Handover
) -> None:
    """Make a variant. Where that fails, the tape graph's calls run one by one: the tape is released by now."""
    misses: Sequence[Miss | Failure]
    unused = [each.key.ambient for each in graph.variants if each.hits == 0 and each.key.settings == settings.key]
    try:
        ambient_state, told = graph.forms.call_what_passes(ambient_state, unused)
        selection.failures += told
        selection.variant, misses = graph.add(settings, ambient_state, handover)
    except Exception as error:  # noqa: BLE001  the step must go on
        raise_what_a_handler_raised(error)
        failure = Failure("program", repr(graph), f"{type(error).__name__}: {error}", "its calls run one by one")
        selection.failures.append(failure)
        misses = [failure]
    selection.reasons.extend(misses[1:] if selection.reasons else misses)


def _nearest_stored(
    settings: Settings, graph: CompiledGraph, handover: Handover, miss: Miss, failures: list[Failure]
) -> Miss:
    """A structure miss, told by the store where it knows more."""
    disk = disk_for(settings)
    if disk is None:
        return miss
    with torch._C.DisableTorchFunctionSubclass():
        shapes = [tuple(tensor.shape) for tensor in handover.tensors]
    try:
        return disk.explain(graph, miss, shapes)
    except Exception as error:  # noqa: BLE001  the tape is released by now, and only the reason is not known
        raise_what_a_handler_raised(error)
        what = f"{type(error).__name__}: {error}"
        failures.append(Failure("explain", repr(graph), what, "the reason ignores the cache on disk"))
        return miss
