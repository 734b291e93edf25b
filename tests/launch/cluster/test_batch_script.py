"""What a batch system is asked for."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from launch.cluster.batch_script import BatchJob, job_name, nodes_for, render_script
from launch.model.cluster_settings import SCRIPTS
from launch.model.errors import UsageError


def test_batch_scripts(golden: Callable[[str, str], None]) -> None:
    job = BatchJob(
        "train", 2, 6, 6, 44, ("lmsrun", "run", "-np", "12", "--", "train.py", "a b", "$(id)", "x'y")
    )
    texts = [
        render_script(system, each) for system in SCRIPTS for each in (job, replace(job, gpus_per_node=0))
    ]
    named = replace(job, walltime="12:30:00", account="phys", partition="gpu", path="/opt/my env/bin")
    texts += [render_script(system, named) for system in SCRIPTS]
    golden("batch-scripts.txt", "\n".join(texts))


@pytest.mark.parametrize(
    ("walltime", "minutes"),
    [
        ("00:00:30", "00:01"),
        ("00:01:00", "00:01"),
        ("00:59:01", "01:00"),
        ("1:02:03", "01:03"),
        ("120:00:00", "120:00"),
    ],
)
def test_lsf_counts_whole_minutes_and_a_job_gets_no_less_than_asked(walltime: str, minutes: str) -> None:
    job = BatchJob("train", 1, 1, 0, 4, ("lmsrun", "train.py"), walltime=walltime)
    assert f"#BSUB -W {minutes}\n" in render_script("lsf", job)


def test_a_batch_job_has_a_harmless_name_and_whole_nodes() -> None:
    assert job_name(["/a/b/train model;$(id).py"]) == "train-model-id"
    assert job_name(["'"]) == "lmsrun"
    assert nodes_for(12, 6) == 2
    with pytest.raises(UsageError, match="try -np 12"):
        nodes_for(13, 6)
