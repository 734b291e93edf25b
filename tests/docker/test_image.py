"""The image for CPUs as its users meet it: real builds, real containers (see ``conftest.py``)."""

import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import container_image
import pytest
import strict_yaml
from container_engine import Containers

pytestmark = [pytest.mark.ranks, pytest.mark.containers]

ROOT = Path(__file__).resolve().parents[2]
DIGITS = "/opt/lmsrun/examples/train_digits.py"
TWO = ("-np", "2", "--oversubscribe")
HOSTILE = "a b\n'c' \"d\";$(id) `id` \\ ü"
PATIENT = 'trap "echo rank $RANK was told; exit 0" TERM; echo rank $RANK is up; while :; do sleep 0.1; done'
NAIVE_USER = ("--user=12345", "--passwd=false", "--cap-drop=all", "--security-opt=no-new-privileges")


def test_two_ranks_learn_the_digits_as_a_plain_user(containers: Containers) -> None:
    """Docker's rules for memory policies hold: CPUs are bound, memory is not, and that is said."""
    done = containers.run(*TWO, DIGITS, options=["--read-only"], timeout_s=600)
    assert done.returncode == 0, done.stderr
    assert "2 ranks hold the same weights" in done.stdout
    assert "memory is not bound, CPUs only" in done.stderr
    assert "--cap-add SYS_NICE" in done.stderr


def test_cap_add_sys_nice_brings_memory_policies(containers: Containers) -> None:
    done = containers.run("-np", "1", "sh", "-c", "id -un", options=["--cap-add=SYS_NICE"])
    assert (done.returncode, done.stdout) == (0, "lmsrun\n"), done.stderr
    assert "bind 0" in done.stderr
    assert "not bound" not in done.stderr


def test_the_exit_code_of_a_program_is_the_container_s(containers: Containers) -> None:
    done = containers.run(*TWO, "sh", "-c", "test $RANK = 1 && exit 7; sleep 100")
    assert done.returncode == 7
    assert done.stderr.endswith("lmsrun: rank 1 on localhost (no GPU) exited with code 7\n")
    assert containers.run("no-such-program.py").returncode == 2


