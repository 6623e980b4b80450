"""The records of a run: complete or absent, and from one writer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import pytest

from rankwise.checkpoint import folders
from rankwise.errors import RunDirError
from rankwise.run.directory import Failure, NodeRecord, RunDir, find_run, write_json, write_text

DEADLINE_S = 120.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "runs" / "train")
    made.prepare(fresh=False)
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- atomic writes


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a b.json"
    write_text(path, "one")
    write_text(path, "größer\n")
    assert path.read_bytes() == "größer\n".encode()
    assert names(tmp_path) == ["a b.json"]


def test_a_record_is_written_as_json_with_a_last_newline(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": [1, None, "ä"]})
    text = (tmp_path / "x.json").read_text()
    assert text.endswith("}\n")
    assert json.loads(text) == {"a": [1, None, "ä"]}


def test_a_file_gets_the_mode_asked_for(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_text(tmp_path / "job.sh", "", mode=0o755)
        write_text(tmp_path / "secret", "", mode=0o600)
        write_text(tmp_path / "plain", "")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("job.sh", "secret", "plain")] == [0o755, 0o600, 0o644]


def test_a_write_that_fails_leaves_the_older_file_and_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "in the way"
    path.mkdir()
    (path / "x").touch()
    with pytest.raises(RunDirError, match=r"^cannot write .*in the way: "):
        write_text(path, "text")
    assert names(tmp_path) == ["in the way"]
    assert names(path) == ["x"]


@pytest.mark.parametrize("name", ["", "logs", "telemetry", "checkpoints", "logs/rank-0.log", "logs/.rank-0.stacks"])
def test_what_another_user_has_made_in_the_folder_is_named_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "train")
    run.prepare(fresh=False)
    for path in (run.log(0), run.stacks(0)):
        path.touch()
    run.checkpoints.mkdir()
    monkeypatch.setattr(os, "access", lambda path, _mode: path != run.path / name)
    said = f"train is not writable{f' ({name} belongs to user {os.getuid()})' if name else ''}; choose another with --run-dir"
    with pytest.raises(RunDirError, match=re.escape(said)):
        run.prepare(fresh=False)


def test_a_write_into_no_folder_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"^cannot write .*gone/x\.json: No such file or directory$"):
        write_json(tmp_path / "gone" / "x.json", {})


_WRITE_FOR_EVER = """
import sys
from pathlib import Path
from rankwise.run.directory import write_json
while True:
    for letter in "ab":
        write_json(Path(sys.argv[1]), letter * 300_000)
