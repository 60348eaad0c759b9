"""The line that moves while a backward waits for a compile: on a real terminal (a pty), in pipes, in a notebook.

The backend of these tests compiles as long as it is told to. What the terminal then shows is found by :class:`Screen`,
which obeys the few sequences that the line is made of.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.file_proxy import FileProxy
from torch import nn

import compiled_autograd as ca
from compiled_autograd.diagnostics import displays, progress
from compiled_autograd.diagnostics.displays import SHOWN, Lines, Notebook, Terminal, display_for
from compiled_autograd.engine import seam
from compiled_autograd.lowering import lower

from .helpers import ROOT, in_subprocess, in_threads, mlp

say = print
_COLUMNS = 60
_TOKEN = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b(.)|([\r\n])|([^\x1b\r\n]+)", re.DOTALL)


class Screen:
    """What a terminal of some rows shows of what it is sent; ``seen`` has all of its contents, one after the other."""

    def __init__(self, rows: int = 8) -> None:
        self.lines = [""] * rows
        self.row = self.column = 0
        self.saved = (0, 0)
        self.seen: list[list[str]] = []

    def feed(self, text: str) -> None:
        for number, command, short, move, plain in _TOKEN.findall(text):
            if plain:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + plain + line[self.column + len(plain) :]
                self.column += len(plain)
                assert self.column < _COLUMNS + 20, "a line is too long for the terminal"
            elif move == "\r":
                self.column = 0
            elif move == "\n" or short == "D":
                self._down()
            elif short == "M":
                assert self.row > 0
                self.row -= 1
            elif short == "7":
                self.saved = self.row, self.column
            elif short == "8":
                self.row, self.column = self.saved
            elif command == "B":
                self.row = min(self.row + int(number or 1), len(self.lines) - 1)
            elif (number, command) == ("2", "K"):
                self.lines[self.row] = ""
            else:
                raise AssertionError(f"a sequence that was not expected: {number!r} {command!r} {short!r}")
            self.seen.append(self.shown())

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.row -= 1
            self.lines = [*self.lines[1:], ""]

    def shown(self) -> list[str]:
        return [line.rstrip() for line in self.lines if line.strip()]


class OnTerminal:
    """The two standard streams on a terminal, inside ``with``; then ``screen`` has what it shows."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.screen = Screen()
        self.sent = ""

    def __enter__(self) -> OnTerminal:
        self._master, slave = terminal()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.streams = [os.fdopen(each, "w", buffering=1) for each in (slave, os.dup(slave))]
        self._patch.setattr(sys, "stdout", self.streams[0])
        self._patch.setattr(sys, "stderr", self.streams[1])
        self._patch.setenv("TERM", "xterm")
        return self

    def __exit__(self, *exception: object) -> None:
        assert SHOWN == [] and not any("write" in vars(each) for each in self.streams)
        self._patch.undo()
        for each in self.streams:
            each.close()
        self._reader.join(60)
        os.close(self._master)
        self.screen.feed(self.sent)

    def _read(self) -> None:
        self.sent = read_all(self._master)

    def lines(self) -> set[str]:
        """The lines of ours that were there, one after the other."""
        return {line for shown in self.screen.seen for line in shown if "compiled_autograd" in line}


