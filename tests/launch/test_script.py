"""What is known of a script before anything is started."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from rankwise.errors import ConfigError
from rankwise.launch import script
from rankwise.launch.script import examine
from rankwise.run.config import RunConfig


def keep_cold(source: str) -> str | None:
    Path("train.py").write_text(source)
    return examine("train.py").keep_cold


def test_a_script_that_is_not_there_is_an_error_that_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        examine("trian.py")
    assert str(caught.value) == f"the script trian.py cannot be read: No such file or directory (from {tmp_path})"


@pytest.mark.parametrize("typed", ["folder", "folder/"])
def test_a_folder_is_an_error_that_says_what_to_give(typed: str) -> None:
    Path("folder").mkdir()
    with pytest.raises(ConfigError) as caught:
        examine(typed)
    assert str(caught.value) == f"{typed} is a folder; give the script that trains, for example folder/train.py"


def test_a_syntax_error_is_shown_with_its_place() -> None:
    Path("train.py").write_text("import os\n\ndef f(:\n    pass\n")
    with pytest.raises(ConfigError) as caught:
        examine("train.py")
    assert str(caught.value) == "train.py:3: syntax error: invalid syntax\n    def f(:\n          ^"


def test_a_syntax_error_in_an_indented_or_endless_line_stays_short() -> None:
    Path("train.py").write_text("if True:\n        x = = 1\n")
    with pytest.raises(ConfigError) as caught:
        examine("train.py")
    assert str(caught.value).splitlines()[1:] == ["    x = = 1", "        ^"]
    Path("train.py").write_text(f"x = = '{'x' * 500}'\n")
    with pytest.raises(ConfigError) as caught:
        examine("train.py")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", [b"a = 1\nb = \0\n", b"# coding: no-such\n", b'a = "\xff"\n'])
def test_bytes_that_are_no_source_are_one_line_of_error(source: bytes) -> None:
    Path("train.py").write_bytes(source)
    with pytest.raises(ConfigError, match=r"\Atrain\.py.*: syntax error: .*(\n    .*\n +\^)?\Z"):
        examine("train.py")


def test_an_empty_script_and_one_in_another_encoding_can_run() -> None:
    Path("train.py").write_bytes(b"")
    assert examine("train.py").keep_cold is None
    Path("train.py").write_bytes("# coding: latin-1\ntext = 'größe'\n".encode("latin-1"))
    assert examine("train.py").keep_cold is None


def test_nothing_of_the_script_is_run_and_its_warnings_are_left_to_python() -> None:
    source = "import sys\nsys.modules['ran'] = sys\ntext = '\\d'\nassert (1, 'always true')\n"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert keep_cold(source) is None
    assert "ran" not in __import__("sys").modules


WRITES = [
    "os.environ['A'] = '1'",
    "os.environ['A'] += ':x'",
    "x = os.environ['A'] = '1'",
    "del os.environ['A']",
    "os.environ.setdefault('A', '1')",
    "os.environ.update(A='1')",
    "os.environ.pop('A', None)",
    "os.environ.clear()",
    "os.putenv('A', '1')",
    "from os import environ; environ['A'] = '1'",
    "if True:\n    os.environ['A'] = '1'",
    "if not True:\n    pass\nelse:\n    os.environ['A'] = '1'",
    "try:\n    os.environ['A'] = '1'\nfinally:\n    pass",
    "for name in 'AB':\n    os.environ[name] = '1'",
    "with open(os.devnull):\n    os.environ['A'] = '1'",
    "print(os.environ.setdefault('A', '1'))",
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("load", ["import torch", "from torch import nn", "import torch.nn as nn", "import numpy, torch"])
def test_a_write_to_the_environment_before_torch_is_imported_keeps_the_ranks_cold(write: str, load: str) -> None:
    line = 2 + next(number for number, text in enumerate(write.split("\n")) if "environ" in text or "putenv" in text)
    said = f"line {line} sets environment variables before torch is imported"
    assert keep_cold(f"import os\n{write}\n{load}\n") == said


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("load", ["import torch", "from torch import nn", "import torch.nn as nn", "import numpy, torch"])
def test_a_write_after_torch_is_imported_is_fine(write: str, load: str) -> None:
    assert keep_cold(f"import os\n{load}\n{write}\n") is None


def test_a_write_in_a_script_that_never_imports_torch_by_itself_keeps_the_ranks_cold() -> None:
    """What it does import may import torch."""
    assert keep_cold("import os\nos.environ['A'] = '1'\nimport speechbrain\n") is not None


def test_a_name_that_only_begins_like_torch_is_not_torch() -> None:
    assert keep_cold("import os, torchless\nfrom torch_like import x\nfrom . import torch\nos.environ['A'] = '1'\n") is not None


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    os.environ['A'] = '1'",
        "async def f():\n    os.environ['A'] = '1'",
        "class C:\n    def f(self):\n        os.environ['A'] = '1'",
        "x = os.environ['A']",
        "x = os.environ.get('A', '1')",
        "x = dict(os.environ)",
        "x = {**os.environ}\nx['A'] = '1'\nx.update(B='2')",
        "environment = {}\nenvironment['A'] = '1'",
    ],
)
def test_a_write_inside_a_function_and_a_read_are_fine(source: str) -> None:
    assert keep_cold(f"import os\n{source}\nimport torch\n") is None


@pytest.mark.parametrize("source", [b"a = \0\n", b"# coding: no-such\n"])
def test_an_error_without_a_line_names_none(source: bytes) -> None:
    Path("train.py").write_bytes(source)
    with pytest.raises(ConfigError, match=r"\Atrain\.py: syntax error: "):
        examine("train.py")


@pytest.mark.parametrize(
    "write",
    [
        "os.environ |= {'A': '1'}", "os.environ['A'], b = '1', 2", "os.environ['A']: str = '1'", "os.unsetenv('A')",
        "os.environ.popitem()", "os.environb[b'A'] = b'1'", "class C:\n    os.environ['A'] = '1'",
    ],
)  # fmt: skip
def test_these_writes_are_seen_too(write: str) -> None:
    Path("train.py").write_text(f"import os\n{write}\nimport torch\n")
    assert examine("train.py").keep_cold is not None


@pytest.mark.parametrize(
    "write",
    [
        "if True:\n    def f():\n        os.environ['A'] = '1'", "f = lambda: os.environ.update(A='1')",
        "try:\n    import torch\nexcept ImportError:\n    raise\nos.environ['A'] = '1'",
    ],
)  # fmt: skip
def test_these_need_no_cold_start(write: str) -> None:
    Path("train.py").write_text(f"import os\n{write}\nimport torch\n")
    assert examine("train.py").keep_cold is None


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import os\nimport torch.nn as nn", 2),
        ("from torch import nn", 1),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", None),
        ("def main():\n    import torch", None),
        ("import torchish\nfrom .torch import nn", None),
    ],
)
def test_an_import_of_torch_that_is_certain_to_run_is_known_by_its_line(source: str, line: int | None) -> None:
    Path("train.py").write_text(source)
    assert examine("train.py").torch_line == line


def test_a_script_that_needs_torch_is_told_what_to_type_where_this_python_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("train.py").write_text("import torch\n")
    assert script.find(RunConfig(argv=("train.py", "--lr", "1"))).no_torch is None
    monkeypatch.setattr(script, "_has_torch", lambda: False)
    found = script.find(RunConfig(argv=("train.py", "--lr", "1"))).no_torch
    assert found is not None
    assert found.startswith("train.py, line 1: it imports torch, and ")
    assert found.endswith("rankwise run -- /path/to/python train.py --lr 1")
    assert script.find(RunConfig(argv=("python3", "train.py"), command=True)).no_torch is None
