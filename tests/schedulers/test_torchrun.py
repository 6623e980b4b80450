"""torchrun's variables."""

from __future__ import annotations

import pytest

from rankwise.errors import WorldError
from rankwise.schedulers import launcher
from rankwise.schedulers.ranks import Ranks, variables_of

torchrun = launcher("torchrun")

QUAD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in QUAD.items() if name not in names}


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR"])
def test_any_of_the_triple_speaks_of_torchrun(name: str) -> None:
    assert torchrun.detect({name: "1"})


def test_other_variables_do_not_speak_of_torchrun() -> None:
    assert not torchrun.detect({})
    assert not torchrun.detect({"LOCAL_RANK": "0", "MASTER_PORT": "29500", "SLURM_PROCID": "1"})


def test_a_complete_triple_needs_nothing_else() -> None:
    ranks = torchrun.ranks(QUAD)
    assert (ranks.rank, ranks.world_size, ranks.master_addr, ranks.master_port) == (1, 2, "host", 29500)


def test_what_is_not_set_is_taken_for_one_node_and_that_is_said() -> None:
    ranks = torchrun.ranks(QUAD)
    assert (ranks.local_rank, ranks.local_world_size, ranks.node_rank) == (1, 2, 0)
    assert ranks.origin["local_rank"] == "RANK, as LOCAL_RANK is not set"
    assert ranks.origin["local_world_size"] == "WORLD_SIZE, as LOCAL_WORLD_SIZE is not set"
    assert ranks.origin["node_rank"] == "0, as GROUP_RANK is not set"


@pytest.mark.parametrize(
    ("missing", "found", "named"),
    [
        (("RANK",), "WORLD_SIZE=2, MASTER_ADDR=host", "RANK"),
        (("WORLD_SIZE",), "RANK=1, MASTER_ADDR=host", "WORLD_SIZE"),
        (("MASTER_ADDR",), "RANK=1, WORLD_SIZE=2", "MASTER_ADDR"),
        (("MASTER_PORT",), "RANK=1, WORLD_SIZE=2, MASTER_ADDR=host", "MASTER_PORT"),
        (("RANK", "WORLD_SIZE"), "MASTER_ADDR=host", "RANK, WORLD_SIZE"),
        (("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "RANK=1", "WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_a_half_set_triple_is_an_error_that_names_what_is_missing(missing: tuple[str, ...], found: str, named: str) -> None:
    with pytest.raises(WorldError, match=f"^{found} but not {named}: .*set all, or unset all.*rankwise run script.py$"):
        torchrun.ranks(without(*missing))


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["one", "", "1.0", "$RANK"])
def test_a_value_that_is_no_number_is_an_error_that_shows_it(name: str, value: str) -> None:
    with pytest.raises(WorldError) as caught:
        torchrun.ranks({**QUAD, name: value})
    assert str(caught.value).startswith(f"{name}={value!r} is not a whole number; ")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"RANK": "2"}, "RANK=2 and WORLD_SIZE=2: a rank must be"),
        ({"RANK": "-1"}, "RANK=-1 and WORLD_SIZE=2: a rank must be"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 and WORLD_SIZE=0: a rank must be"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2: a local rank must be"),
        ({"LOCAL_WORLD_SIZE": "1"}, "RANK, as LOCAL_RANK is not set=1 and LOCAL_WORLD_SIZE=1: a local rank must be"),
    ],
)
def test_a_rank_that_is_not_below_its_size_is_an_error_that_shows_both(change: dict[str, str], found: str) -> None:
    with pytest.raises(WorldError) as caught:
        torchrun.ranks({**QUAD, **change})
    assert str(caught.value).startswith(found)
    assert "rankwise run script.py" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3 and WORLD_SIZE=2: a node cannot have more ranks than there are; "),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR= is empty: set it to the host of rank 0"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0: a port is a number from 1 to 65535; set one that is free on rank 0's host"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999: a port is a number from 1 to 65535; "),
    ],
)
def test_an_address_that_cannot_be_one_is_an_error_that_shows_it(change: dict[str, str], message: str) -> None:
    with pytest.raises(WorldError) as caught:
        torchrun.ranks({**QUAD, **change})
    assert str(caught.value).startswith(message)


def test_a_single_process_needs_no_address() -> None:
    assert torchrun.ranks({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "", "MASTER_PORT": "0"}).world_size == 1


def test_a_rank_finds_the_whole_of_torchruns_list() -> None:
    ranks = Ranks(rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1, master_addr="h", master_port=7)
    assert variables_of(ranks, restart=2, max_restarts=3, run_id="abc") == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "8",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "7",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "abc",
    }
