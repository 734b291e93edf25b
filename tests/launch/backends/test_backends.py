"""Every launcher's command as a whole, and the files beside it."""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from erf import parse_erf
from machines import SPECS, machine

from launch.backends.backend import Order
from launch.backends.ddlrun import DdlRequest, build_ddlrun, parse_ddlrun
from launch.backends.flux import build_flux
from launch.backends.horovodrun import BACKEND, HorovodOptions, build_horovodrun
from launch.backends.jsrun import build_jsrun, render_erf
from launch.backends.mpirun import build_mpirun, refuse_root, render_rankfile
from launch.backends.srun import build_srun, choose_mpi
from launch.cluster.hosts import Host, HostShare
from launch.cluster.job import (
    ClusterJob,
    Command,
    escape_args,
    forwarded_names,
    unescape_args,
    withheld_names,
)
from launch.cluster.planner import plan_shares
from launch.installed.mpi_flavour import MpiFlavour
from launch.model.cluster_settings import ClusterSettings
from launch.model.errors import UsageError
from launch.model.plan import RankPlan
from launch.plan_host.planner import HostRequest

EVEN = ClusterJob(
    shares=(HostShare("a", 0, 4), HostShare("b", 4, 4)),
    worker=("python", "lmsrun/__main__.py", "worker", "--", "train.py", "a b", "$(id)"),
    env={"LMS_ENABLED": "1", "TOKEN": "never in an argv"},
    forward=("PATH", "LMSRUN_JOB_ID"),
    withhold=("WANDB_API_KEY", "CUDA_VISIBLE_DEVICES"),
    tag_output=True,
)
UNEVEN = replace(EVEN, shares=(HostShare("a", 0, 4), HostShare("b", 4, 1)), tag_output=False)
IPV6 = replace(EVEN, shares=(HostShare("fe80::1", 0, 2), HostShare("b", 2, 2)))
ROOT = replace(EVEN, allow_root=True, oversubscribe=True)
FLAVOURS = {
    "openmpi-4": MpiFlavour("openmpi", (4, 1, 4)),
    "openmpi-5": MpiFlavour("openmpi", (5, 0, 3)),
    "spectrum": MpiFlavour("spectrum", (10, 3)),
    "mpich": MpiFlavour("mpich", (4, 0, 2)),
    "intel": MpiFlavour("intel", (2021, 10)),
}


def placed(job: ClusterJob, name: str = "ac922") -> tuple[RankPlan, ...]:
    model = machine(SPECS[name])
    request = HostRequest(("train.py",), 1, job.world_size)
    return plan_shares(job.shares, lambda host: model, request).ranks


def show(command: Command) -> str:
    lines = [
        shlex.join(command.argv),
        *(f"set {name}={value}" for name, value in sorted(command.env.items())),
    ]
    lines += [f"unset {name}" for name in command.unset]
    for path, text in command.files.items():
        lines += [f"file {path}", *(f"| {line}" for line in text.splitlines())]
    return "\n".join(lines) + "\n"


def test_commands_are_as_before(golden: Callable[[str, str], None]) -> None:
    jobs = {"even": EVEN, "uneven": UNEVEN, "root": ROOT}
    commands = {
        f"{name} {job}": build_mpirun(
            "mpirun", flavour, value, "/run", ("--mca", "x", "y z") if job == "root" else ()
        )
        for name, flavour in FLAVOURS.items()
        for job, value in jobs.items()
    }
    commands["openmpi-4 ipv6"] = build_mpirun("mpirun", FLAVOURS["openmpi-4"], IPV6, "/run")
    for name, job in jobs.items():
        commands[f"srun {name}"] = build_srun(job, "/run", "pmix")
        commands[f"jsrun {name}"] = build_jsrun(job, placed(job), "/run")
        commands[f"jsrun {name} cpus"] = build_jsrun(job, placed(job, "single"), "/run")
        commands[f"horovodrun {name}"] = build_horovodrun(job, HorovodOptions())
    commands["flux even"] = build_flux(EVEN)
    commands["flux root"] = build_flux(replace(ROOT, stdin=3, whole_lines=True), ("--setopt=verbose=1",))
    commands["horovodrun mpi"] = build_horovodrun(ROOT, HorovodOptions(controller="mpi", timeline="t.json"))
    elastic = HorovodOptions(min_ranks=2, max_ranks=8, discovery_script="./hosts.sh")
    commands["horovodrun elastic"] = build_horovodrun(EVEN, elastic)
    commands["ddlrun even"] = build_ddlrun(EVEN)
    commands["ddlrun root"] = build_ddlrun(ROOT, ("-pami_noib",))
    golden("launchers.txt", "\n".join(f"# {name}\n{show(command)}" for name, command in commands.items()))


