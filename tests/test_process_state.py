"""What modules keep from one backward to the next is registered in one place, and nothing else at module level changes.

This is looked for in the source. A module has state where it has a ``global`` statement, a hook at a fork, a memo of a
function, where a function changes what a name of the module stands for, or where that can only be there to be changed:
an empty container, a lock, a counter, what is local to a thread, an object of one of our own classes that is not
frozen.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from compiled_autograd.engine import seam
from compiled_autograd.engine.engine import Engine
from compiled_autograd.process_state import PROCESS, OfThread, ProcessState

from .helpers import ROOT, in_subprocess, in_threads

_CONTAINERS = {"dict", "list", "set", "bytearray", "defaultdict", "OrderedDict", "deque", "Counter"}
_WEAK = {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}
_OF_THREADS = {"local", "ContextVar", "Lock", "RLock", "allocate_lock", "Condition", "Event", "Semaphore", "Barrier"}
_CHANGE = {"count", "cycle", "SimpleQueue", "Queue"} | _WEAK | _OF_THREADS
_MEMOS = {"cache", "lru_cache"}
_REGISTERS = {"register", "free_in_child", "compiles_under"}
_CHANGING = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem"}
_CHANGING |= {"popleft", "remove", "setdefault", "update", "subtract"}
_FORK = "os.register_at_fork"

_UNCHANGING = "a memo of what is the same as long as the process runs, in a forked child too"
_ONCE = "it is done once in a process"
_ALONE = "shadow_cache and backends work without compiled_autograd too: what a fork needs, they see to"
_SERVES_ON = "what was compiled, loaded or found serves on after a reset"
_COMPILES = "the thread's own, for the length of a compile"

EXCEPTIONS = {
    "backends/torch_versions.py": {"release": _UNCHANGING},
    "compiled_autograd/process_state.py": {"PROCESS": "others register with it", _FORK: "the one place"},
    "compiled_autograd/cache/environment_key.py": {"versions": _UNCHANGING},
    "compiled_autograd/capture/view_writes.py": {"_place_of_function": _UNCHANGING},
    "compiled_autograd/ir/structure_keys.py": {"_device": _UNCHANGING},
    "compiled_autograd/lowering/aten.py": {"_facts": _UNCHANGING},
    "compiled_autograd/lowering/tracing.py": {"_FAKE_LOG": "a logger of torch's, silent for the length of a trace"},
    "compiled_autograd/proving/perturbing.py": {"_decompositions": _UNCHANGING},
    "compiled_autograd/runner/children/sitecustomize.py": {"sys": "runs once, before the program does"},
    "compiled_autograd/steps/profiling.py": {"_event_named": _UNCHANGING},
    "compiled_autograd/torch_api/grad_dtypes.py": {"_place": _UNCHANGING},
    "compiled_autograd/torch_api/version_differences.py": {"prepare_fake_tensors": _ONCE},
    "compiled_autograd/user_code/functions.py": {"_place_of_flag": _UNCHANGING},
    "shadow_cache/report/page.py": {"_text": _UNCHANGING, "_template": _UNCHANGING},
    "backends/garbage_collection.py": {"RARELY": _ALONE, _FORK: _ALONE},
    "backends/registry.py": {"_loaded": _SERVES_ON},
    "backends/inductor/backend.py": {"_decompositions": _UNCHANGING},
    "backends/inductor/batch.py": {"_known": _SERVES_ON, "_thread": _COMPILES, "_INSTEAD": _COMPILES},
    "backends/inductor/cuda/capture.py": {"_pools": _SERVES_ON, "CAPTURING": _ALONE},
    "backends/inductor/cuda/kernels.py": {"_functions": _SERVES_ON},
    "backends/inductor/environment.py": dict.fromkeys(("_text", "_hash", "_driver", "_triton"), _UNCHANGING),
    "backends/inductor/instruction_sets.py": {"ask": _ONCE},
    "backends/inductor/randomness.py": {
        **dict.fromkeys(("_thread", "_INSTEAD"), _COMPILES),
        "decompositions": _UNCHANGING,
    },
    "backends/inductor/straight_line/statements.py": {"compiled": _UNCHANGING},
    "backends/inductor/kernels.py": {
        **dict.fromkeys(("_loaded", "_addresses"), _SERVES_ON),
        **dict.fromkeys(("LOADING", _FORK), _ALONE),
    },
    "backends/inductor/memory.py": {"keep_freed_memory": _ONCE},
    "backends/inductor/workarounds/complex_scatters.py": {"_LIBRARY": _ONCE},
    "backends/inductor/workarounds/grad_of_tensors.py": {"_INSTEAD": _COMPILES},
    "backends/inductor/workarounds/instead.py": {"_install": _ONCE},
    "backends/inductor/workarounds/outer_loops.py": {"_INSTEAD": _COMPILES},
    "backends/inductor/workarounds/sizes_of_tensors.py": {"_INSTEAD": _COMPILES},
    "compiled_autograd/diagnostics/users_line.py": {"_asked_at": "a context variable, set in threads of our own"},
    "compiled_autograd/engine/native_hits.py": {"Library": _SERVES_ON},
    "backends/inductor/straight_line/products.py": dict.fromkeys(("limit_threads", "products"), _UNCHANGING),
    "backends/inductor/straight_line/program_library.py": {"begin": _SERVES_ON, _FORK: _ALONE},
    "shadow_cache/compile_counter.py": dict.fromkeys(("_watching", "_lock", _FORK), _ALONE),
}
"""What is not registered, and why."""


def _last_name(expression: ast.AST | None) -> str:
    """``c`` of ``a.b.c``, of ``a.c[x]`` and of a call of these."""
    while isinstance(expression, (ast.Call, ast.Subscript)):
        expression = expression.func if isinstance(expression, ast.Call) else expression.value
    return expression.attr if isinstance(expression, ast.Attribute) else getattr(expression, "id", "")


def _first_name(expression: ast.AST) -> str:
    """``a`` of ``a.b.c``, of ``a[x]`` and of ``a``."""
    while isinstance(expression, (ast.Attribute, ast.Subscript)):
        expression = expression.value
    return getattr(expression, "id", "")


def _at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module that run once."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With, ast.For)):
            yield from _at_import([*statement.body, *getattr(statement, "orelse", [])])


def _changing_classes(tree: ast.Module) -> set[str]:
    """The classes of a module whose objects are not frozen."""
    return {each.name for each in tree.body if isinstance(each, ast.ClassDef) and not _is_frozen(each)}


def _is_frozen(cls: ast.ClassDef) -> bool:
    calls = [each for each in cls.decorator_list if isinstance(each, ast.Call)]
    options = [*cls.keywords, *(keyword for call in calls for keyword in call.keywords)]
    bases = set(map(_last_name, cls.bases))
    return any(option.arg == "frozen" for option in options) or not bases.isdisjoint({"NamedTuple", "Enum"})


def _is_state(value: ast.expr, classes: set[str]) -> bool:
    """Whether a value at module level can only be there to be changed."""
    if isinstance(value, ast.Call):
        name = _last_name(value)
        return name in _CHANGE | classes or (name in _CONTAINERS and not value.args)
    if isinstance(value, ast.Dict):
        return not value.keys
    return isinstance(value, ast.List) and not value.elts


def _changed(function: ast.AST) -> Iterator[str]:
    """Names of what a function changes, but for those that are its own."""
    names = [each for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
    own = {each.id for each in names} | {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
    for node in ast.walk(function):
        targets: list[ast.expr] = getattr(node, "targets", [])
        if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            targets = [node.func]
        yield from set(map(_first_name, targets)) - own


def _assigned(statement: ast.stmt) -> set[str]:
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    parts = [part for target in targets if target for part in getattr(target, "elts", [target])]
    return set(map(_first_name, parts))


def registered_in(tree: ast.Module) -> set[str]:
    """Names of what a module registers."""
    names = set()
    for each in _at_import(tree.body):
        value = getattr(each, "value", None)
        if isinstance(value, ast.Call) and _last_name(value) in _REGISTERS:
            names |= _assigned(each) | set(map(_first_name, value.args))
    return names


def state_in(tree: ast.Module, classes: set[str], registered: set[str]) -> set[str]:
    """Names of what a module keeps and has not registered.

    Args:
        tree: the module.
        classes: names of our classes whose objects change.
        registered: names of what any module registers, for what this one imports from others.
    """
    found: set[str] = set()
    own: set[str] = set()
    others: set[str] = set()
    for each in _at_import(tree.body):
        if isinstance(each, (ast.Assign, ast.AnnAssign)) and each.value is not None:
            own |= _assigned(each)
            found |= _assigned(each) if _is_state(each.value, classes) else set()
        elif isinstance(each, ast.ImportFrom):
            others |= {alias.asname or alias.name for alias in each.names if each.level}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.update(node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found |= {node.name} if any(_last_name(each) in _MEMOS for each in node.decorator_list) else set()
            found |= set(_changed(node)) & (own | (others - registered))
        elif _last_name(node) == "register_at_fork":
            found.add(_FORK)
    return found - registered_in(tree) - {""}


def test_what_a_module_keeps_is_registered() -> None:
    packages = [ROOT / name for name in ("compiled_autograd", "backends", "shadow_cache")]
    files = [file for package in packages for file in package.rglob("*.py")]
    trees = {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text()) for file in files}
    classes = set().union(*map(_changing_classes, trees.values()))
    registered = set().union(*map(registered_in, trees.values()))
    found = {file: state_in(tree, classes, registered) for file, tree in trees.items()}
    assert {file: names for file, names in found.items() if names} == {
        file: set(reasons) for file, reasons in EXCEPTIONS.items()
    }


@pytest.mark.parametrize(
    ("planted", "names"),
    [
        ("kept = {}", {"kept"}),
        ("kept: list[int] = list()", {"kept"}),
        ("if True:\n    kept = threading.Lock()", {"kept"}),
        ("class Thread(threading.local): pass\nkept = Thread()", {"kept"}),
        ("kept = 0\ndef count():\n    global kept\n    kept += 1", {"kept"}),
        ("kept = {1: 2}\ndef add():\n    kept[2] = 3", {"kept"}),
        ("kept = [1]\ndef add():\n    kept.append(2)", {"kept"}),
        ("kept = other()\ndef add():\n    kept.of.it = 2", {"kept"}),
        ("from .other import kept\ndef add():\n    del kept[0]", {"kept"}),
        ("@functools.cache\ndef kept(): pass", {"kept"}),
        ("@functools.lru_cache(maxsize=None)\ndef kept(): pass", {"kept"}),
        ("os.register_at_fork(before=print)", {_FORK}),
        ("def add(kept):\n    kept[2] = 3\ntable = {1: 2}\nmany = dict(table)", set()),
        ("kept = PROCESS.register({})", set()),
        ("kept = {}\nPROCESS.register(kept, reset=kept.clear)", set()),
        ("kept = free_in_child(threading.RLock())", set()),
        ("from .other import known\ndef add():\n    known.add(1)", set()),
    ],
)
def test_what_is_planted_is_found(planted: str, names: set[str]) -> None:
    tree = ast.parse(planted)
    assert state_in(tree, _changing_classes(tree), {"known"}) == names


def test_what_is_registered_can_be_listed() -> None:
    """Every object is one that a name of some module stands for."""
    assert Engine  # all of them are imported
    modules = [module for name, module in sys.modules.items() if name.startswith("compiled_autograd")]
    names = {id(value): name for module in modules for name, value in vars(module).items()}
    listed = [names.get(id(kept)) for kept in PROCESS]
    assert None not in listed and len(listed) == len(set(map(id, PROCESS)))
    assert {"GRAPHS", "GATE", "LEAF_WRITES", "STREAMS", "QUEUE", "COMPILER", "KEPT", "_warned"} <= set(listed)
    assert PROCESS._reset[-1] is seam.forget  # first of all: what the engine knows, it hands to the others


def test_a_reset_forgets_from_the_top_down_and_a_restart_the_rest() -> None:
    state, seen = ProcessState(), []
    lower, upper = [0], {1: 1}
    assert state.register(lower, reset=lambda: seen.append("lower"), restart=lambda: seen.append("rest")) is lower
    assert state.register(upper, reset=lambda: seen.append("upper")) is upper
    state.register(seen)
    assert list(state) == [lower, upper, seen]
    state.reset()
    assert seen == ["upper", "lower"]
    state.restart()
    assert seen[2:] == ["upper", "lower", "rest"]


_FORKS = """
import os, sys
from compiled_autograd.process_state import ProcessState

