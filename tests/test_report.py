"""Reports as files: what is in them, that it agrees with the session and the store, that nothing of it is markup."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import profile

import compiled_autograd as ca
import shadow_cache
from backends.eager import EagerBackend
from compiled_autograd.report.step_log import MAX_FIRST, MAX_LAST, StepLog
from shadow_cache import Bypass, Miss
from shadow_cache.cli import main
from shadow_cache.report import data, page
from shadow_cache.report.modules import modules_of
from shadow_cache.report.texts import code_lines

from . import cli_records as stored
from .helpers import ROOT, WAIT, assert_grads, trials_of_two_rows
from .report_pages import CLASS_NAME, MARKUP, Net, Page, report_of, trained

ALLOWED = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "a",
        "header",
        "h1",
        "h2",
        "h3",
        "small",
        "nav",
        "div",
        "input",
    ),
    *("kbd", "button", "noscript", "p", "main", "section", "details", "summary", "b", "dl", "dt", "dd", "ul", "li"),
    *("span", "code", "label", "select", "option", "aside", "dialog", "table", "tbody", "tr", "td", "script"),
}


# Sessions


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[ca.Session, Page]:
    """A session with misses, hits, a bypass and backwards under a profiler, and its report."""
    ca.reset()
    torch.manual_seed(0)
    model = Net()
    session = trained(model, 4)
    x, y = torch.randn(7, 4), torch.randn(7, 1)
    with session:
        F.mse_loss(model(x), y).backward()  # other sizes, and .grad is there
        for _ in range(2):
            F.mse_loss(model(x), y).backward(create_graph=True)
        model.zero_grad()
        for _ in range(2):
            x = torch.randn(5, 4)
            model.zero_grad()
            with profile():
                F.mse_loss(model(x), torch.randn(5, 1)).backward()
    path = session.report(tmp_path_factory.mktemp("report") / "session.html")
    return session, Page.read(path)


def test_a_report_changes_nothing_of_the_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    x, y = torch.randn(5, 4), torch.randn(5, 1)
    with ca.enable(backend="eager", cache_dir=False) as session:
        for _ in range(3):
            model.zero_grad()
            F.mse_loss(model(x), y).backward()
            session.report(tmp_path / "report.html")
    F.mse_loss(reference(x), y).backward()
    assert_grads(model, reference)
    stats = session.stats()
    assert (stats.captures, stats.hits, stats.structure_misses, stats.bypasses) == (1, 2, 1, {})


def test_totals_are_the_sessions(written: tuple[ca.Session, Page]) -> None:
    session, report = written
    stats = session.stats()
    totals = {each["label"]: each["value"] for each in report.report["totals"]}
    assert totals["backwards"] == str(stats.backwards) == "9"
    assert totals["hits"] == str(stats.hits) == "5"
    assert totals["misses"] == str(stats.structure_misses + stats.shape_misses) == "2"
    assert totals["bypasses"] == str(sum(stats.bypasses.values())) == "2"


def test_the_timeline_has_what_was_no_hit(written: tuple[ca.Session, Page]) -> None:
    report = written[1]
    timeline = report.report["timeline"]
    events = [(each["number"], each["count"], each["outcome"]) for each in timeline["events"]]
    assert events == [(1, 1, "structure_miss"), (5, 1, "structure_miss"), (7, 2, "bypass")]
    assert timeline["total"] == 9 and timeline["hits_between"]
    first, other, bypass = timeline["events"]
    assert first["compiles"] == 2 and first["cost"] > 0 and first["reasons"][0]["kind"] == "first_seen"
    assert other["reasons"][0]["kind"] == "grad_state" and other["reasons"][0]["do"]
    assert bypass["graph"] is None and bypass["reasons"][0]["kind"] == "create_graph"
    assert first["graph"] == report.graphs[0]["id"] and len(report.graphs) == 2


def test_the_trie_leads_to_the_graphs(written: tuple[ca.Session, Page]) -> None:
    report = written[1]
    shared, *forks = report.report["trie"]
    assert shared["shared"] == 2 and shared["graph"] is None
    assert {each["graph"] for each in forks} == {each["id"] for each in report.graphs}
    buttons = [attributes for tag, attributes in report.elements if tag == "button" and "data-graph" in attributes]
    assert {each["data-graph"] for each in buttons} == {each["id"] for each in report.graphs}


def test_every_line_of_aten_comes_from_a_node_of_the_tape(written: tuple[ca.Session, Page]) -> None:
    graph = written[1].graphs[0]
    tape, aten, code = graph["stages"]
    assert tape["lines"][0][0].startswith("tape graph: ")
    made = [line for line in aten["lines"] if " = aten." in line[0]]
    assert len(made) > 8 and all(len(links) == 1 for _, links, _ in made)
    by_operator = {text.split(" = ")[0].strip(): tape["lines"][links[0]][0] for text, links, _ in made}
    assert by_operator["tanh_backward"].endswith(" TanhBackward0")
    assert by_operator["mse_loss_backward"].endswith(" MseLossBackward0")
    tanh = next(text for text, _, _ in made if "tanh_backward" in text)
    assert tanh.endswith("  # f32[5, 3]")
    for text, links, _ in code["lines"]:
        if " = torch.ops.aten." in text:
            (line,) = links
            assert aten["lines"][line][0].split(" = ")[0] == text.split(" = ")[0]


def test_regions_and_users_code_are_blocks(written: tuple[ca.Session, Page]) -> None:
    graph = written[1].graphs[0]
    assert [step["kind"] for step in graph["steps"]] == ["region", "leaves", "users", "region", "leaves"]
    assert "HalvedBackward" in graph["steps"][2]["title"]
    tape, aten, code = graph["stages"]
    assert [step for step, _, _ in aten["blocks"]] == [0, 1, 2, 3, 4] and [step for step, _, _ in code["blocks"]] == [
        0,
        3,
    ]
    for stage in (aten, code):
        assert sum(count for _, _, count in stage["blocks"]) == len(stage["lines"])
    users = [first for step, first, _ in tape["blocks"] if step == 2]
    assert [tape["lines"][first][0].split()[1] for first in users] == ["HalvedBackward"]
    steps = {name: step for name, _, _, _, _, step in graph["nodes"]}
    assert (steps["MseLossBackward0"], steps["HalvedBackward"], steps["TanhBackward0"]) == (0, 2, 3)


def test_time_per_region_is_that_of_profiled_runs(written: tuple[ca.Session, Page]) -> None:
    fresh, accumulating = written[1].graphs
    regions = [step for step in fresh["steps"] if step["kind"] != "leaves"]
    assert [step["runs"] for step in regions] == [2, 2, 2]
    assert all(step["seconds"] >= step["least"] > 0 for step in regions)
    assert all(step["seconds"] is None and step["runs"] == 0 for step in accumulating["steps"])


def test_memory_ends_with_the_gradients(written: tuple[ca.Session, Page]) -> None:
    graph = written[1].graphs[0]
    points = graph["memory"]["points"]
    gradients = sum(4 * parameter.numel() for parameter in Net().parameters())
    assert points[-1][:2] == [0, gradients] and points[0][0] > 0 and points[0][1] == 0
    line = next(line for _, _, line in points if line >= 0)
    assert " = aten." in graph["stages"][1]["lines"][line][0]


def test_eager_stands_beside_compiled_where_it_was_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials_of_two_rows(monkeypatch)
    model = nn.Linear(4, 1)
    session = trained(model, 60, tune=True)
    assert session.stats().tuning == 10
    (graph,) = Page.read(session.report(tmp_path / "timed.html")).graphs
    (variant,) = graph["variants"]
    timing = session.graphs()[0].variants[0].timing
    assert timing is not None
    assert (variant["eager"], variant["compiled"], variant["samples"]) == (
        timing.eager,
        timing.compiled,
        8,
    )


def test_a_session_without_backwards_has_a_report(tmp_path: Path) -> None:
    report = Page.read(ca.enable(backend="eager").report(str(tmp_path / "empty.html")))
    assert report.graphs == [] and report.report["timeline"]["events"] == []


def test_a_session_of_hits_alone_shows_what_it_ran(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    trained(model, 1)
    session = trained(model, 2)
    report = Page.read(session.report(tmp_path / "hits.html"))
    assert session.stats().hits == 2 and session.graphs() == []
    assert report.report["timeline"]["events"] == [] and len(report.graphs) == 1


def test_what_failed_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = EagerBackend.compile

    def wrong(self: Any, graph: Any, examples: Any) -> Any:
        call = right(self, graph, examples)
        return lambda arguments: [None if each is None else each + 1 for each in call(arguments)]

    monkeypatch.setattr(EagerBackend, "compile", wrong)
    with pytest.warns(UserWarning, match="mismatch"):
        session = trained(Net(), 3)
    shown = Page.read(session.report(tmp_path / "report.html"))
    assert [(each["label"], each["bad"]) for each in shown.report["totals"] if each["bad"]] == [("failures", True)]
    (event,) = shown.report["timeline"]["events"]
    assert [each["failed"] for each in event["reasons"]] == [False, True, True] and session.stats().failures == 2
    details = [each["detail"] for each in shown.graphs[0]["steps"] if each["kind"] == "region"]
    assert len(details) == 2 and all(each.startswith("not equal to the real calls, and dropped: ") for each in details)


def test_structures_have_one_number_everywhere(tmp_path: Path) -> None:
    with ca.enable(backend="eager", cache_dir=False, tune=False) as session:
        for count in (1, 2, 3):
            x = torch.randn(2, requires_grad=True)
            for _ in range(count):
                x = x.sin()
            x.sum().backward()
    shown = Page.read(session.report(tmp_path / "report.html"))
    titles = [f"{number}. {graph['title']}" for number, graph in enumerate(shown.graphs, 1)]
    assert len(titles) == 3 and {text for text in shown.shown if text in titles} == {*titles}
    assert sum(text in titles for text in shown.shown) == 6  # in the trie, and where one is chosen


def test_sizes_that_change_are_shown_as_they_were_last(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    with ca.enable(backend="eager", cache_dir=False) as session:
        for rows in (5, 6, 7):
            model.zero_grad()
            model(torch.randn(rows, 4)).sum().backward()
    (graph,) = Page.read(session.report(tmp_path / "dynamic.html")).graphs
    assert session.stats().hits == 1 and [each["title"] for each in graph["variants"]] == [
        "variant 0: static, eager",
        "variant 1: dynamic, eager",
    ]
    assert graph["memory"]["points"] and any("# f32[6, 3]" in text for text, _, _ in graph["stages"][1]["lines"])


# The record of steps


def test_a_hit_is_not_recorded() -> None:
    session = trained(nn.Linear(4, 1), 50)
    assert session.stats().hits == 49 and len(session._steps.events()) == 1


def test_bypasses_for_one_reason_are_one_event_and_the_record_is_bounded() -> None:
    log = StepLog()
    for number in range(1, 11):
        log.add(number, "bypass", None, [Bypass("create_graph")], {"run": 0.5}, 0, 0)
    log.add(12, "bypass", None, [Bypass("create_graph")], {"run": 0.5}, 0, 0)  # a hit came between
    log.add(13, "bypass", None, [Bypass("on_miss")], {"run": 0.5}, 0, 0)
    assert [(each.number, each.count, each.seconds["run"]) for each in log.events()] == [
        (10, 10, 5),
        (12, 1, 0.5),
        (13, 1, 0.5),
    ]
    for number in range(14, 14 + MAX_FIRST + MAX_LAST):
        log.add(number, "shape_miss", None, [Miss("shape")], {}, 1, 0)
    kept = log.events()
    assert len(kept) == MAX_FIRST + MAX_LAST and log.left_out == 3
    assert kept[0].number == 10 and kept[-1].number == 13 + MAX_FIRST + MAX_LAST


# What users named


def test_what_came_from_user_code_is_no_markup(tmp_path: Path) -> None:
    class Model(Net):
        pass

    Model.__name__ = Model.__qualname__ = CLASS_NAME
    session = trained(Model(MARKUP), 2)
    report = Page.read(session.report(tmp_path / "planted.html"))
    _is_tame(report)
    names = {node[1] for node in report.graphs[0]["nodes"]}
    assert {f"{MARKUP}.weight", f"{MARKUP}.bias"} <= names  # as they are, where they are data
    assert report.report["title"] == CLASS_NAME and any("<img src=x" in text for text in report.shown)


def _is_tame(report: Page) -> None:
    tags = [tag for tag, _ in report.elements]
    assert set(tags) <= ALLOWED and tags.count("script") == 2 + len(report.graphs)
    assert not [attributes for _, attributes in report.elements if any(name.startswith("on") for name in attributes)]
    assert not [each for _, each in report.elements if (each.get("src") or each.get("href") or "#")[0] != "#"]
    (policy,) = [each["content"] for tag, each in report.elements if each.get("http-equiv")]
    assert policy is not None and policy.startswith("default-src 'none'") and "unsafe" not in policy


def test_nothing_comes_from_a_network() -> None:
    text = page.page(report_of(2))
    assert "http://www.w3.org/2000/svg" in text  # the name of SVG's elements; nothing is loaded from there
    assert text.count("http") - text.count("http-equiv") == 1


# The store


def test_the_store_has_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with shadow_cache.open(tmp_path / "cache") as store:
        stored.fill(store, monkeypatch)
    file = tmp_path / "cache.html"
    with pytest.raises(SystemExit) as ended:
        main(["report", "-o", str(file), "--cache-dir", str(tmp_path / "cache")])
    assert ended.value.code == 0 and capsys.readouterr().out == f"wrote {file}\n"
    report = Page.read(file)
    _is_tame(report)
    assert report.report["of"] == "store" and not report.report["timeline"]["hits_between"]
    assert {each["id"] for each in report.graphs} == {each.id for each in stored.STRUCTURES}
    graph = next(each for each in report.graphs if each["id"] == stored.MEAN.id)
    assert [len(stage["lines"]) > 0 for stage in graph["stages"]] == [True, True, False]
    assert graph["stages"][1]["lines"][1][0] == "    mm = aten.mm.default(arg0, arg1)"
    modules = {name: module for name, _, _, module, _, _ in graph["nodes"] if name == "TanhBackward0"}
    assert modules == {"TanhBackward0": "0"}
    assert len(report.report["timeline"]["events"]) == 3


def test_the_report_of_a_store_needs_no_torch() -> None:
    code = "import sys, shadow_cache.report.page, shadow_cache.report.from_store; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_report_of_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", "-o", str(tmp_path / "x.html"), "--cache-dir", str(tmp_path / "none")])
    assert ended.value.code == 1 and "nothing is stored in" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


# Files


def test_a_file_is_replaced_in_one_step_or_left_as_it_is(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("before")
    assert page.write(report_of(1), target) == target and "before" not in target.read_text()[:20]
    with pytest.raises(FileNotFoundError):
        page.write(report_of(1), tmp_path / "missing" / "report.html")
    with pytest.raises(IsADirectoryError, match="one file"):
        page.write(report_of(1), tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    link, file = tmp_path / "link.html", tmp_path / "folder" / ("n" * 250 + ".html")
    file.parent.mkdir()
    link.symlink_to(file)  # which is not there yet
    for _ in range(2):
        assert page.write(report_of(1), link) == link
        assert link.is_symlink() and Page.read(file).report["of"] == "session"
    assert [*tmp_path.iterdir()] == [file.parent, link] or [*tmp_path.iterdir()] == [link, file.parent]
    assert [*file.parent.iterdir()] == [file]


def test_a_file_is_as_readable_as_others(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert page.write(report_of(1), tmp_path / "report.html").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    """As ``/dev/stdout``, which must not become a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_text, encoding="utf-8")
        page.write(report_of(1), pipe)
        assert Page(read.result(WAIT)).report["of"] == "session"
    assert pipe.is_fifo()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere" / "report.html", "~nosuchuser/report.html"):
        with pytest.raises(FileNotFoundError) as raised:
            page.write(report_of(1), path)
        assert str(raised.value) == f"[Errno 2] No such file or directory: '{path}'"


