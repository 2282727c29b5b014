"""Ranks of mpirun and srun: their variables become torchrun's."""

import pytest

from plait.errors import CommError
from plait.launchers import RENDEZVOUS_FILE, first_host, rank_variables

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_NODELIST": "n[07-09,11],m5",
}
RANKS = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ADDRESS = {"MASTER_ADDR": "head"}


@pytest.mark.parametrize("environ", [OPEN_MPI, MPICH, SLURM])
def test_a_launchers_variables_become_torchruns(environ: dict[str, str]) -> None:
    assert rank_variables(environ | ADDRESS) == RANKS | {"MASTER_PORT": "29500"}


def test_slurms_first_host_has_rank_0_and_a_step_has_its_port() -> None:
    found = rank_variables(SLURM)
    assert found == RANKS | {"MASTER_ADDR": "n07", "MASTER_PORT": "20019"}
    daemons = SLURM | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    assert rank_variables(daemons | OPEN_MPI) == RANKS | {"MASTER_ADDR": "n07", "MASTER_PORT": "20019"}


@pytest.mark.parametrize(
    ("environ", "one_host"),
    [
        (OPEN_MPI, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}),
        (MPICH, {"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3"}),
        (SLURM, {"SLURM_STEP_NUM_NODES": "1", "SLURM_LOCALID": "3"}),
    ],
)
def test_ranks_of_one_host_meet_in_a_file_and_stay_on_loopback(
    environ: dict[str, str], one_host: dict[str, str]
) -> None:
    found = rank_variables(environ | one_host)
    assert found["LOCAL_WORLD_SIZE"] == "4"
    assert found["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert "MASTER_ADDR" not in found
    again = rank_variables(environ | one_host)
    other = rank_variables(environ | one_host | {"SLURM_JOB_ID": "18", "PMIX_NAMESPACE": "5"})
    assert found[RENDEZVOUS_FILE] == again[RENDEZVOUS_FILE] != other[RENDEZVOUS_FILE]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "2"},  # torchrun under mpirun
        OPEN_MPI | {RENDEZVOUS_FILE: "file"},
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"},  # a batch script
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_torchruns_ranks_single_processes_and_batch_scripts_are_left_alone(environ: dict[str, str]) -> None:
    assert rank_variables(environ) == {}


def test_ranks_that_cannot_meet_or_be_numbered_are_an_error_that_says_what_to_set() -> None:
    with pytest.raises(CommError, match="address of rank 0") as raised:
        rank_variables(OPEN_MPI)
    assert "-x MASTER_ADDR" in str(raised.value)
    with pytest.raises(CommError, match="PMI_SIZE is not a number"):
        rank_variables(MPICH | {"PMI_SIZE": "many"})


@pytest.mark.parametrize(
    ("tasks", "host", "local"),
    [
        ("2(x3),1", "2", "2"),
        ("2(x3),1", "3", "1"),
        ("4", "0", "4"),
        ("2(x999999999)", "7", "2"),
        ("", "0", "1"),
    ],
)
def test_tasks_of_a_host_are_counted_without_a_list_of_all(tasks: str, host: str, local: str) -> None:
    environ = SLURM | ADDRESS | {"SLURM_TASKS_PER_NODE": tasks, "SLURM_NODEID": host}
    assert rank_variables(environ)["LOCAL_WORLD_SIZE"] == local


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NODEID"])
def test_a_variable_of_slurm_that_is_no_number_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(CommError, match=f"{name} is not a number") as raised:
        rank_variables(SLURM | {name: "x"})
    assert f"given   : {name}=x" in str(raised.value)


def test_the_id_of_an_interactive_step_has_ten_digits() -> None:
    assert rank_variables(SLURM | {"SLURM_STEP_ID": "4294967290"})["MASTER_PORT"] == "20011"


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[3,5]", "n3"),
        ("a[01-02]b[4-5],c", "a01b4"),
        ("gpu-[12-15].x", "gpu-12.x"),
    ],
)
def test_the_first_host_of_a_compressed_list(node_list: str, first: str) -> None:
    assert first_host(node_list) == first
