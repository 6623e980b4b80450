"""Which code a run uses."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from rankwise.launch import code


@pytest.fixture(autouse=True)
def _a_git_without_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "HOME": str(tmp_path), "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_CEILING_DIRECTORIES": str(tmp_path),
        "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "a b;$(touch x)"
    (folder / "sub").mkdir(parents=True)
    git(folder, "init", "--quiet")
    (folder / "train.py").write_text("lr = 1\n")
    (folder / "sub" / "model.py").write_text("depth = 2\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "one")
    return folder


def section(text: str, title: str) -> list[str]:
    return text.split(f"# {title}\n", 1)[1].split("\n\n", 1)[0].splitlines()


def test_the_commit_of_a_clean_repository_is_named_and_nothing_differs(repository: Path) -> None:
    text = code.describe(repository)
    lines = text.splitlines()
    assert lines[0] == f"python {platform.python_version()} ({sys.executable})"
    assert lines[1] == f"commit {git(repository, 'rev-parse', 'HEAD')}"
    assert text.endswith("\n# git diff HEAD\n\n")


def test_what_differs_from_the_commit_is_there_staged_or_not_seen_from_a_folder_below(repository: Path) -> None:
    (repository / "train.py").write_text("lr = 2\n")
    (repository / "sub" / "model.py").write_text("depth = 3\n")
    git(repository, "add", "train.py")
    diff = section(code.describe(repository / "sub"), "git diff HEAD")
    assert [line for line in diff if line[:1] in "+-" and line[:3] not in ("+++", "---")] == [
        "-depth = 2", "+depth = 3", "-lr = 1", "+lr = 2",
    ]  # fmt: skip


def test_a_long_diff_is_cut_and_that_is_said(repository: Path) -> None:
    (repository / "train.py").write_text("x = 'ä'\n" * 150_000)
    text = code.describe(repository)
    assert 1_000_000 < len(text) < 1_100_000
    last = text.splitlines()[-1]
    assert last.startswith("# ... cut: the diff has 1")
    assert last.endswith(" characters")


def test_a_diff_that_is_no_text_does_no_harm(repository: Path) -> None:
    (repository / "train.py").write_bytes(b"lr = '\xff'\n")
    text = code.describe(repository)
    assert "+lr = '\N{REPLACEMENT CHARACTER}'" in text


def test_the_packages_installed_are_listed_once_each_in_order() -> None:
    packages = section(code.describe(Path()), "packages")
    assert any(line.startswith("pytest==") for line in packages)
    assert any(line.startswith("rankwise==") for line in packages)
    assert packages == sorted(set(packages))


def test_packages_are_found_however_they_were_installed_and_one_that_cannot_be_read_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(path: str, text: bytes) -> None:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(text)

    add("wheel-1.dist-info/METADATA", b"Metadata-Version: 2.1\nName: a-wheel\nVersion: 1.0\n\nName: of the text\n")
    add("develop.egg-info/PKG-INFO", b"name: developed\r\nversion: 2.0\r\n\r\n")
    add("old-3.egg-info", b"Metadata-Version: 1.0\nName: distutils\nVersion: 3.0\n")
    add("latin-4.dist-info/METADATA", b"Name: latin\nVersion: 4.0\nAuthor: Andr\xe9\n")
    add("empty-5.dist-info/METADATA", b"")
    add("nameless-6.dist-info/METADATA", b"Version: 6.0\n\nName: of the text\n")
    (tmp_path / "bare-7.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert section(code.describe(Path()), "packages") == ["a-wheel==1.0", "developed==2.0", "distutils==3.0"]


def test_without_a_repository_that_is_said_and_there_is_no_diff(tmp_path: Path) -> None:
    text = code.describe(tmp_path)
    assert text.splitlines()[1] == "commit none (not in a git repository)"
    assert "git diff" not in text


def test_a_folder_that_is_gone_and_a_machine_without_git_are_no_error(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "commit none" in code.describe(tmp_path / "gone")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "commit none" in code.describe(repository)
