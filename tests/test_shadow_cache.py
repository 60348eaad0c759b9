"""The trie of node keys: what is found, what is not, and why."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadow_cache import Bypass, Failure, Key, Miss, ShadowGraph, VariantKey, explain_variant, unsupported

from .helpers import in_subprocess

ROOT, MUL, ADD, LEAF = ("Root",), ("Mul", "a", "b"), ("Add", "a"), ("Leaf", "w")


def _graph(*paths: list[Key]) -> ShadowGraph[str]:
    graph: ShadowGraph[str] = ShadowGraph()
    for number, path in enumerate(paths):
        graph.insert(path, f"payload {number}")
    return graph


def test_it_does_not_import_torch() -> None:
    done = in_subprocess("import sys, shadow_cache; assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_an_empty_graph_has_seen_nothing() -> None:
    graph = _graph()
    assert graph.find([ROOT]) == (None, Miss("first_seen")) and len(graph) == 0


def test_what_was_inserted_is_found() -> None:
    graph = _graph([ROOT, MUL], [ROOT, ADD])
    leaf, miss = graph.find([ROOT, ADD])
    assert leaf is not None and miss is None
    assert (leaf.payload, leaf.number) == ("payload 1", 1)
    assert [each.payload for each in graph] == ["payload 0", "payload 1"] and len(graph) == 2


def test_inserting_again_gives_the_first_leaf() -> None:
    graph = _graph([ROOT, MUL])
    first, _ = graph.find([ROOT, MUL])
    assert graph.insert([ROOT, MUL], "other") is first and len(graph) == 1
    assert first is not None and first.payload == "payload 0"


@pytest.mark.parametrize(
    ("keys", "miss"),
    [
        ([ROOT, LEAF], Miss("new_node", "node 1", old="Mul", new="Leaf")),
        ([ROOT, ("Mul", "a", "c")], Miss("node_attribute", "node 1 Mul", old="b", new="c")),
        ([ROOT, ("Mul", "a")], Miss("node_attribute", "node 1 Mul", old="3 parts", new="2 parts")),
        ([ROOT, MUL, LEAF], Miss("new_node", "node 2", new="Leaf")),
        ([ROOT], Miss("new_node", "node 1", old="a longer tape", new="the tape ends")),
        ([("Other",)], Miss("new_node", "node 0", old="Root", new="Other")),
    ],
)
def test_a_miss_says_where_and_why(keys: list[Key], miss: Miss) -> None:
    assert _graph([ROOT, MUL]).find(keys) == (None, miss)


def test_a_miss_is_compared_with_the_nearest_node_of_the_same_name() -> None:
    graph = _graph([ROOT, ADD], [ROOT, ("Mul", "x", "y", "z")], [ROOT, ("Mul", "x", "q", "r")])
    _, miss = graph.find([ROOT, ("Mul", "x", "y", "w")])
    assert miss == Miss("node_attribute", "node 1 Mul", old="z", new="w")


def test_a_prefix_of_a_path_can_be_a_path() -> None:
    graph = _graph([ROOT, MUL, LEAF], [ROOT, MUL])
    assert [graph.find(keys)[0].payload for keys in ([ROOT, MUL], [ROOT, MUL, LEAF])] == [  # type: ignore[union-attr]
        "payload 1",
        "payload 0",
    ]


def test_clear() -> None:
    graph = _graph([ROOT, MUL])
    graph.clear()
    assert len(graph) == 0 and list(graph) == []
    assert graph.find([ROOT, MUL]) == (None, Miss("first_seen"))


_KEYS = st.lists(st.tuples(st.sampled_from("ABC"), st.sampled_from("xy")), min_size=1, max_size=5)


@given(st.lists(_KEYS, max_size=12), _KEYS)
def test_it_is_a_mapping(paths: list[Any], asked: Any) -> None:
    """Against a dict: a path is found exactly if it was inserted; what is not found has an explanation."""
    graph: ShadowGraph[int] = ShadowGraph()
    reference: dict[Any, int] = {}
    for number, path in enumerate(paths):
        leaf = graph.insert(path, number)
        assert leaf.payload == reference.setdefault(tuple(path), number)
    leaf_or_none, miss = graph.find(asked)
    if tuple(asked) in reference:
        assert leaf_or_none is not None and leaf_or_none.payload == reference[tuple(asked)] and miss is None
    else:
        assert leaf_or_none is None and miss is not None
        assert miss.kind == "first_seen" or miss.old != miss.new
    assert len(graph) == len(reference)
    assert [leaf.number for leaf in graph] == list(range(len(reference)))


def test_threads_that_insert_the_same_path_get_one_leaf() -> None:
    graph: ShadowGraph[int] = ShadowGraph()
    start = threading.Barrier(8)
    found: list[int] = []

    def work(number: int) -> None:
        start.wait(30)
        for index in range(50):
            found.append(id(graph.insert([("A", str(index))], number)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 400 and len(set(found)) == 50 == len(graph)


# ---- variants --------------------------------------------------------------------------------------------------------


def _variant(settings: str = "eager", threads: int = 2, sizes: tuple[Any, ...] = (3, 4)) -> VariantKey:
    return VariantKey((("backend", settings),), (("autocast", None), ("threads", threads)), sizes)


@pytest.mark.parametrize(
    ("key", "known", "miss"),
    [
        (_variant(), [], Miss("first_seen")),
        (_variant(sizes=(3, 5)), [_variant()], Miss("shape", "size 1", old="4", new="5")),
        (_variant(threads=1), [_variant()], Miss("ambient_state", "threads", old="2", new="1")),
        (_variant("x"), [_variant()], Miss("backend_or_settings", "backend", "eager", "x")),
        (_variant(), [_variant()], Miss("layout", "an input's strides, or its kind of tensor")),
        (_variant(sizes=(9, 9)), [_variant("x"), _variant(threads=1), _variant()], Miss("shape", "size 0", "3", "9")),
    ],
)
def test_why_no_variant_serves(key: VariantKey, known: list[VariantKey], miss: Miss) -> None:
    assert explain_variant(key, known) == miss


def test_the_nearest_variant_is_the_one_with_most_equal_sizes() -> None:
    known = [_variant(sizes=(8, 9)), _variant(sizes=(3, 4))]
    assert explain_variant(_variant(sizes=(3, 5)), known) == Miss("shape", "size 1", old="4", new="5")


# ---- records ---------------------------------------------------------------------------------------------------------


def test_records_read_as_sentences() -> None:
    assert str(Miss("first_seen")) == "first_seen"
    assert str(Miss("shape", "size 0", "3", "5", "pad")) == "shape at size 0: 3 -> 5 (pad)"
    assert str(Bypass("create_graph", hint="why")) == "create_graph: why"
    assert unsupported("hooks").label == "unsupported(hooks)"
    assert str(Failure("compile", "backend 'x'", "Error: y", "z")) == "compile in backend 'x': Error: y; z"


@pytest.mark.parametrize("record", [Miss("shape"), Bypass("create_graph"), Failure("a", "b", "c", "d")])
def test_records_cannot_be_changed(record: Any) -> None:
    with pytest.raises(AttributeError):
        record.kind = "other"
    assert hash(record) == hash(type(record)(*[getattr(record, name) for name in record.__struct_fields__]))
