"""What the source of a program says before it runs."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest

from rankwise.stop import sources

TRAINS = "import rankwise\nrankwise.Trainer()\n"


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def answers(main: str, **others: str) -> bool:
    """`a__b` is the module a.b."""
    for name, text in others.items():
        path = Path(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    Path("main.py").write_text(main)
    return sources.names_what_answers(["main.py"])


@pytest.mark.parametrize("name", ["Trainer", "StopSignal"])
def test_the_script_itself_names_it(name: str) -> None:
    assert answers(f"from rankwise import {name}")
    assert not answers(f"class {name}: ...\n{name}()")
    assert not answers("import rankwise\nrankwise.init()")


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
def test_a_module_beside_it_names_it(imports: str) -> None:
    assert answers(f"import rankwise\n{imports}\n", recipe=TRAINS)


def test_a_trainer_of_another_house_in_such_a_module_is_none() -> None:
    assert not answers("import rankwise\nimport recipe\n", recipe="from lightning import Trainer\n")


@pytest.mark.parametrize(
    "first",
    ["from lib.parts import loop", "import lib.parts.loop", "from lib import outer", "from lib.parts import middle"],
)
def test_modules_are_followed_through_packages_and_relative_imports(first: str) -> None:
    assert answers(
        f"import rankwise\n{first}\n",
        lib____init__="",
        lib__outer="from .parts import middle\n",
        lib__parts____init__="",
        lib__parts__middle="from . import loop\n",
        lib__parts__loop="from ..base import start\n",
        lib__base=TRAINS,
    )


def test_modules_that_import_each_other_and_files_that_are_none_are_no_trouble() -> None:
    Path("folder.py").mkdir()
    assert not answers("import a, folder, torch, rankwise.trainer, gone\n", a="import b\nimport os", b="import a\nimport main")
    assert not sources.names_what_answers(["gone.py", ""])
    Path("odd.py").write_bytes(b"\xff\xfe import rankwise \x00")
    assert not sources.names_what_answers(["odd.py"])


def test_installed_packages_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Path("site-packages").absolute()
    monkeypatch.syspath_prepend(installed)
    assert not answers("import rankwise, recipe\n", **{"site-packages__recipe": TRAINS})
    assert answers("import rankwise, recipe\n", recipe=TRAINS)


def test_a_large_program_is_read_up_to_a_bound() -> None:
    chain = {f"m{i}": f"import m{i + 1}\n" for i in range(300)}
    assert answers("import m0\n", **chain | {"m150": TRAINS})
    assert not answers("import m0\n", **chain | {"m250": TRAINS})


def test_the_cell_of_a_notebook_is_read_from_the_cache_of_lines() -> None:
    lines = TRAINS.splitlines(keepends=True)
    linecache.cache["<cell 3>"] = (len(TRAINS), None, lines, "<cell 3>")
    assert sources.names_what_answers(["<cell 3>"])
