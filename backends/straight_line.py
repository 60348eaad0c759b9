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
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .collecting import RARELY
from .protocol import Compiled
from .translation import MakeProgram, UnknownCodeError, translated

_log = logging.getLogger(__name__)


class StraightLine:
    """Generated code, which from its second run on runs as a straight-line program.

    Sizes and strides of the inputs are those of that run at all others: whoever calls this has checked them.

    Args:
        compiled: what Inductor made of a region whose sizes are numbers.
        source: the generated code; ``namespace`` is the one that it was run in.
        make_program: the function of ``straight_line.cpp``; ``library`` is what it is in, where that can be stored.

    Attributes:
        program: what runs; None as long as it is Python, and ``why_not`` says why.
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
        self._runs = 0
        self._source = source
        self._namespace = namespace

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        """Run it. The arguments are emptied, as :data:`Compiled` has it."""
        if self._runs < 2:
            self._runs += 1
            if self._runs == 2:
                self._translate(arguments)
        if self.program is None or _somebody_looks():
            return self.compiled(arguments)
        return self.program(arguments)

    def _translate(self, arguments: Sequence[Any]) -> None:
        try:
            with RARELY:
                self.program = translated(self._source, self._namespace, arguments).made_by(self.make_program)
            self.why_not = ""
        except UnknownCodeError as error:
            self.why_not = str(error)
            _log.debug("generated code runs as Python: %s", error)
        self._source, self._namespace = "", {}


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
