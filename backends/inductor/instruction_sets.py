"""Finds out which vector instructions generated CPU code may use, while the graph is still being traced.

Inductor finds it out when it generates the first kernel, by compiling and loading small files, which takes seconds, and
keeps what it found (``torch/_inductor/cpu_vec_isa.py``, 2.13). So the same question is asked early, in a thread; and of
the widest set first, since who manages that one manages those that it includes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._inductor.cpu_vec_isa import VecISA


@functools.cache
def ask() -> None:
    """Begin, once in a process, unless there is a GPU to do the work. Returns at once.

    Whoever then asks Inductor waits for the answer: an instruction set cannot be asked by two at once, since it
    changes its flags while it tries some. What goes wrong goes wrong again then, and is said.
    """
    if torch.cuda.is_available():
        return
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # all of it, before there are threads

    assert codecache and cpp_builder
    find: Any = cpu_vec_isa.valid_vec_isa_list
    has = cpu_vec_isa.x86_isa_checker()  # nothing on other processors, for which little is compiled to ask
    if not has or find.cache_info().currsize:
        return
    sets = [each for each in cpu_vec_isa.supported_vec_isa_list if all(flag in has for flag in str(each).split())]
    found: list[list[VecISA]] = []

    def look() -> None:
        with contextlib.suppress(Exception):
            found.append(_widest_first(sets))

    thread = threading.Thread(target=look, name="instruction_sets")
    thread.start()

    @functools.wraps(find)
    def find_when_answered() -> list[VecISA]:
        thread.join()  # in a forked child, which has no such thread, it counts as ended
        if not found:
            found.append(find())
        return found[0]

    for name in ("cache_info", "cache_clear"):
        setattr(find_when_answered, name, getattr(find, name))
    cpu_vec_isa.valid_vec_isa_list = find_when_answered  # type: ignore[assignment]


def _widest_first(sets: Sequence[VecISA]) -> list[VecISA]:
    """Return the sets from the first that compiler, loader and processor support."""
    return next((list(sets[index:]) for index, each in enumerate(sets) if each), [])
