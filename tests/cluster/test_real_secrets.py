"""No value of a variable stands in the list of processes, whoever starts the ranks."""

import json
import sys
import uuid
from pathlib import Path

import pytest
from cluster_run import lmsrun, run
from test_real_mpi import options

pytestmark = [pytest.mark.ranks, pytest.mark.cluster]

RUN = uuid.uuid4().hex
"""Other runs of these tests on this machine have command lines of their own."""
SECRET, GIVEN, SETTING = f"s3cret-of-the-shell-{RUN}", f"s3cret-of-x-{RUN}", f"s3tting-of-the-shell-{RUN}"
LOOK = """
import glob, json, os, sys
seen = []
for path in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        seen.append(open(path, "rb").read().decode(errors="replace"))
    except OSError:
        pass
rank = os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"]
names = ("HOROVOD_GLOO_IFACE", "AWS_SECRET_ACCESS_KEY", "MY_TOKEN", "MY_SETTING", "HOROVOD_SIZE", "RANK")
values = [os.environ[name] for name in names[1:4]]
seen = [one for one in seen if any(value in one for value in values)]
told = {"argv": seen, "env": {name: os.environ.get(name) for name in names}}
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(told, file)
"""


@pytest.mark.parametrize("launcher", ["local", "openmpi", "horovodrun"])
def test_no_value_stands_on_a_command_line(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    words = options(launcher)
    config = tmp_path / "job.toml"  # what a user types himself is the user's
    config.write_text(f'forward = ["MY_TOKEN={GIVEN}"]\n')
    argv = lmsrun("run", *words, "--config", str(config), "-np", "2", "--oversubscribe", "--no-lms", "-v")
    environ = {"AWS_SECRET_ACCESS_KEY": SECRET, "MY_SETTING": SETTING, "HOROVOD_GLOO_IFACE": "lo"}
    done = run([*argv, "--", sys.executable, "look.py", str(tmp_path)], tmp_path, environ)
    assert done.returncode == 0, done.stderr
    for rank in ("0", "1"):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told["argv"] == []
        assert told["env"] == {
            "HOROVOD_GLOO_IFACE": "lo",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "MY_TOKEN": GIVEN,
            "MY_SETTING": SETTING,
            "HOROVOD_SIZE": "2",
            "RANK": rank,
        } | ({} if launcher != "openmpi" else {"HOROVOD_SIZE": told["env"]["HOROVOD_SIZE"]})
    assert "s3" not in done.stdout + done.stderr


def test_what_horovodrun_would_write_to_ssh_is_told(tmp_path: Path) -> None:
    options("horovodrun")
    words = ("plan", "--launcher", "horovodrun", "-H", "a:1,b:1", "-x", f"MY_TOKEN={GIVEN}")
    for elastic in ((), ("-np", "2", "--min-np", "1")):
        done = run(lmsrun(*words, *elastic, "--", "true"), tmp_path)
        told = "horovodrun writes the values of MY_TOKEN into ssh's command line"
        assert (told in " ".join(done.stdout.split())) is bool(elastic)
        assert GIVEN not in done.stdout + done.stderr


@pytest.mark.parametrize("how", [(), ("-v",), ("--json",)])
@pytest.mark.parametrize("launcher", ["local", "openmpi"])
def test_plans_show_no_value(launcher: str, how: tuple[str, ...], tmp_path: Path) -> None:
    words = ("plan", *options(launcher), *how, "-np", "1", "-x", f"MY_TOKEN={GIVEN}", "--", "true")
    done = run(lmsrun(*words), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "MY_TOKEN" in done.stdout
    assert "***" in done.stdout
    assert GIVEN not in done.stdout + done.stderr
