"""Pickles in files: to whom they must belong, and what can be sent."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from pathlib import Path

import pytest

from rankwise.errors import RunDirError
from rankwise.ipc import pickles


def test_a_file_is_written_for_this_user_alone_and_is_gone_when_taken() -> None:
    path = Path("answer")
    pickles.write(path, b"data")
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir() == ["answer"]  # no other file
    assert pickles.take(path) == b"data"
    assert not path.exists()


def test_what_is_not_there_is_told_apart() -> None:
    with pytest.raises(FileNotFoundError):
        pickles.read(Path("nothing"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_read() -> None:
    path = Path("theirs")
    pickles.write(path, b"data")
    os.chown(path, 65534, -1)
    with pytest.raises(RunDirError, match=r"theirs \(of user 65534, mode 600\) is not loaded, because loading it runs code"):
        pickles.read(path)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_is_not_read(mode: int) -> None:
    path = Path("open")
    pickles.write(path, b"data")
    path.chmod(mode)
    with pytest.raises(RunDirError, match=f"mode {mode:o}"):
        pickles.read(path)


def test_a_link_is_not_followed() -> None:
    pickles.write(Path("real"), b"data")
    Path("link").symlink_to("real")
    with pytest.raises(RunDirError, match="link cannot be read"):
        pickles.read(Path("link"))


def test_what_pickle_can_send_is_sent_by_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    value = {"a": [1, Path("b")], "f": os.path.join}
    assert pickle.loads(pickles.dumps(value)) == value


def test_what_lives_in_main_is_not_sent_as_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    Mine = type("Mine", (), {"__module__": "__main__"})  # noqa: N806
    monkeypatch.setattr(main, "Mine", Mine, raising=False)
    assert pickle.loads(pickle.dumps(Mine())).__class__ is Mine  # for pickle this is right
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "cloudpickle", None)
        with pytest.raises(pickles.NotPortableError, match="Mine is defined in __main__"):
            pickles.dumps([Mine()])
    pytest.importorskip("cloudpickle")
    data = pickles.dumps([Mine()])
    monkeypatch.delattr(main, "Mine")
    assert type(pickle.loads(data)[0]).__name__ == "Mine"


def test_what_nothing_can_send_says_why() -> None:
    with pytest.raises(pickles.NotPortableError, match=r"cannot pickle '_thread.lock' object"):
        pickles.dumps(threading.Lock())