def test_ten_thousand_nodes_are_less_than_five_megabytes() -> None:
    report = report_of(1_000)
    assert len(report.graphs[0].nodes) > 10_000
    text = page.page(report)
    assert len(text.encode()) < 5_000_000
    (graph,) = Page(text).graphs
    assert all(stage["lines"] for stage in graph["stages"])


def test_what_would_be_too_much_is_left_out_and_said_to_be() -> None:
    (graph,) = report_of(1_000).graphs
    many = data.Report("session", "", "", (), data.Timeline((), 0, True), (), (graph,) * 12)
    text = page.page(many)
    assert len(text.encode()) < 5_000_000
    graphs = Page(text).graphs
    assert len(graphs) == 12 and graphs[0]["nodes"]
    for graph in graphs:
        gone = [stage for stage in graph["stages"] if not stage["lines"]]
        assert all("left out" in stage["note"] for stage in gone) and ("left out" in graph["note"] or gone)


# Parts


def test_modules_are_told_by_parameters() -> None:
    names = ["GraphRoot", "MeanBackward0", "AddmmBackward0", "AccumulateGrad", "TBackward0", "AccumulateGrad"]
    parameters = [None, None, None, "head.bias", None, "head.weight"]
    edges = [[1], [2], [3, 6, 4], [], [5], []]
    names += ["AddBackward0", "ReluBackward0", "AddmmBackward0", "AccumulateGrad", "AddmmBackward0", "AccumulateGrad"]
    parameters += [None, None, None, "blocks.1.fc2.bias", None, "blocks.1.fc1.bias"]
    edges += [[8, 10], [10], [9, 7], [], [11], []]
    assert modules_of(names, parameters, edges) == [
        *("", "", "head", "head", "head", "head"),
        *("blocks.1", "blocks.1", "blocks.1.fc2", "blocks.1.fc2", "blocks.1.fc1", "blocks.1.fc1"),
    ]


