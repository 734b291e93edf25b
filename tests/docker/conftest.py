"""The built image, for the tests that run it."""

import os

import container_engine
import container_image
import pytest
from build_horovod import BuildError
from container_engine import ROOT, Containers


@pytest.fixture(scope="session")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Containers:
    """The image for CPUs; skips where this machine cannot build or run one."""
    if not container_engine.PROFILE.is_file():
        pytest.skip(f"no containers here: no {container_engine.PROFILE}")
    try:
        store, base, log = container_image.prepare(os.environ)
    except BuildError as error:
        pytest.skip(f"no containers here: {error}")
    dockerfile = ROOT / "docker" / "Dockerfile.cpu"
    try:
        container_image.build(store, dockerfile, {"BASE": base}, container_image.IMAGE, log)
    except BuildError as error:
        if container_engine.UNREACHABLE.search(log.read_text(errors="replace")):
            pytest.skip(f"no containers here: {error}")
        raise
    made = Containers(store, container_image.IMAGE, tmp_path_factory.mktemp("containers"))
    probe = made.run("true")
    if probe.returncode:
        pytest.skip(f"runc starts no container here: {probe.stderr.strip()}")
    return made