state, seen = ProcessState(), []
sys.unraisablehook = lambda error: seen.append(str(error.exc_value))

def fails(*_):
    raise KeyboardInterrupt("passed over")

def hooks(name):
    moments = ("before_fork", "after_fork_in_parent", "after_fork")
    return {moment: (lambda moment=moment: seen.append((name, moment))) for moment in moments}

state.register([], **hooks("lower"))
state.register([], before_fork=fails, after_fork_in_parent=fails, after_fork=fails)
state.register([], **hooks("upper"))
child = os.fork()
after = "after_fork_in_parent" if child else "after_fork"
assert seen == [
    ("upper", "before_fork"), "passed over", ("lower", "before_fork"), ("lower", after), "passed over", ("upper", after)
], seen
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_what_a_hook_raises_at_a_fork_keeps_no_other_from_running() -> None:
    result = in_subprocess(_FORKS)
    assert result.returncode == 0, result.stderr


def test_what_a_thread_has_for_itself_is_there_in_the_midst_of_being_made() -> None:
    """For what ``gc`` runs there."""
    within: list[object] = []

    def make() -> object:
        if not within:
            within.append(None)
            within.append(local.own)
        return object()

    class Local(threading.local):
        own = OfThread(make)

    local = Local()
    assert local.own is within[1] and local.own is within[1]
    assert in_threads(lambda: local.own)[0] is not within[1]
