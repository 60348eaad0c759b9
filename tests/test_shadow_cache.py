"""The trie of node keys: what is found, what is not, and why."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadow_cache import Bypass, Failure, Key, Miss, ShadowGraph, unsupported

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
    assert graph.find([ROOT]) is None and graph.nearest([ROOT]) == (0, None) and len(graph) == 0


def test_what_was_inserted_is_found() -> None:
    graph = _graph([ROOT, MUL], [ROOT, ADD])
    leaf = graph.find([ROOT, ADD])
    assert leaf is not None
    assert (leaf.payload, leaf.number) == ("payload 1", 1)
    assert [each.payload for each in graph] == ["payload 0", "payload 1"] and len(graph) == 2


def test_inserting_again_gives_the_first_leaf() -> None:
    graph = _graph([ROOT, MUL])
    first = graph.find([ROOT, MUL])
    assert graph.insert([ROOT, MUL], "other") is first and len(graph) == 1
    assert first is not None and first.payload == "payload 0"


@pytest.mark.parametrize(
    ("keys", "depth", "nearest"),
    [
        ([ROOT, LEAF], 1, MUL),
        ([ROOT, ("Mul", "a", "c")], 1, MUL),
        ([ROOT, ("Mul", "a")], 1, MUL),
        ([ROOT, MUL, LEAF], 2, None),
        ([ROOT], 1, None),
        ([("Other",)], 0, ROOT),
    ],
)
def test_what_is_not_found_parts_from_the_nearest_path(keys: list[Key], depth: int, nearest: Key | None) -> None:
    graph = _graph([ROOT, MUL])
    assert graph.find(keys) is None and graph.nearest(keys) == (depth, nearest)


def test_a_miss_is_compared_with_the_nearest_node_of_the_same_name() -> None:
    graph = _graph([ROOT, ADD], [ROOT, ("Mul", "x", "y", "z")], [ROOT, ("Mul", "x", "q", "r")])
    assert graph.nearest([ROOT, ("Mul", "x", "y", "w")]) == (1, ("Mul", "x", "y", "z"))


def test_a_prefix_of_a_path_can_be_a_path() -> None:
    graph = _graph([ROOT, MUL, LEAF], [ROOT, MUL])
    assert [graph.find(keys).payload for keys in ([ROOT, MUL], [ROOT, MUL, LEAF])] == [  # type: ignore[union-attr]
        "payload 1",
        "payload 0",
    ]


def test_clear() -> None:
    graph = _graph([ROOT, MUL])
    graph.clear()
    assert len(graph) == 0 and list(graph) == []
    assert graph.find([ROOT, MUL]) is None and graph.nearest([ROOT, MUL]) == (0, None)


_KEYS = st.lists(st.tuples(st.sampled_from("ABC"), st.sampled_from("xy")), min_size=1, max_size=5)


@given(st.lists(_KEYS, max_size=12), _KEYS)
def test_it_is_a_mapping(paths: list[Any], asked: Any) -> None:
    """Against a dict: a path is found exactly if it was inserted; what is not found has a nearest path."""
    graph: ShadowGraph[int] = ShadowGraph()
    reference: dict[Any, int] = {}
    for number, path in enumerate(paths):
        leaf = graph.insert(path, number)
        assert leaf.payload == reference.setdefault(tuple(path), number)
    leaf_or_none = graph.find(asked)
    if tuple(asked) in reference:
        assert leaf_or_none is not None and leaf_or_none.payload == reference[tuple(asked)]
    else:
        assert leaf_or_none is None
        depth, nearest = graph.nearest(asked)
        beyond = [path[depth] for path in paths if path[:depth] == asked[:depth] and len(path) > depth]
        if depth < len(asked):
            assert asked[depth] not in beyond and (nearest in beyond or (nearest is None and not beyond))
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
