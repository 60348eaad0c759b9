"""Straight-line programs: the Python code that Inductor generates around its kernels (torch 2.13), run without Python.

The code is one function, ``call``, without branches. Where kernels are small, most of its time is the interpreter's,
and that of the dispatcher for each product of matrices. Here its statements become a list of instructions, which a
small piece of C++ runs (``straight_line.cpp``): memory is allocated and let go at the same places, by the same
allocator; kernels are called at their addresses; and a product calls the function of BLAS that ``torch.mm`` calls, with
the same arguments, so that its result is the same bit for bit. Whatever is not known is called as Python has it. The
instructions: :mod:`backends.translation`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...garbage_collection import RARELY
from ...protocol import Compiled
from .products import Value
from .translation import MakeProgram, UnknownCodeError, translated, values_of

_log = logging.getLogger(__name__)
Inputs = tuple[Value, ...]
"""All that a program has in it of the run that it was made for."""
Change = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""From a namespace to one with other functions under some names."""


GENERATED_CODE, PROGRAM = "generated code", "straight-line program"
"""The forms of a :class:`StraightLine`."""


class StraightLine:
    """Generated code, which from its second run on runs as a straight-line program.

    Sizes and strides of the inputs are those of that run at all others: whoever calls this has checked them. For inputs
    of other strides, as another region with the same code may have them, there is :meth:`another`.

    Args:
        compiled: what Inductor made of a region whose sizes are numbers.
        source: the generated code; ``namespace`` is the one that it was run in.
        make_program: the function of ``straight_line.cpp``; ``library`` is what it is in, where that can be stored.

    Attributes:
        program: what runs; None as long as it is Python, and ``why_not`` says why.
        has_run: the generated code has; the program can take over.
    """

    def __init__(
        self,
        compiled: Compiled,
        source: str,
        namespace: Mapping[str, Any],
        make_program: MakeProgram,
        library: bytes = b"",
    ) -> None:
        self.compiled = compiled
        self.make_program = make_program
        self.library = library
        self.program: Compiled | None = None
        self.why_not = "it has not run yet"
        self.has_run = False
        self._is_settled = False
        self._source = source
        self._namespace = namespace
        self._inputs: Inputs = ()  # what the program was made for
        self._programs: dict[Inputs, Compiled | None] = {}  # of this code; None where it is not to be used
        self._users: list[weakref.ref[StraightLine]] = [weakref.ref(self)]  # of these programs

    def another(self) -> StraightLine:
        """The same code for another region, with a program of its own where its inputs have other sizes or strides."""
        made = StraightLine(self.compiled, self._source, self._namespace, self.make_program, self.library)
        made._programs, made._users = self._programs, self._users
        self._users.append(weakref.ref(made))
        return made

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        """Run it. The arguments are emptied, as :data:`Compiled` has it."""
        program = self.program
        if program is not None and not _somebody_looks():
            return program(arguments)
        return self.run_form(self.form_for(arguments), arguments)

    def form_for(self, arguments: Sequence[Any]) -> str:
        """What the next call in this thread runs: :data:`GENERATED_CODE`, or :data:`PROGRAM`, which is made for it."""
        if self.has_run and not self._is_settled:
            self._translate(arguments)
        return GENERATED_CODE if self.program is None or _somebody_looks() else PROGRAM

    def run_form(self, form: str, arguments: list[Any], change: Change | None = None) -> Sequence[Any]:
        """Run one of the forms, whichever of them is in use.

        Args:
            form: as :meth:`form_for` gave it.
            arguments: are emptied.
            change: what the names of the generated code stand for in this run alone.
        """
        if form == PROGRAM and change is not None:
            with RARELY:
                program = translated(self._source, change(self._namespace), arguments).made_by(self.make_program)
            return program(arguments)
        made = self.program  # another thread may drop it meanwhile
        if form == PROGRAM and made is not None:
            return made(arguments)
        self.has_run = True
        return self.compiled(arguments)

    def drop(self, form: str) -> bool:
        """Never run a form again, here and wherever else it is the same. False where nothing takes its place."""
        if form != PROGRAM:
            return False
        if self.program is not None:
            self._programs[self._inputs] = None
        for user in [self, *filter(None, [each() for each in self._users])]:
            if user is self or (user.program is not None and user._inputs == self._inputs):
                user.program, user._is_settled, user.why_not = None, True, "it was dropped"
        return True

    def _translate(self, arguments: Sequence[Any]) -> None:
        """Make the program. Two threads may do it at once, and one of the results is used."""
        inputs = values_of(arguments)
        try:
            if inputs not in self._programs:
                with RARELY:
                    made = translated(self._source, self._namespace, arguments).made_by(self.make_program)
                self._programs.setdefault(inputs, made)
            self.why_not = "" if self._programs[inputs] is not None else "it was dropped"
        except UnknownCodeError as error:
            self.why_not = str(error)
            _log.debug("generated code runs as Python: %s", error)
        self._inputs = inputs
        self.program = self._programs.get(inputs)
        self._is_settled = True


def _somebody_looks() -> bool:
    """Whether the single operators are to be seen, or products are to be computed in another way than BLAS does."""
    return (
        torch.autograd.profiler._is_profiler_enabled
        or torch._C._len_torch_dispatch_stack() > 0
        or not _plain_products()
    )


def _plain_products() -> bool:
    """Whether float32 is multiplied as float32 (``mkldnn_reduced_f32_gemm``, ``ATen/native/CPUBlas.cpp``)."""
    return torch._C._get_fp32_precision_getter("mkldnn", "matmul") in ("none", "ieee")
