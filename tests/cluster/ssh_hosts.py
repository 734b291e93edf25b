"""Two hosts on one machine: network, UTS and mount namespaces joined by a veth pair, an sshd in each.

Everything lives in namespaces and a private folder: nothing of the machine's own ssh is read or changed. The
daemons are our children and are ended by their process ids, the namespaces are deleted at the end.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from cluster_run import clean_environ, lmsrun

HOSTS = {"hosta": "10.213.77.1", "hostb": "10.213.77.2"}
PROGRAMS = ("ip", "sshd", "ssh", "ssh-keygen", "unshare", "mount")
_SSHD = """
Port 22
PidFile none
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
StrictModes no
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
SetEnv PATH={path}
ForceCommand {folder}/login
"""
_LOGIN = """#!/bin/sh
. "{folder}/rc-$(hostname)"
exec sh -c "$SSH_ORIGINAL_COMMAND"
"""
_SSH = """
Host *
  IdentityFile {folder}/key
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking accept-new
  LogLevel ERROR
  ConnectTimeout 5
"""


class SshHosts:
    """Use as a context manager; ``wrap`` runs a command on one of the hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names = {host: f"lmsrun-{os.getpid()}-{host}" for host in HOSTS}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "SshHosts":
        try:
            self._write_files()
            for name in self._names.values():
                _run("ip", "netns", "add", name)
            self._lay_cable()
            for host in HOSTS:
                self.start_sshd(host)
            self.wait_until_reachable()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in list(self._daemons):
            self.stop_sshd(host)
        for name in self._names.values():
            for pid in _output("ip", "netns", "pids", name).split():
                subprocess.run(["kill", "-9", pid], check=False)
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def wrap(self, host: str, argv: Sequence[str]) -> list[str]:
        """A command line that runs ``argv`` on a host of its own name, addresses, /etc/hosts and /etc/ssh."""
        mounts = 'mount --bind "$F/hosts" /etc/hosts && mount --bind "$F/ssh" /etc/ssh'
        script = f'hostname {host} && {mounts} && exec "$@"'
        inside = ["unshare", "--uts", "--mount", "env", f"F={self.folder}", "sh", "-c", script, "sh", *argv]
        return ["ip", "netns", "exec", self._names[host], *inside]

    def set_login(self, host: str, script: str = "") -> None:
        """What a login shell of the host does before the command, as an rc file of a user would."""
        (self.folder / f"rc-{host}").write_text(script + "\n")

    def start_sshd(self, host: str) -> None:
        """Start the daemon of a host; it runs in the foreground, as our child."""
        Path("/run/sshd").mkdir(exist_ok=True)
        with open(self.folder / f"sshd-{host}.log", "ab") as log:
            self._daemons[host] = subprocess.Popen(
                self.wrap(host, [shutil.which("sshd") or "sshd", "-D", "-e"]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def stop_sshd(self, host: str) -> None:
        """The host refuses ssh from now on."""
        daemon = self._daemons.pop(host)
        daemon.terminate()
        try:
            daemon.wait(5)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def pull_cable(self) -> None:
        """Nothing gets through any more, and nobody is told."""
        _run("ip", "netns", "exec", self._names["hosta"], "ip", "link", "set", "cable", "down")

    def plug_cable(self) -> None:
        """The network is back."""
        _run("ip", "netns", "exec", self._names["hosta"], "ip", "link", "set", "cable", "up")

    def processes(self, host: str, text: str) -> list[int]:
        """The host's processes whose command line holds ``text``."""
        found = []
        for pid in _output("ip", "netns", "pids", self._names[host]).split():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in command:
                found.append(int(pid))
        return found

    def _write_files(self) -> None:
        (self.folder / "ssh").mkdir()
        for key in ("key", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
        values = {"folder": self.folder, "path": os.environ["PATH"]}
        (self.folder / "ssh" / "sshd_config").write_text(_SSHD.format(**values))
        (self.folder / "ssh" / "ssh_config").write_text(_SSH.format(**values))
        (self.folder / "login").write_text(_LOGIN.format(**values))
        (self.folder / "login").chmod(0o755)
        for host in HOSTS:
            self.set_login(host)
        lines = ["127.0.0.1 localhost", *(f"{address} {host}" for host, address in HOSTS.items())]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def _lay_cable(self) -> None:
        ends = [f"lr{os.getpid()}{letter}" for letter in "ab"]
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for end, (host, address) in zip(ends, HOSTS.items(), strict=True):
            name = self._names[host]
            _run("ip", "link", "set", end, "netns", name, "name", "cable")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            _run("ip", "-n", name, "link", "set", "cable", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def wait_until_reachable(self) -> None:
        """Until ssh leads from hosta to hostb."""
        end = time.monotonic() + 300
        while True:
            done = subprocess.run(
                self.wrap("hosta", ["ssh", "hostb", "hostname"]), capture_output=True, text=True, check=False
            )
            if done.stdout.strip() == "hostb":
                return
            if time.monotonic() > end:
                raise RuntimeError(f"hostb cannot be reached: {done.stderr}")
            time.sleep(0.2)


def on_hosta(hosts: SshHosts, folder: Path, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run lmsrun on the first host."""
    return subprocess.run(
        hosts.wrap("hosta", lmsrun(*argv)),
        cwd=folder,
        env={**clean_environ(), **environ},
        capture_output=True,
        text=True,
        timeout=180,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


def _output(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout
