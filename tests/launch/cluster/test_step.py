"""No job begins in one of several processes of a launcher."""

import pytest

from launch.cluster.step import ROWS, StepRow, refuse_inside_step
from launch.model.errors import UsageError


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.starter)
def test_one_task_of_several(row: StepRow) -> None:
    refuse_inside_step({row.number: "0", row.size: "1"})
    refuse_inside_step({row.number: "0"})
    refuse_inside_step({row.size: "4"})
    with pytest.raises(UsageError, match=f"task 1 of 4 that {row.starter} .*lmsrun worker -- PROGRAM"):
        refuse_inside_step({row.number: "1", row.size: "4"})
    with pytest.raises(UsageError, match=f"{row.size} is 'foo'; needed a whole number"):
        refuse_inside_step({row.number: "1", row.size: "foo"})


@pytest.mark.parametrize("mark", ["LMSRUN_JOB_ID", "LMSRUN_EXPECT"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.starter)
def test_the_program_of_a_rank_may_start_a_job_but_none_over_a_batch_job_again(
    row: StepRow, mark: str
) -> None:
    environ = {row.number: "1", row.size: "4", mark: "x"}
    if row.may_nest:
        refuse_inside_step(environ)
    else:
        with pytest.raises(UsageError, match="task 1 of 4"):
            refuse_inside_step(environ)
