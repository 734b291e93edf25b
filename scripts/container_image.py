"""Build ``docker/Dockerfile.cpu`` without Docker and without a registry: a base by debootstrap, then buildah.

For root on Debian or Ubuntu with ``debootstrap``, ``buildah``, ``podman`` and ``runc``
(``CLUSTER_TOOLS=1 scripts/cluster_tools.py`` installs them). The base comes from where this machine's apt
gets its packages; pip's index and certificate go into the build as secrets, so that nothing of them stays in
the image. Base, layers and downloads are kept below ``~/.cache/lmsrun/containers`` (about 8 GB).

    python scripts/container_image.py            builds, and prints the command that runs the image
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from build_horovod import BuildError, cache_folder, locked, run_logged

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("debootstrap", "buildah", "podman", "runc", "tar")
BASE_IMAGE = "localhost/lmsrun-base"
IMAGE = "localhost/lmsrun:cpu"
DECIDES_LAYERS = (
    "docker/Dockerfile",
    "docker/Dockerfile.cpu",
    "pyproject.toml",
    "lmsrun/wheels/build_horovod.py",
    "lms/version.py",
)
"""A change in one of these makes the large layers anew; the store with the old ones is removed."""
NEEDED_BYTES = 20 << 30
PIP_SETTINGS = frozenset(
    ("index-url", "extra-index-url", "find-links", "trusted-host", "proxy", "default-timeout")
)
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
"""Where the image's pip finds certificates; the build's secret ``ca`` lies there while pip runs."""
_IN_USE: list[IO[str]] = []
"""The locks of the stores that this process uses."""


@dataclass(frozen=True)
class Source:
    """Where a base system comes from: as this machine's apt has it."""

    uri: str
    suite: str
    components: tuple[str, ...]


@dataclass(frozen=True)
class Store:
    """Images and containers of our own, apart from those of the machine.

    Attributes:
        folder: Holds the layers; private.
        driver: ``overlay``, or ``vfs`` where the kernel has no overlay for us.
    """

    folder: Path
    driver: str

    def options(self) -> list[str]:
        """List the options that make buildah and podman use this store."""
        mark = hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:8]
        words = ["--root", str(self.folder), "--runroot", f"/run/lmsrun-containers-{mark}"]
        return [*words, "--storage-driver", self.driver]

    def podman(self) -> list[str]:
        """Build the start of every podman command; neither systemd nor a daemon is asked for anything."""
        words = ["--runtime", "runc", "--cgroup-manager", "cgroupfs", "--events-backend", "none"]
        networks = ["--network-config-dir", str(self.folder.parent / "networks")]
        return ["podman", *self.options(), *words, *networks]

    def podman_run(self) -> list[str]:
        """Build the start of ``podman run``; its default limits, a million, need CAP_SYS_RESOURCE."""
        limits = [word for name in ("nofile", "nproc") for word in ("--ulimit", f"{name}=4096:4096")]
        return [*self.podman(), "run", "--no-healthcheck", *limits]


def missing_tools() -> list[str]:
    """List the programs that are not here."""
    return [name for name in TOOLS if shutil.which(name) is None]


def parse_source(targets: str, suite: str) -> Source:
    """Where apt gets ``suite`` from.

    Args:
        targets: A line for each of apt's package lists: URI, release, component.
        suite: The release, such as ``bookworm``.

    Raises:
        BuildError: If apt has no such source, or its address holds a password, which would show in argvs.
    """
    lines = [line.split() for line in targets.splitlines()]
    found = [
        (uri, component) for uri, release, component in (x for x in lines if len(x) == 3) if release == suite
    ]
    if not found:
        raise BuildError(f"apt has no source of {suite or 'this release'}; needed one. Try: apt-get update")
    uri = found[0][0]
    if urlsplit(uri).username:
        raise BuildError("apt's source holds a password, which would stay in the image. Try: apt's auth.conf")
    return Source(uri, suite, tuple(dict.fromkeys(component for place, component in found if place == uri)))


