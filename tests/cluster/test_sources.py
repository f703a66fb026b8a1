"""The table of launchers: each row by the variables that its launcher sets, and by wrong ones."""

from __future__ import annotations

import pytest

from zcactor.cluster.sources import OWN, SOURCES, Spot, decide, explain

SLURM = {
    "SLURM_PROCID": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_JOB_ID": "17", "SLURM_STEP_NUM_NODES": "4",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "812345", "OMPI_MCA_orte_precondition_transports": "a1-b2",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3", "PMI_FD": "7", "MPI_LOCALNRANKS": "3"}
GROUP = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "4", "LWS_LEADER_ADDRESS": "lws-0.lws.default"}


@pytest.mark.parametrize(
    ("environ", "source", "spot"),
    [
        ({}, "no launcher", Spot(0, 1, "alone")),
        ({"ZCACTOR_RANK": "", "PATH": "/bin"}, "no launcher", Spot(0, 1, "alone")),
        ({"ZCACTOR_RANK": "0", "ZCACTOR_SIZE": "1"}, "own variables", Spot(0, 1, "alone")),
        (
            {"ZCACTOR_RANK": "1", "ZCACTOR_SIZE": "2", "ZCACTOR_HEAD": "n1"},
            "own variables", Spot(1, 2, "name", "n1", None, "n1"),
        ),
        (
            {"ZCACTOR_RANK": "1", "ZCACTOR_SIZE": "2", "ZCACTOR_HEAD": "n1:7000", "ZCACTOR_RUN": "a run"},
            "own variables", Spot(1, 2, "name", "n1", 7000, "a run"),
        ),
        (
            {"ZCACTOR_RANK": "1", "ZCACTOR_SIZE": "2", "ZCACTOR_HEAD": "[::1]:7000"},
            "own variables", Spot(1, 2, "name", "::1", 7000, "[::1]:7000"),
        ),
        (
            {"ZCACTOR_RANK": "1", "ZCACTOR_SIZE": "2", "ZCACTOR_HEAD": "[fd00::1]"},
            "own variables", Spot(1, 2, "name", "fd00::1", None, "[fd00::1]"),
        ),
        (
            {"ZCACTOR_RANK": "1", "ZCACTOR_SIZE": "2", "ZCACTOR_RUN": "r"},
            "own variables", Spot(1, 2, "folder", run="r"),
        ),
        (GROUP, "LeaderWorkerSet", Spot(1, 4, "name", "lws-0.lws.default", run="lws-0.lws.default")),
        (
            {"JOB_COMPLETION_INDEX": "3", "ZCACTOR_SIZE": "4", "ZCACTOR_HEAD": "job-0.job", "ZCACTOR_RUN": "job"},
            "Indexed Job", Spot(3, 4, "name", "job-0.job", None, "job"),
        ),
        (SLURM, "Slurm step", Spot(2, 4, "nodes", "n[1-4]", run="17.0")),
        (
            {**SLURM, "SLURM_STEP_NUM_NODES": "1"},
            "Slurm step", Spot(2, 4, "nodes", "n[1-4]", run="17.0", one_host=True),
        ),
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, "Slurm step", Spot(0, 1, "alone")),
        (OPEN_MPI, "Open MPI", Spot(1, 4, "folder", run="812345/a1-b2", one_host=True)),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "Open MPI", Spot(1, 4, "folder", run="812345/a1-b2")),
        (
            {"PMIX_RANK": "0", "PMIX_SIZE": "2", "PMIX_NAMESPACE": "prterun-n1-9@1"},
            "PMIx", Spot(0, 2, "folder", run="prterun-n1-9@1"),
        ),
        (MPICH, "MPICH", Spot(1, 3, "launcher", "7", one_host=True)),
        ({**MPICH, "PMI_SIZE": "4"}, "MPICH", Spot(1, 4, "launcher", "7")),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "9"}, "PMI-1", Spot(0, 2, "launcher", "9")),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "no launcher", Spot(0, 1, "alone")),
        # mpiexec and mpirun within a job, whose daemons are a step; and srun --mpi=pmix, --mpi=pmi2
        ({**SLURM, **MPICH}, "MPICH", Spot(1, 3, "launcher", "7", one_host=True)),
        ({**SLURM, **OPEN_MPI}, "Open MPI", Spot(1, 4, "folder", run="812345/a1-b2", one_host=True)),
        ({**SLURM, "PMIX_RANK": "2", "PMIX_NAMESPACE": "n"}, "Slurm step", Spot(2, 4, "nodes", "n[1-4]", run="17.0")),
        (
            {**SLURM, "PMI_RANK": "2", "PMI_SIZE": "4", "PMI_FD": "9"},
            "Slurm step", Spot(2, 4, "nodes", "n[1-4]", run="17.0"),
        ),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "3"}, "no launcher", Spot(0, 1, "alone")),  # a batch script
    ],
)  # fmt: skip
def test_each_source(environ: dict[str, str], source: str, spot: Spot) -> None:
    decision = decide(environ)
    assert (decision.source, decision.spot) == (source, spot)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"ZCACTOR_RANK": "two", "ZCACTOR_SIZE": "4"}, "own variables: ZCACTOR_RANK is 'two': it must be a number"),
        ({"ZCACTOR_RANK": "-1", "ZCACTOR_SIZE": "4"}, "ZCACTOR_RANK is '-1'"),
        ({"ZCACTOR_RANK": "٣", "ZCACTOR_SIZE": "4"}, "ZCACTOR_RANK is '٣'"),
        ({"ZCACTOR_RANK": "4", "ZCACTOR_SIZE": "4"}, "ZCACTOR_RANK is 4 and ZCACTOR_SIZE is 4: ranks go from 0 to 3"),
        ({"ZCACTOR_RANK": "0"}, "ZCACTOR_SIZE is not set"),
        ({"ZCACTOR_RANK": "0", "ZCACTOR_SIZE": "0"}, "ZCACTOR_SIZE is '0': it must be a number, at least 1"),
        ({"ZCACTOR_RANK": "0", "ZCACTOR_SIZE": "2"}, "set ZCACTOR_HEAD to host or host:port of rank 0"),
        ({"ZCACTOR_RANK": "0", "ZCACTOR_SIZE": "2", "ZCACTOR_HEAD": "n1:"}, "the port is missing"),
        ({"ZCACTOR_RANK": "0", "ZCACTOR_SIZE": "2", "ZCACTOR_HEAD": ":7"}, "ZCACTOR_HEAD is ':7'"),
        ({"ZCACTOR_RANK": "0", "ZCACTOR_SIZE": "2", "ZCACTOR_HEAD": "n1:70000"}, "ZCACTOR_HEAD is 'n1:70000'"),
        ({"ZCACTOR_RANK": "0", "ZCACTOR_SIZE": "2", "ZCACTOR_HEAD": "::1"}, "an IPv6 address in brackets"),
        ({**GROUP, "LWS_LEADER_ADDRESS": ""}, "LeaderWorkerSet: LWS_LEADER_ADDRESS is not set"),
        ({"JOB_COMPLETION_INDEX": "0", "ZCACTOR_SIZE": "2"}, "Indexed Job: ZCACTOR_HEAD is not set"),
        ({**SLURM, "SLURM_PROCID": "4"}, "Slurm step: SLURM_PROCID is 4 and SLURM_STEP_NUM_TASKS is 4"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "x"}, "Open MPI: OMPI_COMM_WORLD_SIZE is 'x'"),
        ({"PMIX_RANK": "0"}, "PMIx: PMIX_SIZE is not set"),
        ({"PMIX_RANK": "0", "PMIX_SIZE": "2"}, "PMIX_NAMESPACE is not set"),
        ({**MPICH, "PMI_FD": "seven"}, "MPICH: PMI_FD is 'seven'"),
    ],
)
def test_what_no_launcher_sets(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match="^") as raised:
        decide(environ)
    assert message in str(raised.value)
    assert any(message in line for line in explain(environ)), explain(environ)


