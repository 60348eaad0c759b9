"""What ``ca.inspect`` shows: the listing, what is folded in it, pictures, and HTML with everything escaped."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser

import networkx as nx
import pytest
import torch
from torch import nn

import compiled_autograd as ca
from compiled_autograd.inspection.folding import Stretch, stretches
from compiled_autograd.inspection.nodes import TapeNode, size
from compiled_autograd.torch_api.dtype_names import short_name

from .test_inspect import Model

_MARKUP = '<img src=x onerror=alert(1)>"`;]-- \\n'


def _view(layers: int = 4) -> ca.TapeView:
    model = Model(layers)
    return ca.inspect(model(torch.randint(10, (2, 5))).sum())


def _planted() -> ca.TapeView:
    """A tape with markup in all names that a user gives."""

    def hook(gradient: torch.Tensor) -> None:
        return None

    hook.__qualname__ = _MARKUP
    model = type(_MARKUP, (nn.Module,), {})()
    model.add_module(_MARKUP.replace(".", ""), nn.Linear(2, 2))
    (linear,) = model.children()
    function = type(
        _MARKUP,
        (torch.autograd.Function,),
        {"forward": staticmethod(lambda ctx, x: x * 2), "backward": staticmethod(lambda ctx, g: g * 2)},
    )
    linear.weight.register_hook(hook)
    return ca.inspect(function.apply(linear(torch.ones(1, 2))).sum())


# ---- the listing -----------------------------------------------------------------------------------------------------


def test_equal_layers_are_told_once() -> None:
    text = str(_view())
    assert re.search(r"blocks\.0 to blocks\.3: 4 times 17 nodes, [\d.]+ KiB in all", text)
    assert "blocks.3.norm: 3 nodes" in text and "blocks.1" not in text


def test_layers_that_differ_are_told_apart() -> None:
    model = Model(4)
    model.blocks[1].mlp[1] = nn.Tanh()
    text = str(ca.inspect(model(torch.randint(10, (2, 5))).sum()))
    assert "blocks.2 to blocks.3: 2 times" in text
    assert "blocks.1: 17 nodes" in text and "blocks.0: 17 nodes" in text


def test_the_listing_says_what_is_saved_and_where_edges_go() -> None:
    linear, x = nn.Linear(2, 3), torch.ones(5, 2)
    text = str(ca.inspect(linear(x).exp().sum()))
    assert text.splitlines() == [
        "tape of Linear: 6 nodes, 2 of them leaves; the forward keeps 60 B alive",
        "#0 SumBackward0 f32[] -> #1[0]",
        "#1 ExpBackward0 f32[5,3] -> #2[0]",
        "    saved result f32[5,3] 60 B",
        "#2 AddmmBackward0 f32[5,3] -> bias f32[3] #5, -, weight f32[3,2] #4 (TBackward0)",
        "    saved mat1 f32[5,2] (input)",
    ]


def test_nodes_with_nothing_to_show_are_one_line() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    lines = str(ca.inspect(x.t().reshape(2, 3).permute(1, 0).sin().sum())).splitlines()
    assert lines[1:3] == ["#0 SumBackward0 f32[] -> #1[0]", "#1 SinBackward0 f32[3,2] -> #2[0]"]
    assert lines[4].startswith("#2 PermuteBackward0 f32[3,2] -> #3 ") and "TBackward0 f32[3,2] -> #" in lines[4]


def test_a_parameter_that_is_no_plain_leaf_has_its_own_line() -> None:
    """One that two nodes lead to, and one with a hook."""
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight.register_hook(lambda gradient: None)
    model = nn.Sequential(first, second)
    text = str(ca.inspect(model(first(torch.ones(1, 2))).sum()))
    assert re.search(r"#\d+ AccumulateGrad weight f32\[2,2\]\n", text) and "weight f32[2,2] #" not in text
    assert text.count("AccumulateGrad") == 2 and "hooks on the gradient" in text


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize(
    "make", [_Block, lambda width: nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)]
)
def test_twelve_layers_are_less_than_sixty_lines(make: Callable[[int], nn.Module]) -> None:
    model = Model(12)
    model.blocks = nn.Sequential(*(make(8) for _ in range(12)))
    loss = nn.functional.cross_entropy(model(torch.randint(10, (2, 5))).flatten(0, 1), torch.randint(10, (10,)))
    text = str(ca.inspect(loss))
    assert "blocks.0 to blocks.11: 12 times " in text and len(text.splitlines()) < 60


def test_the_last_layer_may_have_a_few_nodes_less() -> None:
    class Layer(nn.Module):
        def __init__(self, last: bool) -> None:
            super().__init__()
            self.linear, self.last = nn.Linear(4, 4), last

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x).exp()
            return x if self.last else x.sin()

    model = nn.Sequential(*(Layer(at == 3) for at in range(4)))
    text = str(ca.inspect(model(torch.ones(2, 4, requires_grad=True).exp()).sum()))
    assert re.search(r"^0 to 3: 4 times 4 to 6 nodes", text, re.MULTILINE)
    assert "  (0 to 2: 1 SinBackward0 more, 1 ExpBackward0 more)\n" in text


def _stretches(names: str) -> list[tuple[str, int]]:
    nodes = [TapeNode(name, 0, None, None, ()) for name in names]
    found: list[Stretch] = stretches(range(len(nodes)), nodes)
    return [("".join(nodes[index].name for index in each.indices), each.times) for each in found]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("", []),
        ("abc", [("abc", 1)]),
        ("ababab", [("ababab", 1)]),  # too few to be worth it
        ("x" + "ab" * 10 + "y", [("x", 1), ("ab", 10), ("y", 1)]),
        ("a" * 30, [("a", 30)]),
        ("abc" * 7 + "ab", [("abc", 7), ("ab", 1)]),
    ],
)
def test_repetitions(names: str, found: list[tuple[str, int]]) -> None:
    assert _stretches(names) == found


def test_a_cell_in_a_loop_is_told_once() -> None:
    cell = nn.Linear(3, 3)
    x = torch.ones(1, 3)
    for _ in range(30):
        x = cell(x).tanh().sin()
    lines = str(ca.inspect(x.sum())).splitlines()
    assert any(re.match(r"\d+ times \d nodes:", line.strip()) for line in lines) and len(lines) < 40


def test_what_is_too_long_is_left_out() -> None:
    x = torch.ones(3, requires_grad=True)
    for number in range(3_000):
        x = (x.sin() if number * number % 7 % 3 else x.cos()) * (1 if number % 97 else 2)
        if number * number % 11 > 4:
            x = x.exp()
    view = ca.inspect(x.sum())
    lines = str(view).splitlines()
    assert len(lines) < 2_100 and re.fullmatch(r"\.\.\. [\d,]+ more lines: readable\(\) lists all nodes", lines[-1])
    assert len(view.readable().splitlines()) == len(view.nodes)
    assert "more nodes are not shown" in view._repr_html_()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 << 10, "1.5 MiB"),
        (5 << 30, "5.0 GiB"),
        (2 << 40, "2,048.0 GiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


def test_dtypes() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
    assert [short_name(dtype) for dtype in dtypes] == ["f32", "bf16", "i64", "u8", "b8", "c64", "f8e4m3fn"]


def test_memory_by_module_and_by_node() -> None:
    memory = _view().memory()
    assert sum(memory.by_module.values()) == sum(memory.by_node.values()) == sum(memory.folded.values()) == memory.bytes
    assert list(memory.by_node.values()) == sorted(memory.by_node.values(), reverse=True)
    assert memory.folded["blocks.{0 to 3}.mlp.0"] == 4 * memory.by_module["blocks.1.mlp.0"]
    assert "4 times GeluBackward0 of blocks.{0 to 3}.mlp.0: self f32[2,5,16]" in str(memory)


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_networkx_has_what_is_known_of_each_node() -> None:
    view = _view()
    graph = view.to_networkx()
    assert nx.is_directed_acyclic_graph(graph) and graph.number_of_nodes() == len(view.nodes)
    assert all(graph.nodes[index]["module"] == node.module for index, node in enumerate(view.nodes))
    assert all(graph.nodes[index]["saved"] == node.saved for index, node in enumerate(view.nodes))


def test_pictures_have_every_edge() -> None:
    view = _view(1)
    expected = {(a, b) for a, b in view.to_networkx().edges}
    dot, mermaid = view.to_dot("node"), view.to_mermaid("node")
    assert {(int(a), int(b)) for a, b in re.findall(r"n(\d+) -> n(\d+);", dot)} == expected
    assert {(int(a), int(b)) for a, b in re.findall(r"n(\d+) --> n(\d+)", mermaid)} == expected
    assert 'label="blocks.0.mlp.0"' in dot and '["blocks.0.mlp.0"]' in mermaid


def test_pictures_by_module_fold_equal_layers() -> None:
    dot = _view().to_dot("module")
    assert '"blocks.{0 to 3}.mlp.0\\n28 nodes, ' in dot and '"Model\\n' in dot
    assert len(re.findall(r"\[label=", dot)) == 8


def test_pictures_are_of_modules_unless_nodes_are_asked_for() -> None:
    view = _view(1)
    assert view.to_dot() == view.to_dot("module") != view.to_dot("node")
    assert view.to_mermaid() == view.to_mermaid("module") != view.to_mermaid("node")


def test_boxes_have_bytes_and_the_colour_of_their_kind() -> None:
    view, modules = _view(), _view().to_mermaid()
    kinds = dict(re.findall(r"class (\S+) (\w+)", modules))
    of = {name: kind for names, kind in kinds.items() for name in names.split(",")}
    names = dict(re.findall(r'(n\d+)\["([^"<]*)<br/>', modules))
    found = {names[number].rpartition(".")[2]: kind for number, kind in of.items()}
    assert (found["head"], found["norm"], found["embed"], found["Model"]) == ("product", "norm", "embedding", "other")
    for name, count in view.memory().folded.items():
        assert not name or f", {size(count)}" in modules
    assert f"GeluBackward0\\n{size(max(view.memory().by_node.values()))}" in view.to_dot("node")


def test_a_wrong_way_to_draw_says_which_there_are() -> None:
    with pytest.raises(ValueError, match="by='layer' is not possible; by is 'node' or 'module'"):
        _view(1).to_dot("layer")  # type: ignore[arg-type]


# ---- what the user named ---------------------------------------------------------------------------------------------


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_has_the_users_names_as_text() -> None:
    page = _Tags()
    page.feed(_planted()._repr_html_())
    assert page.tags <= {"style", "div", "strong", "details", "summary", "table", "tr", "td", "p", "code"}
    assert page.text.count("<img src=x onerror=alert(1)>") >= 4  # the model, its module, the function, the hook


def test_html_folds_as_the_listing_does() -> None:
    page = _view()._repr_html_()
    assert "<summary>blocks.0 to blocks.3: 4 times 17 nodes" in page and "blocks.1" not in page


def test_pictures_have_the_users_names_as_text() -> None:
    view = _planted()
    for by in ("node", "module"):
        for line in view.to_mermaid(by).splitlines():  # type: ignore[arg-type]
            assert "<" not in line.replace("<br/>", "") and "`" not in line
        labels = re.findall(r'label=("(?:[^"\\]|\\.)*")[;,\] ]', dot := view.to_dot(by))  # type: ignore[arg-type]
        assert dot.count("label=") == len(labels)


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_reads_it() -> None:
    for view in (_planted(), _view()):
        for by in ("node", "module"):
            done = subprocess.run(["dot", "-Tsvg"], input=view.to_dot(by), capture_output=True, text=True, check=False)  # type: ignore[arg-type]
            assert done.returncode == 0 and "<svg" in done.stdout, done.stderr
