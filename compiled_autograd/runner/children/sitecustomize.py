"""Found first on ``PYTHONPATH`` by programs that the runner starts, and by their children: once such a process has
imported ``torch``, it imports ``compiled_autograd``, which reads ``COMPILED_AUTOGRAD`` then.

Python imports a module of this name before it runs a program (``site.execsitecustomize``, 3.10 to 3.14).
"""

import atexit
import importlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  pathlib would make each start slower
_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))  # noqa: PTH120
_OF_OTHERS = os.path.join("torch", "_inductor", "compile_worker")  # noqa: PTH118
_RUN = "_COMPILED_AUTOGRAD_RUN"


class _AfterTorch:
    """A finder that finds nothing, and sees when ``torch`` is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        loader = spec.loader if spec is not None else None
        if loader is None:
            return spec

        def exec_module(module):
            del vars(loader)["exec_module"]  # the class's own is there again
            loader.exec_module(module)
            if find_spec("compiled_autograd") is None:
                sys.path.append(_PARENT)  # last: it hides nothing of the program's
            try:
                importlib.import_module("compiled_autograd")
            except ImportError as error:  # an environment that has torch, and not what this package needs
                print(f"compiled_autograd: {sys.executable} runs without it: {error}", file=sys.stderr)  # noqa: T201

        vars(loader)["exec_module"] = exec_module
        return spec


def _at_the_end():
    name = next(iter(sys.argv), None)  # a program may have changed these
    began = name == "-" or (isinstance(name, str) and os.path.exists(name))  # noqa: PTH110 # else python found none
    if began and "torch" not in sys.modules and os.environ[_RUN].startswith(f"{os.getpid()} "):  # no forked child's
        print("compiled_autograd: the program did not import torch", file=sys.stderr)  # noqa: T201


def _run_the_next_one():
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != _HERE])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.path[:] = [path for path in sys.path if path != _HERE]
_ARGUMENTS = getattr(sys, "orig_argv", ())  # since Python 3.10; a program may start another one
if not any(_OF_OTHERS in argument for argument in _ARGUMENTS[1:2]):  # Inductor's workers run no backward
    if os.environ.get("COMPILED_AUTOGRAD"):
        sys.meta_path.insert(0, _AfterTorch())
    if os.environ.get(_RUN, "").startswith(f"{os.getpid()} "):
        atexit.register(_at_the_end)
_run_the_next_one()
