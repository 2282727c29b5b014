"""Ranks that `mpirun` or `srun` has started: the launcher's variables, translated into torchrun's.

[Note: names of variables]
Read from processes that Open MPI 4.1 and MPICH 4.0 (hydra, which Intel MPI uses too) have started, and from
Slurm's manual of srun. Launchers may start one another: in a Slurm allocation, `mpirun` starts its daemons by
srun, one task per host, and their ranks inherit Slurm's variables of the daemon. So MPI's come first. Only
srun sets the variables of a step: a batch script has SLURM_PROCID=0 too, and is no rank.

[Note: rendezvous without torchrun]
On one host, ranks rendezvous through a file in a private directory, so that no socket but Gloo's or NCCL's is
opened, on loopback. Its name is made of the job's id and of the launcher's process, which no other job has.
A launcher that starts a job again gives it the same name: `comm/rendezvous.py` tells the starts apart.
Between hosts they need the address of rank 0: MASTER_ADDR, or in a Slurm allocation its first host, where
rank 0 is unless the distribution of tasks is arbitrary. The port is then the same on all ranks of a step.
"""

import hashlib
import multiprocessing
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plait.errors import CommError

# Path of a FileStore, which listens on no port; torch's TCPStore listens on every interface even for a
# loopback address.
RENDEZVOUS_FILE = "PLAIT_RENDEZVOUS_FILE"
BEGUN = ".begun"  # suffix of the file that exists when all processes of a job with servers have joined
LAUNCHER_PID = "PLAIT_LAUNCHER_PID"  # of a rank that our launcher has started

_TORCH_PORT = "29500"
_FIRST_SLURM_PORT, _NUM_SLURM_PORTS = 20_000, 8192  # below the ports that systems give out
_JOB_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "SLURM_STEP_ID")
_PROCESSES = ("mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "hydra_pmi_proxy", "slurmstepd")


@dataclass(frozen=True)
class Launcher:
    """The names of a launcher's variables. `requires`: one that only its ranks have."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    requires: str


LAUNCHERS = (  # in order of precedence
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        requires="OMPI_COMM_WORLD_RANK",
    ),
    Launcher(
        "MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", requires="MPI_LOCALRANKID"
    ),
    Launcher(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_TASKS_PER_NODE",
        requires="SLURM_STEP_ID",
    ),
)


def adopt_ranks() -> bool:
    """Return whether this process is a rank of torchrun, of our launcher, or of `mpirun` or `srun`, whose
    variables become torchrun's in this process. Raises CommError."""
    variables = rank_variables(os.environ)
    if RENDEZVOUS_FILE in variables:
        make_private(Path(variables[RENDEZVOUS_FILE]).parent)
    os.environ.update(variables)
    return "WORLD_SIZE" in os.environ


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables of a rank that `mpirun` or `srun` has started as one of several; nothing in
    any other process. Raises CommError if the ranks have no way to find each other."""
    if environ.keys() & {"RANK", "WORLD_SIZE", RENDEZVOUS_FILE}:
        return {}
    for launcher in LAUNCHERS:
        if launcher.rank in environ and launcher.requires in environ:
            break
    else:
        return {}
    rank, local_rank = (read_number(environ, name) for name in (launcher.rank, launcher.local_rank))
    size, local_size = _sizes(environ, launcher)
    if size == 1:
        return {}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        **_meeting_point(environ, launcher, is_one_host=local_size == size),
    }


def loopback_sockets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep Gloo and NCCL on the loopback interface, but not those already set."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: loopback for name in names if name not in environ}


def process_identity(pid: int) -> str:
    """Return host, id and start time of a process: no other process ever has the same."""
    return f"{socket.gethostname()} {pid} {start_time(pid)}"


def start_time(pid: int) -> str:
    """Return when a process has started, in the kernel's unit; "" if it has ended, or cannot be seen."""
    return _process(pid)[1]


def has_ended(pid: int, started: str) -> bool:
    """Return whether the process with this start time has ended; False where no process can be seen."""
    return bool(started) and start_time(pid) != started


def missing_semaphores(number: int) -> str:
    """Return why so many semaphores of processes, files in /dev/shm, cannot be created; "" if they can."""
    context = multiprocessing.get_context("fork")  # which unlinks them at once
    try:
        kept = [context.Semaphore() for _ in range(number)]
    except OSError as error:
        return f"/dev/shm: {error.strerror}"
    del kept
    return ""


def private_folder() -> Path:
    """Return this user's directory for temporary files of jobs, which may not exist yet."""
    return Path(tempfile.gettempdir()) / f"plait-{os.getuid()}"


def _sizes(environ: Mapping[str, str], launcher: Launcher) -> tuple[int, int]:
    """Return the number of ranks, and of those on this host."""
    if launcher.name != "Slurm":
        return read_number(environ, launcher.size), read_number(environ, launcher.local_size)
    size = read_number(
        environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else launcher.size
    )
    if environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES")) == "1":
        return size, size
    # "2(x3),1": two tasks on each of three hosts, then one
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get(launcher.local_size, ""))
    host = read_number(environ, "SLURM_NODEID", "0")
    for tasks, repeats in re.findall(r"(\d{1,9})(?:\(x(\d{1,9})\))?", text):
        host -= int(repeats or 1)
        if host < 0:
            return size, int(tasks)
    return size, 1


