"""Options of schedulers, which are declared once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rankwise.errors import ConfigError
from rankwise.run.options import Knows, Option, Options, from_one, is_given, matching

NODES = Option("nodes", "How many.", metavar="N", spellings=("--nodes", "--nnodes"))
QUEUE = Option("queue", "Where it waits.", metavar="NAME", spellings=("--queue", "-q"))


def test_zero_is_a_setting_like_any_other() -> None:
    assert [value for value in (None, False, (), 0, 0.0, "", True) if is_given(value)] == [0, 0.0, "", True]


@pytest.mark.parametrize(
    ("option", "value", "read"),
    [
        (Option("a", ""), "x", "x"),
        (Option("a", ""), 3, "3"),
        (Option("a", ""), None, None),
        (Option("a", "", metavar="A,B"), ["x", 1], "x,1"),
        (Option("a", "", kind=int), 0, 0),
        (Option("a", "", kind=Path), "/x/../y", "/x/../y"),
        (Option("a", "", kind=bool), True, True),
        (Option("a", "", kind=list), ["x", "y"], ("x", "y")),
        (Option("a", "", kind=list), "x", ("x",)),
        (Option("a", "", kind=int, check=from_one), 1, 1),
        (Option("a", "", check=matching("x+", "a number of x")), "xx", "xx"),
    ],
)
def test_a_value_is_read_as_a_file_or_the_command_line_has_it(option: Option, value: Any, read: Any) -> None:
    assert option.checked(value) == read


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        (Option("a_b", ""), ["x"], "--a-b ['x']: it must be text in quotes"),
        (Option("a_b", ""), True, "--a-b True: it must be text in quotes"),
        (Option("a_b", ""), "x\ny", "--a-b 'x\\ny': give it on one line"),
        (Option("a_b", ""), " ", "--a-b ' ' is empty; give a value, or leave it out"),
        (Option("a_b", "", kind=int), "3", "--a-b '3': it must be a whole number"),
        (Option("a_b", "", kind=int), True, "--a-b True: it must be a whole number"),
        (Option("a_b", "", kind=bool), "yes", "--a-b 'yes': it must be true or false"),
        (Option("a_b", "", kind=list), [1], "--a-b: 1 is not text; put it in quotes"),
        (Option("a_b", "", kind=int, check=from_one), 0, "--a-b 0: give a number of at least 1"),
        (Option("a", "", spellings=("-a", "--also")), "\x00", "-a '\\x00': give it on one line"),
        (Option("a_b", "", check=matching("x+", "a number of x")), "y", "--a-b y: give a number of x"),
    ],
)
def test_a_value_that_cannot_be_is_named_as_it_is_typed_with_what_it_must_be(option: Option, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        option.checked(value)


def test_an_option_that_several_know_is_one_and_each_of_its_names_finds_it() -> None:
    options = Options([Knows("a", "A", "rankwise", (NODES, QUEUE)), Knows("b", "", "other", (NODES,))])
    assert list(options) == ["nodes", "queue"]
    assert (options.known_to("nodes"), options.known_to("queue")) == (["a", "b"], ["a"])
    assert [options.named(word) for word in ("nnodes", "nodes", "queue", "q", "x")] == ["nodes", "nodes", "queue", None, None]
    assert options.heading("queue") == "A"


@pytest.mark.parametrize("theirs", [Option("queue", "Another."), Option("quick", "", spellings=("--quick", "-q"))])
def test_one_word_for_two_things_is_an_error_that_names_both_packages(theirs: Option) -> None:
    said = r"^(--queue|queue|-q) is an option of both a \(package rankwise\) and b \(package other\); uninstall one"
    with pytest.raises(ConfigError, match=said):
        Options([Knows("a", "A", "rankwise", (QUEUE,)), Knows("b", "", "other", (theirs,))])


def test_two_that_say_the_same_exclude_each_other() -> None:
    options = Options([Knows("a", "", "rankwise", (NODES, Option("hosts", "", instead_of="nodes")))])
    assert options.checked({"nodes": 2}) == {"nodes": "2"}
    with pytest.raises(ConfigError, match=r"^--nodes 2 and --hosts x: give one of the two$"):
        options.checked({"nodes": 2, "hosts": "x"})
