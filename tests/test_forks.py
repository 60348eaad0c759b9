"""A child that is forked at a bad moment: what its parent had compiled runs, the rest is eager's, and nothing hangs."""

from __future__ import annotations

import os

import pytest

from .helpers import in_subprocess

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

_START = """
import os, signal, sys, threading
import torch
import compiled_autograd as ca
from compiled_autograd.diagnostics import bypass
from compiled_autograd.cache import graphs
from compiled_autograd.engine import session as sessions
from compiled_autograd.threads.gate import GATE
from shadow_cache import compile_counter
from backends.inductor import kernels

signal.alarm(100)
torch.set_num_threads(1)

def grad(function):
    x = torch.arange(1.0, 5.0, requires_grad=True)
    return torch.autograd.grad(function(x).sum(), x)[0]

def known(x):
    return (x * x).exp()

def new(x):
    return x.sin().cos() * x

held, done = threading.Event(), threading.Event()

def hold(lock):
    with lock:
        held.set()
        done.wait()

def in_child(what):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        status = 1
        try:
            what()
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    done.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

wanted = grad(known), grad(new)
session = ca.enable(backend="eager")
with session:
    grad(known)
"""

_COMPILING = """
def slow(graph_module, examples):
    held.set()
    done.wait()
    return graph_module.forward

def compile_slowly():
    with ca.enable(backend=slow):
        grad(lambda x: x.tanh())

threading.Thread(target=compile_slowly, daemon=True).start()
held.wait()

def child():
    for settings in ({}, {"on_miss": "background"}, {"on_miss": "raise"}, {"on_unsupported": "raise"}):
        with ca.enable(backend="eager", **settings) as mine:
            assert torch.equal(grad(known), wanted[0])
            if "on_miss" in settings and settings["on_miss"] == "raise":
                continue
            assert torch.equal(grad(new), wanted[1])
            assert torch.equal(grad(lambda x: known(x[:3])), grad(lambda x: known(x[:3])))
        stats = mine.stats()
        assert stats.hits == 1 and stats.bypasses == {"forked": 3}, stats
        assert mine.wait(0)

in_child(child)
with session:
    assert torch.equal(grad(new), wanted[1])  # the parent compiles
assert session.stats().structure_misses == 2
"""

_OTHER_LOCKS = """
for lock in (sessions._RECORDING, graphs._ADDING):
    held.clear(), done.clear()
    thread = threading.Thread(target=hold, args=(lock,), daemon=True)
    thread.start()
    held.wait()

    def child():
        with session:
            assert torch.equal(grad(known), wanted[0])
            assert torch.equal(grad(new), wanted[1])
        stats = session.stats()
        assert (stats.hits, stats.structure_misses, stats.bypasses) == (1, 2, {}), stats

    in_child(child)
    thread.join()
"""

_HELD_OVER_FORK = """
for lock in (kernels.LOADING, compile_counter._lock):
    held.clear(), done.clear()
    thread = threading.Thread(target=hold, args=(lock,), daemon=True)
    thread.start()
    held.wait()
    threading.Timer(0.2, done.set).start()

    def child():
        assert done.is_set()  # the fork has waited for it
        with lock:
            pass

    in_child(child)
    thread.join()

def walk():
    with GATE.lock:
        assert GATE.why_not_walk() is None
        held.set()
        done.wait()

held.clear(), done.clear()
threading.Thread(target=walk).start()
held.wait()
threading.Timer(0.2, done.set).start()

def child():
    assert done.is_set()
    with session:
        assert torch.equal(grad(new), wanted[1])
    assert session.stats().structure_misses == 2 and not session.stats().bypasses

in_child(child)
assert GATE.idle()
"""

_INSIDE_A_CALL = """
class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        held.set()
        done.wait()
        return grad

def work():
    with ca.enable(backend="eager"):
        h = torch.randn(3, requires_grad=True).exp()
        h.retain_grad()
        Waits.apply(h).sum().backward()

thread = threading.Thread(target=work)
thread.start()
held.wait()

def child():  # the engine's own lock is that thread's for ever
    with session:
        assert torch.equal(grad(known), wanted[0])
    assert session.stats().bypasses == {"forked": 1}, session.stats()

in_child(child)
thread.join()
"""

_ASKED = """
from concurrent.futures import Future, ThreadPoolExecutor
from backends.inductor import instruction_sets
from torch._inductor import cpu_vec_isa

def slow(sets):
    held.set()
    done.wait()
    return list(sets)

def find():
    return ["asked anew"]

find.cache_info = lambda: type("Info", (), {"currsize": 0})
find.cache_clear = lambda: None
cpu_vec_isa.valid_vec_isa_list = find
cpu_vec_isa.x86_isa_checker = lambda: ["avx2", "avx512f", "avx512vl", "avx512bw", "avx512dq"]
instruction_sets._widest_first = slow
instruction_sets.ask()
held.wait()

def child():
    assert cpu_vec_isa.valid_vec_isa_list() == ["asked anew"]

in_child(child)
assert cpu_vec_isa.valid_vec_isa_list() != ["asked anew"]

def child():
    assert cpu_vec_isa.valid_vec_isa_list() != ["asked anew"]

in_child(child)
"""


@pytest.mark.parametrize(
    "then",
    [
        pytest.param(_COMPILING, id="compiling"),
        pytest.param(_OTHER_LOCKS, id="other locks", marks=pytest.mark.slow),
        pytest.param(_HELD_OVER_FORK, id="held over the fork", marks=pytest.mark.slow),
        pytest.param(_INSIDE_A_CALL, id="inside the engine's call"),
        pytest.param(_ASKED, id="instruction sets", marks=pytest.mark.slow),
    ],
)
def test_a_child_forked_while_another_thread_is_busy(then: str) -> None:
    result = in_subprocess(_START + then, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr


_WHILE_IT_WAITS = """
import os, signal, threading, torch, compiled_autograd as ca
from compiled_autograd.threads.gate import GATE

def step():
    x = torch.ones(4, requires_grad=True)
    (x * x).exp().sum().backward()
    return torch.allclose(x.grad, 2 * torch.e * torch.ones(4))

forked, held = [], threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: forked.append(os.fork()))
session, main = ca.enable(backend="eager", extension="off", cache_dir=False), threading.get_ident()

def hold():
    with GATE.lock:
        held.set()
        threading.Event().wait(0.5)
        signal.pthread_kill(main, signal.SIGUSR1)
        threading.Event().wait(0.5)

with session:
    step()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    right = step() and GATE.idle() and step()
if forked == [0]:
    os._exit(0 if right else 3)
thread.join()
print(right, os.waitstatus_to_exitcode(os.waitpid(forked[0], 0)[1]))
"""


def test_a_child_that_a_handler_forks_while_its_thread_waits_for_the_gate() -> None:
    ended = in_subprocess(_WHILE_IT_WAITS, timeout=60)
    assert ended.stdout.split() == ["True", "0"], ended.stderr