def test_generated_code_is_linked_by_the_inputs_that_it_names() -> None:
    aten = [
        "def forward(self, saved0_1, arg1_1):",
        "    mul = aten.mul.Tensor(saved0_1, saved0_1)",
        "    mm = aten.mm.default(mul, arg1_1)",
        "    return [mm]",
        "    neg = aten.neg.default(mul)",
        "    exp = aten.exp.default(mm)",
    ]
    code = """cpp_fused_0 = async_compile.cpp_pybinding(['const float*'], r'''
extern "C" void kernel(const float* in_ptr0)
''')
    def call(self, args):
        saved0_1, arg1_1 = args
        cpp_fused_0(saved0_1, buf0)
        extern_kernels.mm(buf0, arg1_1, out=buf1)
        del arg1_1
        return (buf1, )"""
    lines = code_lines(code, enumerate(aten, 10), 100)
    assert [line.links for line in lines] == [(11, 14), 100, 100, (), (11, 12), (11, 14), (12,), (), (13,)]


def test_the_pages_data_is_what_the_records_say() -> None:
    report = report_of(3)
    read = Page(page.page(report))
    assert read.report["title"] == "Chain" and json.dumps(read.graphs[0]["facts"]) == '[["nodes", "31"]]'
    assert read.graphs[0]["memory"]["points"][0] == [800, 0, 1]
