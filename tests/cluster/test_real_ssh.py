"""Two hosts in network namespaces, an sshd in each: jobs by mpirun and by Gloo, a pulled cable.

``ssh_hosts.py`` says how the hosts are made and taken down.
"""

import subprocess
import time
from pathlib import Path

import pytest
from cluster_run import SHOW_RANK, TRAIN_SUM, clean_environ, lmsrun, read_ranks
from hostile import ARGUMENTS, VALUES
from ssh_hosts import SshHosts, on_hosta

pytestmark = [pytest.mark.ranks, pytest.mark.cluster]

BOTH = ("-H", "hosta:1,hostb:1")
MPIRUN = ("--launcher", "mpirun", "--allow-run-as-root")


def test_a_job_over_ssh(hosts: SshHosts, tmp_path: Path) -> None:
    given = [word for name, value in VALUES.items() for word in ("-x", f"{name}={value}")]
    argv = ("run", *MPIRUN, *BOTH, *given, "--", str(SHOW_RANK), str(tmp_path), "ok", *ARGUMENTS)
    own = {"MY_SECRET_TOKEN": "x", "CUDA_VISIBLE_DEVICES": "3"}
    done = on_hosta(hosts, tmp_path, *argv, **own)
    assert done.returncode == 0, done.stderr
    for rank in read_ranks(tmp_path, 2):
        assert rank["argv"] == list(ARGUMENTS)
        assert {name: rank["env"].get(name) for name in VALUES} == VALUES
        assert rank["sizes"] == ["0", "2", "1"]
        assert rank["secrets"] == [], "nothing of this host's own may reach another"
    assert not list(tmp_path.rglob("pwned"))
    table = [line.split() for line in done.stderr.splitlines() if line.endswith(" yes")]
    assert [(row[0], row[1]) for row in table] == [("0", "hosta"), ("1", "hostb")]


def test_the_failing_host_is_named(hosts: SshHosts, tmp_path: Path) -> None:
    done = on_hosta(hosts, tmp_path, "run", *MPIRUN, *BOTH, "--", str(SHOW_RANK), str(tmp_path), "exit:1:7")
    assert done.returncode == 7, done.stderr
    assert done.stderr.splitlines()[-1] == "lmsrun: rank 1 on hostb (no GPU) exited with code 7"
    assert hosts.processes("hostb", str(SHOW_RANK)) == []


def test_a_pulled_cable_ends_the_job_on_both_sides(hosts: SshHosts, tmp_path: Path) -> None:
    job = subprocess.Popen(
        hosts.wrap("hosta", lmsrun("run", *MPIRUN, *BOTH, "--", str(SHOW_RANK), str(tmp_path), "exit:9:1")),
        cwd=tmp_path,
        env=clean_environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        end = time.monotonic() + 300
        while len(list(tmp_path.glob("rank-*.json"))) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        hosts.pull_cable()
        output, _ = job.communicate(timeout=300)
        assert job.returncode not in (0, None), output
        assert "lost communication with a remote daemon" in output
        while hosts.processes("hostb", str(SHOW_RANK)) and time.monotonic() < end + 30:
            time.sleep(0.2)
        assert hosts.processes("hosta", str(SHOW_RANK)) == []
        assert hosts.processes("hostb", str(SHOW_RANK)) == []
    finally:
        job.kill()
        hosts.plug_cable()
        hosts.wait_until_reachable()


LOOK_AND_SAVE = """
import glob, os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["HOROVOD_RANK"]
def save(*_):
    time.sleep(6)
    (folder / f"saved-{rank}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
secrets = [os.environ[name].encode() for name in ("MY_TOKEN", "LMSRUN_CONTROL_KEY")]
seen = []
for path in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        line = open(path, "rb").read()
    except OSError:
        continue
    seen += [line for secret in secrets if secret in line]
(folder / f"found-{rank}").write_text(f"{os.environ['MY_TOKEN']} {len(seen)}")
time.sleep(100)
"""


@pytest.mark.tensorflow
def test_horovodrun_shows_no_value_and_its_ranks_have_their_grace(hosts: SshHosts, tmp_path: Path) -> None:
    """Horovod itself writes the environment into ssh's command line, and gives ranks five seconds."""
    pytest.importorskip("horovod")
    (tmp_path / "look.py").write_text(LOOK_AND_SAVE)
    held = set(Path("/tmp").glob("lmsrun-files-*"))
    given = ("-x", "MY_TOKEN", "--launcher", "horovodrun", "--framework", "horovod", "--grace-period", "20")
    argv = lmsrun("run", *given, *BOTH, "--no-lms", "--", "look.py", str(tmp_path))
    job = subprocess.Popen(
        hosts.wrap("hosta", argv),
        cwd=tmp_path,
        env={**clean_environ(), "MY_TOKEN": f"s3cret-{tmp_path.name}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        end = time.monotonic() + 300
        while len(list(tmp_path.glob("found-*"))) < 2 and time.monotonic() < end and job.poll() is None:
            time.sleep(0.1)
        job.terminate()
        output, _ = job.communicate(timeout=300)
    finally:
        job.kill()
    found = {path.name: path.read_text() for path in tmp_path.glob("found-*")}
    assert found == dict.fromkeys(("found-0", "found-1"), f"s3cret-{tmp_path.name} 0"), output
    assert job.returncode == 0, output
    assert len(list(tmp_path.glob("saved-*"))) == 2, output
    assert "horovodrun writes the values" not in output
    assert set(Path("/tmp").glob("lmsrun-files-*")) <= held, "nothing is left on either host"


@pytest.mark.tensorflow
def test_gloo_over_ssh_trains(hosts: SshHosts, tmp_path: Path) -> None:
    pytest.importorskip("horovod")
    done = on_hosta(
        hosts, tmp_path, "run", "--launcher", "horovodrun", *BOTH, "--no-lms", "--", str(TRAIN_SUM)
    )
    assert done.returncode == 0, done.stderr
    found = {
        line.partition("weights ")[2].split()[2] for line in done.stdout.splitlines() if "weights" in line
    }
    assert len(found) == 1, done.stdout
    assert done.stderr.count("yes, also after hvd.init()") == 2
