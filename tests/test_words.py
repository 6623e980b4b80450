"""Words that no message and no page uses: each has a plain replacement, which is the same everywhere."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted((ROOT / "docs").glob("*.md"))]
SOURCE = ROOT / "src" / "rankwise"
SOURCES = sorted(SOURCE.rglob("*.py"))

WRONG = {
    r"life|lives": "attempt, attempts",
    r"anew": "again, from scratch",
    r"left out": "skipped",
    r"(is|are|was) told": "rankwise reports, prints",
    r"is said": "rankwise reports, prints",
    r"by ssh": "over ssh",
    r"(one|a task|a rank) a (GPU|node|device|rank|host|task|slot|core)": "one per ...",
    r"in (the )?place of": "instead of",
    r"goes on where": "resumes",
    r"by hand": "manually",
    r"of one's own": "your own",
    r"an? \w+ of (its|your|their) own": "its own ..., a separate ...",
    r"is none of": "is not",
}
_ANY = re.compile(rf"\b({'|'.join(WRONG)})\b", re.IGNORECASE)


def wrong(text: str) -> list[str]:
    return [found[0] for found in _ANY.finditer(" ".join(text.split()))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_uses_plain_words(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert wrong(re.sub(r"`[^`]*`", "", text)) == []


def messages(tree: ast.AST) -> Iterator[str]:
    """What a file may print: strings with a space in them that are not docstrings."""
    bodies = [body for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list)]
    docstrings = {id(statement.value) for body in bodies for statement in body if isinstance(statement, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value and id(node) not in docstrings:
            yield node.value


def test_the_help_of_the_command_uses_plain_words() -> None:
    functions = [node for node in ast.walk(ast.parse((SOURCE / "cli.py").read_text())) if isinstance(node, ast.FunctionDef)]
    texts = [ast.get_docstring(node) or "" for node in functions if node.decorator_list]
    assert len(texts) > 6
    assert [text for text in texts if wrong(text)] == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src" / "rankwise")))
def test_a_message_uses_plain_words(source: Path) -> None:
    assert [text for text in messages(ast.parse(source.read_text())) if wrong(text)] == []


PLAIN_INSIDE = {
    "__init__", "actions", "checkpoint", "checks", "dist", "evaluation", "files", "telemetry", "training",
    "errors", "cli", "host", "run", "ipc", "schedulers", "agent", "launch", "report", "functions", "stop",
    "data", "hdf5", "sync", "trainer",
}  # fmt: skip
"""Packages whose docstrings and comments also use plain words."""


def prose(source: str) -> Iterator[str]:
    """The docstrings and the comments of a file, without code: what is in quotes or backticks, and examples."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""')):
            text = "\n".join(line for line in token.string.splitlines() if not re.match(r"    \S+.*[(=]", line))
            yield re.sub(r"`[^`]*`|\"\w+\"", "", text)


@pytest.mark.parametrize(
    "source",
    [source for source in SOURCES if source.relative_to(SOURCE).parts[0].removesuffix(".py") in PLAIN_INSIDE],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_docstrings_and_comments_use_plain_words(source: Path) -> None:
    assert [text for text in prose(source.read_text()) if wrong(text)] == []


def test_each_wrong_word_is_found() -> None:
    assert wrong("its last life, begun anew") == ["life", "anew"]
    assert wrong("one a GPU is told by\n  ssh") == ["one a GPU", "is told", "by ssh"]
    assert wrong("a run of its own, and its own run") == ["a run of its own"]
    assert wrong("it lived, alive, livestock, by sshd, one per GPU") == []
    assert list(prose('"""It is told\n\n    f(life)\n"""\nx = "life"  # `life`, by ssh\n')) == [
        '"""It is told\n\n"""',
        "# , by ssh",
    ]
    assert list(messages(ast.parse('"""A doc string."""\nx = f"a life {1}"\ny = "key"\n'))) == ["a life "]
