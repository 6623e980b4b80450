"""What launchers really set, copied from real clusters: one mapping per process, with nothing that was not found there.

discover(SLURM_STEP[2])      # the third of four tasks of `srun -N2 --ntasks-per-node=2`

Slurm 22.05, Son of Grid Engine 8.1.9, Open MPI 4.1.4, MPICH 4.0.2. Variables that say nothing about ranks are omitted, except
for a few that mislead.
"""

from __future__ import annotations

Env = dict[str, str]

# --- Slurm

_JOB_OF_TWO = {
    "SLURM_JOB_ID": "3", "SLURM_JOBID": "3", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_CPUS_PER_NODE": "2(x2)", "SLURM_NNODES": "2",
    "SLURM_JOB_NAME": "A b", "SLURM_SUBMIT_DIR": "/root", "SLURM_CONF": "/etc/slurm/slurm.conf",
}  # fmt: skip

SLURM_STEP: list[Env] = [
    {
        **_JOB_OF_TWO,
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "SLURM_NODEID": str(rank // 2),
        "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_GTIDS": "0,1" if rank < 2 else "2,3",
        "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURMD_NODENAME": f"node{1 + rank // 2}",
        "SLURM_LAUNCH_NODE_IPADDR": "10.88.0.254", "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1",
    }
    for rank in range(4)
]  # fmt: skip
"""srun -N2 --ntasks-per-node=2 --gres=gpu:2"""

SLURM_BATCH: Env = {
    **_JOB_OF_TWO, "SLURM_JOB_ID": "5", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0",
    "SLURM_NTASKS": "6", "SLURM_NPROCS": "6", "ENVIRONMENT": "BATCH", "SLURMD_NODENAME": "node1", "CUDA_VISIBLE_DEVICES": "0,1",
}  # fmt: skip
"""sbatch -N2 -n6: the batch shell, on the first node"""

SLURM_BATCH_WRAP: Env = {name: value for name, value in SLURM_BATCH.items() if name not in ("SLURM_NTASKS", "SLURM_NPROCS")}
"""sbatch -N2 --wrap …: no -n, so no NTASKS"""

SLURM_BATCH_ONE: Env = {**SLURM_BATCH_WRAP, "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "16"}
"""sbatch --wrap …: one node, and the number of tasks that its cores could hold"""

SLURM_STEP_IN_BATCH: list[Env] = [{**SLURM_BATCH, **task, "SLURM_NTASKS_PER_NODE": "2"} for task in SLURM_STEP]
"""srun inside sbatch: variables of the batch shell remain, unless the step sets them too"""

SLURM_SALLOC: Env = {
    "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_NNODES": "2", "SLURM_NODELIST": "node[1-2]",
    "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NAME": "interactive",
}  # fmt: skip
"""salloc -N2 -n4: its shell, on the submit host"""

SLURM_INTERACTIVE: Env = {
    **SLURM_SALLOC, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0", "SLURM_GTIDS": "0",
}  # fmt: skip
"""The same if LaunchParameters=use_interactive_step puts this shell on the first node. From slurm.h, not from a cluster."""

SLURM_OVERLAP: Env = {
    **_JOB_OF_TWO, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0", "SLURM_NTASKS": "1",
    "SLURM_NPROCS": "1", "SLURM_NNODES": "1", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "node2", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NTASKS_PER_NODE": "2",
}  # fmt: skip
"""srun --overlap -w node2 -n1, beside a running step"""


def _uneven(rank: int, local_rank: int, node: int, gtids: str) -> Env:
    return {
        **_JOB_OF_TWO, "SLURM_JOB_NUM_NODES": "3", "SLURM_NNODES": "3", "SLURM_NTASKS": "5", "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank), "SLURM_NODEID": str(node), "SLURM_GTIDS": gtids, "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NODELIST": "node[1-3]", "SLURM_STEP_TASKS_PER_NODE": "3,1(x2)",
    }  # fmt: skip


SLURM_UNEVEN: list[Env] = [
    _uneven(0, 0, 0, "0,1,2"), _uneven(1, 1, 0, "0,1,2"), _uneven(2, 2, 0, "0,1,2"), _uneven(3, 0, 1, "3"),
    _uneven(4, 0, 2, "4"),
]  # fmt: skip
"""srun -N3 -n5"""

SLURM_CYCLIC: list[Env] = [
    _uneven(0, 0, 0, "0,3,4"), _uneven(1, 0, 1, "1"), _uneven(2, 0, 2, "2"), _uneven(3, 1, 0, "0,3,4"),
    _uneven(4, 2, 0, "0,3,4"),
]  # fmt: skip
"""srun -N3 -n5 -m cyclic"""

SLURM_ARBITRARY: Env = {
    **_uneven(0, 0, 1, "0,1,3"), "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node[1,3]",
    "SLURM_STEP_TASKS_PER_NODE": "1,3",
}  # fmt: skip
"""srun -m arbitrary with SLURM_HOSTFILE node3,node3,node1,node3: rank 0 is on the second node of the list"""

SLURM_AGENTS: list[Env] = [
    {
        **_uneven(node, 0, node, str(node)),
        "SLURM_NTASKS": "3",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    }
    for node in range(3)
]
"""srun --ntasks-per-node=1 -n3: one agent per node"""

SLURM_ARRAY: Env = {
    **SLURM_BATCH_ONE, "SLURM_JOB_ID": "16", "SLURM_NTASKS": "1", "SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_MAX": "9", "SLURM_ARRAY_TASK_STEP": "3", "SLURM_ARRAY_TASK_COUNT": "3",
}  # fmt: skip
"""sbatch -n1 -a 3-9:3"""

# --- Open MPI


def openmpi(rank: int, size: int, local_rank: int, local_size: int) -> Env:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size), "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size), "OMPI_COMM_WORLD_NODE_RANK": str(local_rank), "OMPI_UNIVERSE_SIZE": "3",
        "OMPI_MCA_orte_num_nodes": "2", "PMIX_RANK": str(rank), "PMIX_NAMESPACE": "162267137", "PMIX_HOSTNAME": "node2",
    }  # fmt: skip


