"""The meaning and the remedy of each kind of miss: one table for all displays."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """``means`` and ``do`` are one sentence each, for readers who do not know the source."""

    means: str
    do: str


KINDS: dict[str, Kind] = {
    "first_seen": Kind(
        "This structure was seen for the first time.",
        "Nothing: every structure is compiled once, and the next backward of this structure is a hit.",
    ),
    "new_node": Kind(
        "The tape begins like a known one, then has another operation, or ends earlier or later.",
        "Nothing if this is another loss on the same model; else look for an `if` or a loop that ran differently.",
    ),
    "node_attribute": Kind(
        "The operations are known, but one of them has another constant.",
        "Use the same value in every step, or keep the value in a tensor: saved numbers are part of the structure.",
    ),
    "grad_state": Kind(
        "A leaf had a `.grad` where the known tape had None, or None where the known tape had a `.grad`.",
        "Nothing if gradients are accumulated: both forms are cached; else call `zero_grad()` alike in each step.",
    ),
    "hooks_changed": Kind(
        "Hooks were added, removed or replaced by hooks of another kind at a node of the tape.",
        "Register hooks once, before the first backward; a hook with another function at the same node is a hit.",
    ),
    "undefined_gradients": Kind(
        "Other gradients than before were undefined: an output was not used, or a function returned None.",
        "Use the same outputs in every step; in a function that returns None only sometimes, return zeros instead.",
    ),
    "shape": Kind(
        "The structure is known, but a tensor on the tape had a size for which no variant was compiled.",
        "Pad to a few sizes or drop the last partial batch; with `dynamic=None` a size that changes becomes a symbol.",
    ),
    "dtype": Kind(
        "A tensor on the tape had another dtype.",
        "Use one dtype for parameters and inputs; autocast in only some of the steps also has this effect.",
    ),
    "device": Kind(
        "A tensor on the tape was on another device.",
        "Move the model and its inputs to one device before the first backward.",
    ),
    "layout": Kind(
        "A tensor on the tape had other strides or another layout, or was another kind of tensor.",
        "Call `.contiguous()` on tensors that are sometimes transposed or sliced views, or use one memory format.",
    ),
    "guard": Kind(
        "The sizes violated a guard of the dynamic variant's code.",
        "Read the guard: the usual causes are sizes 0 and 1, and sizes that are equal by chance.",
    ),
    "variant_limit": Kind(
        "The structure had reached the maximum number of variants.",
        "Set `dynamic=True`, or pad inputs to fewer sizes.",
    ),
    "ambient_state": Kind(
        "Process state on which the code depends had changed: autocast, determinism, threads and the like.",
        "Set this state once, before training; every state that occurs is compiled separately.",
    ),
    "backend_or_settings": Kind(
        "The backward ran with another backend, other settings or other passes.",
        "Use the same settings in every `enable()`; code for the earlier settings stays cached.",
    ),
    "environment": Kind(
        "The stored code was compiled with other versions, or for another processor or compiler.",
        "Nothing: it was compiled again for this environment; `shadow-cache prune --older 30d` removes unused entries.",
    ),
    "evicted": Kind(
        "The entry was evicted to keep the cache below its maximum size, or removed by `prune`.",
        "If this happens often, give programs folders of their own (cache_dir); `shadow-cache stats` shows the limit.",
    ),
    "corrupt": Kind(
        "The stored entry is damaged: a file is missing, or does not match its checksum.",
        "Run `shadow-cache verify`; if it happens again, check the disk that the cache is on.",
    ),
    "mismatch": Kind(
        "Compiled code gave other results than the real calls, run for comparison.",
        "Nothing for this training: the right gradients were used; please report the bug, with the file it names.",
    ),
}


MISMATCH = "mismatch"
"""The kind of a wrong result of compiled code."""
NOT_WORTH_IT = Kind(
    "The eager engine was faster when both were timed: it runs such backwards, which count as bypasses.",
    "Nothing: eager and compiled code are timed again from time to time, and in each process. `tune=False` ends it.",
)
"""Explanation of an entry that is slower than eager."""
OVER_BUDGET = Kind(
    "Compiling had cost more time than hits had saved: the eager engine ran new structures and shapes from then on.",
    "Pad to a few lengths, mark them (`torch._dynamo.mark_dynamic`), put `ca.disable()` around backwards that never "
    "repeat, or set `compile_budget`.",
)
NOT_YET = Kind(
    "It was new, and had not run on the eager engine for as long as a compile is likely to hold up the training.",
    'Nothing: it is compiled once it has run on eager for long enough; `on_miss="compile"` compiles it at once.',
)
NO_MISSES = {"not_worth_it": NOT_WORTH_IT, "over_budget": OVER_BUDGET, "not_yet": NOT_YET}
"""Reasons to run a backward on eager that could be compiled: bypasses, for which nothing is compiled."""


def explain(kind: str) -> Kind:
    """Return the explanation of ``kind``, also of a kind that only a newer version knows."""
    unknown = Kind(f"This version has no explanation of {kind!r}.", "Use the version that wrote this cache.")
    return KINDS.get(kind) or NO_MISSES.get(kind) or unknown
