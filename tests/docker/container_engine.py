"""The image for CPUs, built and run for real: a base by debootstrap, buildah, podman with runc.

``scripts/container_image.py`` builds into a store of our own below ``~/.cache/lmsrun/containers``; nothing of
the machine's own images or containers is touched. What a test starts ends with it, by its name.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import container_image  # noqa: E402 - scripts/ is no package

UNREACHABLE = re.compile(
    r"Could not (connect|resolve)|Temporary failure (in name resolution|resolving)|Network is unreachable"
    r"|Failed getting release file|NewConnectionError"
)
POLICY_CALLS = ("get_mempolicy", "mbind", "set_mempolicy", "set_mempolicy_home_node")
PROFILE = Path("/usr/share/containers/seccomp.json")


class Containers:
    """Runs containers of one image, under a seccomp profile as strict as Docker's."""

    def __init__(self, store: container_image.Store, image: str, folder: Path) -> None:
        self.store, self.image = store, image
        self._profile = folder / "seccomp.json"
        self._profile.write_text(json.dumps(docker_profile(json.loads(PROFILE.read_text()))))

    def argv(self, *words: str, options: Sequence[str] = ()) -> list[str]:
        """The command that runs a container, removed when it ends."""
        profile = ["--security-opt", f"seccomp={self._profile}"]
        network = [] if any(word.startswith("--network") for word in options) else ["--network=none"]
        start = [*self.store.podman_run(), "--rm", *profile, *network, *options]
        return [*start, self.image, *words]

    def run(
        self, *words: str, options: Sequence[str] = (), timeout_s: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run a container to its end."""
        return subprocess.run(
            self.argv(*words, options=options),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def podman(self, *words: str) -> str:
        """Another podman command that has to succeed."""
        argv = [*self.store.podman(), *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


def docker_profile(profile: dict[str, Any]) -> dict[str, Any]:
    """Podman's default, with memory policies bound to CAP_SYS_NICE as in Docker's."""
    for rule in profile["syscalls"]:
        rule["names"] = [name for name in rule["names"] if name not in POLICY_CALLS]
    kept = [rule for rule in profile["syscalls"] if rule["names"]]
    allowed = {
        "names": list(POLICY_CALLS),
        "action": "SCMP_ACT_ALLOW",
        "includes": {"caps": ["CAP_SYS_NICE"]},
    }
    return {**profile, "syscalls": [*kept, {**allowed, "args": [], "comment": "", "excludes": {}}]}