OPENMPI: list[Env] = [openmpi(0, 3, 0, 2), openmpi(1, 3, 1, 2), openmpi(2, 3, 0, 1)]
"""mpirun --host node1:2,node2:1 -np 3"""

OPENMPI_BY_NODE: list[Env] = [openmpi(0, 4, 0, 2), openmpi(1, 4, 0, 2), openmpi(2, 4, 1, 2), openmpi(3, 4, 1, 2)]
"""mpirun --host node1:2,node2:2 --map-by node -np 4: ranks 0 and 2 on node1"""

OPENMPI_IN_SBATCH: list[Env] = [
    *({**SLURM_BATCH, "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", **openmpi(rank, 4, rank, 2)} for rank in (0, 1)),
    *({**SLURM_OVERLAP, "SLURM_STEP_ID": "0", **openmpi(rank, 4, rank - 2, 2)} for rank in (2, 3)),
]
"""mpirun inside sbatch: no step on the batch host; elsewhere a step with one task per node, in which each rank seems to be
alone"""

# --- MPICH


def mpich(rank: int, size: int, local_rank: int, local_size: int) -> Env:
    return {
        "PMI_RANK": str(rank), "PMI_SIZE": str(size), "PMI_FD": "7", "MPI_LOCALRANKID": str(local_rank),
        "MPI_LOCALNRANKS": str(local_size), "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "node1",
    }  # fmt: skip


MPICH: list[Env] = [mpich(0, 3, 0, 2), mpich(1, 3, 1, 2), mpich(2, 3, 0, 1)]
"""mpirun -hosts node1:2,node2:1 -np 3"""

MPICH_ROUND_ROBIN: list[Env] = [mpich(0, 4, 0, 2), mpich(1, 4, 0, 2), mpich(2, 4, 1, 2), mpich(3, 4, 1, 2)]
"""mpirun -hosts node1,node2 -np 4: node1 has 0 and 2, node2 has 1 and 3"""

MPICH_IN_SBATCH: list[Env] = [
    {
        **SLURM_STEP[2 * (rank // 2)], "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_PROCID": str(rank // 2), "SLURM_LOCALID": "0", "SLURM_GTIDS": str(rank // 2), **mpich(rank, 4, rank % 2, 2),
    }
    for rank in range(4)
]  # fmt: skip
"""mpirun inside sbatch: one step over all nodes with one task per node; PROCID is the index of the node"""

# --- SGE

SGE_SCRIPT: Env = {
    "JOB_ID": "2", "JOB_NAME": "job", "QUEUE": "main.q", "NSLOTS": "3", "NHOSTS": "2", "NQUEUES": "1", "PE": "mpi",
    "PE_HOSTFILE": "/var/spool/node2/active_jobs/2.1/pe_hostfile", "RESTARTED": "0", "SGE_TASK_ID": "undefined",
    "SGE_ROOT": "/opt/sge", "SGE_O_HOST": "head", "JOB_SCRIPT": "/var/spool/node2/job_scripts/2", "HOSTNAME": "node2",
}  # fmt: skip
"""qsub -pe mpi 3: the script, on the first of two hosts"""

SGE_ONE_HOST: Env = {**SGE_SCRIPT, "NHOSTS": "1", "PE": "mpi_fill"}
"""qsub -pe mpi_fill 3: three slots on one host"""

SGE_SERIAL: Env = {
    name: value for name, value in {**SGE_SCRIPT, "NHOSTS": "1", "NSLOTS": "1"}.items() if name not in ("PE", "PE_HOSTFILE")
}
"""qsub without a parallel environment"""

SGE_ARRAY: Env = {**SGE_SERIAL, "JOB_ID": "26", "SGE_TASK_ID": "4", "SGE_TASK_FIRST": "2", "SGE_TASK_LAST": "6"}
"""qsub -t 2-6:2"""

SGE_TASK: Env = {
    "JOB_ID": "2", "PE": "mpi", "QUEUE": "main.q", "TMPDIR": "/scratch/2.1.main.q", "JOB_NAME": "petask", "JOB_SCRIPT": "QRSH",
    "NSLOTS": "1", "NHOSTS": "1",
}  # fmt: skip
"""qrsh -inherit node1: the numbers are those of this host"""

OPENMPI_IN_SGE: list[Env] = [
    {**SGE_SCRIPT, **openmpi(0, 3, 0, 2)},
    {**SGE_SCRIPT, **openmpi(1, 3, 1, 2)},
    {**SGE_TASK, "PE_HOSTFILE": SGE_SCRIPT["PE_HOSTFILE"], **openmpi(2, 3, 0, 1)},
]
"""mpirun inside SGE: remote ranks are started by qrsh, and the file in PE_HOSTFILE is only on the first host"""
