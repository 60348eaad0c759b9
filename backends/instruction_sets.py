"""Finds out which vector instructions generated CPU code may use, while the graph is still being traced.

Inductor finds it out when it generates the first kernel: for each instruction set that the processor has, it compiles
a few small files and loads them, one after the other; in a process with nothing cached that takes seconds. It keeps
what it found (``torch/_inductor/cpu_vec_isa.py``, 2.13). So the same questions are asked early, each in a thread, by
compilers that need no interpreter.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch


@functools.cache
def ask() -> None:
    """Begin, once in a process, unless there is a GPU to do the work. Returns at once.

    Whoever then asks Inductor waits for the answers: an instruction set cannot be asked by two at once, since it
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
    pool = ThreadPoolExecutor(max(1, len(sets)), "instruction_sets")
    answers = [pool.submit(bool, each) for each in sets]
    pool.shutdown(wait=False)

    @functools.wraps(find)
    def find_when_answered() -> list[cpu_vec_isa.VecISA]:
        wait(answers)
        return find()

    for name in ("cache_info", "cache_clear"):
        setattr(find_when_answered, name, getattr(find, name))
    cpu_vec_isa.valid_vec_isa_list = find_when_answered  # type: ignore[assignment]