def test_values_stay_out_of_every_argv() -> None:
    commands = [build_mpirun("mpirun", flavour, EVEN, "/run") for flavour in FLAVOURS.values()]
    commands += [
        build_flux(EVEN),
        build_srun(EVEN, "/run"),
        build_jsrun(EVEN, (), "/run"),
        build_ddlrun(EVEN),
    ]
    commands.append(build_horovodrun(EVEN, HorovodOptions()))
    for command in commands:
        assert not any("never in an argv" in word for word in command.argv)
        assert command.env["TOKEN"] == "never in an argv"
        assert set(EVEN.withhold) <= set(command.unset)
        assert command.argv[-3:] == ("train.py", "a b", "$(id)")


def test_what_cannot_carry_ipv6_says_so() -> None:
    for flavour in ("mpich", "intel"):
        with pytest.raises(UsageError, match="IPv6 address 'fe80::1'"):
            build_mpirun("mpirun", FLAVOURS[flavour], IPV6, "/run")
    with pytest.raises(UsageError, match="IPv6 address 'fe80::1'"):
        build_horovodrun(IPV6, HorovodOptions())


@pytest.mark.parametrize(
    ("flavour", "said"),
    [
        *(
            (name, text)
            for name in ("openmpi-4", "intel")
            for text in ("-np 3", "--host=c", "-a b -machinefile m")
        ),
        *(("openmpi-4", text) for text in ("--rankfile r.txt", "-c 3", "-npernode 1")),
        *(("intel", text) for text in ("-f hosts", "-ppn 1")),
    ],
)
def test_words_for_mpirun_contradict_no_plan(flavour: str, said: str) -> None:
    extra = tuple(said.split())
    with pytest.raises(UsageError, match="is planned before mpirun starts; give lmsrun's own -np"):
        build_mpirun("mpirun", FLAVOURS[flavour], EVEN, "/run", extra)
    build_mpirun("mpirun", FLAVOURS[flavour], EVEN, "/run", ("--mca", "np", "host", "--timeout", "9"))


def test_flux_refuses_hosts_that_differ_in_ranks() -> None:
    with pytest.raises(UsageError, match="as many ranks, but found a:4, b:1; give the hosts equal slots"):
        build_flux(UNEVEN)


def test_root_is_asked_for_consent_where_the_mpi_does() -> None:
    for name, flavour in FLAVOURS.items():
        refuse_root(flavour, EVEN, 1000)
        refuse_root(flavour, ROOT, 0)
        if name in ("mpich", "intel"):
            refuse_root(flavour, EVEN, 0)
        else:
            with pytest.raises(UsageError, match="--allow-run-as-root"):
                refuse_root(flavour, EVEN, 0)


def test_srun_takes_pmix_where_it_is_built() -> None:
    listed = (
        "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions available: pmix_v4\n"
    )
    assert choose_mpi(listed) == "pmix"
    assert choose_mpi("srun: MPI types are...\nsrun: none\nsrun: pmi2\n") == "pmi2"
    assert choose_mpi("srun: error: no configuration") is None


@pytest.mark.parametrize("name", ["ac922", "dgx", "single"])
def test_an_erf_says_what_was_planned(name: str) -> None:
    job = replace(EVEN, shares=(HostShare("h1", 0, 2), HostShare("h2", 2, 1)))
    planned = placed(job, name)
    preamble, ranks = parse_erf(render_erf(planned))
    assert preamble["cpu_index_using"] == "physical"
    assert [(rank.rank, rank.hostname, rank.cpus) for rank in ranks] == [
        (rank.rank, rank.host, rank.cpus) for rank in planned
    ]
    assert {(rank.gpu, rank.mem) for rank in ranks} == {("*", "*")}, "peers stay visible"
    assert render_rankfile(planned).startswith("rank 0=h1 slot=")


def test_an_erf_needs_cpus() -> None:
    unbound = replace(placed(EVEN)[0], cpus=frozenset())
    for render in (render_erf, render_rankfile):
        with pytest.raises(UsageError, match="no CPUs to name"):
            render([unbound])


def parse(argv: Sequence[str]) -> DdlRequest:
    """Parse a command line of IBM's whose hostfile, ``f``, has the hosts a, without slots, and an address."""
    return parse_ddlrun(argv, lambda path: (Host("a"), Host("::1", 4)) if path == "f" else ())


def test_ibms_command_line() -> None:
    options = "-H h1,h2 --mpiarg -pami_noib --accelerators 4 -m b --tcp -x A=1 -x B -v"
    request = parse([*options.split(), "python", "train.py", "--lms=True", "-H", "x"])
    assert request.program == ("python", "train.py", "--lms=True", "-H", "x")
    assert request.options == (
        *("--hosts", "h1:4,h2:4", "-x", "A=1", "-x", "B"),
        *("--mpi-args=-pami_noib -tcp", "-v"),
    )
    assert request.notes == ("ddlrun -m b: DDL's reduction mode has no meaning without DDL",)
    assert parse(["--accelerators", "2", "python", "t.py"]).options == ("--hosts", "localhost:2")
    assert parse(["-hostfile", "f", "t.py"]).options == ("--hostfile", "f")


