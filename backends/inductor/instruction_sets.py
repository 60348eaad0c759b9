"""Finds out which vector instructions generated CPU code may use, while the graph is still being traced.

Inductor finds it out when it generates the first kernel: for each instruction set that the processor has, it compiles
a small file and loads it, one after the other; in a process with nothing cached that takes seconds. It keeps what it
found (``torch/_inductor/cpu_vec_isa.py``, 2.13). So the same question is asked early, in a thread, by a compiler that
needs no interpreter; and of the widest set first, since who manages that one manages those that it includes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
    pool = ThreadPoolExecutor(1, "instruction_sets")
    answer = pool.submit(_widest_first, sets)
    pool.shutdown(wait=False)
    asker = os.getpid()

    found: list[list[VecISA]] = []  # what a forked child may read: the answer has a lock
    answer.add_done_callback(lambda done: None if done.exception() else found.append(done.result()))

    @functools.wraps(find)
    def find_when_answered() -> list[cpu_vec_isa.VecISA]:
        if os.getpid() != asker and not found:  # the thread is the parent's
            return find()
        if not found:
            found.append(answer.result() if answer.exception() is None else find())
        return found[0]

    for name in ("cache_info", "cache_clear"):
        setattr(find_when_answered, name, getattr(find, name))
    cpu_vec_isa.valid_vec_isa_list = find_when_answered  # type: ignore[assignment]


def _widest_first(sets: Sequence[VecISA]) -> list[VecISA]:
    """Those from the first that compiler, loader and processor manage."""
    return next((list(sets[index:]) for index, each in enumerate(sets) if each), [])
