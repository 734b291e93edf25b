"""Container files: linted, and the entrypoint run for real with a stand-in for lmsrun."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
SCRIPTS = sorted([DOCKER / "entrypoint.sh", *(DOCKER / "templates").glob("*.sh")])
DOCKERFILES = sorted(DOCKER.glob("Dockerfile*"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed here")
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_pass_hadolint(dockerfile: Path) -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed here")
    done = subprocess.run(["hadolint", str(dockerfile)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_run_without_privileges_behind_an_init(dockerfile: Path) -> None:
    lines = dockerfile.read_text().splitlines()
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001"]
    assert lines[-1] == 'ENTRYPOINT ["tini", "--", "lmsrun-entrypoint"]'
    assert "lmsrun check" in " ".join(lines) or '"lmsrun", "check"' in " ".join(lines)


def test_yaml_templates_are_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((DOCKER / "templates" / "mpijob.yaml").read_text())
    assert job["kind"] == "MPIJob" and set(job["spec"]["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    compose = yaml.safe_load((DOCKER / "templates" / "compose.yaml").read_text())
    assert set(compose["services"]) == {"host-a", "host-b"}


def entrypoint(tmp_path: Path, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the entrypoint with a stand-in ``lmsrun`` that prints its arguments."""
    fake = tmp_path / "lmsrun"
    fake.write_text('#!/bin/sh\nprintf "<%s>" lmsrun "$@"\n')
    fake.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(DOCKER / "entrypoint.sh"), *argv],
        env={"HOME": str(tmp_path), "PATH": path, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "<lmsrun><check>"),
        (("-np", "2", "train.py", "a b;$(id)"), "<lmsrun><-np><2><train.py><a b;$(id)>"),
        (("train.py",), "<lmsrun><train.py>"),
        (("plan", "--json", "t.py"), "<lmsrun><plan><--json><t.py>"),
        (("echo", "a  b", "*"), "a  b *\n"),
    ],
)
def test_arguments_become_a_run(tmp_path: Path, argv: tuple[str, ...], said: str) -> None:
    done = entrypoint(tmp_path, *argv)
    assert (done.returncode, done.stdout) == (0, said), done.stderr


def test_a_user_without_home_gets_one(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root can write everywhere")
    done = entrypoint(tmp_path, "sh", "-c", "touch $HOME/x && echo $HOME", HOME="/nonexistent")
    assert done.returncode == 0 and done.stdout.strip() != "/nonexistent"


def test_the_job_takes_the_place_of_the_entrypoint(tmp_path: Path) -> None:
    """So that a signal to the container reaches the job itself, and its exit code is the container's."""
    job = subprocess.Popen(
        [
            str(DOCKER / "entrypoint.sh"),
            "sh",
            "-c",
            "trap 'exit 42' TERM; touch $READY; while :; do sleep 0.05; done",
        ],
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"], "READY": str(tmp_path / "ready")},
    )
    try:
        end = time.monotonic() + 10
        while not (tmp_path / "ready").exists() and time.monotonic() < end:
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        assert job.wait(10) == 42
    finally:
        job.kill()
        job.wait()