def read_source() -> Source:
    """Read this machine's own release, and where apt gets it from."""
    argv = [
        "apt-get",
        "indextargets",
        "--format",
        "$(REPO_URI) $(RELEASE) $(COMPONENT)",
        "Created-By: Packages",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return parse_source(done.stdout, platform.freedesktop_os_release().get("VERSION_CODENAME", ""))


def pip_configuration(listed: str) -> str:
    """Convert ``pip config list`` to what a build needs: indexes and proxy, without paths of this machine."""
    lines = ["[global]", f"cert = {CERTIFICATES}"]
    settings: dict[str, str] = {}
    for name, value in re.findall(r"^[^.\n]+\.\.?([a-z-]+)='(.*)'$", listed, re.MULTILINE):
        values = [word for word in value.split() if not word.startswith(("/", "file:"))]
        if name in PIP_SETTINGS and values:
            settings.setdefault(name, " ".join(values))  # the environment comes first in the list, and wins
    return "\n".join([*lines, *(f"{name} = {value}" for name, value in sorted(settings.items())), ""])


def read_pip_configuration() -> str:
    """Read this interpreter's pip configuration, as a ``pip.conf`` for the build."""
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    return pip_configuration(subprocess.run(argv, capture_output=True, text=True, check=False).stdout)


def find_certificates(environ: Mapping[str, str]) -> Path | None:
    """Find the bundle of certificates that this machine's programs trust."""
    places = [environ.get(name) for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")]
    return next((Path(place) for place in [*places, CERTIFICATES] if place and Path(place).is_file()), None)


def make_base(cache: Path, source: Source, log: Path) -> Path:
    """Make the base system as a tar file, once."""
    archive = cache / f"base-{source.suite}-{platform.machine()}.tar"
    if archive.exists():
        return archive
    print(f"container: making a base of {source.suite} with debootstrap", flush=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".base-") as folder:
        tree, part = Path(folder, "tree"), Path(folder, "base.tar")
        argv = ["debootstrap", "--variant=minbase", "--force-check-gpg"]
        argv += [f"--components={','.join(source.components)}", source.suite, str(tree), source.uri]
        run_logged(argv, os.environ, log, lambda line: None)
        waste = [*(tree / "var/cache/apt/archives").glob("*.deb"), *(tree / "var/lib/apt/lists").glob("*_*")]
        for path in waste:
            path.unlink()
        argv = ["tar", "--numeric-owner", "-C", str(tree), "-cf", str(part), "."]
        run_logged(argv, os.environ, log, lambda line: None)
        part.rename(archive)
    return archive


def storage_driver(folder: Path) -> str:
    """``overlay`` where this process can mount one over ``folder``'s file system, else ``vfs``."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".overlay-") as scratch:
        parts = {name: Path(scratch, name) for name in ("lower", "upper", "work", "merged")}
        for part in parts.values():
            part.mkdir()
        layers = f"lowerdir={parts['lower']},upperdir={parts['upper']},workdir={parts['work']}"
        merged = str(parts["merged"])
        argv = ["mount", "-t", "overlay", "overlay", "-o", layers, merged]
        if subprocess.run(argv, stderr=subprocess.DEVNULL, check=False).returncode:
            return "vfs"
        subprocess.run(["umount", merged], check=True)
    return "overlay"


def open_store(cache: Path, base: Path) -> Store:
    """Open the store of these layers; remove any of other layers that nobody uses."""
    digest = hashlib.sha256(str(base.stat().st_mtime_ns).encode())
    for name in DECIDES_LAYERS:
        digest.update((ROOT / name).read_bytes() + b"\0")
    folder = cache / f"store-{digest.hexdigest()[:8]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    _IN_USE.append(folder.with_suffix(".lock").open("w"))
    fcntl.flock(_IN_USE[-1], fcntl.LOCK_SH)  # until this process ends
    for old in cache.glob("store-????????"):
        with old.with_suffix(".lock").open("w") as handle, contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_store(old)
    return Store(folder, storage_driver(cache))


def remove_store(folder: Path) -> None:
    """Remove a store with what a build that was killed has left mounted in it."""
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        if Path(place := line.split()[1]).is_relative_to(folder):
            subprocess.run(["umount", place], check=False)
    shutil.rmtree(folder, ignore_errors=True)


def import_base(store: Store, archive: Path, log: Path) -> str:
    """Import the base as an image of the store; once, for the layers above hang on its id."""
    image = f"{BASE_IMAGE}:{archive.stem.removeprefix('base-')}"
    if subprocess.run([*store.podman(), "image", "exists", image], check=False).returncode:
        run_logged(
            [*store.podman(), "import", "--quiet", str(archive), image], os.environ, log, lambda line: None
        )
    return image


def build(store: Store, dockerfile: Path, arguments: Mapping[str, str], tag: str, log: Path) -> None:
    """Build one image; layers that are there already are taken, save in a ``vfs`` store, which copies each.

    Raises:
        BuildError: With the errors of the log.
    """
    cache = store.folder.parent
    with tempfile.TemporaryDirectory(dir=cache, prefix=".build-") as folder:
        settings = Path(folder, "pip.conf")
        settings.touch(mode=0o600)
        settings.write_text(read_pip_configuration())
        argv = ["buildah", *store.options(), "bud", "--isolation=chroot", "--format=docker", "--pull-never"]
        argv += [f"--layers={'true' if store.driver == 'overlay' else 'false'}"]
        argv += [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        argv += ["--secret", f"id=pip,src={settings}"]
        if certificates := find_certificates(os.environ):
            argv += ["--secret", f"id=ca,src={certificates}"]
        wheels = cache_folder(os.environ)
        wheels.mkdir(parents=True, exist_ok=True)
        argv += ["--volume", f"{wheels}:/root/.cache/lmsrun/wheels"]
        argv += ["--file", str(dockerfile), "--tag", tag, str(ROOT)]
        run_logged(argv, {**os.environ, "TMPDIR": folder}, log, show_step)


def show_step(line: str) -> None:
    """Of buildah's output, the start of each step."""
    if found := re.match(r"(\[\d+/\d+\] )?STEP \d+/\d+: (.{0,70})", line):
        print(f"container: {found[2]}", flush=True)


def prepare(environ: Mapping[str, str]) -> tuple[Store, str, Path]:
    """Prepare base and store.

    Returns:
        The store, the name of the base image in it, and the log.

    Raises:
        BuildError: If this machine cannot do it, saying why.
    """
    if os.geteuid() != 0:
        raise BuildError("not root; debootstrap and mounts need it. Try: docker build, where Docker is")
    if missing := missing_tools():
        raise BuildError(
            f"not found: {', '.join(missing)}. Try: CLUSTER_TOOLS=1 python scripts/cluster_tools.py"
        )
    cache = cache_folder(environ).parent / "containers"
    cache.mkdir(parents=True, mode=0o700, exist_ok=True)
    log = cache / "build.log"
    with locked(cache / "prepare.lock"):
        log.unlink(missing_ok=True)
        if not any(cache.glob("store-*")) and shutil.disk_usage(cache).free < NEEDED_BYTES:
            raise BuildError(
                f"less than {NEEDED_BYTES >> 30} GiB free at {cache}. Try: XDG_CACHE_HOME elsewhere"
            )
        base = make_base(cache, read_source(), log)
        store = open_store(cache, base)
        return store, import_base(store, base, log), log


def main() -> int:
    """Build the image for CPUs; 1 with one line when that cannot be done."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    try:
        store, base, log = prepare(os.environ)
        build(store, ROOT / "docker" / "Dockerfile.cpu", {"BASE": base}, IMAGE, log)
    except BuildError as error:
        print(f"container: {error}", file=sys.stderr)
        return 1
    print(
        shlex.join([*store.podman_run(), "--rm", IMAGE, "-np", "2", "/opt/lmsrun/examples/train_digits.py"])
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
