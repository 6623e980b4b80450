"""Which `mpirun` is installed: those of Open MPI and MPICH have different options."""

from __future__ import annotations

from rankwise.errors import ConfigError
from rankwise.schedulers.job import call

_MISSING = "install Open MPI or MPICH, or load the module of your site first: module load openmpi"


def installed() -> str:
    """`openmpi` or `mpich`, from `mpirun --version`. Raises ConfigError if it is neither, or if there is no mpirun."""
    done = call(["mpirun", "--version"], _MISSING)
    return flavour(f"{done.stdout}\n{done.stderr}")


def flavour(version: str) -> str:
    """The same from the output of `mpirun --version`. Raises ConfigError."""
    if "Open MPI" in version or "OpenRTE" in version or "PRRTE" in version:
        return "openmpi"
    if "HYDRA" in version or "MPICH" in version or "Intel(R) MPI" in version:
        return "mpich"
    said = next((line.strip() for line in version.splitlines() if line.strip()), "nothing")
    raise ConfigError(f"--on mpi: `mpirun --version` says {said!r}, neither Open MPI nor MPICH; put one of them on PATH")