def _meeting_point(environ: Mapping[str, str], launcher: Launcher, *, is_one_host: bool) -> dict[str, str]:
    """Return the variables of the rendezvous. See [Note: rendezvous without torchrun]."""
    if "MASTER_ADDR" in environ:
        return {"MASTER_PORT": environ.get("MASTER_PORT", _TORCH_PORT)}
    if is_one_host:
        path = private_folder() / f"ranks-{_job_key(environ, launcher)}"
        return {RENDEZVOUS_FILE: str(path), **loopback_sockets(environ)}
    hosts = environ.get("SLURM_STEP_NODELIST") if launcher.name == "Slurm" else None
    hosts = hosts or environ.get("SLURM_JOB_NODELIST")
    if not hosts:
        raise CommError(
            f"{launcher.name} does not tell ranks of several hosts the address of rank 0",
            given="neither MASTER_ADDR nor SLURM_JOB_NODELIST",
            expected="MASTER_ADDR, and MASTER_PORT if it is not 29500",
            hint="mpirun -x MASTER_ADDR=HOST (Open MPI), mpiexec -genv MASTER_ADDR HOST (MPICH)",
        )
    step = sum(read_number(environ, name, "0", digits=10) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = environ.get("MASTER_PORT", str(_FIRST_SLURM_PORT + step % _NUM_SLURM_PORTS))
    return {"MASTER_ADDR": first_host(hosts), "MASTER_PORT": port}


def first_host(node_list: str) -> str:
    """Return the first host of Slurm's compressed list, for example n01 of `n[01-03,7],m5`."""
    first = re.split(r",(?![^\[]*\])", node_list)[0]
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first)


def _job_key(environ: Mapping[str, str], launcher: Launcher) -> str:
    """Return a name that all ranks of this job on this host have, and no other job."""
    ids = [f"{name}={environ[name]}" for name in _JOB_IDS if name in environ]
    text = "\n".join([launcher.name, *ids, _launcher_process() or str(os.getppid())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _launcher_process() -> str:
    """Return the identity of the nearest ancestor that is a launcher; "" where it cannot be found."""
    pid = os.getppid()
    while pid > 1:
        name, _, parent = _process(pid)
        if name in _PROCESSES:
            return process_identity(pid)
        pid = parent
    return ""


def _process(pid: int) -> tuple[str, str, int]:
    """Return name, start time and parent of a process; the parent is 0 if it has ended, or without /proc."""
    try:
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return "", "", 0
    fields = after.split()
    if fields[0] in "ZX":
        return "", "", 0
    return before.partition("(")[2], fields[19], int(fields[1])


def make_private(folder: Path) -> None:
    """Create a directory that only this user can write to. Raises CommError if it is another's."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CommError(
            "the directory for the rendezvous of this host's ranks is not private",
            given=f"{folder}, of user {status.st_uid}, mode {status.st_mode & 0o777:o}",
            expected="a directory that only this user can write to",
            hint="TMPDIR, or MASTER_ADDR and MASTER_PORT",
        )


def read_number(environ: Mapping[str, str], name: str, default: str = "", *, digits: int = 9) -> int:
    """Return a variable that launchers set. Raises CommError."""
    text = environ.get(name, default)
    if not re.fullmatch(f"[0-9]{{1,{digits}}}", text):
        raise CommError(
            f"{name} is not a number",
            given=f"{name}={text}",
            expected="a number, as launchers set it",
            hint="start with torchrun",
        )
    return int(text)
