"""The file with the address at which a process listens."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rankwise.host import network
from rankwise.ipc import address_file
from rankwise.ipc.address_file import OtherUserError, ways


def test_it_is_for_its_user_alone_and_removed_by_who_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "door"
    address_file.write(path, {"secret": "mine", "port": 4242})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert address_file.read(path) == {"secret": "mine", "port": 4242}
    address_file.remove(path, "another's")
    assert path.exists()
    address_file.remove(path, "mine")
    assert not path.exists()
    address_file.remove(path, "mine")


@pytest.mark.parametrize("text", ["", "{", "[]", "1"])
def test_what_is_no_record_is_an_error_and_is_not_removed(text: str, tmp_path: Path) -> None:
    (tmp_path / "door").write_text(text)
    with pytest.raises(ValueError):  # noqa: PT011  # json's own, or ours
        address_file.read(tmp_path / "door")
    address_file.remove(tmp_path / "door", "mine")
    assert (tmp_path / "door").exists()


def test_another_users_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.geteuid()
    address_file.write(tmp_path / "door", {"secret": "mine"})
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(OtherUserError) as raised:
        address_file.read(tmp_path / "door")
    assert raised.value.owner == me


def test_a_link_is_followed_unless_its_reader_says_no(tmp_path: Path) -> None:
    address_file.write(tmp_path / "door", {"secret": "mine"})
    (tmp_path / "link").symlink_to(tmp_path / "door")
    assert address_file.read(tmp_path / "link") == {"secret": "mine"}
    with pytest.raises(OSError, match="symbolic links"):
        address_file.read(tmp_path / "link", os.O_NOFOLLOW)


def test_on_its_own_host_loopback_is_tried_first() -> None:
    addresses = ["10.0.0.1", "fd00::1"]
    assert ways({"home": network.home(), "addresses": addresses}) == ["127.0.0.1", *addresses]
    assert ways({"home": "another", "addresses": addresses}) == addresses


def test_a_proof_is_of_one_secret_and_one_nonce() -> None:
    said = network.proof("secret", "door", "nonce")
    assert network.is_proof(said, "secret", "door", "nonce")
    assert not any([
        network.is_proof(said, "other", "door", "nonce"), network.is_proof(said, "secret", "door", "other"),
        network.is_proof(None, "secret", "door", "nonce"),
    ])  # fmt: skip
