"""Inductor's modes, named as ``torch.compile`` names them (torch 2.13).

What each means is ``torch._inductor.list_mode_options``; the names stand here too, so that a setting can be checked
without an import of Inductor. A backend in another mode than the default is another backend, with a name of its own.
"""

from __future__ import annotations

DEFAULT = "default"
MODES = (DEFAULT, "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
WITH_MODES = "inductor"
"""The one backend that has modes."""


def name_in(mode: str) -> str:
    """The name of Inductor's backend in a mode: ``inductor``, or ``inductor:max-autotune``."""
    return WITH_MODES if mode == DEFAULT else f"{WITH_MODES}:{mode}"