def test_stopping_the_container_tells_the_ranks(containers: Containers) -> None:
    name = f"lmsrun-stop-{uuid.uuid4().hex[:8]}"
    job = subprocess.Popen(
        containers.argv(*TWO, "bash", "-c", PATIENT, options=[f"--name={name}"]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert job.stdout is not None
        assert sorted(job.stdout.readline() for _ in range(2)) == ["[0] rank 0 is up\n", "[1] rank 1 is up\n"]
        containers.podman("stop", "--time=60", name)
        output, errors = job.communicate(timeout=300)
    finally:
        job.kill()
        job.wait()
    assert sorted(output.splitlines()) == ["[0] rank 0 was told", "[1] rank 1 was told"], errors
    assert job.returncode == 0, "ranks that end well when they are told to end the job well"
    assert name not in containers.podman("ps", "--all", "--format={{.Names}}")


def test_orphans_are_reaped(containers: Containers) -> None:
    """The first process of the container is an init; what others leave behind does not stay as zombies."""
    count = "import glob; print(sum(') Z ' in open(p).read() for p in glob.glob('/proc/[0-9]*/stat')))"
    script = f'cat /proc/1/comm; (sleep 0.2 &) ; sleep 1; python3 -c "{count}"'
    assert containers.run("sh", "-c", script).stdout.split() == ["tini", "0"]


def test_the_health_check_works(containers: Containers) -> None:
    (image,) = json.loads(containers.podman("inspect", containers.image))
    kind, *command = image["Healthcheck"]["Test"]
    done = containers.run(*command)
    assert (kind, done.returncode) == ("CMD", 0), done.stderr
    found = {check["name"]: check["status"] for check in json.loads(done.stdout)["checks"]}
    assert (found["TensorFlow"], found["Horovod"], found["MPI"]) == ("ok", "ok", "ok")
    assert containers.run().returncode == 0, "without arguments the container checks itself"


@pytest.mark.parametrize("tmpfs", [True, False], ids=["tmp is a tmpfs", "nothing but shared memory"])
def test_any_user_without_home_on_a_read_only_system(
    containers: Containers, tmp_path: Path, tmpfs: bool
) -> None:
    """OpenShift's way. Options come as variables, with whatever their values hold."""
    tmp_path.chmod(0o777)
    variables = {
        "LMSRUN_NUM_PROC": "2",
        "LMSRUN_OVERSUBSCRIBE": "true",
        "LMSRUN_OUTPUT_DIR": f"/out/{HOSTILE}",
    }
    options = [
        *NAIVE_USER,
        "--read-only",
        f"--read-only-tmpfs={str(tmpfs).lower()}",
        f"--volume={tmp_path}:/out",
    ]
    options += [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    script = 'touch "$HOME/x" && echo "$(id -u) $LOGNAME $HOME" | cut -d. -f1'
    done = containers.run("run", "sh", "-c", script, options=options)
    assert done.returncode == 0, done.stderr
    home = "/tmp/home" if tmpfs else "/dev/shm/home"
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] 12345 uid-12345 {home}" for rank in (0, 1)]
    assert [path.name for path in tmp_path.iterdir()] == [HOSTILE]
    assert (tmp_path / HOSTILE / "latest" / "receipts.json").is_file()


def test_a_misspelt_variable_is_one_line(containers: Containers) -> None:
    done = containers.run("true.py", options=["--env=LMSRUN_NUM_PORC=2"])
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "lmsrun: unknown variable LMSRUN_NUM_PORC; rename it to LMSRUN_NUM_PROC, or unset it"
    ]


def test_variables_of_kubernetes_services_are_no_options(containers: Containers) -> None:
    """Kubernetes gives each pod the addresses of the namespace's Services; one may be called lmsrun-board."""
    names = ("LMSRUN_BOARD_SERVICE_HOST", "LMSRUN_BOARD_PORT", "LMSRUN_BOARD_PORT_80_TCP_ADDR")
    done = containers.run("-np", "1", "true", options=[f"--env={name}=10.0.0.1" for name in names])
    assert done.returncode == 0, done.stderr


def test_root_becomes_the_image_s_user(containers: Containers) -> None:
    done = containers.run("sh", "-c", "id -un; echo $HOME", options=["--user=0"])
    assert done.stdout.split() == ["lmsrun", "/home/lmsrun"], done.stderr


def test_nothing_of_the_build_s_secrets_stays(containers: Containers) -> None:
    """The index that pip was told, and the certificates: neither in a layer nor in the history."""
    words = container_image.read_pip_configuration().split()
    told = containers.podman("history", "--no-trunc", containers.image)
    told += containers.podman("inspect", containers.image)
    assert not [word for word in words if "://" in word and word in told]
    # Where a build mounts a cache, an empty folder stays.
    places = ("/etc/passwd", "/etc/pip.conf", "/root/.cache", "/src", "/wheels")
    found = containers.run(*places, "-type", "f", options=["--user=0", "--entrypoint=find"])
    assert found.stdout.split() == ["/etc/passwd"], found.stderr
    certificates = container_image.find_certificates(os.environ)
    if certificates:
        inside = containers.run("sh", "-c", f"cat {container_image.CERTIFICATES} 2>/dev/null; true").stdout
        assert inside != certificates.read_text()


@contextmanager
def composition(containers: Containers) -> Iterator[tuple[str, str]]:
    """The name of a network and of a volume; removed with all that is in them."""
    name = f"lmsrun-{uuid.uuid4().hex[:8]}"
    containers.podman("network", "create", "--disable-dns", name)
    try:
        yield name, f"{name}-home"
    finally:
        containers.podman("network", "rm", "--force", name)
        containers.podman("volume", "rm", "--force", f"{name}-home")


def service_options(service: dict[str, Any], network: str, home: str) -> list[str]:
    """What ``docker compose`` would make of a service of the template."""
    options = [f"--network={network}", *(f"--cap-add={name}" for name in service.get("cap_add", ()))]
    return options + [f"--volume={home}:{volume.split(':')[1]}" for volume in service["volumes"]]


def test_two_hosts_of_the_compose_file_train_together(containers: Containers) -> None:
    """Two containers on a bridge, their sshd as a plain user, Open MPI between them."""
    text = (ROOT / "docker" / "templates" / "compose.yaml").read_text()
    services = strict_yaml.read(text.replace("$$", "$"), strict_yaml.COMPOSE)["services"]
    with composition(containers) as (network, home):
        options = {name: service_options(service, network, home) for name, service in services.items()}
        keys = containers.run(*services["keys"]["command"], options=options["keys"])
        assert keys.returncode == 0, keys.stderr
        host_b = f"{network}-host-b"
        argv = containers.argv(
            *services["host-b"]["command"], options=[*options["host-b"], f"--name={host_b}"]
        )
        other = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            assert other.stderr is not None
            heard = other.stderr.readline()
            assert "listening on" in heard, heard + other.stderr.read()
            address = containers.podman(
                "inspect", "--format={{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", host_b
            ).strip()
            job = services["host-a"]["command"]
            at = [*options["host-a"], f"--add-host=host-b:{address}", "--env=LMSRUN_PROBE_TIMEOUT=200"]
            done = containers.run(*job, options=at, timeout_s=600)
        finally:
            containers.podman("stop", "--ignore", "--time=10", host_b)
            other.communicate(timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks hold the same weights" in done.stdout
    places = [line.split()[1] for line in done.stderr.splitlines() if "  yes" in line]
    assert len(set(places)) == 2, done.stderr
