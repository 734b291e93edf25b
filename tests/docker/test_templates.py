"""The templates: YAML held against what the formats know, job scripts run with stand-ins for launchers."""

import copy
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import strict_yaml
import yaml

from lmsrun.sources.command_line import parse_argv

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "docker" / "templates"
ENTRYPOINT = (ROOT / "docker" / "entrypoint.sh").read_text()
JOB_SCRIPTS = sorted(TEMPLATES.glob("*.sh"))
SSHD_PORT = 2222

Document = dict[str, Any]


@pytest.fixture(scope="module")
def job() -> Document:
    return strict_yaml.read((TEMPLATES / "mpijob.yaml").read_text(), strict_yaml.MPI_JOB)


@pytest.fixture(scope="module")
def compose() -> Document:
    return strict_yaml.read((TEMPLATES / "compose.yaml").read_text(), strict_yaml.COMPOSE)


def container(job: Document, role: str) -> Document:
    (only,) = job["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def wrong_kind(job: Document) -> None:
    job["kind"] = "Job"


def misspelt_slots(job: Document) -> None:
    job["spec"]["slotPerWorker"] = job["spec"].pop("slotsPerWorker")


def slots_as_text(job: Document) -> None:
    job["spec"]["slotsPerWorker"] = "4"


def restart_in_the_pod(job: Document) -> None:
    job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["restartPolicy"] = "Never"


def no_image(job: Document) -> None:
    del container(job, "Worker")["image"]


def number_in_arguments(job: Document) -> None:
    container(job, "Launcher")["args"].append(2)


@pytest.mark.parametrize(
    "spoil", [wrong_kind, misspelt_slots, slots_as_text, restart_in_the_pod, no_image, number_in_arguments]
)
def test_a_wrong_job_is_found(job: Document, spoil: Callable[[Document], None]) -> None:
    spoilt = copy.deepcopy(job)
    spoil(spoilt)
    with pytest.raises(strict_yaml.SchemaError):
        strict_yaml.read(yaml.safe_dump(spoilt), strict_yaml.MPI_JOB)


def test_a_key_twice_is_found() -> None:
    with pytest.raises(strict_yaml.SchemaError, match="a key twice"):
        strict_yaml.read("services: {}\nservices: {}\n", strict_yaml.COMPOSE)


@pytest.mark.parametrize("role", ["Launcher", "Worker"])
def test_pods_of_the_job_hold_together(job: Document, role: str) -> None:
    spec = job["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for mount in container(job, role)["volumeMounts"]} == volumes
    assert container(job, role)["securityContext"]["runAsUser"] == 10001
    assert spec["enableServiceLinks"] is False


def test_the_launcher_reaches_the_workers(job: Document) -> None:
    """Port and key of the launcher's ssh are those of the workers' sshd; its options are lmsrun's."""
    keys = job["spec"]["sshAuthMountPath"]
    command, *argv = container(job, "Launcher")["args"]
    given = parse_argv(command, argv)
    assert given.program == ("/data/train.py",)
    assert f"'-p {SSHD_PORT} -i {keys}/id_rsa " in given.values["mpi_args"]
    worker = container(job, "Worker")
    assert worker["args"] == ["sshd"]
    assert worker["env"] == [{"name": "AUTHORIZED_KEYS", "value": f"{keys}/authorized_keys"}]
    assert worker["readinessProbe"]["tcpSocket"]["port"] == SSHD_PORT
    assert f"-p {SSHD_PORT} " in ENTRYPOINT
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == job["spec"]["slotsPerWorker"]


def test_compose_names_what_it_has(compose: Document) -> None:
    services = compose["services"]
    for service in services.values():
        assert set(service.get("depends_on", ())) <= set(services)
        assert {volume.split(":")[0] for volume in service["volumes"]} == set(compose["volumes"])
    command, *argv = services["host-a"]["command"]
    given = parse_argv(command, argv)
    assert "host-b:1" in str(given.values["hosts"])
    assert f"-p {SSHD_PORT} " in given.values["mpi_args"]


def test_no_private_key_gets_into_an_image() -> None:
    """Host keys are made at the first start, a user's come from outside or lie in a volume."""
    for dockerfile in (ROOT / "docker").glob("Dockerfile*"):
        text = dockerfile.read_text()
        assert "ssh-keygen" not in text
        assert "/etc/ssh/ssh_host_*" in text, "openssh-server's package makes host keys; the image drops them"


@pytest.mark.parametrize("script", JOB_SCRIPTS, ids=lambda path: path.name)
def test_directives_come_before_the_first_command(script: Path) -> None:
    """Slurm, LSF and PBS stop looking for their directives at the first command; a later one does nothing."""
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    first = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    mark = re.compile(r"#(SBATCH|BSUB|PBS) (-{1,2}[A-Za-z_-]+)(=| |$)")
    directives = [index for index, line in enumerate(lines) if line.startswith(("#SBATCH", "#BSUB", "#PBS"))]
    assert directives and max(directives) < first
    assert all(mark.match(lines[index]) for index in directives)


def stand_in(folder: Path, name: str) -> None:
    """A program that writes down its arguments."""
    program = folder / name
    program.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" >"{folder}/{name}.argv"\n')
    program.chmod(0o755)


def run_script(script: str, program: str, folder: Path, **environ: str) -> list[str]:
    """What the job script starts ``program`` with, and where, as its batch system would run it."""
    stand_in(folder, program)
    work = folder / "work dir"
    work.mkdir()
    variables = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **environ}
    done = subprocess.run(
        ["bash", str(TEMPLATES / script)],
        cwd=work,
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return (folder / f"{program}.argv").read_text().split("\0")[:-1]


def test_lsf_gives_six_ranks_to_each_compute_node(tmp_path: Path) -> None:
    hosts = "batch5 1 c699c020 42 c699c021 42"
    argv = run_script("lsf.sh", "lmsrun", tmp_path, LSB_MCPU_HOSTS=hosts)
    given = parse_argv(argv[0], argv[1:])
    assert given.values["num_proc"] == 12
    assert argv[argv.index("--hosts") + 1] == "c699c020:6,c699c021:6"
    assert given.program == ("train.py",)


def test_pbs_leaves_all_to_lmsrun(tmp_path: Path) -> None:
    assert run_script("pbs.sh", "lmsrun", tmp_path, PBS_NODEFILE="/x") == ["run", "train.py"]


def test_slurm_starts_a_shim_a_task_and_binds_nothing(tmp_path: Path) -> None:
    argv = run_script("slurm.sh", "srun", tmp_path)
    options = [word for word in argv if word.startswith("--")]
    assert {"--cpu-bind=none", "--mem-bind=none", "--gpu-bind=none", "--kill-on-bad-exit=1"} <= set(options)
    assert argv[argv.index("apptainer") :] == [
        "apptainer", "exec", "--nv", "lmsrun.sif", "lmsrun", "worker", "--", "python", "train.py",
    ]  # fmt: skip


@pytest.mark.parametrize("script", JOB_SCRIPTS, ids=lambda path: path.name)
def test_the_folder_of_the_submission_is_gone(tmp_path: Path, script: Path) -> None:
    """A job whose folder is not there ends, instead of training somewhere else."""
    names = {"slurm.sh": "SLURM_SUBMIT_DIR", "lsf.sh": "LS_SUBCWD", "pbs.sh": "PBS_O_WORKDIR"}
    for program in ("lmsrun", "srun"):
        stand_in(tmp_path, program)
    done = subprocess.run(
        ["bash", str(script)],
        env={
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            names[script.name]: str(tmp_path / "gone"),
        },
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert not list(tmp_path.glob("*.argv"))


def test_the_apptainer_definition_has_known_sections_with_sound_scripts() -> None:
    """Header keys and section names are those of Apptainer's definition files; bodies are shell."""
    header, *sections = re.split(r"^%", (TEMPLATES / "apptainer.def").read_text(), flags=re.MULTILINE)
    keys = dict(line.split(": ", 1) for line in header.splitlines() if line and not line.startswith("#"))
    assert keys == {"Bootstrap": "docker-archive", "From": "lmsrun.tar"}
    bodies = {name: body for name, body in (section.split("\n", 1) for section in sections)}
    assert set(bodies) == {"environment", "runscript", "test"}
    for body in bodies.values():
        subprocess.run(["sh", "-n"], input=body, text=True, check=True)
    assert bodies["runscript"].split() == ["exec", "/usr/local/bin/lmsrun-entrypoint", '"$@"']
