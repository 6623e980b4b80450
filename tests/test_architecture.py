"""The rules of this project as tests: layers, light imports, sizes, words."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import pytest
from sources import FILES, SOURCE, nodes_in, parsed

from rankwise import schedulers

PACKAGES = {
    "errors": "",
    "host": "errors",
    "run": "errors host",
    "ipc": "errors host run",
    "schedulers": "errors host run",
    "dist": "errors host run ipc schedulers",
    "data": "errors host ipc dist",
    "files": "errors host dist",
    "hdf5": "errors host files",
    "stop": "errors host ipc dist",
    "telemetry": "errors host run ipc dist",
    "training": "errors host run schedulers dist data",
    "sync": "errors host dist training",
    "agent": "errors host run ipc schedulers telemetry",
    "launch": "errors host run ipc schedulers dist sync",
    "report": "errors host run schedulers dist",
    "checkpoint": "errors host run dist training report",
    "actions": "errors host ipc dist stop telemetry training sync",
    "evaluation": "errors host dist data telemetry training sync actions",
    "trainer": "errors host run report dist data stop telemetry training sync checkpoint actions evaluation",
    "checks": "errors host run dist data training launch sync checkpoint evaluation trainer",
    "functions": "errors host run ipc schedulers dist stop launch",
    "cli": "errors run schedulers dist launch report checkpoint checks",
    "__init__": "errors dist data stop telemetry training sync checkpoint actions evaluation trainer checks functions hdf5",
    "__main__": "cli",
}
"""From the bottom up: what each package or module at the top may import besides itself. A package lists only those above its
line, so imports point down. An entry that is no longer needed is also an error."""

TORCH_FREE = {
    "errors", "host", "run", "ipc", "schedulers", "agent", "launch", "report", "functions", "cli", "__init__", "__main__",
    "dist/__init__", "dist/private_names", "dist/world", "dist/rendezvous", "dist/start_file", "stop/__init__", "stop/early",
    "data/order", "telemetry/__init__", "telemetry/breakdown", "telemetry/slowness", "checkpoint/__init__",
    "checkpoint/commands", "checkpoint/folders", "checkpoint/manifest", "checkpoint/retention", "actions/__init__",
    "training/__init__", "sync/__init__", "sync/names", "checks/__init__", "checks/compare", "checks/difference",
    "checks/finding", "checks/script", "checks/settings",
}  # fmt: skip
"""Packages and files that import no torch, neither directly nor through other imports. Inside a function they may."""

BESIDE = (
    "agent/fork_server", "agent/collective_notes", "agent/data_wait", "agent/exception_record", "agent/private_names",
    "agent/script_end", "host/listener", "host/main_script", "host/wait_cost",
)  # fmt: skip
"""The file that the script's interpreter runs by its path, and the files that it loads from there under another name, so by
relative imports. They import only each other, the standard library and torch."""


def package(path: Path) -> str:
    """The package or module at the top that a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    """`dist/world`."""
    return str(path.relative_to(SOURCE)).removesuffix(".py")


