"""The command line: what it prints, in its three formats, and its exit codes. EXPECTTEST_ACCEPT=1 accepts new texts."""

# ruff: noqa: E501  (what is printed stands here as it is)

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from expecttest import assert_expected_inline

import shadow_cache
from backends import torch_versions
from compiled_autograd.errors import CompiledAutogradError
from compiled_autograd.settings import resolve
from shadow_cache import miss_kinds
from shadow_cache.cli import VERBS, main
from shadow_cache.cli.difference import Difference
from shadow_cache.cli.explain import Why
from shadow_cache.entries import Entry, MissEntry, Problem, StoreStats, Structure, Summary, Timing
from shadow_cache.trie import Branch

from . import cli_records as stored
from .helpers import ROOT, in_subprocess

GOLDEN = Path(__file__).parent / "golden" / "cli"
DESIGN = """
first_seen new_node node_attribute grad_state hooks_changed undefined_gradients shape dtype device layout guard
variant_limit ambient_state backend_or_settings environment evicted corrupt mismatch
"""
VERB_NAMES = "ls show tree stats why diff graph report rm prune verify export import dir env completion"
BOX = "─│├└╭╮╰╯"


class Ran(NamedTuple):
    out: str
    err: str
    code: int


Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the records of ``cli_records.py``; not to be changed."""
    path = tmp_path_factory.mktemp("cli") / "cache"
    with pytest.MonkeyPatch.context() as monkeypatch, shadow_cache.open(path) as store:
        stored.fill(store, monkeypatch)
    return path


@pytest.fixture
def cache(filled: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return shutil.copytree(filled, tmp_path / "cache")


@pytest.fixture
def run(filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs the command line at the records' time; ``cache`` names another cache than the filled one."""
    monkeypatch.setattr("time.time", lambda: stored.NOW)
    for name in [name for name in os.environ if name.startswith("COMPILED_AUTOGRAD_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str | Path, cache: Path | str = filled) -> Ran:
        monkeypatch.setenv("COMPILED_AUTOGRAD_CACHE_DIR", str(cache))
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return Ran(said.out, said.err, code)

    return run


def _in_terminal(*arguments: str, **environment: str) -> str:
    """What it writes where standard output is a terminal of 60 columns."""
    import pty  # not on Windows

    main_end, its_end = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "60", **environment}
    code = f"from compiled_autograd.shadow_cache.cli import main; main({list(arguments)})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=its_end, stderr=its_end, cwd=ROOT, env=environ) as child:
        os.close(its_end)
        parts = []
        while True:
            try:
                part = os.read(main_end, 65536)
            except OSError:  # Linux: the other end was closed
                break
            if not part:
                break
            parts.append(part)
        os.close(main_end)
    assert child.returncode == 0
    return b"".join(parts).decode()


def _golden(name: str, text: str) -> None:
    """As ``assert_expected_inline``, for what is parametrised or not ASCII, which that cannot take."""
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        file.write_text(text)
    assert text == file.read_text()


# ---- what people read ------------------------------------------------------------------------------------------------


def test_ls(run: Run) -> None:
    assert_expected_inline(
        run("ls").out,
        """\
ID      NAME                                                    SHAPES   NODES  BACKEND        COST    SIZE  LOADS  USED           RUNS
3fb07e  MeanBackward0 of Sequential, train.py:41 in step        dynamic     11  inductor     19.8 s  3.1 MB      3  5 minutes ago  compiled
3fa91c  MeanBackward0 of Sequential, train.py:41 in step        static      11  inductor     17.3 s  3.2 MB     12  5 minutes ago
e2a944  MseLossBackward0 of Sequential, evaluate.py:9 in main   static      11  inductor  2 min 1 s  1.9 MB      1  3 days ago
81c0d2  MeanBackward0 of Sequential, train.py:58 in accumulate  static      11  eager        231 ms  4.8 kB      0  1 month ago    on eager

4 entries, 8.2 MB, 2 min 38 s of compiling
""",
    )


def test_ls_says_what_was_left_out(run: Run) -> None:
    assert_expected_inline(
        run("ls", "--sort", "cost", "--limit", "2").out,
        """\
ID      NAME                                                   SHAPES   NODES  BACKEND        COST    SIZE  LOADS  USED           RUNS
e2a944  MseLossBackward0 of Sequential, evaluate.py:9 in main  static      11  inductor  2 min 1 s  1.9 MB      1  3 days ago
3fb07e  MeanBackward0 of Sequential, train.py:41 in step       dynamic     11  inductor     19.8 s  3.1 MB      3  5 minutes ago  compiled

2 entries of 4, 5.0 MB, 2 min 21 s of compiling
""",
    )


def test_show(run: Run) -> None:
    assert_expected_inline(
        run("show", "3fb").out,
        """\
3fb07e  MeanBackward0 of Sequential, train.py:41 in step

  made       1 hour ago, 2025-06-15 14:06 UTC
  why        shape at node 2 AddmmBackward0, mat1, dim 0: 32 -> 48, 19.8 s (dim 0 is dynamic from now on)
  cost       19.8 s
  used       5 minutes ago, loaded 3 times, saved 59.5 s
  timed      50 minutes ago: eager takes 0.62 ms, the compiled graph 0.41 ms (means of 7 each); the compiled graph is used
  size       3.1 MB in 1 region
  shapes     dynamic
  structure  5e1fab90c2d4, 11 nodes

settings
  backend  inductor
  passes   ()

ambient
  autocast       None
  deterministic  False
  default_dtype  torch.float32
  threads        2

environment
  python    3.12.3
  torch     2.13.0
  cpu       AMD EPYC, avx2
  compiler  g++ 13.2.0

inputs
  node 2 AddmmBackward0, mat1  float32[s0, 3] cpu
  node 6 AddmmBackward0, mat1  float32[s0, 4] cpu

guards
  s0 > 1
  s0 <= 4096

regions
  REGION  CALLS  CODE          ATEN
  0           9  a79d84379374  fe514101e59a
""",
    )


def test_show_a_structure(run: Run) -> None:
    _golden("structure", run("show", "5e1f").out)


def test_tree(run: Run) -> None:
    _golden("tree", run("tree").out)


def test_stats(run: Run, filled: Path) -> None:
    _golden("stats", run("stats").out.replace(str(filled), "/cache"))


def test_why(run: Run) -> None:
    assert run("why") == run("why", "--last")
    assert_expected_inline(
        run("why").out,
        """\
MeanBackward0 of Sequential, train.py:41 in step, 3 minutes ago

  kind   shape
  means  The structure is known, but a tensor on the tape had a size for which no variant was compiled.
  where  node 2 AddmmBackward0, mat1, dim 0
  old    32
  new    50
  hint   dim 0 is dynamic from now on
  do     Pad to a few sizes or drop the last partial batch; with `dynamic=None` a size that changes becomes a symbol.
  made   entry 3fb07e (inductor, dynamic, 3.1 MB) of structure 5e1fab90c2d4
""",
    )


def test_why_of_an_entry(run: Run) -> None:
    assert_expected_inline(
        run("why", "3fb").out,
        """\
3fb07e  MeanBackward0 of Sequential, train.py:41 in step

  made   1 hour ago
  kind   shape
  means  The structure is known, but a tensor on the tape had a size for which no variant was compiled.
  where  node 2 AddmmBackward0, mat1, dim 0
  old    32
  new    48
  cost   19.8 s
  hint   dim 0 is dynamic from now on
  do     Pad to a few sizes or drop the last partial batch; with `dynamic=None` a size that changes becomes a symbol.

2 misses recorded for it
  WHEN           KIND   WHERE                               CHANGE      COST
  3 minutes ago  shape  node 2 AddmmBackward0, mat1, dim 0  32 -> 50
  1 hour ago     shape  node 2 AddmmBackward0, mat1, dim 0  32 -> 48  19.8 s
""",
    )


def test_what_is_left_to_eager(run: Run, cache: Path) -> None:
    assert run("ls", "--slower", "--format", "quiet").out == "81c0d2\n"
    assert run("ls", "--slower", "--dynamic").code == 1
    assert_expected_inline(
        run("why", "81").out.partition("\n\n  made")[0],
        """\
81c0d2  MeanBackward0 of Sequential, train.py:58 in accumulate

  runs   on eager
  kind   not_worth_it
  means  The eager engine was faster when both were timed: it runs such backwards, which count as bypasses.
  timed  1 month ago: eager takes 0.18 ms, the compiled graph 0.31 ms (means of 7 each); eager is used
  do     Nothing: eager and compiled code are timed again from time to time, and in each process. `tune=False` ends it.""",
    )
    with shadow_cache.open(cache) as store:
        store.timed("3fb07e", Timing(0.5, 0.625, 7, stored.NOW, "eager"))
    *_, made, but = run("why", cache=cache).out.splitlines()
    assert made.startswith("  made   entry 3fb07e")
    assert but.startswith("  but    eager runs it, timed just now: eager takes 0.50 ms, the compiled graph 0.62 ms")
    assert "faster on eager: 2" in run("stats", cache=cache).out


def test_what_was_never_timed_says_nothing_of_it(run: Run, cache: Path) -> None:
    assert "timed" not in run("show", "e2").out and "RUNS" not in run("ls", "--loss", "mse").out
    run("rm", "3fb", "81", cache=cache)
    assert "RUNS" not in run("ls", cache=cache).out and "\ntimed" not in run("stats", cache=cache).out
    assert run("ls", "--slower", cache=cache).code == 1


def test_figures_of_the_clock_for_programs(run: Run) -> None:
    listed = msgspec.json.decode(run("ls", "--format", "json").out)
    assert {each["id"]: each["timing"] and each["timing"]["goes_on"] for each in listed} == {
        "3fb07e": "compiled",
        "81c0d2": "eager",
        "3fa91c": None,
        "e2a944": None,
    }
    shown = msgspec.json.decode(run("show", "81", "--format", "json").out)["timing"]
    when = stored.NOW - 40 * stored.DAY
    assert shown == {"eager": 0.18, "compiled": 0.31, "samples": 7, "when": when, "goes_on": "eager"}
    figures = msgspec.json.decode(run("stats", "--format", "json").out)
    assert (figures["timed"], figures["left_to_eager"]) == (2, 1)


def test_why_of_an_entry_that_was_made_without_a_record(run: Run) -> None:
    assert_expected_inline(
        run("why", "e2").out,
        """\
e2a944  MseLossBackward0 of Sequential, evaluate.py:9 in main

  made   3 days ago
  kind   new_node
  means  The tape begins like a known one, then has another operation, or ends earlier or later.
  where  node 1
         #1 MseLossBackward0
         train.py:40 in step
  old    MeanBackward0
  new    MseLossBackward0
  cost   2 min 1 s
  do     Nothing if this is another loss on the same model; else look for an `if` or a loop that ran differently.

no other miss is recorded for it
""",
    )


def test_why_of_an_entry_that_is_gone(run: Run, cache: Path) -> None:
    assert run("rm", "3fb", cache=cache).code == 0
    assert_expected_inline(
        run("why", "3fb", cache=cache).out,
        """\
3fb07e  MeanBackward0 of Sequential, train.py:41 in step, not stored any more

2 misses recorded for it
  WHEN           KIND   WHERE                               CHANGE      COST
  3 minutes ago  shape  node 2 AddmmBackward0, mat1, dim 0  32 -> 50
  1 hour ago     shape  node 2 AddmmBackward0, mat1, dim 0  32 -> 48  19.8 s
""",
    )
    assert "entry 3fb07e, not stored any more" in run("why", cache=cache).out


def test_diff_of_variants(run: Run) -> None:
    assert_expected_inline(
        run("diff", "3fa", "3fb").out,
        """\
- 3fa91c  MeanBackward0 of Sequential, train.py:41 in step
+ 3fb07e  MeanBackward0 of Sequential, train.py:41 in step

inputs
  node 2 AddmmBackward0, mat1  float32[32, 3] cpu -> float32[s0, 3] cpu
  node 6 AddmmBackward0, mat1  float32[32, 4] cpu -> float32[s0, 4] cpu

variant
  shapes  static -> dynamic
  guards  nothing -> s0 > 1, s0 <= 4096

structure
  the same, 5e1fab90c2d4, 11 nodes
""",
    )


def test_diff_of_structures(run: Run) -> None:
    assert_expected_inline(
        run("diff", "3fa", "81").out,
        """\
- 3fa91c  MeanBackward0 of Sequential, train.py:41 in step
+ 81c0d2  MeanBackward0 of Sequential, train.py:58 in accumulate

settings
  backend  inductor -> eager

structure
  5e1fab90c2d4 and 5e77d01a9b3c part after 4 nodes
  - #4 AccumulateGrad, 2.weight
  -   %19 = accumulate_grad(input_3, None, %18)
  + #4 AccumulateGrad, 2.weight
  +   %19 = accumulate_grad(input_3, input_4, %18)
""",
    )


def test_diff_of_operations(run: Run) -> None:
    assert_expected_inline(
        run("diff", "3fa", "e2").out,
        """\
- 3fa91c  MeanBackward0 of Sequential, train.py:41 in step
+ e2a944  MseLossBackward0 of Sequential, evaluate.py:9 in main

structure
  5e1fab90c2d4 and c04d5e6f7a81 part after 1 node
  - #1 MeanBackward0, train.py:40 in step
  + #1 MseLossBackward0, train.py:40 in step
""",
    )


def test_graph_dot(run: Run) -> None:
    assert_expected_inline(
        run("graph", "e2", "--format", "dot").out,
        """\
digraph tape {
  node [shape=ellipse, fontname=Helvetica];
  n0 [label="GraphRoot"];
  n1 [label="MseLossBackward0\\ntrain.py:40 in step"];
  n2 [label="AddmmBackward0"];
  n3 [label="TBackward0"];
  n4 [label="AccumulateGrad\\n2.weight", shape=box];
  n5 [label="TanhBackward0\\nmodel.py:12 in forward"];
  n6 [label="AddmmBackward0"];
  n7 [label="TBackward0"];
  n8 [label="AccumulateGrad\\n0.weight", shape=box];
  n9 [label="AccumulateGrad\\n0.bias", shape=box];
  n10 [label="AccumulateGrad\\n2.bias", shape=box];
  n0 -> n1;
  n1 -> n2;
  n2 -> n10;
  n2 -> n5;
  n2 -> n3;
  n3 -> n4;
  n5 -> n6;
  n6 -> n9;
  n6 -> n7;
  n7 -> n8;
}
""",
    )


def test_graph_mermaid(run: Run) -> None:
    assert_expected_inline(
        run("graph", "e2", "--format", "mermaid").out,
        """\
flowchart TD
  n0("GraphRoot")
  n1("MseLossBackward0<br>train.py:40 in step")
  n2("AddmmBackward0")
  n3("TBackward0")
  n4["AccumulateGrad<br>2.weight"]
  n5("TanhBackward0<br>model.py:12 in forward")
  n6("AddmmBackward0")
  n7("TBackward0")
  n8["AccumulateGrad<br>0.weight"]
  n9["AccumulateGrad<br>0.bias"]
  n10["AccumulateGrad<br>2.bias"]
  n0 --> n1
  n1 --> n2
  n2 --> n10
  n2 --> n5
  n2 --> n3
  n3 --> n4
  n5 --> n6
  n6 --> n9
  n6 --> n7
  n7 --> n8
""",
    )


def test_graph_text_is_what_was_stored(run: Run) -> None:
    assert run("graph", "3fa").out == stored.TEXT == run("graph", stored.MEAN.id).out


def test_graph_lowered(run: Run) -> None:
    assert_expected_inline(
        run("graph", "3fa", "--lowered").out,
        """\
# region 0 of 3fa91c: 9 calls
def forward(self, arg0, arg1):
    mm = torch.ops.aten.mm.default(arg0, arg1)
    return [mm]

""",
    )
    assert msgspec.json.decode(run("graph", "3fa", "--lowered", "--format", "json").out) == [stored.ATEN]
    assert run("graph", "3fa", "--lowered", "--format", "dot").code == 2
    assert run("graph", stored.MEAN.id, "--lowered").code == 1


def test_prune(run: Run, cache: Path) -> None:
    dry = run("prune", "--older", "30d", "--dry-run", cache=cache)
    assert_expected_inline(
        dry.out,
        """\
81c0d2  MeanBackward0 of Sequential, train.py:58 in accumulate, 4.8 kB
would remove 1 entry, 4.8 kB
""",
    )
    assert len(run("ls", "--format", "quiet", cache=cache).out.split()) == 4
    assert run("prune", "--older", "30d", cache=cache).out == dry.out.replace("would remove", "removed")
    assert run("prune", "--max-size", "4MB", "--format", "quiet", cache=cache).out.split() == ["e2a944", "3fa91c"]
    assert run("ls", "--format", "quiet", cache=cache).out == "3fb07e\n"
    assert run("stats", "--format", "json", cache=cache).code == 0


def test_rm(run: Run, cache: Path) -> None:
    assert run("rm", "3fa", "zz", cache=cache).code == 1
    assert len(run("ls", "--format", "quiet", cache=cache).out.split()) == 4, "nothing goes where an id is unknown"
    assert_expected_inline(
        run("rm", "3fa", "81c", "3fa91c", cache=cache).out,
        """\
3fa91c  MeanBackward0 of Sequential, train.py:41 in step, 3.2 MB
81c0d2  MeanBackward0 of Sequential, train.py:58 in accumulate, 4.8 kB
removed 2 entries, 3.2 MB
""",
    )
    assert run("ls", "--format", "quiet", cache=cache).out.split() == ["3fb07e", "e2a944"]


def test_verify(run: Run, cache: Path) -> None:
    assert run("verify", cache=cache) == Ran("4 entries, no problem\n", "", 0)
    region = stored.FIRST.regions[0]
    file = next(path for path in cache.rglob(region.artifact))
    file.write_bytes(b"x" + stored.artifact("3fa91c")[1:])
    found = run("verify", cache=cache)
    assert found.code == 1 and "3fa91c: " in found.out and found.out.endswith("1 problem\n")
    problems = msgspec.json.decode(run("verify", "--format", "json", cache=cache).out, type=list[Problem])
    assert [problem.where for problem in problems] == ["3fa91c"]
    assert run("verify", "--format", "quiet", cache=cache).out == "3fa91c\n"


def test_export_and_import(run: Run, tmp_path: Path) -> None:
    file, other = tmp_path / "warm", tmp_path / "other"
    assert_expected_inline(
        run("export", file, "3fa", "81").out,
        """\
3fa91c  MeanBackward0 of Sequential, train.py:41 in step, 3.2 MB
81c0d2  MeanBackward0 of Sequential, train.py:58 in accumulate, 4.8 kB
exported 2 entries, 3.2 MB
""",
    )
    assert_expected_inline(
        run("import", file, cache=other).out,
        """\
3fa91c  MeanBackward0 of Sequential, train.py:41 in step, 3.2 MB
81c0d2  MeanBackward0 of Sequential, train.py:58 in accumulate, 4.8 kB
added 2 entries, 3.2 MB
""",
    )
    assert run("import", file, cache=other).out.endswith("replaced 2 entries with the same ids\n")
    assert sorted(run("ls", "--format", "quiet", cache=other).out.split()) == ["3fa91c", "81c0d2"]
    assert run("export", file, cache=other).code == 0
    file.write_bytes(b"no archive")
    assert run("import", file, cache=other).code == 1
    assert run("import", tmp_path / "none", cache=other).code == 2
    assert run("export", tmp_path / "no" / "folder").code == 1


def test_dir_and_env(run: Run, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run("dir") == Ran(f"{filled}\n", "", 0)
    assert run("--cache-dir", tmp_path, "dir").out == run("dir", "--cache-dir", tmp_path).out == f"{tmp_path}\n"
    for word in ("False", "0", "none", ""):
        assert run("dir", cache=word).out == f"{shadow_cache.default_dir()}\n"
    found = msgspec.json.decode(run("env", "--format", "json").out, type=dict[str, str])
    assert found["torch"].startswith("2.") and found["cache"] == str(filled) and found["cache size"] == "8.2 MB"
    assert {"python", "compiled-autograd", "platform", "compiler"} <= set(found)
    assert f"cache={filled}\n" in run("env", "--format", "quiet").out
    assert found["extension"] == _NOT_BUILT
    unchecked = not torch_versions.runs_own_loop(found["torch"])
    assert found["own loop"].startswith("off: it was not tested" if unchecked else "off: the extension is not built")
    assert found["torch support"] == f"tested on torch{torch_versions.TESTED_TORCH}"
    assert {f"torch: {name}" for name in torch_versions.DIFFERENCES} <= set(found)


_NOT_BUILT = "not built; built in the background at the first compile, or after a thousand eager backwards"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("torch-{torch}-0.so", "built for torch {torch}"),
        ("torch-{torch}-0.failed", "not built: the build failed, see {folder}/torch-{torch}-0.failed"),
        ("torch-1.0-0.so", _NOT_BUILT),
    ],
)
def test_env_says_whether_the_extension_is_built(run: Run, tmp_path: Path, file: str, said: str) -> None:
    folder = tmp_path / "native"
    names = {"torch": metadata.version("torch"), "folder": str(folder)}
    folder.mkdir(parents=True)
    (folder / file.format(**names)).touch()
    found = msgspec.json.decode(run("--cache-dir", tmp_path, "env", "--format", "json").out, type=dict[str, str])
    assert found["extension"] == said.format(**names)


