"""The source of a program, without files that are not the user's own."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path

import pytest

from rankwise.host import sources

HERE = "here = True\n"


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def reached(main: str, **others: str) -> bool:
    """Whether the text HERE is found in the program's files; `a__b` is the module a.b."""
    for name, text in others.items():
        path = Path(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    Path("main.py").write_text(main)
    return HERE in sources.texts(["main.py"], sys.path)


@pytest.mark.parametrize(
    "imports",
    [
        "import recipe",
        "import os, recipe as r",
        "from recipe import fit",
        "if True:\n    from recipe import (\n    fit,  # all of it\n    )",
        "def late():\n    import recipe; recipe.fit()",
    ],
)
def test_a_module_beside_the_script_is_read(imports: str) -> None:
    assert reached(f"import rankwise\n{imports}\n", recipe=HERE)


@pytest.mark.parametrize(
    "first",
    ["from lib.parts import loop", "import lib.parts.loop", "from lib import outer", "from lib.parts import middle"],
)
def test_modules_are_followed_through_packages_and_relative_imports(first: str) -> None:
    assert reached(
        f"import rankwise\n{first}\n",
        lib____init__="",
        lib__outer="from .parts import middle\n",
        lib__parts____init__="",
        lib__parts__middle="from . import loop\n",
        lib__parts__loop="from ..base import start\n",
        lib__base=HERE,
    )


def test_modules_that_import_each_other_and_files_that_are_none_are_no_trouble() -> None:
    Path("folder.py").mkdir()
    assert not reached("import a, folder, torch, rankwise.trainer, gone\n", a="import b\nimport os", b="import a\nimport main")
    assert list(sources.texts(["gone.py", ""], sys.path)) == ["", ""]
    Path("odd.py").write_bytes(b"\xff\xfe import rankwise \x00")
    assert len(list(sources.texts(["odd.py"], sys.path))) == 1


def test_installed_packages_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Path("site-packages").absolute()
    monkeypatch.syspath_prepend(installed)
    assert not reached("import rankwise, recipe\n", **{"site-packages__recipe": HERE})
    assert reached("import rankwise, recipe\n", recipe=HERE)


def test_a_large_program_is_read_up_to_a_bound() -> None:
    chain = {f"m{i}": f"import m{i + 1}\n" for i in range(300)}
    assert reached("import m0\n", **chain | {"m150": HERE})
    assert not reached("import m0\n", **chain | {"m250": HERE})


def test_the_cell_of_a_notebook_is_read_from_the_cache_of_lines() -> None:
    linecache.cache["<cell 3>"] = (len(HERE), None, [HERE], "<cell 3>")
    assert list(sources.texts(["<cell 3>"], sys.path)) == [HERE]
