"""What the kernel reports about memory, from files in the kernel's format."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankwise.agent.out_of_memory import limit_bytes, oom_kills

V1_EVENTS = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2_EVENTS = "low 0\nhigh 0\nmax 12\noom 1\noom_kill {}\noom_group_kill 0\n"


def system(tmp_path: Path, cgroup: str, mounts: str, files: dict[str, str]) -> Path:
    """A /proc whose mounts are below tmp_path."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(cgroup)
    (proc / "self/mountinfo").write_text(mounts.replace("/sys", f"{tmp_path}/sys"))
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc


V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "35 31 0:32 ROOT /sys/fs/cgroup/memory rw,relatime shared:7 - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)


def test_v1_the_own_cgroups_counter_and_the_least_limit_up_to_the_mount(tmp_path: Path) -> None:
    proc = system(
        tmp_path,
        "8:pids:/\n4:memory:/slurm/job_7/step_0\n0::/\n",
        V1_MOUNTS.replace("ROOT", "/"),
        {
            "sys/fs/cgroup/memory/slurm/job_7/step_0/memory.oom_control": V1_EVENTS.format(2),
            "sys/fs/cgroup/memory/slurm/job_7/step_0/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes": "900000000\n",
            "sys/fs/cgroup/memory/slurm/memory.limit_in_bytes": "4000000000\n",
            "sys/fs/cgroup/memory/memory.oom_control": V1_EVENTS.format(99),
        },
    )
    assert oom_kills(proc) == 2
    assert limit_bytes(proc) == 900_000_000


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/job", "/elsewhere/seen/from/outside"])
def test_a_container_that_sees_only_its_part_of_the_hierarchy_finds_its_files(tmp_path: Path, path: str) -> None:
    folder = "sys/fs/cgroup/memory" + ("/job" if path.endswith("/job") else "")
    proc = system(
        tmp_path,
        f"4:memory:{path}\n",
        V1_MOUNTS.replace("ROOT", "/docker/abc"),
        {f"{folder}/memory.oom_control": V1_EVENTS.format(1), "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000\n"},
    )
    assert oom_kills(proc) == 1
    assert limit_bytes(proc) == 1000


def test_v2_reads_events_and_max(tmp_path: Path) -> None:
    proc = system(
        tmp_path,
        "0::/user.slice/session-2.scope\n",
        "24 1 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
        {
            "sys/fs/cgroup/user.slice/session-2.scope/memory.events": V2_EVENTS.format(3),
            "sys/fs/cgroup/user.slice/session-2.scope/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/memory.max": "5000\n",
        },
    )
    assert oom_kills(proc) == 3
    assert limit_bytes(proc) == 5000


def test_outside_any_memory_cgroup_the_machines_counter_is_what_there_is(tmp_path: Path) -> None:
    proc = system(
        tmp_path,
        "0::/\n",
        "24 1 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        {"proc/vmstat": "nr_free_pages 7\noom_kill 5\n"},
    )
    assert oom_kills(proc) == 5
    assert limit_bytes(proc) is None


def test_where_nothing_can_be_read_nothing_is_said(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) == 0
    assert limit_bytes(tmp_path) is None
