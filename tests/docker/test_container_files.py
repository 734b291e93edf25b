"""Dockerfiles and scripts: clean for hadolint and shellcheck, and what all images have in common."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
SCRIPTS = sorted([DOCKER / "entrypoint.sh", ROOT / ".ci" / "run", *(DOCKER / "templates").glob("*.sh")])
DOCKERFILES = sorted(DOCKER.glob("Dockerfile*"))


def find_tool(name: str) -> str:
    """The tool of the environment's own packages, else of the machine; skips without."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed here (PyPI has it for x86_64)")
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script: Path) -> None:
    argv = [find_tool("shellcheck"), str(script)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_pass_hadolint(dockerfile: Path) -> None:
    argv = [find_tool("hadolint"), str(dockerfile)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_run_without_privileges_behind_an_init(dockerfile: Path) -> None:
    lines = dockerfile.read_text().splitlines()
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001"]
    assert lines[-1] == 'ENTRYPOINT ["tini", "--", "lmsrun-entrypoint"]'
    assert 'HEALTHCHECK --interval=1m --timeout=30s CMD ["lmsrun", "check", "--json"]' in lines


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_have_what_binding_and_ssh_need(dockerfile: Path) -> None:
    last_stage = re.split(r"^FROM ", dockerfile.read_text(), flags=re.MULTILINE)[-1]
    assert {"libnuma1", "numactl", "openssh-client", "openssh-server", "tini"} <= set(last_stage.split())


def test_images_for_gpus_and_for_cpus_are_made_the_same_way() -> None:
    """The tests build the one for CPUs; the one for GPUs may differ in its base and in what GPUs need."""

    def lines(name: str) -> list[str]:
        text = (DOCKER / name).read_text()
        text = re.sub("(RUN|BUILD)_BASE", "BASE", text.replace("gpu,mpi,examples", "mpi,examples"))
        text = text.replace('"${TENSORFLOW_REQUIREMENT}"', '"tensorflow==${TENSORFLOW}.*"')
        return [
            line.rstrip(" \\") for line in text.splitlines() if line and not line.startswith(("#", "ARG "))
        ]

    extra = [line for line in lines("Dockerfile") if line not in lines("Dockerfile.cpu")]
    assert all("NCCL" in line for line in extra), extra
    assert [line for line in lines("Dockerfile.cpu") if line not in lines("Dockerfile")] == []


def test_no_build_argument_carries_an_index() -> None:
    """Build arguments are kept in an image's history; an index may hold a password and comes as a secret."""
    for dockerfile in DOCKERFILES:
        assert not re.search(r"^ARG \w*(INDEX|TOKEN|PASSWORD|SECRET)", dockerfile.read_text(), re.MULTILINE)
