"""PyTorch's tests of its own compiled autograd, run with another engine: what turns theirs on turns that one on.

In ``inductor/test_compiled_autograd.py`` a test runs a function as it is, then again inside
``torch._dynamo.compiled_autograd._enable(...)``, and compares. So the engine must not be on around the whole test.
Counts of captures and compiles are of PyTorch's compiler alone: the method that compares them compares results only.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

FILE = "test_compiled_autograd.py"
Engine = Callable[[], contextlib.AbstractContextManager[Any]]


class Redirect:
    """Takes the place of ``_enable``.

    Attributes:
        backwards, failures, own_loop, bypasses: counts of all sessions since they were last asked for.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.backwards = self.failures = self.own_loop = 0
        self.bypasses: Counter[str] = Counter()
        from torch._dynamo import compiled_autograd

        compiled_autograd._enable = self.enable

    @contextlib.contextmanager
    def enable(self, *_: Any, **__: Any) -> Iterator[None]:
        """What tests enter in place of PyTorch's context manager."""
        with self._engine() as session:
            try:
                yield None
            finally:
                if session is not None:
                    stats = session.stats()
                    self.backwards += stats.backwards
                    self.failures += stats.failures
                    self.own_loop += stats.own_loop
                    self.bypasses.update(stats.bypasses)

    def stats(self) -> Redirect:
        """The counts, as a session gives them; they begin anew."""
        counted = object.__new__(Redirect)
        counted.backwards, counted.failures, counted.bypasses = self.backwards, self.failures, self.bypasses
        counted.own_loop = self.own_loop
        self.backwards, self.failures, self.own_loop, self.bypasses = 0, 0, 0, Counter()
        return counted

    def compare_results_only(self, tests: type) -> None:
        """Replace the method of the tests that also compares the counts of PyTorch's compiler."""
        if not hasattr(tests, "check_output_and_recompiles"):
            return

        def check(test: Any, function: Any, *_: Any, compile_fn: bool = False, **__: Any) -> None:
            torch._dynamo.reset()
            torch.manual_seed(123)
            expected = list(function())
            torch.manual_seed(123)
            with self.enable():
                found = list((torch.compile(function) if compile_fn else function)())
            test.assertEqual(expected, found)

        tests.check_output_and_recompiles = check  # type: ignore[attr-defined]