def terminal() -> tuple[int, int]:
    """A new one of few columns: our end, and that of who uses it."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 8, _COLUMNS, 0, 0))
    return master, slave


def read_all(master: int, until: str = "") -> str:
    """What a terminal is sent, until a text comes or nobody has it any more."""
    sent = b""
    while not until or until not in sent.decode():
        try:
            some = os.read(master, 1 << 16)
        except OSError:
            break
        if not some:
            break
        sent += some
    return sent.decode()


def backward(
    seconds: float = 0.0, during: Callable[[], Any] = lambda: None, depth: int = 1, **settings: Any
) -> ca.Session:
    """One whose compile takes a while, in which something else happens."""

    def slow(graph_module: Any, example_inputs: Any) -> Any:
        during()
        time.sleep(seconds)
        return graph_module

    with ca.enable(backend=slow, cache_dir=False, **settings) as session:
        mlp(depth=depth)(torch.randn(2, 8)).mean().backward()
    return session


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> OnTerminal:
    monkeypatch.setattr(progress, "PATIENCE", 0.2)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "PATIENCE", 0.0)
        backward()  # what is imported by the first one has been
    return OnTerminal(pytest.MonkeyPatch())


def test_a_line_moves_and_vanishes(on_terminal: OnTerminal) -> None:
    with on_terminal:
        say("before")
        assert backward(1.0).stats().compiles == 1
        say("after")
    assert on_terminal.screen.shown() == ["before", "after"]
    lines = on_terminal.lines()
    assert {line[0] for line in lines} == set("|/-\\")
    assert all(re.match(r". compiled_autograd: (compiling|tracing) region 1 of 1, \d s: Mean", line) for line in lines)
    assert max(map(len, lines)) == _COLUMNS - 1


@pytest.mark.parametrize(
    ("module", "name", "shown"),
    [(seam, "in_engine_order", "capturing node "), (lower, "breaches", "tracing region 1 of 1")],
)
def test_captures_and_traces_are_shown(
    module: Any, name: str, shown: str, on_terminal: OnTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = getattr(module, name)

    def slow(*arguments: Any) -> Any:
        time.sleep(0.6)
        return function(*arguments)

    monkeypatch.setattr(module, name, slow)
    with on_terminal:
        assert backward(depth=2).stats().compiles == 1  # of another structure than the fixture's
    assert on_terminal.screen.shown() == []
    assert any(f"compiled_autograd: {shown}" in line for line in on_terminal.lines())


def test_it_goes_on_from_region_to_region(on_terminal: OnTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = nn.Linear(4, 4)

    def slow(graph_module: Any, example_inputs: Any) -> Any:
        time.sleep(0.3)
        return graph_module

    with on_terminal, ca.enable(backend=slow, cache_dir=False) as session:
        middle = hidden(torch.randn(3, 4)).tanh()
        middle.register_hook(lambda grad: grad * 2)
        middle.sin().sum().backward()
    assert session.stats().compiles == 2 and on_terminal.screen.shown() == []
    assert {match[0] for line in on_terminal.lines() for match in re.finditer(r"region \d of \d", line)} == {
        "region 1 of 2",
        "region 2 of 2",
    }


def test_what_is_written_meanwhile_stays(on_terminal: OnTerminal) -> None:
    def write() -> None:
        time.sleep(0.5)
        for number in range(12):
            say(f"line {number}")
            say(f"error {number}", file=sys.stderr)
            time.sleep(0.01)
        say("half a ", end="", flush=True)
        time.sleep(0.3)
        say("line")

    thread = threading.Thread(target=write)
    with on_terminal:
        say("epoch 1: ", end="", flush=True)
        backward(1.5, thread.start)
        thread.join()
        say("done")
    last = [f"{kind} {number}" for number in (9, 10, 11) for kind in ("line", "error")]
    assert on_terminal.screen.shown() == [*last, "half a line", "done"][-7:]
    written = {line for shown in on_terminal.screen.seen for line in shown} - on_terminal.lines()
    assert {"epoch 1: line 0", "half a line", *last} <= written
    assert not any(set("|/-\\[") & set(line) for line in written), "a piece of our line is left"
    assert len(on_terminal.lines()) > 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_it_vanishes_whatever_ends_the_compile(on_terminal: OnTerminal, error: type[BaseException]) -> None:
    def fail() -> None:
        time.sleep(0.6)
        raise error("planted")

    with on_terminal:
        try:
            with pytest.warns(UserWarning, match="planted"):
                assert backward(0, fail).stats().failures == 1
        except KeyboardInterrupt:
            say("interrupted")
    assert on_terminal.screen.shown() == ["interrupted"] * (error is KeyboardInterrupt)
    assert on_terminal.lines()


@pytest.mark.slow
def test_ctrl_c_at_a_terminal() -> None:
    master, slave = terminal()
    code = """
import time, torch, compiled_autograd as ca
from compiled_autograd.diagnostics import progress
progress.PATIENCE = 0.1
try:
    with ca.enable(backend=lambda graph_module, inputs: time.sleep(600), cache_dir=False):
        torch.nn.Linear(4, 4)(torch.randn(5, 4)).mean().backward()
except KeyboardInterrupt:
    print("interrupted")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    screen = Screen()
    screen.feed(read_all(master, until="compiling"))
    process.send_signal(signal.SIGINT)
    screen.feed(read_all(master))
    assert process.wait(60) == 0 and screen.shown() == ["interrupted"]
    os.close(master)


def test_two_threads_have_one_line(on_terminal: OnTerminal) -> None:
    with on_terminal:
        in_threads(lambda: backward(0.6, depth=1), lambda: backward(0.6, depth=2))
    seen = on_terminal.screen.seen
    assert all(sum("compiled_autograd" in line for line in shown) <= 1 for shown in seen) and on_terminal.lines()
    assert on_terminal.screen.shown() == []


@pytest.mark.parametrize(
    ("settings", "environment"),
    [
        ({"progress": False}, {}),
        ({}, {"COMPILED_AUTOGRAD_PROGRESS": "false"}),
        ({}, {"TERM": "dumb"}),
        ({}, {"RANK": "1"}),
        ({"on_miss": "background"}, {}),
    ],
    ids=["off", "off in the environment", "a dumb terminal", "another rank", "in the background"],
)
def test_nothing_is_shown(
    on_terminal: OnTerminal, settings: dict[str, Any], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_terminal:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert backward(0.8, **settings).wait()
    assert on_terminal.sent == ""


def test_nothing_is_shown_of_a_short_one(on_terminal: OnTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    with on_terminal:
        backward(0.1)
    assert on_terminal.sent == ""


def test_a_forked_child_writes_as_it_did(on_terminal: OnTerminal) -> None:
    ended: list[int] = []

    def fork() -> None:
        time.sleep(0.6)
        child = os.fork()
        if not child:
            left = bool(SHOWN) or any("write" in vars(each) for each in on_terminal.streams)
            sys.stdout.write("")
            os._exit(left)
        ended.append(os.waitpid(child, 0)[1])

    with on_terminal:
        backward(0, fork)
    assert ended == [0] and on_terminal.lines()


def test_a_write_of_somebody_elses_is_left_to_them(on_terminal: OnTerminal) -> None:
    heard: list[str] = []

    def listen(text: str) -> int:
        heard.append(text)
        return len(text)

    with on_terminal:
        sys.stdout.write = listen  # type: ignore[method-assign]
        backward(0.5, lambda: (time.sleep(0.5), say("meanwhile")))
        assert vars(sys.stdout)["write"] is listen
        del sys.stdout.write
    assert "".join(heard) == "meanwhile\n" and on_terminal.lines()


def test_a_display_of_richs_is_left_whole(on_terminal: OnTerminal) -> None:
    """It puts something in the place of the streams that writes whole lines alone, and shows sequences as text."""
    heard = io.StringIO()
    with on_terminal:
        proxied = FileProxy(Console(file=heard), sys.stderr)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stderr", proxied)
            backward(0.8)
    assert heard.getvalue() == "" and on_terminal.lines() and on_terminal.screen.shown() == []


@pytest.mark.parametrize("stream", ["None", "closed", "somebody else's", "detached"])
def test_a_stream_that_is_no_terminal_any_more(on_terminal: OnTerminal, stream: str) -> None:
    class Both(io.StringIO):
        def isatty(self) -> bool:
            return True

    with on_terminal, pytest.MonkeyPatch.context() as patch:
        gone = os.fdopen(os.dup(sys.stderr.fileno()), "w")
        if stream == "closed":
            gone.close()
        elif stream == "detached":
            gone.detach().close()
        patch.setattr(sys, "stderr", {"None": None, "somebody else's": Both()}.get(stream, gone))
        backward(0.6)
        assert stream != "somebody else's" or sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
        if stream in ("None", "somebody else's"):
            gone.close()  # else the terminal is not at its end
    assert on_terminal.sent == ""


def test_a_terminal_of_one_row_shows_nothing(on_terminal: OnTerminal) -> None:
    with on_terminal:
        fcntl.ioctl(sys.stderr.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 1, _COLUMNS, 0, 0))
        say("mine")
        backward(0.6)
    assert on_terminal.sent == "mine\r\n"


def test_the_line_comes_back_behind_what_is_written_now_and_then(on_terminal: OnTerminal) -> None:
    def write() -> None:
        time.sleep(0.5)
        for number in range(5):
            say(f"line {number}")
            time.sleep(0.1)

    with on_terminal, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Terminal, "pause", lambda self, seconds: 60.0)  # it is drawn once
        backward(0, write)
    below = [shown for shown in on_terminal.screen.seen if len(shown) > 1 and "compiled_autograd" in shown[-1]]
    assert {shown[-2] for shown in below} >= {f"line {number}" for number in range(5)}
    assert on_terminal.screen.shown() == [f"line {number}" for number in range(5)]