@functools.cache
def imports(path: Path, at_start: bool = False) -> list[str]:
    """Every module that a file imports, anywhere in it, `from a import b` as both `a` and `a.b`; with `at_start`, only on
    import."""
    found = []
    for node in _at_start(parsed(path)) if at_start else nodes_in(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level and name_of(path) in BESIDE:
            found += [f"rankwise.{node.module or 'agent'}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module or "")
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def _at_start(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        typing_only = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not isinstance(child, ast.FunctionDef) and not typing_only:
            yield child
            yield from _at_start(child)


def packages_of(modules: list[str]) -> set[str]:
    """Our packages among these modules; `rankwise` itself is not counted."""
    return {parts[1] for m in modules if (parts := m.split("."))[0] == "rankwise" and len(parts) > 1 and parts[1] in PACKAGES}


def not_allowed(path: Path, modules: list[str]) -> set[str]:
    """The packages that a file imports although its own package must not."""
    return packages_of(modules) - set(PACKAGES[package(path)].split()) - {package(path)}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_what_its_package_may(path: Path) -> None:
    assert package(path) in PACKAGES, f"{path}: give its package a line in PACKAGES"
    assert not not_allowed(path, imports(path))


def test_packages_import_those_above_their_line_alone() -> None:
    above: set[str] = set()
    for name, allowed in PACKAGES.items():
        assert set(allowed.split()) <= above, name
        above.add(name)


@pytest.mark.parametrize("name", PACKAGES)
def test_what_a_package_may_import_it_does(name: str) -> None:
    used = {other for path in FILES if package(path) == name for other in packages_of(imports(path))}
    assert set(PACKAGES[name].split()) <= used


def test_the_map_in_the_design_has_every_package() -> None:
    design = Path(__file__).parents[1].joinpath("docs", "design.md").read_text()
    named = set(re.findall(r"\w+", design.partition("```text\n")[2].partition("```")[0]))
    assert set(PACKAGES) - named == set()


def test_the_house_has_few_entries() -> None:
    assert len([path for path in SOURCE.iterdir() if path.name != "__pycache__"]) <= 26


def test_an_import_that_points_up_is_found() -> None:
    assert not_allowed(SOURCE / "dist" / "world.py", ["rankwise.sync"]) == {"sync"}
    assert not_allowed(SOURCE / "agent" / "head.py", ["rankwise.launch.launch"]) == {"launch"}
    assert not_allowed(SOURCE / "data" / "loader.py", ["rankwise.trainer"]) == {"trainer"}
    assert not not_allowed(SOURCE / "data" / "loader.py", ["rankwise.data.order", "rankwise.dist.comm"])


ORDINARY = {"local", "manual", "others"}
"""Names of schedulers that also have other meanings."""


def named_schedulers(path: Path) -> list[str]:
    """Where a file mentions one scheduler, except for texts for the user: an identifier, or a string that is its name."""
    nodes = nodes_in(path)
    names = {*schedulers.launchers({}), *schedulers.queues()}
    special = names - ORDINARY
    compared = {id(side) for node in nodes if isinstance(node, ast.Compare) for side in (node.left, *node.comparators)}
    compared |= {id(node.value) for node in nodes if isinstance(node, ast.MatchValue)}
    found = []
    for node in nodes:
        match node:
            case ast.Constant(value=str(value)) if value in special or (value in names and id(node) in compared):
                found.append(f"{node.lineno}: {value!r}")
            case ast.Name(id=value) | ast.Attribute(attr=value) if value in special:
                found.append(f"{node.lineno}: {value}")
            case ast.alias(name=value) if value.split(".")[-1] in special:
                found.append(f"{node.lineno}: import {value}")
    return found


@pytest.mark.parametrize("path", [path for path in FILES if package(path) != "schedulers"], ids=name_of)
def test_no_scheduler_is_asked_for_by_its_name_outside_of_its_package(path: Path) -> None:
    assert named_schedulers(path) == [] or name_of(path) == "functions/submitit_executor"


def test_a_branch_on_a_name_is_found(tmp_path: Path) -> None:
    lines = ('x = name == "slurm"', 'x = name != "local"', "from rankwise.schedulers import sge", 'f("ssh")', "slurm.x")
    for number, line in enumerate(lines):
        path = tmp_path / f"{number}.py"  # each file is read once
        path.write_text(line)
        assert named_schedulers(path), line


def test_what_a_scheduler_can_do_is_its_class() -> None:
    for path in FILES:
        if package(path) in ("schedulers", "agent", "launch", "dist"):
            assert re.findall(r"(?:hasattr|getattr)\((?:choice\.)?(?:queue|scheduler|launcher)\b", path.read_text()) == []


def test_launch_and_agent_know_only_the_plan_and_the_run_directory_of_each_other() -> None:
    assert "launch" not in PACKAGES["agent"]
    assert "agent" not in PACKAGES["launch"]


def with_torch() -> dict[str, str]:
    """Each file whose import imports torch, and the import that causes this."""
    at_start = {name_of(path): set(imports(path, at_start=True)) for path in FILES}
    module = {name: "rankwise." + name.replace("/", ".").removesuffix(".__init__") for name in at_start}
    found = {n: m for n, modules in at_start.items() for m in modules if m.split(".")[0] == "torch"}
    while more := {
        name: module[other]
        for name, modules in at_start.items()
        for other in found
        if name not in found and any(m == module[other] or m.startswith(module[other] + ".") for m in modules)
        and (other.endswith("__init__") or module[other] in modules)
    }:  # fmt: skip
        found |= more
    return found


def test_torch_is_imported_on_the_worker_side_alone() -> None:
    found = with_torch()
    assert {n: m for n, m in found.items() if n in TORCH_FREE or (n.split("/")[0] in TORCH_FREE)} == {}
    assert {"dist/comm", "trainer", "sync/all_reduce"} <= set(found)


def test_torch_distributed_appears_in_comm_joining_store_and_sync_alone() -> None:
    for path in FILES:
        if name_of(path) not in ("dist/comm", "dist/joining", "dist/store") and package(path) != "sync":
            assert not [m for m in imports(path) if m.startswith("torch.distributed")], path


@pytest.mark.parametrize("name", BESIDE)
def test_the_warm_process_needs_nothing_but_the_standard_library_and_torch(name: str) -> None:
    needed = set(imports(SOURCE / f"{name}.py")) - {"rankwise." + other.replace("/", ".") for other in BESIDE}
    assert {m.split(".")[0] for m in needed} <= {*sys.stdlib_module_names, "torch"}


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of lines without signature and docstring, but with inner functions."""
    body = function.body if ast.get_docstring(function) is None else function.body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_is_longer_than_500_lines_and_no_body_of_a_function_longer_than_50(path: Path) -> None:
    assert path.read_text().count("\n") <= 500
    functions = [node for node in nodes_in(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert not [f.name for f in functions if body_lines(f) > 50]


def test_a_body_is_counted_without_its_signature_and_docstring() -> None:
    [function] = ast.parse('def f(\n    a,\n):\n    """One.\n\n    Two."""\n    b = a\n\n    return b\n').body
    assert isinstance(function, ast.FunctionDef)
    assert body_lines(function) == 3


OF_OTHERS = {"_fields", "_exit", "_reductions", "_usr_sig"}
"""Names with an underscore that are documented (of named tuples, of os), or belong to torchmetrics and Submitit."""


def private_names(path: Path) -> set[str]:
    """Names with one underscore in front that a file reads, writes or asks for but does not define. On `self`, `cls` and
    `super()`, they are defined somewhere in the package; `_rankwise_...` is what we set on an object of torch."""
    nodes = nodes_in(path)
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and not _is_own(node.value)}
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr", "delattr"):
            used |= {str(a.value) for a in node.args[1:2] if isinstance(a, ast.Constant) and not _is_own(node.args[0])}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            used |= {word for module in modules if module != "_thread" for word in module.split(".")}  # it is documented
    return {name for name in used if re.match(r"_(?!_|rankwise_)", name)} - defined(nodes) - OF_OTHERS


def _is_own(owner: ast.expr) -> bool:
    called = owner.func if isinstance(owner, ast.Call) else owner
    return isinstance(called, ast.Name) and called.id in ("self", "cls", "super")


def defined(nodes: list[ast.AST]) -> set[str]:
    """Functions, classes, names and attributes of `self`."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_private_names_of_torch_and_python_stand_in_two_files_alone() -> None:
    found = {name_of(path): names for path in FILES if (names := private_names(path))}
    assert found.keys() == {"dist/private_names", "agent/private_names"}


@pytest.mark.parametrize(
    "line",
    ["torch._foreach_norm(x, 2)", "from torch.nn.modules.batchnorm import _NormBase", "import torch._dynamo",
     "from torch._C import Generator", 'getattr(module, "_buffers")', "module._parameters", "sys._getframe(1)"],
)  # fmt: skip
def test_a_private_name_elsewhere_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(f"def use(): {line}\n")
    assert private_names(tmp_path / "file.py")


def test_no_two_classes_have_one_name() -> None:
    names = [n.name.lstrip("_") for path in FILES for n in nodes_in(path) if isinstance(n, ast.ClassDef)]
    assert [name for name, times in Counter(names).items() if times > 1] == []


def test_no_module_is_called_utils_or_helpers() -> None:
    assert not [p for p in FILES if p.stem in ("utils", "util", "helpers", "misc", "common")]


def test_pytest_looks_for_tests_in_every_folder(pytestconfig: pytest.Config) -> None:
    """Its own list of folders to pass over has `dist` and `build`."""
    here = Path(__file__).parent
    folders = {part for path in here.rglob("test_*.py") for part in path.relative_to(here).parts[:-1]}
    assert "dist" in folders
    assert not [f for f in folders if any(fnmatch(f, pattern) for pattern in pytestconfig.getini("norecursedirs"))]


def test_each_module_says_what_it_owns() -> None:
    for path in FILES:
        assert ast.get_docstring(parsed(path)), path


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_command_the_launcher_and_the_agent_start_without_torch_and_numpy() -> None:
    modules = modules_after(
        "import rankwise, rankwise.cli, rankwise.launch.launch, rankwise.agent.head, rankwise.report.terminal"
    )
    assert not modules & {"torch", "numpy"}


def test_importing_rankwise_imports_none_of_its_rooms_but_what_remembers_a_signal() -> None:
    modules = modules_after("import rankwise")
    assert {m for m in modules if m.startswith("rankwise.")} == {"rankwise.stop", "rankwise.stop.early"}
    assert not modules & {"json", "subprocess", "typing_extensions"}


def test_every_public_name_resolves_and_the_type_checker_sees_the_same_names() -> None:
    import rankwise

    for name in rankwise.__all__:
        assert getattr(rankwise, name) is not None
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If))
    shown = sorted(alias.asname or "" for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names)
    assert shown == rankwise.__all__
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = rankwise.nothing
    for wrong, name in (("Trainr", "Trainer"), ("AllReduced", "AllReduce"), ("allreduce", "all_reduce")):
        with pytest.raises(AttributeError, match=rf"has no attribute '{wrong}'; did you mean {name}\?$"):
            getattr(rankwise, wrong)


def test_the_public_names_are_few_and_each_has_a_docstring() -> None:
    import rankwise

    assert len(rankwise.__all__) <= 35
    assert [name for name in rankwise.__all__ if not (getattr(rankwise, name).__doc__ or "").strip()] == []


def test_a_public_name_that_has_moved_is_found_for_one_version_more_with_a_warning_of_one_line_to_write() -> None:
    import rankwise

    for name, module in rankwise._MOVED_TO.items():
        cure = f"from {module} import {name}"
        with pytest.warns(DeprecationWarning, match=rf"^rankwise\.{name} has moved; write: {cure}$") as warned:
            here = getattr(rankwise, name)
        assert warned[0].filename == __file__
        there: dict[str, object] = {}
        exec(cure, there)
        assert here is there[name]
        assert name not in rankwise.__all__


@pytest.mark.parametrize("name", ["actions", "checkpoint", "dist", "functions"])
def test_a_package_resolves_what_it_names_and_nothing_else(name: str) -> None:
    module = import_module(f"rankwise.{name}")
    assert [each for each in module.__all__ if getattr(module, each) is None] == []
    with pytest.raises(AttributeError, match=f"module 'rankwise.{name}' has no attribute 'nothing'"):
        _ = module.nothing
