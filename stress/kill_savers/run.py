"""If a training is killed at random while it saves: what does each library's documented way to resume find?

    python stress/kill_savers/run.py [--kills 200] [--limit_s 150] [--draws 40] [--seed 0] [--folder /dev/shm]
                                           [--savers NAME ...]

savers.py trains and saves every 3 steps. A parent that has already imported everything forks it and kills it with SIGKILL: half
of the kills at a random moment, half inside a save, in the third save or later, each in its own folder. Then another fork
resumes. If this raises and checkpoints are in numbered folders, it tries once more without the newest, as a user would. Other
cases: the newest checkpoint truncated, or with one bit flipped; a disk that is full at the third save (as root: a tmpfs), and a
folder that becomes read-only. Exits with 1 if rankwise lost, tore or misread something.
"""

from __future__ import annotations

import argparse
import collections
import mmap
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from savers import ENDLESS, EVERY, SAVERS, Board, LightningElsewhere, Ours, Saver, import_all

THIRD = 3 * EVERY
NOBODY = 65534
draw = random.Random()
elsewhere = Path("/var/tmp") / f"kill-savers-{os.getpid()}"  # usually on another disk than --folder


def forked(work: Callable[[Callable[[str], None]], None], uid: int | None = None) -> tuple[int, int]:
    """Run `work` in a child, and discard its output. Returns (its process id, a pipe with what it reports)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        warnings.simplefilter("ignore")
        if uid is not None:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        work(lambda text: (os.write(writing, text.encode()[:4000]), None)[1])
    except BaseException as error:  # also what is not an Exception: the child exits here
        os.write(writing, f"raised {type(error).__name__}: {error}".encode()[:4000])
    finally:
        os._exit(0)


def told(pid: int, reading: int) -> str:
    text = b""
    while part := os.read(reading, 4096):
        text += part
    os.close(reading)
    os.waitpid(pid, 0)
    return text.decode(errors="replace")


def temporary(kind: type[Saver], folder: Path) -> None:
    """Use a folder for temporary files: on the same disk, or on another one."""
    tempfile.tempdir = str(elsewhere if kind is LightningElsewhere else folder.parent / "tmp")


def train(kind: type[Saver], folder: Path, board: Board, steps: int, uid: int | None = None) -> tuple[int, int]:
    def work(tell: Callable[[str], None]) -> None:
        temporary(kind, folder)
        kind(folder).train(board, steps)

    return forked(work, uid)


def resumed(kind: type[Saver], folder: Path, uid: int | None = None) -> str:
    """What resuming finds: "step 6", "torn ...", "nothing" or "raised ..."."""

    def work(tell: Callable[[str], None]) -> None:
        temporary(kind, folder)

        def say(found: set[float]) -> None:
            tell(f"step {int(next(iter(found)))}" if len(found) == 1 else f"torn {sorted(found)}")

        kind(folder).resume(say)

    return told(*forked(work, uid)) or "nothing"


class Place:
    """A fresh folder, writable by all, for each trial."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.number = 0
        (base / "tmp").mkdir(exist_ok=True)
        (base / "tmp").chmod(0o777)

    def fresh(self) -> Path:
        self.number += 1
        folder = self.base / f"run-{self.number}"
        folder.mkdir()
        folder.chmod(0o777)
        return folder

    def clean(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        for path in [*(self.base / "tmp").iterdir(), *elsewhere.iterdir()]:
            if path.is_dir():  # torch creates it
                shutil.rmtree(path)
            else:
                path.unlink()


# --- kills


def await_save(pid: int, board: Board, number: int) -> None:
    """Wait until save `number` has started. The child must not exit before."""
    limit = time.monotonic() + 60
    while board.read()[0] < number * EVERY:
        if time.monotonic() > limit or os.waitpid(pid, os.WNOHANG)[0]:
            raise SystemExit(f"the training ended or stood still before save {number}")
        time.sleep(0.0002)


def save_seconds(kind: type[Saver], place: Place) -> tuple[float, float]:
    """(the median time of a save, the median time of a save and the steps to the next)."""
    folder, board = place.fresh(), Board(mmap.mmap(-1, 64))
    pid, reading = train(kind, folder, board, ENDLESS)
    took, cycles = [], []
    for number in range(2, 9):
        await_save(pid, board, number)
        began = time.perf_counter()
        while board.read()[1] < (number - (kind.late > 0)) * EVERY:
            time.sleep(0.0002)
        took.append(time.perf_counter() - began)
        await_save(pid, board, number + 1)
        cycles.append(time.perf_counter() - began)
    os.kill(pid, signal.SIGKILL)
    told(pid, reading)
    place.clean(folder)
    return statistics.median(took), statistics.median(cycles)


def without_newest(folder: Path) -> bool:
    """Delete the newest of numbered folders. False if there are none."""
    numbered = {int(path.name[11:]): path for path in folder.rglob("checkpoint[-_]*") if path.is_dir()}
    if numbered:
        shutil.rmtree(numbered[max(numbered)])
    return bool(numbered)


def kill_once(kind: type[Saver], place: Place, aimed: bool, took: float, cycle: float) -> tuple[int, int, str, str]:
    """(the last save that was started, the last that is known to be complete, what resuming finds, what it finds without the
    newest)."""
    folder, board = place.fresh(), Board(mmap.mmap(-1, 64))
    pid, reading = train(kind, folder, board, ENDLESS)
    await_save(pid, board, draw.randint(3, 5) if aimed else 3)
    time.sleep(draw.uniform(0, took if aimed else 4 * cycle))
    os.kill(pid, signal.SIGKILL)
    told(pid, reading)
    begun, done = board.read()
    outcome = resumed(kind, folder)
    again = resumed(kind, folder) if outcome.startswith("raised") and without_newest(folder) else ""
    place.clean(folder)
    return begun, done, outcome, again


def kills(kind: type[Saver], place: Place, count: int, limit_s: float) -> tuple[str, bool]:
    took, cycle = save_seconds(kind, place)
    ends: collections.Counter[str] = collections.Counter()
    texts: collections.Counter[str] = collections.Counter()
    behind, inside, by_hand = [], 0, 0
    end = time.monotonic() + limit_s
    for number in range(count):
        if time.monotonic() > end:
            break
        begun, done, outcome, again = kill_once(kind, place, number % 2 == 0, took, cycle)
        inside += begun > done + kind.late
        by_hand += again.startswith("step")
        word = outcome.split()[0]
        if word == "step":
            behind.append(max(0, done - int(outcome.split()[1])))
            word = "behind" if behind[-1] else "whole"
        else:
            texts[re.sub(r"\d+", "N", outcome.replace(str(place.base), ""))[:110]] += 1
        ends[word] += 1
    most = max(behind, default=0)
    by_hand_text = f" ({by_hand} of them no more once the newest is deleted)" if by_hand else ""
    line = (
        f"{ends.total()} kills, {inside} inside a save: {ends['raised']} raise{by_hand_text}, "
        f"{ends['nothing']} find nothing, {ends['torn']} torn, "
        f"{ends['behind']} behind the last complete save (most: {most} steps), {ends['whole']} as promised"
    )
    for text, times in texts.most_common(3):
        line += f"\n{'':26}{times} x {' '.join(text.split())}"
    return line, ends["whole"] == ends.total() > 0


# --- damage


def newest_files(folder: Path) -> list[Path]:
    """The files of the newest checkpoint: those of the newest folder, or the newest file."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    last = [file for file in files if file.name == "last.ckpt"]  # Lightning uses "last", and writes another file beside it
    newest = last[0] if last else max(files, key=lambda file: file.stat().st_mtime_ns)
    return [newest] if newest.parent == folder else [file for file in files if file.parent == newest.parent]


def damage(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    at = draw.randrange(len(data))
    if how == "truncation":
        data = data[:at]
    else:
        data[at] ^= 1 << draw.randrange(8)
    file.unlink()
    file.write_bytes(data)


def damages(kind: type[Saver], place: Place, how: str, count: int) -> tuple[str, bool]:
    """Three saves, and the newest is damaged: again and again, each time in a copy."""
    whole, board = place.fresh(), Board(mmap.mmap(-1, 64))
    text = told(*train(kind, whole, board, THIRD))
    if text:
        raise SystemExit(f"{kind.name}: {text}")
    ends: collections.Counter[str] = collections.Counter()
    for _ in range(count):
        folder = place.fresh()
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        files = [file for file in newest_files(folder) if file.stat().st_size]
        damage(draw.choices(files, [file.stat().st_size for file in files])[0], how)
        outcome = resumed(kind, folder)
        ends[meaning(outcome)] += 1
        place.clean(folder)
    place.clean(whole)
    line = f"{count} times: " + ", ".join(f"{times} {end}" for end, times in ends.most_common())
    return line, set(ends) <= {"resume the one before"}


def meaning(outcome: str) -> str:
    if outcome == f"step {THIRD}":
        return "load what was saved"
    if outcome == f"step {THIRD - EVERY}":
        return "resume the one before"
    return {"raised": "raise", "nothing": "find nothing", "torn": "load something else, silently"}.get(
        outcome.split()[0], f"resume {outcome}"
    )


# --- a full disk, a read-only folder


def full(folder: Path) -> Callable[[int], None]:
    """When the third save starts, fill the disk; only the space of a quarter of a state is left."""

    def at_begin(step: int) -> None:
        if step == THIRD:
            disk = os.statvfs(folder)
            with open(folder.parent / "filler", "wb") as filler:
                filler.write(bytes(max(0, disk.f_bavail * disk.f_frsize - 1_000_000)))

    return at_begin


def read_only(folder: Path) -> Callable[[int], None]:
    def at_begin(step: int) -> None:
        if step == THIRD:
            for path in [*folder.rglob("*"), folder]:
                path.chmod(0o555 if path.is_dir() else 0o444)

    return at_begin


def refused(kind: type[Saver], folder: Path, at_begin: Callable[[int], None], uid: int | None, base: Path) -> str:
    """What the save reports, and what is found after there is space again, or the folder can be read."""
    board = Board(mmap.mmap(-1, 64), at_begin)
    said = told(*train(kind, folder, board, THIRD, uid)) or "no error"
    (folder.parent / "filler").unlink(missing_ok=True)
    found = meaning(resumed(kind, folder, uid))
    short = " ".join(said.replace(str(base), "")[:150].split())
    return f"saving: {short}; then: {found}"


def refusals(kind: type[Saver], place: Place) -> Iterator[tuple[str, str]]:
    disk = place.base / "disk"
    disk.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode == 0:
        try:
            (disk / "run").mkdir()
            (disk / "tmp").mkdir()
            yield "full disk", refused(kind, disk / "run", full(disk / "run"), None, place.base)
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)
    folder = place.fresh()
    if os.geteuid() == 0:  # root may write everywhere
        os.chown(folder, NOBODY, NOBODY)
    yield "read only", refused(kind, folder, read_only(folder), NOBODY if os.geteuid() == 0 else None, place.base)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o777)
    place.clean(folder)


def measure(kind: type[Saver], place: Place, options: argparse.Namespace) -> Iterator[tuple[str, str, bool]]:
    draw.seed(options.seed)
    if options.kills:
        yield "kills", *kills(kind, place, options.kills, options.limit_s)
    if options.draws:
        for how in ("truncation", "bit flip"):
            yield how, *damages(kind, place, how, options.draws)
        for how, line in refusals(kind, place):
            yield how, line, "then: resume the one before" in line and "CheckpointError" in line


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--limit_s", type=float, default=150, help="for the kills of each: fewer where it is slow")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--savers", nargs="*", default=[])
    options = parser.parse_args()
    for word in options.savers:
        if not any(word in kind.name for kind in SAVERS):
            parser.error(f"--savers {word}: the savers are {', '.join(kind.name for kind in SAVERS)}")
    torch.set_num_threads(1)
    chosen = [kind for kind in SAVERS if not options.savers or any(word in kind.name for word in options.savers)]
    versions = import_all(chosen)
    print(", ".join(f"{name} {version}" for name, version in versions.items()), flush=True)
    base = Path(tempfile.mkdtemp(dir=options.folder))
    base.chmod(0o755)
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    place, right = Place(base), True
    try:
        for kind in chosen:
            if kind.needs not in versions:
                print(f"{kind.name:23}left out: {kind.needs} is not installed")
                continue
            if kind is LightningElsewhere and elsewhere.stat().st_dev == base.stat().st_dev:
                print(f"{kind.name:23}left out: {base} and {elsewhere} are on one disk")
                continue
            for what, line, good in measure(kind, place, options):
                print(f"{kind.name:23}{what:11} {line}", flush=True)
                right = right and (good or not issubclass(kind, Ours))
    finally:
        shutil.rmtree(base, ignore_errors=True)
        shutil.rmtree(elsewhere, ignore_errors=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
