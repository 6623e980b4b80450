"""Which rank does a script think it is, in every place that starts it? rankwise, Lightning, Accelerate and PyTorch-Ignite.

    python stress/truth_table/run.py PYTHON [LIBRARY...]

PYTHON must have the other libraries. Needs root on Debian: it starts Slurm, Grid Engine and ssh hosts one after another, like
the tests in tests/cluster, and lets other tests use the machine in between. Exits with 1 if rankwise is wrong in a place; what
the other libraries do there is printed.
"""

import shutil
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import clusters
from truth import PLACES, SCRIPT, Place, ask

SCRIPTS = Path(__file__).with_name("scripts")
# On each of these hosts, its own name is 127.0.1.1, as Debian installs it. These variables help the other libraries with this.
HELP = {"GLOO_SOCKET_IFNAME": "eth0", "OMPI_MCA_mca_base_env_list": "GLOO_SOCKET_IFNAME"}
AT_ONCE = 3
"""The machine is held for this many places; then others that wait for it may use it."""

LIBRARIES = ["rankwise", "lightning", "lightning, told", "accelerate", "ignite"]


def source(library: str, place: Place) -> str:
    """With `told`, Lightning gets the number of ranks, as its own guide says; the other libraries need no number."""
    told = {"devices": (place.ranks or 4) // place.hosts, "num_nodes": place.hosts} if "told" in library else {}
    return (SCRIPTS / f"{library.split(',')[0]}.py").read_text().replace("TOLD = {}", f"TOLD = {told}")


class Session:
    """Replaces pytest's session, which the code that starts clusters uses to stop them at the end."""

    def __init__(self) -> None:
        self.end = lambda: None

    def addfinalizer(self, end) -> None:
        self.end = end


def measure(library: str, places: list[Place], python: str, folder: Path) -> dict[str, str]:
    """A word for each of these places, which need the same cluster; the cluster is started for this."""
    session, words = Session(), {}
    try:
        if places[0].up in ("slurm", "sge", "hosts"):
            clusters._machine.use(places[0].up, session)
        for place in places:
            there = folder / f"{library.replace(', ', '-')}-{PLACES.index(place)}"
            there.mkdir()
            shutil.copy(SCRIPTS / "answer.py", there)
            if library == "rankwise":
                answer = ask(place, there, SCRIPT)
            else:
                answer = ask(place, there, source(library, place), python, **(HELP if place.hosts > 1 else {}))
            words[place.name] = answer.verdict(place)
            lines = [line for line in answer.text.splitlines() if "Error" in line or "error" in line] or [""]
            print(f"{library:16} {place.name:26} {words[place.name]:40} {lines[-1].strip()[:230]}", flush=True)
    finally:
        session.end()
    return words


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # then clusters are stopped too
    python, libraries = sys.argv[1], sys.argv[2:] or LIBRARIES
    folder = Path(tempfile.mkdtemp(prefix="truth-", dir="/tmp"))
    table: dict[str, dict[str, str]] = {library: {} for library in libraries}
    for library in libraries:
        for up in dict.fromkeys(place.up for place in PLACES):
            places = [place for place in PLACES if place.up == up]
            for first in range(0, len(places), AT_ONCE):
                table[library] |= measure(library, places[first : first + AT_ONCE], python, folder)
    print(f"\nwhat each printed is in {folder}\n\n| place | meant | {' | '.join(libraries)} |")
    print("|---|---|" + "---|" * len(libraries))
    for place in PLACES:
        row = [table[library][place.name] for library in libraries]
        print(f"| {place.name} | {place.ranks or 'an error'} | {' | '.join(row)} |")
    ours = table.get("rankwise", {})
    wrong = [place.name for place in PLACES if ours and ours[place.name] != ("right" if place.ranks else "error")]
    if wrong:
        print(f"WRONG: rankwise in these places: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
