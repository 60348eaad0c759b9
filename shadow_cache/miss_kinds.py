"""What each kind of miss means, and what one can do about it: one table, which every display reads."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """``means`` and ``do`` are one sentence each, for someone who has not read the source."""

    means: str
    do: str


KINDS: dict[str, Kind] = {
    "first_seen": Kind(
        "No tape like this one had been met before.",
        "Nothing: every structure is compiled once, and the next backward like it is a hit.",
    ),
    "new_node": Kind(
        "The tape runs along a known one and then has another operation, or ends earlier or later.",
        "Nothing, for another loss on the same model; else look for an `if` or a loop that took another way here.",
    ),
    "node_attribute": Kind(
        "The operations are known, but one of them has a different constant.",
        "Keep that value the same at every step, or hold it in a tensor: numbers that operations save are structure.",
    ),
    "grad_state": Kind(
        "A leaf had a `.grad` where it had none before, or the other way round.",
        "Nothing, if gradients are accumulated: both are then kept; else call `zero_grad()` in the same way each step.",
    ),
    "hooks_changed": Kind(
        "Hooks were added, removed, or are of another kind at a place on the tape.",
        "Register hooks once, before the first backward; a new function at the same place is a hit.",
    ),
    "undefined_gradients": Kind(
        "Another set of gradients was undefined: an output was not used, or a function returned None.",
        "Use the same outputs at every step, or return zeros where None is returned only sometimes.",
    ),
    "shape": Kind(
        "The structure is known, but a tensor on the tape had a size that no variant serves.",
        "Pad to few sizes or drop the last partial batch; with `dynamic=None` a size that changes becomes a symbol.",
    ),
    "dtype": Kind(
        "A tensor on the tape had another dtype.",
        "Keep one dtype for parameters and inputs; autocast that is on for some steps only also shows here.",
    ),
    "device": Kind(
        "A tensor on the tape was on another device.",
        "Move the model and its inputs to one device before the first backward.",
    ),
    "layout": Kind(
        "A tensor on the tape had other strides, or was another kind of tensor.",
        "Call `.contiguous()` on what is sometimes a transposed or sliced view, or use one memory format throughout.",
    ),
    "guard": Kind(
        "A dynamic variant was there, but the sizes broke a condition that its code relies on.",
        "Read the condition: sizes 0 and 1 and sizes that are equal by chance are the usual causes.",
    ),
    "variant_limit": Kind(
        "The structure had as many variants as it may have.",
        "Set `dynamic=True`, or pad inputs so that fewer sizes occur.",
    ),
    "ambient_state": Kind(
        "State of the process that the code depends on was different: autocast, determinism, threads and the like.",
        "Set it once, before training; each value of it that occurs is compiled by itself.",
    ),
    "backend_or_settings": Kind(
        "The backward was run under another backend, or with other settings or passes.",
        "Use the same settings in every `enable()`; what was compiled under the others stays and serves them.",
    ),
    "environment": Kind(
        "What is stored was compiled with other versions, or for another processor or compiler.",
        "Nothing: it was compiled again for what runs now; `shadow-cache prune --older 30d` removes what is not used.",
    ),
    "evicted": Kind(
        "It had been compiled, but was removed since to keep the cache below its largest size, or by `prune`.",
        "Let the cache grow larger if this happens often; `shadow-cache stats` shows its size and the limit.",
    ),
    "corrupt": Kind(
        "What is stored is damaged: a file is missing, or is not what its checksum says.",
        "Run `shadow-cache verify`; if it happens again, check the disk that the cache is on.",
    ),
    "mismatch": Kind(
        "Compiled code gave something else than the calls that it was made of, which were run beside it.",
        "Nothing for this training: the right gradients were used; please report it, with the file that it names.",
    ),
}


MISMATCH = "mismatch"
"""Of what compiled code has computed wrongly."""
NOT_WORTH_IT = Kind(
    "It was timed against the eager engine, and that is faster: such backwards go there, and count as bypasses.",
    "Nothing: it is timed again from time to time, and in each process; `tune=False` runs it compiled all the same.",
)
"""What stands beside an entry that is left to eager."""
OVER_BUDGET = Kind(
    "Compiling had cost more than hits had made up for: what is new was left to the eager engine from then on.",
    "Pad lengths to few, mark them (`torch._dynamo.mark_dynamic`), put `ca.disable()` around what never repeats, or "
    "set `compile_budget`.",
)
NO_MISSES = {"not_worth_it": NOT_WORTH_IT, "over_budget": OVER_BUDGET}
"""Why something runs on eager that could be compiled. These are no kinds of misses: nothing is compiled for them."""


def explain(kind: str) -> Kind:
    """What is known of ``kind``; a kind that a newer version wrote is said to be one."""
    unknown = Kind(f"This version has no explanation of {kind!r}.", "Use the version that wrote this store.")
    return KINDS.get(kind) or NO_MISSES.get(kind) or unknown