def test_the_first_of_two_that_disagree_decides() -> None:
    both = {**SLURM, **OPEN_MPI}
    assert decide(both).source == "Open MPI"
    assert [reading.source.name for reading in decide(both).readings] == ["Open MPI", "Slurm step", "PMIx"]
    lines = explain(both)
    assert lines[-1].endswith("Open MPI: rank 1 of 4, the head is found by a file in a shared folder")
    assert any(line.startswith("Slurm step") and "rank 2 of 4" in line for line in lines)
    assert "They disagree, and the first one that is there decides." in lines


def test_two_that_agree() -> None:
    lines = explain({**SLURM, **OPEN_MPI, "SLURM_PROCID": "1"})
    assert not any("disagree" in line for line in lines)
    own = {"ZCACTOR_RANK": "0", "ZCACTOR_SIZE": "2", "ZCACTOR_HEAD": "n9"}
    assert decide({**own, **SLURM, **MPICH}).spot == Spot(0, 2, "name", "n9", None, "n9")


def test_a_wrong_source_further_down_is_shown_only() -> None:
    environ = {**SLURM, "PMIX_RANK": "7", "PMIX_SIZE": "4"}
    assert decide(environ).source == "Slurm step"
    (line,) = (line for line in explain(environ) if line.startswith("PMIx"))
    assert "set, but PMIX_RANK is 7 and PMIX_SIZE is 4" in line


def test_the_table_has_a_line_for_each_source() -> None:
    lines = explain({})
    assert [line.split("  ")[0].strip() for line in lines] == [*(source.name for source in SOURCES), "decided by"]
    assert all("not set" in line for line in lines[:-1])
    assert set(OWN) >= {"ZCACTOR_RANK", "ZCACTOR_SIZE", "ZCACTOR_HEAD", "ZCACTOR_RUN"}
