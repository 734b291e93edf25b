"""Hosts and launchers on the command line: plans for elsewhere, and every mistake as one line and code 2."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from machines import SPECS, build_root

from launch.cluster.job import Command
from launch.model.errors import JobError
from lmsrun.cli import main
from lmsrun.cluster_run import new_files_dir, written_files

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def dgx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return str(build_root(SPECS["dgx"], tmp_path / "dgx"))


def plan(capsys: Capture, *argv: str, **environ: str) -> dict[str, Any]:
    assert main(["plan", "--json", *argv, "train.py"], {"PATH": "/nowhere", **environ}) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_a_plan_over_hosts_needs_no_launcher_here(dgx: str, capsys: Capture) -> None:
    found = plan(capsys, "--topology", dgx, "--launcher", "srun", "-H", "a:2,b:2")
    assert (found["world_size"], found["launcher"]) == (4, "srun")
    ranks = found["ranks"]
    assert isinstance(ranks, list)
    assert [(rank["rank"], rank["host"], rank["local_rank"]) for rank in ranks] == [
        *((0, "a", 0), (1, "a", 1), (2, "b", 0), (3, "b", 1))
    ]
    assert found["commands"][0][:3] == ["srun", "--nodes=2", "--ntasks=4"]  # type: ignore[index]


def test_a_dry_run_over_hosts_needs_no_launcher_here_either(capsys: Capture) -> None:
    argv = ["run", "--dry-run", "--json", "--launcher", "srun", "-H", "a:1,b:1", "--", "true"]
    assert main(argv, {"PATH": "/nowhere"}) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["commands"][0][0] == "srun"
    assert any("the hosts were not asked, because srun is not in PATH" in line for line in found["warnings"])


@pytest.mark.parametrize(
    ("launcher", "environ", "said"),
    [
        ("srun", {}, "this is not inside a Slurm allocation; try salloc or sbatch (--print-script slurm"),
        ("flux", {}, "this is not inside a Flux job; try flux alloc or flux batch (--print-script flux"),
        ("jsrun", {}, "this is not inside an LSF allocation; try bsub (--print-script lsf"),
        ("srun", {"LSB_JOBID": "7", "LSB_HOSTS": "a b"}, "this is not inside a Slurm allocation"),
    ],
)
def test_a_batch_systems_launcher_is_not_started_outside_of_it(
    tmp_path: Path, dgx: str, capsys: Capture, launcher: str, environ: dict[str, str], said: str
) -> None:
    tool = tmp_path / launcher
    tool.write_text(f"#!/bin/sh\necho none >> '{tmp_path}/started'\n")
    tool.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", **environ}
    words = ("--launcher", launcher, "-np", "1", "--", "true")
    assert main(["run", *words], environ) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"lmsrun: --launcher {launcher}: ") and err.count("\n") == 1
    assert said in err
    assert not (tmp_path / "started").exists()
    assert main(["plan", "--topology", dgx, "--json", *words], environ) == 0
    hosts = ("-H", "a:1,b:1")
    assert main(["run", "--dry-run", "--json", *hosts, *words], environ) == 0
    assert "the hosts were not asked, because this is not inside a" in capsys.readouterr().out


def test_auto_takes_all_slots_of_an_allocation(dgx: str, capsys: Capture) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "3"}
    found = plan(capsys, "--topology", dgx, "--launcher", "srun", **slurm)
    assert found["world_size"] == 6
    by_machine = plan(capsys, "--topology", dgx, "--launcher", "srun", "-H", "n1,n2")
    assert by_machine["world_size"] == 16, "slots that are not given are the machine's GPUs"


LSF = {"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "a 12 b 12"}


@pytest.mark.parametrize("words", [("--launcher", "mpirun"), ("-H", "a,b", "--launcher", "mpirun")])
def test_slots_that_are_cores_give_a_rank_per_gpu(
    dgx: str, tmp_path: Path, capsys: Capture, words: tuple[str, ...]
) -> None:
    (tmp_path / "nodes").write_text("a\n" * 12 + "b\n" * 12)
    for environ in (LSF, {"PBS_JOBID": "5", "PBS_NODEFILE": str(tmp_path / "nodes")}):
        ranks = plan(capsys, "--topology", dgx, *words, **environ)["ranks"]
        assert [rank["host"] for rank in ranks] == ["a"] * 8 + ["b"] * 8
        alike = plan(capsys, "--topology", dgx, *words, "-np", "12", **environ)["ranks"]
        assert [rank["host"] for rank in alike] == ["a"] * 8 + ["b"] * 4
        assert main(["plan", "--topology", dgx, *words, "-np", "17", "t.py"], environ) == 2
        assert "17 ranks do not fit on 2 hosts with 16 slots" in capsys.readouterr().err


def test_slots_that_are_ranks_or_of_the_user_stay(dgx: str, capsys: Capture) -> None:
    words = ("--topology", dgx, "--launcher", "mpirun")
    few = {**LSF, "LSB_MCPU_HOSTS": "a 2 b 2"}
    assert plan(capsys, *words, **few)["world_size"] == 4
    assert plan(capsys, *words, "-H", "a:12", **LSF)["world_size"] == 12
    assert plan(capsys, *words, "--gpus", "none", **LSF)["world_size"] == 24


HOST = "9 ranks for 8 GPUs"
CANNOT = "cannot be used; nothing was started (--no-host-probe tries anyway)"


@pytest.mark.parametrize("command", [("plan",), ("run", "--dry-run"), ("run",)])
def test_more_ranks_than_a_host_has_gpus_are_refused_by_plan_as_by_run(
    dgx: str, tmp_path: Path, capsys: Capture, command: tuple[str, ...]
) -> None:
    tool = tmp_path / "mpirun"
    tool.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    tool.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    words = ("--topology", dgx, "--launcher", "mpirun", "-H", "a:9,b:9", "--", "true")
    assert main([*command, *words], environ) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"lmsrun: a, b  {HOST}; give it fewer, or --oversubscribe\nlmsrun: 2 of 2 hosts {CANNOT}\n"
    )
    here = ("--topology", dgx, "--launcher", "mpirun", "-H", "localhost:9", "--", "true")
    assert main([*command, *here], environ) == 2
    assert f"lmsrun: 1 of 1 host {CANNOT}\n" in capsys.readouterr().err


def test_hosts_that_are_only_assumed_to_be_small_are_planned_with_a_warning(capsys: Capture) -> None:
    found = plan(capsys, "--launcher", "mpirun", "-H", "a:999,b:1")
    assert found["world_size"] == 1000
    assert [one for one in found["warnings"] if one.startswith("a: 999 ranks for ")]


def test_more_ranks_than_gpus_may_be_asked_for(dgx: str, capsys: Capture) -> None:
    words = ("--topology", dgx, "--launcher", "mpirun", "-H", "a:9,b:8")
    assert plan(capsys, *words, "--oversubscribe")["world_size"] == 17
    assert f"a: {HOST}" in plan(capsys, *words, "--no-host-probe")["warnings"]
    assert f"a: {HOST}" in plan(capsys, *words, **{**LSF, "LSB_MCPU_HOSTS": "a 9 b 9"})["warnings"]


@pytest.mark.parametrize(("slots", "ranks"), [(12, 8), (2, 2)])
def test_on_this_host_slots_that_are_cores_give_a_rank_per_gpu(
    dgx: str, capsys: Capture, slots: int, ranks: int
) -> None:
    here = {"LSB_JOBID": "9", "LSB_MCPU_HOSTS": f"localhost {slots}"}
    found = plan(capsys, "--topology", dgx, **here)
    assert (found["launcher"], found["world_size"]) == ("local", ranks)
    assert main(["plan", "--topology", dgx, "-np", "9", "t.py"], here) == 2
    assert f"9 ranks do not fit on 1 host with {ranks} slots" in capsys.readouterr().err


def test_gpus_that_a_given_variable_shows_are_the_slots(
    dgx: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lmsrun.toml").write_text('forward = ["CUDA_VISIBLE_DEVICES=2,3"]\n')
    words = ("--topology", dgx, "--launcher", "srun", "-H", "a,b")
    assert [rank["gpu"]["index"] for rank in plan(capsys, *words)["ranks"]] == [2, 3, 2, 3]
    alone = plan(capsys, "--topology", dgx, "--launcher", "local", "-np", "auto")
    assert [rank["gpu"]["index"] for rank in alone["ranks"]] == [2, 3]
    assert main(["--print-script", "slurm", "--topology", dgx, "-H", "a,b", "--", "t.py"], {}) == 0
    assert "#SBATCH --ntasks-per-node=2\n#SBATCH --gpus-per-node=2\n" in capsys.readouterr().out


def test_a_hostfile_and_a_choice_from_it(dgx: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "hosts").write_text("a slots=4\nb:2 # the small one\n")
    words = ("--topology", dgx, "--launcher", "mpirun", "--hostfile", "hosts")
    assert plan(capsys, *words)["world_size"] == 6
    assert plan(capsys, *words, "-H", "b")["world_size"] == 2


def test_local_stays_local_in_an_allocation(dgx: str, capsys: Capture) -> None:
    found = plan(capsys, "--topology", dgx, "--launcher", "local", "-np", "2", SLURM_JOB_NODELIST="n[1-2]")
    assert (found["world_size"], found["launcher"]) == (2, "local")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-H", "a:1,a:1"], "names host 'a' twice"),
        (["-H", "a:0,b"], "zero slots"),
        (
            ["-H", "localhost.:1,127.0.0.1:1"],
            "-H names this host twice, as 'localhost.' and '127.0.0.1'",
        ),
        (["-H", "a;id"], "is not a host name"),
        (["-H", "-oProxyCommand=id"], "is not a host name"),
        (["-H", "a:2,b:2", "-np", "9"], "9 ranks do not fit on 2 hosts with 4 slots"),
        (["--walltime", "00:00:00"], "--walltime is '00:00:00'; needed a time above zero, such as 01:30:00"),
        (["--hostfile", "missing"], "cannot read the hostfile missing: No such file"),
        (["--launcher", "local", "-H", "a,b"], "this host only"),
        (["--launcher", "mpirum"], "needed one of auto, local, mpirun"),
        (["--mpi-args", "'"], "words as a shell would take them"),
        (["--print-script", "sge"], "one of slurm, lsf, pbs"),
        (["--print-script", "slurm", "-H", "a:4,b:2"], "hosts have 2, 4 slots"),
        (["-H", "a,b", "--launcher", "srun"], "srun is not in PATH"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(
    dgx: str, capsys: Capture, argv: list[str], said: str
) -> None:
    assert main(["run", "--topology", dgx, *argv, "--", "true"], {"PATH": "/nowhere"}) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("lmsrun: ") and said in lines[0], lines


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("a b", ": 'a b' is not a host name"),
        ("a,A", " names host 'A' twice"),
        ("localhost,127.0.0.1", " names this host twice"),
        ("c", ": host 'c' is not in LSF job 9; it has a, b"),
        ("a:13", ": host 'a' was given 13 slots; LSF job 9 has 12 there"),
    ],
)
def test_a_mistake_in_hosts_names_where_they_stand(
    dgx: str, tmp_path: Path, capsys: Capture, hosts: str, said: str
) -> None:
    words = ["plan", "--topology", dgx, "--launcher", "mpirun"]
    environ = LSF if "not in" in said or "given" in said else {}
    assert main([*words, "t.py"], {**environ, "LMSRUN_HOSTS": hosts}) == 2
    assert capsys.readouterr().err.startswith(f"lmsrun: LMSRUN_HOSTS{said}")
    (tmp_path / "lmsrun.toml").write_text(f"hosts = {hosts!r}\n")
    assert main([*words, "t.py"], environ) == 2
    assert capsys.readouterr().err.startswith(f"lmsrun: lmsrun.toml: hosts{said}")


@pytest.mark.parametrize("launcher", ["local", "horovodrun", "srun"])
def test_a_rankfile_that_the_launcher_cannot_read_is_refused(
    dgx: str, tmp_path: Path, capsys: Capture, launcher: str
) -> None:
    for command in ("plan", "run"):
        argv = [command, "--topology", dgx, "-np", "2", "--launcher", launcher, "--rankfile-out", "ranks"]
        assert main([*argv, "--", "/bin/sh"], {"PATH": "/nowhere"}) == 2
        assert capsys.readouterr().err == (
            f"lmsrun: --rankfile-out means nothing to the launcher {launcher}, "
            "only to mpirun, jsrun, ddlrun; try --launcher mpirun, or leave it out\n"
        )
    assert not (tmp_path / "ranks").exists()


def test_an_option_that_the_launcher_does_not_read_is_a_warning(dgx: str, capsys: Capture) -> None:
    words = ("--topology", dgx, "-np", "2")
    given = ("--timeline", "t.json", "--mpi-args", "x", "--controller", "mpi", "--mpirun", "/opt/none")
    read = {
        "local": (),
        "mpirun": ("--mpi-args", "--mpirun"),
        "horovodrun": ("--timeline", "--mpi-args", "--controller"),
    }
    for launcher, names in read.items():
        found = plan(capsys, *words, "--launcher", launcher, *given)
        warned = {line.partition(" ")[0] for line in found["warnings"] if "means nothing" in line}  # type: ignore[attr-defined]
        assert warned == {*given[::2]} - {*names}, launcher


def test_a_period_of_no_look_is_a_warning(dgx: str, capsys: Capture) -> None:
    words = ("--topology", dgx, "-np", "2", "--period", "5")
    said = "--period means nothing without --live or --metrics FILE; it is left out"
    assert said in plan(capsys, *words)["warnings"]
    assert said not in plan(capsys, *words, "--live")["warnings"]


def test_a_plan_over_hosts_has_a_column_of_hosts(dgx: str, capsys: Capture) -> None:
    words = ["plan", "--topology", dgx, "--launcher", "srun", "-H", "a:6,node-b:6", "train.py"]
    assert main(words, {"PATH": "/nowhere"}) == 0
    lines = capsys.readouterr().out.splitlines()
    (head,) = (number for number, line in enumerate(lines) if line.startswith("rank  host    GPU "))
    assert lines[head + 2].startswith("0     a       0: ")
    assert lines[head + 13].startswith("11    node-b  5: ")


def test_ibms_command_line_is_a_run(dgx: str, capsys: Capture) -> None:
    argv = ["ddlrun", "--accelerators", "2", "--mode", "p", "--gpus", "3", "python", "t.py"]
    assert main(argv, {"PATH": "/nowhere"}) == 2
    assert "ddlrun has no option '--gpus'" in capsys.readouterr().err


def test_ibms_command_line_has_help_that_names_its_options(capsys: Capture) -> None:
    for argv in (["ddlrun", "--help"], ["ddlrun", "-H", "a", "-h"], ["plan", "ddlrun", "--help"]):
        assert main(argv, {}) == 0
        assert capsys.readouterr().out.startswith("usage: lmsrun")
    assert main(["ddlrun", "--help"], {}) == 0
    text = capsys.readouterr().out
    assert "  -H, --host H1,H2            hosts of the job\n" in text
    assert "  -m, --mode MODE             not used: DDL's reduction mode" in text
    assert "--allow-run-as-root " in text and max(map(len, text.splitlines())) <= 104


@pytest.mark.parametrize(
    "words", ["plan ddlrun", "ddlrun --dry-run", "--dry-run ddlrun", "run --dry-run ddlrun"]
)
def test_ibms_command_line_can_be_planned(dgx: str, capsys: Capture, words: str) -> None:
    line = "--accelerators 2 -H a,b --mode p --allow-run-as-root python t.py -H x"
    environ = {"PATH": "/nowhere", "LMSRUN_TOPOLOGY": dgx, "LMSRUN_LAUNCHER": "mpirun"}
    assert main([*words.split(), *line.split()], environ) == 0
    out, err = capsys.readouterr()
    assert err == "lmsrun: ddlrun --mode p: DDL's reduction mode has no meaning without DDL\n"
    assert "mpirun --allow-run-as-root -np 4 -H a:2,b:2 " in out
    assert out.rstrip().endswith("worker -- python t.py -H x")


@pytest.mark.parametrize(
    ("confirm", "words", "is_given"),
    [("1", (), True), ("0", (), False), ("true", (), False), ("1", ("--no-allow-run-as-root",), False)],
)
def test_open_mpis_own_consent_for_root_is_ours(
    dgx: str, capsys: Capture, confirm: str, words: tuple[str, ...], is_given: bool
) -> None:
    consent = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": confirm}
    for launcher in (("mpirun",), ("horovodrun", "--controller", "mpi"), ("ddlrun",)):
        found = plan(capsys, "--topology", dgx, "-H", "a,b", "--launcher", *launcher, *words, **consent)
        assert ("--allow-run-as-root" in " ".join(found["commands"][0])) == is_given, launcher


def test_ibms_accelerators_count_for_a_hostfile(dgx: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "f").write_text("a slots=2\nb\n")
    environ = {"PATH": "/nowhere", "LMSRUN_TOPOLOGY": dgx, "LMSRUN_LAUNCHER": "mpirun"}
    words = ["plan", "ddlrun", "--hostfile", "f", "--accelerators"]
    assert main([*words, "1", "t.py"], environ) == 0
    assert "-np 2 -H a:1,b:1 " in capsys.readouterr().out
    assert main([*words, "4", "t.py"], environ) == 2
    assert capsys.readouterr().err == "lmsrun: --hosts: host 'a' was given 4 slots; f has 2 there\n"


def test_a_program_called_ddlrun_goes_behind_two_dashes(dgx: str, capsys: Capture) -> None:
    assert main(["plan", "--topology", dgx, "-np", "1", "--", "ddlrun", "-H", "a"], {}) == 0
    assert capsys.readouterr().out.rstrip().endswith("worker -- ddlrun -H a")


def test_a_batch_script_repeats_the_options(dgx: str, capsys: Capture) -> None:
    argv = [
        "--print-script",
        "slurm",
        "--topology",
        dgx,
        "-np",
        "16",
        "--numa",
        "strict",
        "-x",
        "A=b c",
        "--",
        "t.py",
        "$x",
    ]
    assert main(argv, {"PATH": "/nowhere"}) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in script
    assert script.endswith("exec lmsrun run --num-proc 16 --numa strict --forward A -- t.py '$x'\n")
    assert "export A='b c'\n" in script


@pytest.mark.parametrize("system", ["pbs", "slurm"])
def test_a_batch_script_names_what_it_inherits_and_holds_no_value_of_it(
    dgx: str, capsys: Capture, system: str
) -> None:
    environ = {
        **{"PATH": "/nowhere", "LMS_POLICY": "hidden", "WANDB_API_KEY": "hidden", "HF_TOKEN": "hidden"},
        **{"LMSRUN_NUMA": "strict", "LMSRUN_PRINT_SCRIPT": system, "LMSRUN_FORWARD": "A=b,HF_TOKEN,C"},
    }
    assert main(["-x", "A=b", "-x", "HF_TOKEN", "-x", "C", "--topology", dgx, "t.py"], environ) == 0
    script, said = capsys.readouterr()
    names = ("HF_TOKEN", "LMSRUN_NUMA", "LMS_POLICY", "PATH")
    assert f"# From the shell that hands this in: {', '.join(names)}\n" in script
    assert (f"#PBS -v {','.join(names)}\n" in script) is (system == "pbs")
    assert "hidden" not in script and "WANDB" not in script and "export A=b\n" in script
    assert "warning: -x C: C is not set here" in said


def test_a_batch_job_does_what_the_script_says_whatever_was_exported(
    dgx: str, capsys: Capture, tmp_path: Path
) -> None:
    exported = {"LMSRUN_PRINT_SCRIPT": "slurm", "LMSRUN_HOSTS": "a,b", "LMSRUN_NUMA": "strict"}
    assert main(["--topology", dgx, "t.py"], {"PATH": "/nowhere", **exported}) == 0
    script = capsys.readouterr().out
    (tmp_path / "lmsrun").write_text("#!/bin/sh\nenv\n")
    (tmp_path / "lmsrun").chmod(0o755)
    # PATH stands in the script as it was here; the job's lmsrun is this one.
    mine = re.sub(r"(?m)^export PATH=.*$", f"export PATH={tmp_path}:/usr/bin:/bin", script)
    environ = {"PATH": "/usr/bin:/bin", **exported}
    done = subprocess.run(["bash"], input=mine, env=environ, capture_output=True, text=True, check=True)
    of_lmsrun = [line for line in done.stdout.splitlines() if line.startswith("LMSRUN_")]
    assert of_lmsrun == ["LMSRUN_NUMA=strict"]


@pytest.mark.parametrize("key", ['hostfile = "h"', 'hosts = ["a", "b"]'])
def test_what_a_file_says_of_a_script_would_count_in_its_job(
    dgx: str, capsys: Capture, tmp_path: Path, key: str
) -> None:
    (tmp_path / "job.toml").write_text(f"{key}\n")
    words = ["--config", str(tmp_path / "job.toml"), "--topology", dgx]
    assert main([*words, "--print-script", "slurm", "t.py"], {"PATH": "/nowhere"}) == 2
    assert "would count in the batch job, too; give it on the command line" in capsys.readouterr().err


def test_a_batch_script_has_what_a_variable_forwards(dgx: str, capsys: Capture) -> None:
    words = ["--print-script", "slurm", "--topology", dgx, "t.py"]
    assert main(words, {"PATH": "/nowhere", "LMSRUN_FORWARD": "A=b"}) == 0
    script = capsys.readouterr().out
    assert "export A=b\n" in script and script.endswith("exec lmsrun run --forward A -- t.py\n")


def test_a_commands_files_lie_in_a_folder_of_its_own_and_go_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    command = Command(("true",), files={str(folder / "hostfile"): "a slots=1\n"})
    with written_files(command):
        assert (folder / "hostfile").read_text() == "a slots=1\n"
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_a_folder_that_is_there_already_is_not_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    command = Command(("true",), files={str(folder / "hostfile"): "a slots=1\n"})
    with pytest.raises(JobError, match="cannot make"), written_files(command):
        raise AssertionError("the job must not start")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-np", "2", "--min-np", "3"), "--min-np 3 is more than -np 2"),
        (("-np", "2", "--max-np", "1"), "-np 2 is more than --max-np 1"),
        (("--min-np", "2", "--max-np", "1"), "--min-np 2 is more than --max-np 1"),
        (
            ("-np", "2", "--min-np", "1", "--max-np", "2"),
            "give --host-discovery-script, or at least",
        ),
        (("--hostfile", "/dev/zero"), "cannot read the hostfile /dev/zero: larger than 16 MiB"),
        (("--config", "/dev/zero"), "cannot read /dev/zero: larger than 16 MiB"),
        (("--lms-config", "/dev/zero"), "cannot read /dev/zero: larger than 16 MiB"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words, "train.py"], {"PATH": "/nowhere"}) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


def test_what_is_written_for_ranks_is_private_and_in_a_folder_with_a_whole_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = new_files_dir({"TMPDIR": "."})
    assert Path(folder).parent == tmp_path
    with written_files(Command(("true",), files={f"{folder}/environment": "secret"})):
        assert Path(folder, "environment").stat().st_mode & 0o777 == 0o600
    assert not Path(folder).exists()