def test_ibms_accelerators_count_for_the_hosts_of_a_file() -> None:
    found = parse(["-hostfile", "f", "-accelerators", "2", "t.py"])
    assert found.options == ("--hosts", "a:2,[::1]:2", "--hostfile", "f")
    chosen = parse(["-hostfile", "f", "-accelerators", "2", "-H", "a", "-rf", "r", "t.py"])
    assert chosen.options == ("--hosts", "a:2", "--hostfile", "f")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--gpus 4 python t.py", "no option '--gpus'"),
        ("-H", "-H needs a value"),
        ("-H a", "names no program"),
        ("", "names no program"),
        ("--accelerators x python t.py", "whole number of GPUs"),
        ("--accelerators", "--accelerators needs a value: --accelerators N"),
        ("--mpiarg ' python t.py", "No closing quotation"),
        ("--rankfile r --accelerators 4 python t.py", "rank file is not read; give its hosts with -H H1,H2"),
    ],
)
def test_a_wrong_command_line_of_ibms(typed: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(typed.split())


def test_secrets_and_devices_stay_here() -> None:
    names = (
        *(
            "PATH",
            "HOME",
            "LD_LIBRARY_PATH",
            "PYTHONPATH",
            "TF_XLA_FLAGS",
            "NCCL_DEBUG",
            "LMS_MODE",
            "LMSRUN_NUMA",
        ),
        *(
            "WANDB_API_KEY",
            "AWS_SECRET_ACCESS_KEY",
            "GITHUB_TOKEN",
            "DB_PASSWORD",
            "TF_TOKEN",
            "SSH_AUTH_SOCK",
        ),
        *("CUDA_VISIBLE_DEVICES", "RANK", "HOROVOD_RANK", "HOROVOD_FUSION_THRESHOLD", "LMSRUN_EXPECT"),
    )
    assert forwarded_names(names) == (
        *("HOROVOD_FUSION_THRESHOLD", "LD_LIBRARY_PATH", "LMSRUN_NUMA", "LMS_MODE"),
        *("NCCL_DEBUG", "PATH", "PYTHONPATH", "TF_XLA_FLAGS"),
    )
    assert set(forwarded_names(names, ["GITHUB_TOKEN", "ABSENT"])) - set(forwarded_names(names)) == {
        "GITHUB_TOKEN"
    }
    assert "SSH_AUTH_SOCK" not in withheld_names(names), "ssh needs it to reach the hosts"
    assert {"GITHUB_TOKEN", "CUDA_VISIBLE_DEVICES", "RANK", "WANDB_API_KEY"} <= set(withheld_names(names))
    assert withheld_names(["my_password", "PATH"]) == ("my_password",)
    assert "GITHUB_TOKEN" not in withheld_names(names, ["GITHUB_TOKEN"])
    of_another_job = ("HOROVOD_HOSTNAME", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_CONTROLLER")
    assert withheld_names(of_another_job) == tuple(sorted(of_another_job))
    assert forwarded_names(["HOROVOD_GLOO_TIMEOUT_SECONDS"]), "a setting, not a meeting place"


def test_escaped_arguments_come_back() -> None:
    args = (":", "%", "%3A", "a:b", "%25", "", "::", "%%3A:")
    assert ":" not in "".join(escape_args(args))
    assert unescape_args(escape_args(args)) == args


@pytest.mark.parametrize(
    ("only_here", "settings", "shows", "has_key"),
    [
        (False, ClusterSettings(), False, True),
        (False, ClusterSettings(min_np=1), True, False),
        (False, ClusterSettings(controller="mpi"), False, False),
        (True, ClusterSettings(), False, False),
    ],
)
def test_horovodrun_shows_its_environment_only_to_hosts_that_come_and_go(
    only_here: bool, settings: ClusterSettings, shows: bool, has_key: bool
) -> None:
    environ = {"PATH": "/bin", "HOME": "/root", "WANDB_API_KEY": "w"}
    order = Order("horovodrun", True, only_here, settings, EVEN, (), environ, True, "/nowhere/x")
    command = BACKEND.build(order)
    assert (command.shows_environ, bool(command.control_key)) == (shows, has_key)
    if not has_key:
        return
    ((path, text),) = command.files.items()
    assert command.argv[command.argv.index("--environment") + 1] == path == "/tmp/x/environment"
    held = {"LMS_ENABLED": "1", "TOKEN": "never in an argv", "PATH": "/bin"}
    assert json.loads(text) == {**held, "LMSRUN_CONTROL_KEY": command.control_key}
    assert command.env == {} and command.elsewhere == ("a", "b")
    assert command.control_key not in " ".join(command.argv)
