"""Do the tests notice a mistake? Makes small ones in the source, one at a time, and runs the tests that cover the changed line.

    python stress/mutants/run.py map                first: records which test covers which line (runs the default tier once)
    python stress/mutants/run.py                    judges the mutants of drawn.jsonl that are not in results.jsonl; a table
    python stress/mutants/run.py --only 7,12        judges these again
    python stress/mutants/run.py table              prints the table only
    python stress/mutants/run.py draw --seed 13     draws --count new mutants, at least --least per area; removes results.jsonl

`draw` requires `pip install cosmic-ray==8.7.0`; `map` and judging require `pip install coverage==7.17.3`.

The tests of the file that mirrors the module run first (those that the map does not know before all others), then all other
tests that cover the line, quick ones first, until an assertion fails, for --limit seconds at most. A mutant is killed when a
test fails that passes without the mutant; the failure is an error if no assertion failed. It has timed out when a test fails
because it did not end. Each of --jobs works in a copy of the repository. Exits with 1 if a mutant survived.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COVERAGE = HERE.parent / "coverage"
DRAWN, RESULTS = HERE / "drawn.jsonl", HERE / "results.jsonl"
sys.path += [str(HERE), str(COVERAGE)]

import drawing  # noqa: E402
from drawing import AREAS, Mutant  # noqa: E402
from scratch import Scratch  # noqa: E402

from rankwise.host import processes  # noqa: E402

TEST_S = 100
"""The time limit of a test."""

MEMORY = 6 << 30
"""The memory limit of a process: an endless loop may fill a list."""

TIMED_OUT = ("Timeout (>", "no answer within", "timed out after")
"""Texts in the message of a test that did not end: pytest-timeout, on_ranks, subprocess."""

QUIET = {"PYTHONWARNINGS": "ignore::SyntaxWarning"}
"""`x is 1` must fail because of what it does, not because of the compiler's warning, which the tests treat as an error."""


# --- which tests


def nearby(file: str) -> list[str]:
    """The test files that mirror a module, or its package."""
    path = Path(file).relative_to("src/rankwise")
    mirrored = Path("tests") / path.parent / f"test_{path.stem}.py"
    if (ROOT / mirrored).exists():
        return [str(mirrored)]
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / mirrored).parent.glob("test_*.py"))


