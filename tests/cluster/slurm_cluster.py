"""A real Slurm on one machine: munged, slurmctld and two slurmd on ports of their own, in a private folder.

Every daemon is started in the foreground as our child and ended by its process id; nothing of the system's
own Slurm or munge is touched.
"""

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "scancel", "sinfo")
_CONF = """
ClusterName=lmsrun-test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
ReturnToService=2
KillWait=5
SlurmdTimeout=10
UnkillableStepTimeout=20
{nodes}
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


class SlurmCluster:
    """Two nodes. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: list[IO[bytes]] = []

    def __enter__(self) -> "SlurmCluster":
        try:
            self._configure()
            self._start("munged", self._munge_argv())
            self._wait_for("munge's socket", (self.folder / "munge.socket").is_socket)
            self._start("slurmctld", ["slurmctld", "-D", "-c", "-i"])
            for node in NODES:
                self.start_node(node)
            self._wait_for("two idle nodes", self._nodes_are_idle)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel_jobs()
        for name in ("slurmctld", *NODES, "munged"):
            self._stop(name)
        for log in self._logs:
            log.close()

    def start_node(self, node: str) -> None:
        """Start one node's daemon."""
        self._start(node, ["slurmd", "-D", "-N", node])

    def kill_node(self, node: str) -> None:
        """The node's daemon dies without a word."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def ready_again(self) -> None:
        """Wait until both nodes take jobs."""
        self._wait_for("two idle nodes", self._nodes_are_idle)

    def _cancel_jobs(self) -> None:
        """A task outlives the daemon of its node: what a failed test left is ended before the daemons are."""
        if "slurmctld" not in self._daemons:
            return
        environ = {**os.environ, **self.environ}
        try:
            subprocess.run(["scancel", "--user=root"], env=environ, capture_output=True, timeout=10)
            self.ready_again()
        except (subprocess.TimeoutExpired, RuntimeError):
            # They do not answer; there is nobody else to ask.
            return

    def _configure(self) -> None:
        self.folder.chmod(0o755)
        # PMIx leaves its folders in TmpFS, under names that two nodes of one machine would share.
        for name in ("state", *(f"{kind}-{node}" for kind in ("spool", "tmp") for node in NODES)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        controller, *ports = _free_ports(1 + len(NODES))
        host = os.uname().nodename
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=100"
            for node, port in zip(NODES, ports, strict=True)
        )
        text = _CONF.format(host=host, user="root", folder=self.folder, controller=controller, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)

    def _munge_argv(self) -> list[str]:
        files = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "pid-file": "munge.pid",
            "seed-file": "munge.seed",
        }
        return [
            *("munged", "--foreground", "--force", "--num-threads=2"),
            *(f"--{option}={self.folder / name}" for option, name in files.items()),
            f"--log-file={self.folder / 'munge.log'}",
        ]

    def _start(self, name: str, argv: Sequence[str]) -> None:
        log = open(self.folder / f"{name}.log", "ab")
        self._logs.append(log)
        self._daemons[name] = subprocess.Popen(
            list(argv),
            env={**os.environ, **self.environ},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=self.folder,
        )

    def _stop(self, name: str) -> None:
        daemon = self._daemons.pop(name, None)
        if daemon is None:
            return
        daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def _nodes_are_idle(self) -> bool:
        argv = ["sinfo", "--Node", "--noheader", "--format=%N %T"]
        try:
            done = subprocess.run(
                argv, env={**os.environ, **self.environ}, capture_output=True, text=True, timeout=5
            )
        except subprocess.TimeoutExpired:
            return False
        return sorted(done.stdout.split("\n")) == ["", "n1 idle", "n2 idle"]

    def _wait_for(self, what: str, is_there: "object", limit_s: float = 40) -> None:
        end = time.monotonic() + limit_s
        while not is_there():  # type: ignore[operator]
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > end:
                tail = "\n".join(
                    f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}"
                    for log in self.folder.glob("*.log")
                )
                raise RuntimeError(f"no {what}; ended: {dead}\n{tail}")
            time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