@pytest.mark.parametrize(
    ("variables", "checked", "said"),
    [
        ({}, True, "on, once small tapes gave the same results as the engine; session.own_loop has the state"),
        ({"OWN_LOOP": "false"}, True, "off: COMPILED_AUTOGRAD_OWN_LOOP=false"),
        ({"OWN_LOOP": "true", "NATIVE": "0"}, True, "off: COMPILED_AUTOGRAD_NATIVE=0"),
        ({"EXTENSION": "hits"}, True, "off: COMPILED_AUTOGRAD_EXTENSION=hits"),
        ({"EXTENSION": "off"}, True, "off: COMPILED_AUTOGRAD_EXTENSION=off"),
        ({}, False, "off: it was not tested on torch {torch}"),
        *(
            (given, False, "on, once small tapes gave the same results as the engine; session.own_loop has the state")
            for given in ({"EXTENSION": "all"}, {"OWN_LOOP": "1"})
        ),
    ],
)
def test_env_says_whether_the_own_loop_is_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], checked: bool, said: str
) -> None:
    for name in ("EXTENSION", "OWN_LOOP", "NATIVE"):
        monkeypatch.delenv(f"COMPILED_AUTOGRAD_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"COMPILED_AUTOGRAD_{name}", value)
    torch = metadata.version("torch")
    monkeypatch.setattr(torch_versions, "runs_own_loop", lambda version: checked)
    (tmp_path / "native").mkdir(parents=True)
    (tmp_path / "native" / f"torch-{torch}-0.so").touch()
    found = msgspec.json.decode(run("--cache-dir", tmp_path, "env", "--format", "json").out, type=dict[str, str])
    assert found["own loop"] == said.format(torch=torch)


@pytest.mark.parametrize(
    ("name", "value"),
    [("EXTENSION", "yes"), ("EXTENSION", "OFF"), ("UNTESTED_TORCH", "TRY"), ("NATIVE", "no"), ("TUEN", "0")],
)
def test_env_has_the_error_of_a_wrong_variable(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """That of sessions, and all the rest."""
    variable = f"COMPILED_AUTOGRAD_{name}"
    monkeypatch.setenv(variable, value)
    with pytest.raises(CompiledAutogradError) as raised:
        resolve({}, {variable: value})
    ran = run("env", "--format", "json")
    found = msgspec.json.decode(ran.out, type=dict[str, str])
    assert found["extension"] == found["own loop"] == str(raised.value) and found[variable] == value
    assert ran.code == 1


@pytest.mark.parametrize(
    ("asked", "said", "extension", "own_loop"),
    [
        ("", "every backward runs on eager (bypass untested_torch)", *["off: this torch was not tested"] * 2),
        ("try", "backwards are compiled if python -m compiled_auto", _NOT_BUILT, "off: it was not tested on torch"),
    ],
)
def test_env_says_that_torch_was_not_tested(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, said: str, extension: str, own_loop: str
) -> None:
    for name in ("EXTENSION", "OWN_LOOP", "NATIVE"):
        monkeypatch.delenv(f"COMPILED_AUTOGRAD_{name}", raising=False)
    monkeypatch.setenv("COMPILED_AUTOGRAD_UNTESTED_TORCH", asked)
    monkeypatch.setattr(torch_versions, "LAST", (2, 10))
    found = msgspec.json.decode(run("--cache-dir", tmp_path, "env", "--format", "json").out, type=dict[str, str])
    assert "not on this one" in found["torch support"] and said in found["torch support"]
    assert found["extension"] == extension and found["own loop"].startswith(own_loop)


# ---- every kind of miss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", stored.MISSES)
def test_each_kind_of_miss_is_explained(kind: str, run: Run, cache: Path) -> None:
    with shadow_cache.open(cache) as store:
        store.record(stored.missed(stored.MISSES[kind]))
    _golden(f"why_{kind}", run("why", "--last", cache=cache).out)


def test_every_kind_has_one_explanation_and_one_example() -> None:
    design = DESIGN.split()
    assert list(miss_kinds.KINDS) == design == list(stored.MISSES)
    for kind in miss_kinds.KINDS.values():
        assert kind.means.endswith(".") and kind.do.endswith("."), kind
    assert len({kind.do for kind in miss_kinds.KINDS.values()}) == len(design)


def test_what_was_evicted_is_not_said_to_have_been_made(run: Run, cache: Path) -> None:
    assert run("prune", "--older", "30d", cache=cache).code == 0
    said = run("why", cache=cache).out
    assert "kind   evicted" in said and "lost   entry 81c0d2, not stored any more" in said
    assert (
        "MeanBackward0 of Sequential, train.py:58 in accumulate, not stored any more"
        in run("why", "81", cache=cache).out
    )


@pytest.mark.parametrize("node", [None, -1, 11])
def test_a_node_that_is_not_known_is_not_made_up(node: int | None, run: Run, cache: Path) -> None:
    """What an earlier version stored says no node."""
    with shadow_cache.open(cache) as store:
        store.record(stored.missed(shadow_cache.Miss("node_attribute", "#4 PowBackward0", "2", "3", node=node)))
    assert "2.weight" not in run("why", cache=cache).out


def test_a_kind_of_a_newer_version_is_said_to_be_one(run: Run, cache: Path) -> None:
    with shadow_cache.open(cache) as store:
        store.record(stored.missed(shadow_cache.Miss("moon_phase")))
    assert "no explanation of 'moon_phase'" in run("why", cache=cache).out


# ---- what programs read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("ls",), list[Summary]),
        (("show", "3fb"), Entry),
        (("show", "5e1f"), Structure),
        (("tree",), list[Branch]),
        (("stats",), StoreStats),
        (("why",), MissEntry),
        (("why", "3fb"), Why),
        (("diff", "3fa", "e2"), Difference),
        (("graph", "3fa"), Structure),
        (("prune", "--dry-run", "--max-size", "0B"), list[Entry]),
        (("verify",), list[Problem]),
        (("dir",), str),
        (("env",), dict[str, str]),
    ],
)
def test_json_is_the_records(arguments: tuple[str, ...], kind: Any, run: Run) -> None:
    ran = run(*arguments, "--format", "json")
    record = msgspec.json.decode(ran.out, type=kind, strict=True)
    assert ran.code == 0 and msgspec.json.decode(ran.out) == msgspec.json.decode(msgspec.json.encode(record))


def test_json_has_what_was_stored(run: Run) -> None:
    shown = msgspec.json.decode(run("show", "3fb", "--format", "json").out, type=Entry)
    assert shown == stored.DYNAMIC
    listed = msgspec.json.decode(run("ls", "--format", "json").out, type=list[Summary])
    expected = {entry.id: entry for entry in stored.ENTRIES}
    for summary in listed:
        entry = expected.pop(summary.id)
        assert all(getattr(entry, name) == getattr(summary, name) for name in (*Summary.__struct_fields__, "name"))
    assert not expected
    assert msgspec.json.decode(run("graph", "3fa", "--format", "json").out, type=Structure) == stored.MEAN


def test_quiet_is_one_value_a_line(run: Run) -> None:
    assert run("ls", "--format", "quiet", "--sort", "created").out == "3fb07e\n3fa91c\ne2a944\n81c0d2\n"
    assert run("--format", "quiet", "ls").out == run("ls", "--format", "quiet").out
    assert run("show", "3fa", "--format", "quiet").out == "3fa91c\n"
    assert sorted(run("tree", "--format", "quiet").out.split()) == sorted(each.id for each in stored.STRUCTURES)
    assert run("stats", "--format", "quiet").out == f"{8_204_812 - 3 * len(stored.ATEN)}\n"
    assert run("why", "--format", "quiet").out == "shape\n"
    assert run("diff", "3fa", "81", "--format", "quiet").out == "settings.backend\nstructure.4\n"


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        (("--sort", "size"), ["3fa91c", "3fb07e", "e2a944", "81c0d2"]),
        (("--sort", "size", "--reverse"), ["81c0d2", "e2a944", "3fb07e", "3fa91c"]),
        (("--sort", "cost"), ["e2a944", "3fb07e", "3fa91c", "81c0d2"]),
        (("--sort", "loads"), ["3fa91c", "3fb07e", "e2a944", "81c0d2"]),
        (("--sort", "name"), ["3fb07e", "3fa91c", "81c0d2", "e2a944"]),
        (("--limit", "1"), ["3fb07e"]),
        (("--backend", "eager"), ["81c0d2"]),
        (("--loss", "mseloss"), ["e2a944"]),
        (("--name", "ACCUMULATE"), ["81c0d2"]),
        (("--dynamic",), ["3fb07e"]),
        (("--static", "--backend", "inductor"), ["3fa91c", "e2a944"]),
    ],
)
def test_ls_sorts_and_filters(arguments: tuple[str, ...], ids: list[str], run: Run) -> None:
    assert run("ls", "--format", "quiet", *arguments).out.split() == ids


# ---- ids, exit codes, errors -----------------------------------------------------------------------------------------


def test_an_id_may_be_cut_short(run: Run) -> None:
    assert run("show", "3FB07") == run("show", "3fb07e")
    assert_expected_inline(
        run("show", "3f").err,
        """\
Error: 2 ids begin with '3f'; give more characters:
  3fb07e  MeanBackward0 of Sequential, train.py:41 in step
  3fa91c  MeanBackward0 of Sequential, train.py:41 in step
""",
    )
    assert_expected_inline(
        run("rm", "zz").err,
        """\
Error: there is no entry whose id begins with 'zz'; the cache has:
  3fb07e  MeanBackward0 of Sequential, train.py:41 in step
  3fa91c  MeanBackward0 of Sequential, train.py:41 in step
  e2a944  MseLossBackward0 of Sequential, evaluate.py:9 in main
  81c0d2  MeanBackward0 of Sequential, train.py:58 in accumulate
""",
    )
    assert run("show", "3f").code == run("rm", "zz").code == 1


@pytest.mark.parametrize("verb", ["ls", "tree", "stats", "why", "verify", "prune", "export x", "show 3fa", "rm 3fa"])
def test_without_a_cache_nothing_is_found_and_nothing_is_made(verb: str, run: Run, tmp_path: Path) -> None:
    ran = run(*verb.split(), cache=tmp_path / "none")
    assert ran.code == 1 and ran.out == "" and "nothing is stored in" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_cache_is_left_as_it_is(run: Run, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    ran = run("ls", cache=tmp_path)
    assert ran.code == 1 and "nothing is stored in" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_finding_nothing_is_told_by_the_exit_code(run: Run) -> None:
    assert run("ls", "--backend", "none") == Ran("", "none of 4 entries matches; remove a filter.\n", 1)
    assert run("ls", "--backend", "none", "--format", "quiet") == Ran("", "", 1)
    assert run("ls", "--backend", "none", "--format", "json") == Ran("[]\n", "", 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("lss",), "Did you mean 'ls'?"),
        (("ls", "--sort", "colour"), "'colour' is not one of"),
        (("prune", "--older", "30 moons"), "write a number with s, m, h, d or w, like 30d."),
        (("prune", "--max-size", "many"), "like 2GB."),
        (("why", "3fa", "--last"), "give only one of"),
        (("completion", "tcsh"), "'tcsh' is not one of"),
        (("diff", "3fa"), "Missing argument"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], said: str, run: Run) -> None:
    ran = run(*arguments)
    assert ran.code == 2 and said in ran.err and ran.out == ""


def test_a_store_that_cannot_be_used_is_an_error_in_one_line(run: Run, cache: Path) -> None:
    cache.chmod(0o755)
    ran = run("ls", cache=cache)
    assert ran.code == 1 and ran.err.startswith("Error: ") and "chmod 700" in ran.err and ran.err.count("\n") == 1


@pytest.mark.parametrize("verb", ["ls", "ls --format json", "stats"])
def test_a_damaged_index_is_said_by_the_first_that_finds_it(verb: str, run: Run, cache: Path) -> None:
    whole = run(*verb.split(), cache=cache)
    for log in (cache / "index").glob("index.db-*"):
        log.unlink()
    index = cache / "index" / "index.db"
    data = bytearray(index.read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    index.write_bytes(data)
    first, second = run(*verb.split(), cache=cache), run(*verb.split(), cache=cache)
    assert "damaged: the index" in first.err and "entries were saved from it; see index.corrupt-" in first.err
    assert whole.err == "" and "damaged:" not in second.err


def test_damaged_entries_are_said_by_the_first_that_finds_them(run: Run, cache: Path) -> None:
    with contextlib.closing(sqlite3.connect(cache / "index" / "index.db")) as connection, connection:
        connection.execute("UPDATE entries SET checksum = 'none' WHERE id = '3fa91c'")
    first, second = run("ls", cache=cache), run("ls", cache=cache)
    assert re.fullmatch(r"damaged: row \d of entries: other bytes; the row was dropped\n", first.err)
    assert first.code == 0 and second == Ran(first.out, "", 0)


# ---- help, completion ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [verb.name for verb in VERBS])
def test_help_says_what_is_printed_and_has_examples(verb: str, run: Run) -> None:
    ran = run(verb, "--help")
    assert ran.code == 0 and "Print" in ran.out and "Examples:\n" in ran.out
    examples = ran.out.split("Examples:\n")[1].split("Options:\n")[0]
    assert f"shadow-cache {verb}" in examples
    assert not set(BOX) & set(ran.out) and "\x1b" not in ran.out


def test_help_of_all(run: Run) -> None:
    assert run("--help").out.startswith("Usage: shadow-cache [OPTIONS] COMMAND")
    assert all(f"  {verb.name} " in run("-h").out for verb in VERBS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_the_shell(shell: str, run: Run) -> None:
    script = run("completion", shell).out
    assert f"_SHADOW_CACHE_COMPLETE={shell}_complete" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_the_shell_is_told_verbs_and_ids(filled: Path) -> None:
    def completed(words: str, number: int) -> list[str]:
        ran = in_subprocess(
            "from shadow_cache.cli import main; main()",
            _SHADOW_CACHE_COMPLETE="bash_complete",
            COMP_WORDS=words,
            COMP_CWORD=str(number),
            COMPILED_AUTOGRAD_CACHE_DIR=str(filled),
        )
        return [line.removeprefix("plain,") for line in ran.stdout.split()]

    assert completed("shadow-cache s", 1) == ["show", "stats"]
    assert completed("shadow-cache show 3f", 2) == ["3fb07e", "3fa91c"]


# ---- terminals and pipes ---------------------------------------------------------------------------------------------


def test_colours_are_for_terminals(filled: Path) -> None:
    shown = _in_terminal("--cache-dir", str(filled), "ls")
    assert "\x1b[33m3fb07e" in shown
    lines = shown.split("\r\n")
    assert "MeanBack" in shown and "…" in lines[1], "names are cut to the terminal's width"
    plain = _in_terminal("--cache-dir", str(filled), "ls", NO_COLOR="1")
    assert "\x1b" not in plain and "3fb07e" in plain
    assert "╭" in _in_terminal("ls", "--help"), "rich-click draws help for a terminal"


def test_a_stream_that_knows_only_ascii_gets_ascii(filled: Path) -> None:
    code = f"from compiled_autograd.shadow_cache.cli import main; main(['--cache-dir', {str(filled)!r}, 'tree'])"
    ran = in_subprocess(code, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert ran.returncode == 0 and "`- 3fa91c" in ran.stdout, ran.stderr


def test_a_pipe_that_is_closed_is_no_traceback(filled: Path) -> None:
    code = f"from compiled_autograd.shadow_cache.cli import main; main(['--cache-dir', {str(filled)!r}, 'show', '3fb'])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert "Traceback" not in child.stderr.read()


def test_no_verb_imports_torch(filled: Path, tmp_path: Path) -> None:
    calls = [
        *(["ls"], ["show", "3fa"], ["tree"], ["stats"], ["why"], ["why", "3fa"], ["diff", "3fa", "e2"]),
        *(["graph", "3fa"], ["graph", "3fa", "--lowered"], ["prune", "--dry-run"], ["verify"], ["dir"], ["env"]),
        *(["export", str(tmp_path / "all")], ["completion", "bash"], ["--help"], ["--version"], ["ls", "--help"]),
        *(["import", str(tmp_path / "all"), "--cache-dir", str(tmp_path / "other")],),
        *(["rm", "3fa", "--cache-dir", str(tmp_path / "other")],),
        ["report", "-o", str(tmp_path / "report.html")],
    ]
    assert {verb.name for verb in VERBS} <= {call[0] for call in calls}
    ran = in_subprocess(
        f"""
import sys
from compiled_autograd.shadow_cache.cli import main
for call in {calls!r}:
    try:
        main(call)
    except SystemExit as ended:
        assert ended.code == 0, (call, ended.code)
    heavy = {{"torch", "numpy", "networkx", "compiled_autograd.api", "rich.table"}} & set(sys.modules)
    assert not heavy, (call, heavy)
""",
        COMPILED_AUTOGRAD_CACHE_DIR=str(filled),
    )
    assert ran.returncode == 0, ran.stderr


def test_python_m(filled: Path) -> None:
    command = [sys.executable, "-m", "shadow_cache", "--cache-dir", str(filled), "ls", "--format", "quiet"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert len(ran.stdout.split()) == 4


def test_all_verbs_are_there() -> None:
    assert " ".join(str(verb.name) for verb in VERBS) == VERB_NAMES


# ---- the guide -------------------------------------------------------------------------------------------------------

_GUIDE = ROOT / "docs" / "command_line.md"
_CONSOLE = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)


def test_the_guide_shows_what_is_printed(run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each command of ``docs/command_line.md``, in their order, on one cache."""
    monkeypatch.chdir(cache.parent)

    def shown(block: re.Match[str]) -> str:
        parts = []
        for line in block[0].splitlines():
            if line.startswith("$ shadow-cache "):
                ran = run(*line.split()[2:], cache=cache)
                said = (ran.out + ran.err).rstrip("\n")
                parts.append(f"{line}\n{said}\n".replace(str(cache), "/home/me/.cache/compiled_autograd"))
        return "\n".join(parts)

    text = _GUIDE.read_text()
    fresh = _CONSOLE.sub(shown, text)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        _GUIDE.write_text(fresh)
    assert fresh == _GUIDE.read_text()
    verbs = set(re.findall(r"`(\w+)`|shadow-cache (\w+)", text))
    assert {str(verb.name) for verb in VERBS} <= {name for pair in verbs for name in pair}