class Map:
    """Which test covers which line, and how long each takes."""

    def __init__(self, path: Path) -> None:
        import coverage

        self._data = coverage.CoverageData(str(path))
        self._data.read()
        record = json.loads(path.with_suffix(".json").read_text())
        self._seconds: dict[str, float] = record["seconds"]
        self._failed = set(record["failed"])

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that cover the mutant's statement, quick ones first. For a statement that runs on import, these are all
        tests that cover a function of the file."""
        lines = _lines(ROOT / mutant.file, mutant.line, len(mutant.old))
        by_line = self._data.contexts_by_lineno(str(ROOT / mutant.file))
        found = {test for line in lines for test in by_line.get(line, ()) if test}
        return self._sorted(found)

    def of_files(self, files: Sequence[str]) -> list[str]:
        return self._sorted({test for test in self._seconds if test.partition("::")[0] in files})

    def _sorted(self, tests: set[str]) -> list[str]:
        return sorted(tests - self._failed, key=lambda test: self._seconds.get(test, 0.0))


def _lines(path: Path, line: int, count: int) -> set[int]:
    changed = set(range(line, line + max(count, 1)))
    inside: set[int] = set()  # the lines in bodies of functions; a function's definition itself runs on import
    found: tuple[int, set[int]] | None = None
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            inside |= set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            own = set(range(node.lineno, body[0].lineno if body else (node.end_lineno or 0) + 1))
            if own & changed and (found is None or len(own) < found[0]):
                found = len(own), own
    lines = found[1] if found is not None else changed
    return lines if lines <= inside else inside


# --- judging


@dataclass(frozen=True)
class Failure:
    """Why a test failed; chosen.py writes it."""

    test: str
    type: str
    says: str
    is_assertion: bool


@dataclass(frozen=True)
class Verdict:
    number: int
    change: str
    outcome: str
    """`killed`, `timed out` or `survived`."""

    test: str = ""
    by: str = ""
    """The type of the exception that the test raised."""

    is_assertion: bool = False
    tests: int = 0
    """The number of tests that cover the line."""

    all_ran: bool = True
    """False for a survivor if --limit ended the tests early."""

    seconds: float = 0.0


class Judge:
    """Judges mutants in its own copy of the repository. Needs a separate process: it kills all processes that tests leave
    behind."""

    def __init__(self, folder: Path) -> None:
        processes.become_subreaper()
        processes.die_with_parent(os.getppid())
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        self._folder = folder
        self._scratch = Scratch(folder / "rankwise")
        self._scratch.install(HERE / "chosen.py")
        self._passes: set[str] = set()
        self._fails: set[str] = set()
        """Tests that fail without a mutant."""

    def judge(self, mutant: Mutant, covering: Map, limit_s: float) -> Verdict:
        began = time.monotonic()
        near, tests = nearby(mutant.file), covering.tests(mutant)
        first = list(dict.fromkeys([*(test for test in tests if test.partition("::")[0] in near), *covering.of_files(near)]))
        others = [test for test in tests if test not in first]
        failure, all_ran = None, True
        with contextlib.suppress(subprocess.TimeoutExpired):
            all_ran = False
            failure = self._killed(mutant, first, near, began + limit_s)
            if others and not (failure and failure.is_assertion):
                later = self._killed(mutant, others, [], began + limit_s)
                failure = later if later and (later.is_assertion or failure is None) else failure
            all_ran = True
        outcome, killer = "survived", Failure("", "", "", False)
        if failure is not None:
            outcome, killer = "timed out" if any(words in failure.says for words in TIMED_OUT) else "killed", failure
        found = (outcome, killer.test, killer.type, killer.is_assertion, len(tests), all_ran)
        return Verdict(mutant.number, mutant.describe(), *found, round(time.monotonic() - began, 1))

    def _killed(self, mutant: Mutant, tests: list[str], all_of: list[str], until: float) -> Failure | None:
        """The failure of a test that passes without the mutant: of an assertion, if there is one. Raises TimeoutExpired."""
        path = self._scratch.folder / mutant.file
        source = path.read_text()
        while True:
            try:
                path.write_text(mutant.applied(source))
                failure = self._run(tests, all_of, max(until - time.monotonic(), 0.0))
            finally:
                path.write_text(source)
            if failure is None or self._passes_without(failure.test):
                return failure

    def _passes_without(self, test: str) -> bool:
        if test not in self._passes:
            (self._passes if self._run([test], [], 3.0 * TEST_S) is None else self._fails).add(test)
        return test in self._passes

    def _run(self, tests: list[str], all_of: list[str], limit_s: float) -> Failure | None:
        """The first failed assertion, or else the first error; None if all passed. TimeoutExpired: none has failed yet."""
        chosen, failure = self._folder / "chosen.json", self._folder / "failure.json"
        chosen.write_text(json.dumps({"tests": tests, "all_of": all_of, "but": sorted(self._fails)}))
        failure.unlink(missing_ok=True)
        files = list(dict.fromkeys([*all_of, *(test.partition("::")[0] for test in tests)]))
        words = ("-p", "chosen", "--chosen", chosen, "--failure", failure, f"--timeout={TEST_S}")
        status: int | None = None
        try:
            status = self._scratch.pytest(*words, *files, "-Wignore::SyntaxWarning", timeout_s=limit_s, environ=QUIET)
        except subprocess.TimeoutExpired:
            if not failure.exists():
                raise
        finally:
            processes.end_tree()
        if failure.exists():
            return Failure(**json.loads(failure.read_text()))
        if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return None
        raise RuntimeError(f"pytest exited with {status} for {files}, but no test failed")


_judge: Judge | None = None
_map: Map | None = None


def _begin(folder: str, path: Path) -> None:
    global _judge, _map
    _judge, _map = Judge(Path(tempfile.mkdtemp(dir=folder))), Map(path)


def _judged(mutant: Mutant, limit_s: float) -> Verdict:
    assert _judge is not None
    assert _map is not None
    return _judge.judge(mutant, _map, limit_s)


# --- the table


def table(mutants: Iterable[Mutant], verdicts: dict[int, Verdict]) -> str:
    counted: dict[str, collections.Counter[str]] = {area: collections.Counter() for area in (*AREAS, "all")}
    for mutant in mutants:
        for area in (mutant.area, "all"):
            counted[area]["drawn"] += 1
            if verdict := verdicts.get(mutant.number):
                counted[area][verdict.outcome] += 1
                counted[area]["by an assertion"] += verdict.outcome == "killed" and verdict.is_assertion
    columns = ("drawn", "killed", "by an assertion", "timed out", "survived")
    rows = [f"{'':22}{''.join(f'{column:>17}' for column in columns)}"]
    rows += [f"{area:22}{''.join(f'{count[column]:>17}' for column in columns)}" for area, count in counted.items()]
    return "\n".join(rows)


def results() -> dict[int, Verdict]:
    """The last verdict for each number."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {verdict.number: verdict for verdict in (Verdict(**json.loads(line)) for line in lines)}


def write(verdicts: dict[int, Verdict]) -> None:
    RESULTS.write_text("".join(json.dumps(vars(verdicts[number])) + "\n" for number in sorted(verdicts)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", nargs="?", choices=("judge", "draw", "map", "table"), default="judge")
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--least", type=int, default=6)
    parser.add_argument("--only", help="numbers, with commas between")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600.0, metavar="S", help="for the tests of one mutant")
    parser.add_argument("--map", type=Path, default=ROOT / "build" / "mutants" / "tests", help="where `map` leaves its data")
    arguments = parser.parse_args()
    if arguments.verb == "map":
        return subprocess.call([sys.executable, str(COVERAGE / "run.py"), "--keep", str(arguments.map.parent)])
    if arguments.verb == "draw":
        mutants, said = drawing.draw(ROOT, arguments.seed, arguments.count, arguments.least)
        drawing.write(DRAWN, mutants)
        RESULTS.unlink(missing_ok=True)
        print(said)
        return 0
    mutants = drawing.read(DRAWN)
    verdicts = {n: v for n, v in results().items() if v.change == mutants[n - 1].describe()}
    if arguments.verb == "judge":
        only = set(map(int, arguments.only.split(","))) if arguments.only else {m.number for m in mutants} - verdicts.keys()
        with (
            tempfile.TemporaryDirectory(prefix="rankwise-mutants-") as folder,
            concurrent.futures.ProcessPoolExecutor(
                arguments.jobs, multiprocessing.get_context("spawn"), _begin, (folder, arguments.map)
            ) as pool,
        ):
            asked = [pool.submit(_judged, m, arguments.limit) for m in mutants if m.number in only]
            for future in concurrent.futures.as_completed(asked):
                verdict = future.result()
                verdicts[verdict.number] = verdict
                write(verdicts)
                tests = "" if verdict.all_ran else f", but not all of its {verdict.tests} tests ran"
                print(f"{verdict.number:3} {verdict.outcome:9} {verdict.seconds:6.1f} s  {verdict.change}{tests}", flush=True)
                print(f"{'':14}{verdict.by} {verdict.test}", flush=True) if verdict.test else None
    print(table(mutants, verdicts))
    return int(any(verdict.outcome == "survived" for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
