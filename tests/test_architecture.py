"""The house rules as tests: layers, light imports, sizes, words."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "rankwise"

# An import points down, to a smaller number; a package may import its own files.
LAYERS = {
    "errors": 0, "early": 0,
    "machine": 0.5, "processes": 0.5, "page": 0.5, "terminal": 0.5,
    "network": 0.7,
    "lease": 0.9,
    "config": 1, "plan": 1, "rundir": 1,
    "channel": 1.1, "pickles": 1.1,
    "schedulers": 1.2,
    "world": 1.5,
    "rendezvous": 1.7,
    "accelerator": 1.8,
    "comm": 2,
    "gatekeeper": 3.5,
    "guards": 3.5, "settings": 3.5, "log": 3, "seed": 3, "device": 3, "precision": 3, "state": 3, "optimizer": 3,
    "digest": 3, "model": 3.5,
    "launch": 3, "agent": 3, "report": 3,
    "data": 4, "sync": 4, "checkpoint": 4, "telemetry": 4, "stop": 4,
    "actions": 4.5, "evaluation": 4.5, "claim": 4.5, "divergence": 4.5, "finite": 4.5, "plateau": 4.6,
    "moments": 4.6, "step": 4.5,
    "selftest": 4.7,
    "train": 5,
    "functions": 5.5, "probe": 5.5,
    "cli": 6,
    "__init__": 7, "__main__": 7,
}  # fmt: skip

TORCH_ALLOWED = {
    "accelerator", "comm", "guards", "gatekeeper", "log", "seed", "device", "precision", "state", "optimizer", "model",
    "settings", "data", "digest", "sync", "checkpoint", "telemetry", "stop", "actions", "evaluation", "divergence", "finite",
    "plateau", "moments", "step", "train", "selftest", "probe",
}  # fmt: skip
"""Besides agent/fork_server.py, which runs in a process of its own."""

FILES = sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    """The top-level module or package that a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    """Every module that a file imports, anywhere in it, `from a import b` as both `a` and `a.b`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module or "")
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def broken_layers(path: Path, modules: list[str]) -> list[str]:
    """The imports of a file that do not point down."""
    here = room(path)
    broken = []
    for module in modules:
        parts = module.split(".")
        if parts[0] != "rankwise" or len(parts) < 2 or parts[1] not in LAYERS:
            continue
        there = parts[1]
        if there != here and LAYERS[there] >= LAYERS[here]:
            broken.append(f"{path.relative_to(SOURCE)} ({LAYERS[here]}) imports {module} ({LAYERS[there]})")
    return broken


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_an_import_points_down(path: Path) -> None:
    assert room(path) in LAYERS, f"{path}: give it a layer"
    assert not broken_layers(path, imports(path))


def test_the_map_in_the_design_has_every_room() -> None:
    design = Path(__file__).parents[1].joinpath("docs", "design.md").read_text()
    named = set(re.findall(r"\w+", design.partition("```text\n")[2].partition("```")[0]))
    assert set(LAYERS) - named == set()


def test_the_layer_test_finds_an_import_that_points_up() -> None:
    assert broken_layers(SOURCE / "world.py", ["rankwise.dist.comm"])
    assert broken_layers(SOURCE / "agent" / "head.py", ["rankwise.launch.launch"])
    assert broken_layers(SOURCE / "data" / "loader.py", ["rankwise.trainer"])
    assert not broken_layers(SOURCE / "data" / "loader.py", ["rankwise.data.order", "rankwise.dist.comm"])


def test_launch_and_agent_know_only_the_plan_and_the_run_directory_of_each_other() -> None:
    for path in FILES:
        for module in imports(path):
            if room(path) == "agent":
                assert not module.startswith("rankwise.launch"), path
            if room(path) == "launch":
                assert not module.startswith("rankwise.agent"), path


def test_torch_is_imported_on_the_worker_side_alone() -> None:
    for path in FILES:
        if room(path) not in TORCH_ALLOWED and path.name != "fork_server.py":
            assert not [m for m in imports(path) if m.split(".")[0] == "torch"], path


def test_torch_distributed_appears_in_comm_and_sync_alone() -> None:
    for path in FILES:
        if room(path) not in ("comm", "sync"):
            assert not [m for m in imports(path) if m.startswith("torch.distributed")], path


@pytest.mark.parametrize("name", ["fork_server.py", "collective_notes.py"])
def test_the_warm_process_needs_nothing_but_the_standard_library_and_torch(name: str) -> None:
    allowed = {*sys.stdlib_module_names, "torch"}
    assert {m.split(".")[0] for m in imports(SOURCE / "agent" / name)} <= allowed


def test_no_file_is_longer_than_600_lines_and_no_function_longer_than_a_page() -> None:
    for path in FILES:
        text = path.read_text()
        assert text.count("\n") <= 600, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name != "__init__":
                assert node.end_lineno - node.lineno < 60, f"{path}:{node.lineno} {node.name}"


def test_no_module_is_called_utils_or_helpers() -> None:
    assert not [p for p in FILES if p.stem in ("utils", "util", "helpers", "misc", "common")]


def test_each_module_says_what_it_owns() -> None:
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text())), path


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
    assert {m for m in modules if m.startswith("rankwise.")} == {"rankwise.stop.early"}
    assert not modules & {"json", "subprocess", "typing_extensions"}


def test_every_public_name_resolves_and_the_type_checker_sees_the_same_names() -> None:
    import rankwise

    for name in rankwise.__all__:
        assert getattr(rankwise, name) is not None
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If))
    shown = sorted(alias.asname or "" for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names)
    assert shown == rankwise.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rankwise.nothing
