"""Straight-line programs: the Python code that Inductor generates around its kernels (torch 2.13), run without Python.

``docs/internals/backends.md`` says where a program and the code are equal, and where they differ.
"""

from __future__ import annotations

import ast
import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...garbage_collection import RARELY
from ...protocol import Compiled
from .products import Value
from .statements import body_of_call
from .translation import MakeProgram, UnknownCodeError, translated, values_of

_log = logging.getLogger(__name__)
Inputs = tuple[Value, ...]
"""The properties of its inputs that a program contains."""
Change = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Maps a namespace to one with other functions under some names."""
GENERATED_CODE, PROGRAM = "generated code", "straight-line program"
"""The forms of a :class:`StraightLine`."""


@dataclass(eq=False, repr=False)
class StraightLine:
    """Generated code, which from its second run on runs as a straight-line program.

    Sizes and strides of the inputs are those of that run at all others: whoever calls this has checked them. For inputs
    of other strides, as another region with the same code may have them, there is :meth:`another`.

    Args:
        compiled: Inductor's result for a region whose sizes are numbers.
        source: the generated code; ``namespace`` is the one that it was run in.
        make_program: the function of ``straight_line.cpp``; ``library`` is its library, if that can be stored.

    Attributes:
        program: the program; None as long as Python runs, and ``why_not`` has the reason.
        has_run: the generated code has run, so the program can take over.
    """

    compiled: Compiled
    source: str
    namespace: Mapping[str, Any]
    make_program: MakeProgram
    library: bytes = b""
    program: Compiled | None = field(init=False, default=None)
    why_not: str = field(init=False, default="it has not run yet")
    has_run: bool = field(init=False, default=False)
    _is_settled: bool = field(init=False, default=False)
    _inputs: Inputs = field(init=False, default=())  # what the program was made for
    _programs: dict[Inputs, Compiled | None] = field(default_factory=dict)  # of this code; None: not to be used
    _body: list[ast.stmt] | None = field(init=False, default=None)  # as it was read, until the next run
    _changed: tuple[tuple[Change, Inputs], Compiled] | None = field(init=False, default=None)  # of another namespace
    _users: list[weakref.ref[StraightLine]] = field(default_factory=list)  # of these programs

    def __post_init__(self) -> None:
        self._users.append(weakref.ref(self))

    def another(self) -> StraightLine:
        """Return the same code for another region, with its own program if its inputs have other sizes or strides."""
        return replace(self)

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        """Run it. The arguments are emptied, as :data:`Compiled` has it."""
        program = self.program_in_use()
        self._changed = None
        return self.run_form(self.form_for(arguments), arguments) if program is None else program(arguments)

    def program_in_use(self) -> Compiled | None:
        """The program, where it is what the next call in this thread runs."""
        return None if self.program is None or _somebody_looks() else self.program

    def questions(self) -> list[tuple[Any, str | None, Any]]:
        """Return questions with which C++ checks that this is still the program, and that nothing observes it: (object,
        name, answer) for an attribute, or (function, None, answer)."""
        precision = functools.partial(torch._C._get_fp32_precision_getter, "mkldnn", "matmul")
        return [
            (self, "program", self.program),
            (torch.autograd.profiler, "_is_profiler_enabled", False),
            (torch._C._len_torch_dispatch_stack, None, 0),
            (precision, None, precision()),
        ]

    def form_for(self, arguments: Sequence[Any]) -> str:
        """Return the form of the next call in this thread: :data:`GENERATED_CODE`, or :data:`PROGRAM`, which is made
        for it."""
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
            return self._changed_by(change, arguments)(arguments)
        self._body = self._changed = None
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

    def _changed_by(self, change: Change, arguments: Sequence[Any]) -> Compiled:
        """The program of another namespace. It is kept as long as no other runs: there may be many such runs."""
        key, kept = (change, values_of(arguments)), self._changed
        if kept is not None and kept[0] == key:
            return kept[1]
        with RARELY:
            body, self._body = self._body, None
            program = translated(self.source, change(self.namespace), arguments, body).made_by(self.make_program)
        self._changed = key, program
        return program

    def _translate(self, arguments: Sequence[Any]) -> None:
        """Make the program. Two threads may do it at once, and one of the results is used."""
        inputs = values_of(arguments)
        try:
            if inputs not in self._programs:
                with RARELY:
                    self._body = body = body_of_call(self.source)
                    made = translated(self.source, self.namespace, arguments, body).made_by(self.make_program)
                self._programs.setdefault(inputs, made)
            self.why_not = "" if self._programs[inputs] is not None else "it was dropped"
        except UnknownCodeError as error:
            self.why_not = str(error)
            _log.debug("generated code runs as Python: %s", error)
        self._inputs = inputs
        self.program = self._programs.get(inputs)
        self._is_settled = True


def _somebody_looks() -> bool:
    """Return whether single operators must be visible, or products must be computed in another way than by BLAS."""
    return (
        torch.autograd.profiler._is_profiler_enabled
        or torch._C._len_torch_dispatch_stack() > 0
        # Otherwise float32 is not multiplied as float32 (`mkldnn_reduced_f32_gemm`, `ATen/native/CPUBlas.cpp`).
        or torch._C._get_fp32_precision_getter("mkldnn", "matmul") not in ("none", "ieee")
    )