@pytest.mark.slow
def test_a_pipe_gets_nothing_unless_it_is_asked_for() -> None:
    code = """
import time, torch, compiled_autograd as ca
from compiled_autograd.diagnostics import progress
progress.PATIENCE = 0.1
def slow(graph_module, example_inputs):
    time.sleep(0.5)
    return graph_module
for asked in (None, True):
    with ca.enable(backend=slow, cache_dir=False, progress=asked):
        torch.nn.Linear(4, 4 if asked is None else 5)(torch.randn(5, 4)).mean().backward()
    print(asked, flush=True)
"""
    ran = in_subprocess(code)
    line = r"([|/] compiled_autograd: compiling region 1 of 1, \d+ s: MeanBackward0, \d+ nodes\n)+"
    assert ran.stdout == "None\nTrue\n" and re.fullmatch(line, ran.stderr), ran.stderr


def test_lines_become_rarer() -> None:
    assert [Lines().pause(seconds) for seconds in (0.5, 2, 4, 40, 90)] == [2, 2, 4, 40, 60]


class _Shell:
    kernel = object()


def _notebook(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, Any]]:
    """Put a module in the place of IPython's that notes what is displayed."""
    shown: list[tuple[str, Any, Any]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda data, raw, display_id: shown.append((name, data, display_id)) if raw else None

    of_display = types.ModuleType("IPython.display")
    of_display.display, of_display.update_display = note("display"), note("update")  # type: ignore[attr-defined]
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = _Shell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", of_display)
    return shown


def test_a_notebook_has_an_output_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _notebook(monkeypatch)
    monkeypatch.setattr(progress, "PATIENCE", 0.1)
    backward(1.2)
    names, datas, ids = zip(*shown, strict=True)
    assert names == ("display", *["update"] * (len(names) - 1)) and len(names) >= 3 and len(set(ids)) == 1
    assert all(re.search("(tracing|compiling) region 1 of 1", data["text/plain"]) for data in datas[:-1])
    assert datas[-1] == {"text/plain": ""}


def test_a_display_that_fails_costs_a_warning_and_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: Any, raw: Any, display_id: Any) -> None:
        raise ValueError("the kernel is gone")

    _notebook(monkeypatch)
    monkeypatch.setattr(sys.modules["IPython.display"], "display", broken, raising=False)
    monkeypatch.setattr(progress, "PATIENCE", 0.1)
    with pytest.warns(UserWarning, match="the progress line could not be shown .ValueError: the kernel is gone"):
        session = backward(1.2)
    assert session.stats().compiles == 1


@pytest.fixture
def everything_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(displays, "_is_terminal", lambda stream: True)
    yield
    assert SHOWN == []


@pytest.mark.usefixtures("everything_a_terminal")
@pytest.mark.parametrize(
    ("setting", "rank", "expected"),
    [
        (None, "", Terminal),
        (None, "0", Terminal),
        (None, "1", type(None)),
        (True, "1", Lines),
        (True, "", Terminal),
        (False, "", type(None)),
    ],
)
def test_who_shows_it(setting: bool | None, rank: str, expected: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    assert type(display_for(setting)) is expected


def test_a_notebook_goes_before_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    _notebook(monkeypatch)
    assert type(display_for(None)) is Notebook
