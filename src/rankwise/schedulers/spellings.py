"""How other launchers spell the options of `rankwise run`; launch/foreign_options.py uses it.

SPELLINGS["--ntasks"]      # (1, "--nproc {0}"): one value, which becomes that of --nproc
"""

from __future__ import annotations

COMMANDS = ("torchrun", "horovodrun", "mpirun", "mpiexec", "srun")
MODULES = ("torch.distributed.launch", "torch.distributed.run")
"""How a command line of another launcher begins: with a command, or with a module after `python -m`."""

SETS_VARIABLES = {"-x": "{0}", "--mixed-precision": "ACCELERATE_MIXED_PRECISION={0}"}
"""Options whose value may set a variable of the ranks (`-x NCCL_DEBUG=INFO`)."""

SPELLINGS: dict[str, tuple[int, str]] = {
    # torch.distributed.launch, torchrun
    "--use-env": (0, ""),  # rankwise always sets the variables
    "--local-rank": (1, ""),
    "--standalone": (0, ""),
    "--rdzv-backend": (1, ""),
    "--rdzv-id": (1, ""),
    "--rdzv-conf": (1, ""),
    "--rdzv-endpoint": (1, "--master-addr {host} --master-port {port}"),
    "--log-dir": (1, "--run-dir {0}"),
    "--redirects": (1, ""),
    "--monitor-interval": (1, ""),
    "--max-restarts": (1, "--max-restarts {0}"),
    # mpirun, horovodrun
    "-np": (1, "--nproc {each}"),
    "--np": (1, "--nproc {each}"),
    "-n": (1, "--nproc {each}"),
    "--num-proc": (1, "--nproc {each}"),
    "-x": (1, ""),  # ranks get the environment of the command, on other hosts too
    "-bind-to": (1, ""),
    "--bind-to": (1, ""),
    "-map-by": (1, ""),
    "--map-by": (1, ""),
    "-mca": (2, ""),
    "--mca": (2, ""),
    "--oversubscribe": (0, ""),
    "--allow-run-as-root": (0, ""),
    "--tag-output": (0, "--tee all"),
    "--gloo": (0, ""),
    "--mpi": (0, ""),
    "--start-timeout": (1, "--join-timeout {0}"),
    # srun, sbatch
    "-N": (1, "--nodes {0}"),
    "--ntasks-per-node": (1, "--nproc {0}"),
    "--ntasks": (1, "--nproc {each}"),
    "--gres": (1, "--gpus-per-node {gres}"),
    "-J": (1, "--name {0}"),
    "--job-name": (1, "--name {0}"),
    # qsub
    "-hard": (0, ""),
    "-cwd": (0, ""),
    "-V": (0, ""),
    "-notify": (0, ""),
    "-pe": (2, "--pe {0} --slots {1}"),
    # accelerate launch
    "--num-processes": (1, "--nproc {each}"),
    "--num-machines": (1, "--nodes {0}"),
    "--machine-rank": (1, "--node-rank {0}"),
    "--main-process-ip": (1, "--master-addr {0}"),
    "--main-process-port": (1, "--master-port {0}"),
    "--multi-gpu": (0, ""),
    "--mixed-precision": (1, ""),
    # a script's own Slurm mode
    "-slurm": (0, "--on slurm"),
    "-slurm-nnodes": (1, "--nodes {0}"),
    "-slurm-ngpus": (1, "--gpus-per-node {0}"),
    "-slurm-partition": (1, "--partition {0}"),
    "-slurm-nodelist": (1, "--nodelist {0}"),
    "-slurm-timeout": (1, "--time {0}"),
    "-gpus": (1, "--gpus {0}"),
}
"""By spelling (with `-` for `_`): how many values the option takes, and the same option here; empty if none is needed.
`{each}`: the value is the total number of ranks, and the option here the number on each node."""
