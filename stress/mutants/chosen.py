"""A plugin of pytest (-p chosen): runs the tests that a file names, in its order, until an assertion fails, and records that.

`--chosen FILE` is JSON: {"tests": [ids], "all_of": [test files], "but": [ids]}. All other tests of the files in `all_of` run
first, because they are new; those in `but` do not run.
`--failure FILE` is the first assertion that failed, or, if none did, the first error in a test or in the import of a file.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chosen", type=Path)
    parser.addoption("--failure", type=Path)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = json.loads(config.getoption("--chosen").read_text())
    place = {test: number for number, test in enumerate(chosen["tests"])}
    named = [item for item in items if item.nodeid in place or item.nodeid.partition("::")[0] in chosen["all_of"]]
    items[:] = [item for item in named if item.nodeid not in chosen["but"]]
    items.sort(key=lambda item: place.get(item.nodeid, -1))


class Failure:
    """Records the first failed assertion, and until then the first error."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_exception_interact(
        self, node: pytest.Item | pytest.Collector, call: pytest.CallInfo[object], report: object
    ) -> None:
        assert call.excinfo is not None
        error = call.excinfo.value
        is_assertion = isinstance(error, AssertionError | pytest.fail.Exception)
        if is_assertion or not self._path.exists():
            record = {
                "test": node.nodeid,
                "type": type(error).__name__,
                "is_assertion": is_assertion,
                "says": str(error)[-2000:],
            }
            self._path.write_text(json.dumps(record))
        if is_assertion:
            node.session.shouldstop = "an assertion has failed"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Failure(config.getoption("--failure")))
