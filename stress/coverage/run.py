"""Which lines and branches of src/ do the tests run, those of ranks, agents and commands included?

    python stress/coverage/run.py                          the default tier: a table; its last line is the whole
    python stress/coverage/run.py tests/data --missing     some tests; with the lines that none of them runs
    python stress/coverage/run.py --keep build/coverage    keeps the data: which test runs which line, how long each takes

Requires `pip install coverage==7.17.3`. Takes about twice as long as the tests themselves. A process that SIGKILL or SIGTERM
ends saves nothing, so the tests run a few lines more than the table says. Words that are not known here go to pytest.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import coverage
from scratch import ROOT, Scratch

HERE = Path(__file__).parent

RC = """\
[run]
branch = true
parallel = true
data_file = {folder}/tests
source = {source}
disable_warnings = no-data-collected, module-not-imported, already-imported, no-sysmon, no-ctracer
"""


def measure(scratch: Scratch, words: list[str], data: Path) -> int:
    """Run tests. Writes `data`, coverage's file with the tests as contexts and the paths of this checkout. Returns pytest's
    status."""
    pieces = scratch.folder.parent / "pieces"
    pieces.mkdir()
    scratch.packages.joinpath("tracer.rc").write_text(RC.format(folder=pieces, source=scratch.folder / "src" / "rankwise"))
    scratch.install(HERE / "tracer.py", at_start=True)
    status = scratch.pytest("-p", "tracer", *words, quiet=False)
    data.parent.mkdir(parents=True, exist_ok=True)
    rc = scratch.folder.parent / "combine.rc"
    rc.write_text(f"[run]\nbranch = true\n[paths]\nsource =\n  {ROOT / 'src'}\n  {scratch.folder / 'src'}\n")
    combined = coverage.Coverage(str(data), config_file=str(rc))
    combined.combine([str(pieces)])
    combined.save()
    shutil.copy(scratch.packages / "tracer.json", data.with_suffix(".json"))
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for `tests` (coverage's data) and `tests.json`")
    parser.add_argument("--missing", action="store_true", help="with the lines and branches that no test runs")
    arguments, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="rankwise-coverage-") as folder:
        data = (arguments.keep or Path(folder)).absolute() / "tests"
        status = measure(Scratch(Path(folder) / "rankwise"), words, data)
        report = coverage.Coverage(str(data), branch=True)
        report.load()
        report.report(show_missing=arguments.missing, precision=1, ignore_errors=True)  # a test may remove what it made in src/
    return status


if __name__ == "__main__":
    sys.exit(main())