"""


def test_a_reader_never_sees_half_a_record_though_its_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "world.json"
    write_json(path, "a" * 300_000)
    seen: set[str] = set()
    with subprocess.Popen([sys.executable, "-c", _WRITE_FOR_EVER, str(path)]) as writer:
        try:
            deadline = time.monotonic() + DEADLINE_S
            changes = 0
            last = path.stat().st_ino
            while changes < 100:
                assert time.monotonic() < deadline
                seen.add(json.loads(path.read_text()))
                changes += path.stat().st_ino != last
                last = path.stat().st_ino
        finally:
            writer.kill()
    seen.add(json.loads(path.read_text()))
    assert seen == {"a" * 300_000, "b" * 300_000}


# --- the folder


def test_prepare_makes_the_folders_and_keeps_what_is_there(run: RunDir) -> None:
    assert run.logs.is_dir()
    assert run.telemetry.is_dir()
    run.log(0).write_text("printed")
    assert run.prepare(fresh=False) is None
    assert run.log(0).read_text() == "printed"


def test_fresh_moves_the_older_runs_aside_each_to_a_name_of_its_own(run: RunDir) -> None:
    asides = []
    for number in range(4):
        run.log(0).write_text(str(number))
        asides.append(run.prepare(fresh=True))
        assert not run.log(0).exists()
        assert run.logs.is_dir()
    assert len(set(asides)) == 4
    for number, aside in enumerate(asides):
        assert aside is not None
        assert aside.parent == run.path.parent
        assert aside.name.startswith("train.")
        assert RunDir(aside).log(0).read_text() == str(number)


def test_fresh_follows_a_link_to_the_folder_of_the_run(tmp_path: Path) -> None:
    """Users keep runs on a large disk, and link to them from their home folder."""
    large, home = tmp_path / "large", tmp_path / "home"
    (large / "train").mkdir(parents=True)
    home.mkdir()
    (home / "train").symlink_to(large / "train")
    run = RunDir(home / "train")
    run.prepare(fresh=False)
    run.log(0).write_text("old")
    aside = run.prepare(fresh=True)
    run.log(0).write_text("new")
    assert aside is not None
    assert (names(home), sorted(names(large))) == (["train"], sorted(["train", aside.name]))
    assert (RunDir(aside).log(0).read_text(), RunDir(large / "train").log(0).read_text()) == ("old", "new")


def test_fresh_with_no_older_run_has_nothing_to_move(tmp_path: Path) -> None:
    made = RunDir(tmp_path / "new")
    assert made.prepare(fresh=True) is None
    assert names(tmp_path) == ["new"]


def test_fresh_leaves_a_run_that_is_alive_where_it_is(run: RunDir) -> None:
    lease = run.take()
    with pytest.raises(RunDirError, match=f"is still running: pid {os.getpid()} on "):
        run.prepare(fresh=True)
    assert names(run.path.parent) == ["train"]
    lease.release()
    assert run.prepare(fresh=True) is not None


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_that_cannot_be_made_is_an_error_that_says_why_and_how_to_choose_another(fresh: bool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match=r"file/sub/train cannot be created or written \(Not a directory: .*--run-dir PATH$"):
        RunDir(tmp_path / "file" / "sub" / "train").prepare(fresh)


def test_a_file_where_the_folder_should_be_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("mine")
    with pytest.raises(RunDirError, match=r"train cannot be created or written \(.*--run-dir PATH$"):
        RunDir(tmp_path / "train").prepare(fresh=False)
    assert (tmp_path / "train").read_text() == "mine"


# --- a part of it on a host that does not see the rest


def test_with_fresh_a_host_of_its_own_disk_moves_an_older_run_aside_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "train")
    run.begin_copy("first", fresh=False)
    (run.checkpoints / "step-00000400").mkdir(parents=True)
    run.begin_copy("second", fresh=False)  # resumes
    assert run.saved() == ["step-00000400"]
    run.begin_copy("third", fresh=True)
    assert run.saved() == []
    (run.checkpoints / "step-00000005").mkdir(parents=True)
    run.begin_copy("third", fresh=True)  # requeued, or another agent on this host
    assert run.saved() == ["step-00000005"]
    assert len(names(run.path.parent)) == 2


# --- attempts


def test_the_newest_checkpoint_is_the_last_also_with_more_digits(run: RunDir) -> None:
    names = ["step-99999999", "step-99999999-2", "step-99999999-10", "step-100000000"]
    for name in reversed(names):
        (run.checkpoints / name).mkdir(parents=True)
    assert run.saved() == names


def test_attempts_are_counted_from_one_and_the_newest_is_changed(run: RunDir) -> None:
    assert run.attempts() == []
    part = NodeRecord(host="h", first=0, ranks=2, page="/proc/1/fd/3")
    first = run.begin_attempt(2, ("train.py", "--lr", "1"), (part,))
    assert (first.life, first.ranks, first.parts, first.ended, first.status) == (1, 2, (part,), None, None)
    run.update_attempt(first, pids=(7, 8))
    second = run.begin_attempt(4, ("train.py",))
    changed = run.update_attempt(second, ended=second.started + 5, status=75, outcome="stopped by SIGTERM after step 3")
    attempts = run.attempts()
    assert [attempt.life for attempt in attempts] == [1, 2]
    assert list(attempts[0].pids) == [7, 8]
    assert attempts[0].parts == (part,)
    assert (attempts[0].part_of(1), attempts[0].part_of(2)) == (part, None)
    assert list(attempts[0].argv) == ["train.py", "--lr", "1"]
    assert (attempts[0].status, attempts[0].outcome) == (None, "")
    assert (attempts[1].ended, attempts[1].status, attempts[1].outcome) == (
        changed.ended,
        75,
        "stopped by SIGTERM after step 3",
    )
    assert attempts[1].ranks == 4


def test_a_run_that_was_taken_over_does_not_write_how_it_ended_into_the_attempt_of_the_other(run: RunDir) -> None:
    mine = run.begin_attempt(1, ("train.py",))
    run.begin_attempt(1, ("train.py",))
    run.update_attempt(mine, outcome="taken over")
    assert [attempt.outcome for attempt in run.attempts()] == ["taken over", ""]


def test_attempts_of_a_later_version_can_be_read(run: RunDir) -> None:
    attempt = run.begin_attempt(1, ("train.py",))
    write_json(run.world, {"lives": [{**asdict(attempt), "nodes": 2}], "more": 1})
    assert run.attempts()[0].started == attempt.started


# --- metrics and failures


def test_half_a_line_of_metrics_is_passed_over(run: RunDir) -> None:
    assert run.read_metrics() == []
    run.metrics.write_bytes(b'{"step": 1, "loss": 2.5}\n{"step": 2, "lo\n\n{"step": 3, "text": "\xff"}\n{"step": 4, "loss": 2.')
    assert [record["step"] for record in run.read_metrics()] == [1, 3]


def test_a_failure_is_read_as_it_was_written_and_forgotten_when_asked(run: RunDir) -> None:
    assert run.read_failure() is None
    run.write_failure(None)  # there is none to remove
    failure = Failure(1, "host", "rank 1 raised ValueError: ü", 1, exit_code=1, traceback="a\nb", step=60, life=2)
    run.write_failure(failure)
    assert run.read_failure() == failure
    write_json(run.failure, {**asdict(failure), "cause": "later"})
    assert run.read_failure() == failure
    run.write_failure(None)
    assert run.read_failure() is None
    assert not run.failure.exists()


def test_the_end_of_a_log_is_not_of_an_earlier_attempt(run: RunDir) -> None:
    run.logs.mkdir(parents=True, exist_ok=True)
    run.log(1).write_text("one\ntwo\n")
    assert run.log_tail(1, 4) == b"two\n"
    run.begin_log(1)
    assert run.log_tail(1, 4) == b""
    with open(run.log(1), "a") as log:
        log.write("three\n")
    assert run.log_tail(1, 99) == b"three\n"
    assert run.log_tail(1, 3) == b"ee\n"
    earlier, last = run.log(1).read_text().split("=== next attempt, ")
    assert earlier == "one\ntwo\n"
    datetime.strptime(last, "%Y-%m-%d %H:%M:%S\nthree\n")
    run.log(1).unlink()
    run.log(1).mkdir()  # as a file server that does not give it: the verdict is printed all the same
    assert run.log_tail(1, 3) == b""
    run.begin_log(2)
    assert run.log_tail(2, 4) == b""
    assert not run.log(2).exists()
    for earlier in ("", "cut while it wrote"):
        run.log(2).write_text(earlier)
        run.begin_log(2)
        assert run.log_tail(2, 4) == b""
    assert run.log(2).read_text().startswith("cut while it wrote\n=== next attempt, ")


def test_each_rank_has_a_log_and_a_place_for_its_exception(run: RunDir) -> None:
    paths = {run.log(0), run.log(1), run.exception(0), run.exception(1)}
    assert len(paths) == 4
    assert {path.parent for path in paths} == {run.logs}
    assert run.log(11).name == "rank-11.log"


def test_a_text_that_cannot_be_encoded_leaves_no_temporary_file(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "job.sh", "\ud800")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["[]", "1", "null"])
def test_a_lease_that_is_no_object_cannot_be_read(run: RunDir, text: str) -> None:
    run.lease.write_text(text)
    with pytest.raises(RunDirError, match="cannot be read"):
        run.take()


def test_a_world_of_other_things_cannot_be_read(run: RunDir) -> None:
    run.world.write_text('{"lives": [1]}')
    with pytest.raises(RunDirError, match="cannot be read"):
        run.attempts()


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_failure_that_cannot_be_read_is_an_error_of_ours(run: RunDir, text: str) -> None:
    run.failure.write_text(text)
    with pytest.raises(RunDirError):
        run.read_failure()


def test_an_attempt_read_back_is_the_attempt_that_was_written(run: RunDir) -> None:
    attempt = run.begin_attempt(2, ("train.py",))
    assert run.attempts() == [attempt]


def test_fresh_with_a_file_in_the_way_says_how_to_choose_another(tmp_path: Path) -> None:
    (tmp_path / "train").touch()
    with pytest.raises(RunDirError, match="--run-dir PATH"):
        RunDir(tmp_path / "train").prepare(fresh=True)


def test_a_folder_with_other_things_is_neither_written_to_nor_moved_aside(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").touch()
    for fresh in (False, True):
        with pytest.raises(RunDirError, match="is not empty and is not the folder of a run; choose an empty or a new folder"):
            RunDir(tmp_path / "project").prepare(fresh)
    assert names(tmp_path / "project") == ["train.py"]


def test_the_folder_one_stands_in_is_not_moved_away(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.path)
    with pytest.raises(RunDirError, match="the folder you are in"):
        run.prepare(fresh=True)
    assert run.logs.is_dir()


# --- corrupted files, and files in the way


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "{}", "3", "[]", '{"lives": 3}', '{"lives": [3]}', '{"lives": [{"life": 1}]}', "\x00" * 10,
        '{"lives": [{"life": 1, "started": "x", "host": "h", "ranks": 1, "argv": []}]}',
        '{"lives": [{"life": 1, "started": 0, "host": "h", "ranks": 1, "argv": "x.py"}]}',
    ],
)  # fmt: skip
def test_a_damaged_record_of_attempts_is_named_with_the_cure(run: RunDir, text: str) -> None:
    run.world.write_text(text)
    with pytest.raises(RunDirError, match=r"world\.json, the record .* cannot be read \(.*\); remove that file .*--fresh$"):
        run.attempts()


@pytest.mark.parametrize("name", ["checkpoints", "logs", "telemetry"])
def test_a_file_in_place_of_a_folder_is_refused_before_anything_is_run(tmp_path: Path, name: str) -> None:
    made = RunDir(tmp_path / "train")
    made.prepare(fresh=False)
    path = made.path / name
    if path.exists():
        path.rmdir()
    path.write_text("mine")
    with pytest.raises(
        RunDirError, match=rf"{name} is a file, and the run needs a folder there; move it away, or type --fresh$"
    ):
        made.prepare(fresh=False)
    assert path.read_text() == "mine"
    aside = made.prepare(fresh=True)
    assert aside is not None
    assert (aside / name).read_text() == "mine"


@pytest.mark.parametrize("name", ["metrics.jsonl", "world.json", "failure.json", "lease.json"])
def test_a_folder_in_place_of_a_file_is_refused_before_anything_is_run(run: RunDir, name: str) -> None:
    (run.path / name).mkdir()
    with pytest.raises(RunDirError, match=rf"{name} is a folder, and the run needs a file there"):
        run.prepare(fresh=False)


def test_the_newest_metrics_are_found_without_reading_all_of_a_long_file(run: RunDir) -> None:
    assert run.newest_metrics() == []
    line = '{"life": 1, "step": 7, "loss": 0.5}\n'
    run.metrics.write_text(line * 40_000 + "x" * 2_000_000 + "\n")
    assert run.newest_metrics() == run.read_metrics()  # none in the end of the file
    run.metrics.write_text(line * 40_000 + '{"life": 2, "step": 8}\n{"life": 2, "st')
    newest = run.newest_metrics()
    assert newest[-1] == {"life": 2, "step": 8}
    assert len(newest) < 31_000
    assert all(record == {"life": 1, "step": 7, "loss": 0.5} for record in newest[:-1])


def test_an_odd_line_of_the_metrics_is_passed_over(run: RunDir) -> None:
    from rankwise.launch.status import as_text, facts
    from rankwise.report.terminal import report

    whole = {"life": 1, "step": 3, "loss": 0.5, "clock_s": 2.0, "share/saving": 0.1}
    odd = ["3", "null", "[1]", '"x"', '{"a": 1}', '{"step": "3", "life": 1}', '{"step": true, "life": 1}', '{"step": 3}',
           "[" * 100_000, '{"loss": 0.', '{"step": 4, "life": 1, "clock_s": "x", "share/saving": "y"}']  # fmt: skip
    run.metrics.write_bytes(b"\xff\n" + "\n".join([*odd, json.dumps(whole), *odd]).encode())
    assert [record["step"] for record in run.read_metrics()] == [3, 4, 3, 3, 4]
    run.begin_attempt(1, ("train.py",))
    assert "0.5" in report(run)
    assert "step" in as_text(facts(run))


def test_a_name_that_no_file_can_have_is_the_name_of_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for find in (find_run, lambda name, _: folders.find(name)):
        with pytest.raises(RunDirError, match=r"^there is no run xxx"):
            find("x" * 300, "status")
