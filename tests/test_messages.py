"""Every message that rankwise prints or raises is on a page of messages: why it appears, and what to do."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from sources import FILES, SOURCE, nodes_in, nodes_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / name for name in ("messages.md", "messages_launching.md", "messages_training.md")]

PRINTED = {"say", "warn", "warning_once", "echo", "fail"}
"""Functions and methods whose first argument is printed."""

RAISED = {
    *(node.name for node in ast.parse((SOURCE / "errors.py").read_text()).body if isinstance(node, ast.ClassDef)),
    "UsageError", "BadParameter", "ClickException",
}  # fmt: skip
"""Exceptions whose first argument is printed."""

SENTENCE = 5
"""Any other text with this many plain words is also a message or a part of one: verdicts, reasons, tables of hints."""

NOT_READ = (
    "it was only looked for",  # why an agent closes a connection of another
    "the plan of the first node",
    "attempted relative import with no known parent package",  # of Python, of torch, of schedulers: what is searched for
    "Traceback (most recent call last):",
    "is killed by signal: Killed",
    "Failed to recv, got 0 bytes",
    "range must be greater than zero|Numerical value invalid",
    "(?P<why>No route to host|Network is unreachable|Host is down)",
    "ssh with -H, manual with",  # --help
    "commit none (not in a git repository)",  # code.txt
    "# ... cut: the diff has",
    "# 75: stopped and saved",  # the script of a job
    "bind=$(scontrol show config",
    "raised on the main rank",  # a note that is recognised
)
"""The first words of texts that are not messages."""

Names = dict[str, list[ast.expr]]


class Message(NamedTuple):
    place: str
    pieces: tuple[str, ...]
    """The constant parts between the values: of f"{n} ranks on {host}", "ranks on"."""

    def __str__(self) -> str:
        return f"{self.place}: {' ... '.join(self.pieces)}"


def variants(node: ast.expr, names: Names) -> list[list[str]]:
    """The constant parts of each text that an expression may have: one list for each branch of a condition."""
    match node:
        case ast.Constant(value=str(text)):
            return [re.split(r"{[^{}]*}", text)]
        case ast.JoinedStr():
            return [[str(part.value) for part in node.values if isinstance(part, ast.Constant)]]
        case ast.IfExp():
            return variants(node.body, names) + variants(node.orelse, names)
        case ast.BoolOp():
            return [found for value in node.values for found in variants(value, names)]
        case ast.BinOp():
            return [left + right for left in variants(node.left, names) for right in variants(node.right, names)]
        case ast.Call(func=ast.Attribute(value=template, attr="format")):
            return variants(template, names)
        case ast.Name(id=name) if name in names:
            rest = {other: values for other, values in names.items() if other != name}
            return [found for value in names[name] for found in variants(value, rest)]
    return [[]]


def assigned(nodes: Iterable[ast.AST]) -> Names:
    """The expressions that are assigned to each local name."""
    found: Names = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.NamedExpr(target=ast.Name(id=name), value=value):
                found.setdefault(name, []).append(value)
    return found


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", None) or getattr(node.func, "id", "")


def not_messages(nodes: Iterable[ast.AST]) -> set[int]:
    """The ids of the nodes of docstrings and of help texts, which --help shows."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.add(id(node.value))
        elif isinstance(node, ast.keyword) and node.arg in ("help", "epilog"):
            found |= {id(inner) for inner in nodes_of(node.value)}
        elif isinstance(node, ast.Call) and called(node) == "Option":
            found |= {id(inner) for inner in nodes_of(node)}
    return found


def texts(nodes: list[ast.AST]) -> Iterator[tuple[int, list[str], int]]:
    """(the line, the parts, the number of words that make them a message) of the nodes of a file."""
    apart = not_messages(nodes)
    for body in nodes:
        if isinstance(body, ast.FunctionDef):
            within = nodes_of(body)
            names = assigned(within)
            for node in within:
                if isinstance(node, ast.Call) and node.args and called(node) in RAISED | PRINTED:
                    yield from ((node.lineno, pieces, 2) for pieces in variants(node.args[0], names))
    for node in nodes:
        if id(node) in apart:
            continue
        if isinstance(node, ast.JoinedStr):
            apart |= {id(part) for part in node.values if isinstance(part, ast.Constant)}
        if isinstance(node, (ast.JoinedStr, ast.Constant)):
            yield from ((node.lineno, pieces, SENTENCE) for pieces in variants(node, {}))


def collected(nodes: list[ast.AST], place: str = "") -> list[Message]:
    found: dict[tuple[str, ...], Message] = {}
    for line, pieces, least in texts(nodes):
        plain = tuple(filter(None, (" ".join(piece.split()) for piece in pieces)))
        words = re.findall(r"(?<![^\s(])[A-Za-z][a-z']+(?=[\s,;:.)?]|$)", "\n".join(plain))
        if len(words) >= least and "\\" not in "".join(plain) and not plain[0].startswith(NOT_READ):  # a regular expression
            found.setdefault(plain, Message(f"{place}:{line}", plain))
    return list(found.values())


@functools.cache  # not at import: each worker of the tests would read all of the source
def all_messages() -> list[Message]:
    return [message for path in FILES for message in collected(nodes_in(path), str(path.relative_to(SOURCE)))]


def quoted(page: str) -> set[str]:
    """The texts of messages that the tables of a page quote, in the first cell of each row."""
    rows = [re.split(r"(?<!\\)\|", line)[1] for line in page.splitlines() if line.startswith("| ")]
    spans = [either for row in rows for found in re.findall(r"`` (.+?) ``|(?<!`)`([^`]+)`", row) for either in found]
    return {span.strip().replace("\\|", "|") for span in spans if span}


IN_TOO_MANY = 12
"""Words that occur in more messages than this do not distinguish them."""


def without_a_page() -> list[Message]:
    messages = {message: "\n".join(message.pieces) for message in all_messages()}  # no quote has a line break
    quotes = {
        words
        for page in PAGES
        for words in quoted(page.read_text())
        if " " in words and sum(words in text for text in messages.values()) <= IN_TOO_MANY
    }
    return [message for message, text in messages.items() if not any(words in text for words in quotes)]


def test_each_message_is_on_a_page_of_messages() -> None:
    assert len(all_messages()) > 500
    assert list(map(str, without_a_page())) == []


def test_the_pages_quote_what_is_printed() -> None:
    strings = [node for path in FILES for node in nodes_in(path) if isinstance(node, ast.Constant)]
    known = "\n".join(" ".join(node.value.split()) for node in strings if isinstance(node.value, str))
    for page in PAGES:
        words = sorted(words for words in quoted(page.read_text()) if " " in words and "train.py" not in words)
        assert (page.name, [quote for quote in words if quote not in known]) == (page.name, [])


def test_the_collector_finds_what_a_person_reads() -> None:
    source = '''
def f(n):
    """A docstring of more than five words in all."""
    why = f"no GPU for {n}" if n else "not here"
    say(f"{n} ranks on {n}: {why}")
    option(help="How many seconds it may take at most.")
    if n:
        raise ConfigError(why)
    return {"hint": "type it again, with another name, please"}, "a key"
'''
    assert [message.pieces for message in collected(nodes_of(ast.parse(source)))] == [
        ("ranks on", ":"),
        ("no GPU for",),
        ("not here",),
        ("type it again, with another name, please",),
    ]
    assert quoted("| `a b` *N* `c \\| d` | why `x y` |\n|---|\nwords `e f`") == {"a b", "c | d"}


if __name__ == "__main__":  # prints the messages that no page has yet
    for message in without_a_page():
        print(message)
