"""A plugin of pytest: the extension of ``compiled_autograd/native`` is built with sanitizers, which end the process."""

from __future__ import annotations

from compiled_autograd.native import library

library._FLAGS = (*library._FLAGS, "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
