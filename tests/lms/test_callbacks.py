"""The statistics callbacks and IBM's statistics, in a training with Keras 3."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from child_job import run_job

from lms.callbacks import EitherKeras, LMSStatsAverage, LMSStatsLogger, StepStats
from lms.errors import PlaceError

pytestmark = pytest.mark.extras

HEADER = "step type,epoch,step,duration,allocs,reclaimOnes,reclaimAlls,GiB reclaimed"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    return run_job("compat_job.py", str(tmp_path_factory.mktemp("stats")))


@pytest.mark.tensorflow
def test_a_line_for_each_step(seen: dict[str, Any]) -> None:
    header, *lines = seen["log"]
    assert header == HEADER
    rows = [line.split(",") for line in lines]
    assert [row[:3] for row in rows] == [
        *(["t", "0", str(step)] for step in range(4)),
        ["v", "0", "0"],
        *(["t", "1", str(step)] for step in range(4)),
        ["v", "1", "0"],
    ]
    tensors, nbytes = seen["report"]
    assert all(row[5:] == [str(tensors), "0", str(nbytes / 2**30)] for row in rows if row[0] == "t")
    assert rows[0][4] == "", "planning the step started the allocator's counters anew"
    assert all(int(row[4]) > tensors for row in rows[1:] if row[0] == "t"), "each swap-in allocates"
    assert all(float(row[3]) > 0 for row in rows)


@pytest.mark.tensorflow
def test_tensorboard_gets_the_same_series(seen: dict[str, Any]) -> None:
    tensors, _ = seen["report"]
    assert set(seen["board"]) == {
        f"lms/{kind}/{column}"
        for kind in ("train", "validation")
        for column in ("duration", "allocs", "reclaimOnes", "reclaimAlls", "GiB reclaimed")
    }
    assert seen["board"]["lms/train/reclaimOnes"] == [tensors] * 8
    durations = [float(line.split(",")[3]) for line in seen["log"][1:] if line.startswith("t")]
    assert seen["board"]["lms/train/duration"] == pytest.approx(durations, rel=1e-6)


@pytest.mark.tensorflow
def test_one_line_for_the_average(seen: dict[str, Any]) -> None:
    header, line = seen["average"]
    rates = "image_size,megapixels/sec,median megapixels/sec,gib_reclaimed"
    assert header == f"{rates},allocs,num_steps,reclaim_alls,reclaim_ones,time"
    row = dict(zip(header.split(","), line.split(","), strict=True))
    assert float(row["megapixels/sec"]) == pytest.approx(16 * 32**2 / float(row["time"]) / 1e6)
    assert (row["num_steps"], float(row["reclaim_ones"])) == ("4", seen["report"][0])
    said = "LMSStatsAverage: no step counted; training ended before step 9 of epoch 0, both from 0\n"
    assert seen["short"] == [said, False]


@pytest.mark.tensorflow
def test_the_average_from_the_first_step_on_has_all_of_them(seen: dict[str, Any]) -> None:
    """As IBM's did with ``start_batch=0``: the step that traces and plans counts like the others."""
    header, line = seen["whole"]
    row = dict(zip(header.split(","), line.split(","), strict=True))
    durations = [float(line.split(",")[3]) for line in seen["log"][1:] if line.startswith("t")]
    assert (row["num_steps"], float(row["reclaim_ones"])) == ("8", seen["report"][0])
    assert float(row["time"]) == pytest.approx(sum(durations) / 8, rel=0.2)
    assert float(row["time"]) > float(seen["average"][1].split(",")[-1]), "tracing takes longer than a step"
    assert row["allocs"] == "", "planning the step started the allocator's counters anew"


@pytest.mark.tensorflow
def test_statistics_are_the_allocators_and_the_stores(seen: dict[str, Any]) -> None:
    values, (tensors, nbytes) = seen["values"], seen["report"]
    assert values["get_bytes_limit"] == 400 * 2**20
    assert 0 < values["get_bytes_in_use"] < values["get_peak_bytes_in_use"] < values["get_bytes_limit"]
    assert (values["get_num_single_reclaims"], values["get_bytes_reclaimed"]) == (8 * tensors, 8 * nbytes)
    assert (values["get_peak_bytes_reclaimed"], values["get_current_bytes_reclaimed"]) == (nbytes, 0)
    assert values["get_gpu_host_peak_bytes_in_use"] == nbytes
    assert values["get_num_allocs"] > 8 * tensors
    assert 0 < values["get_largest_alloc_size"] <= values["get_peak_bytes_in_use"]
    reserved, most = values["get_bytes_reserved"], values["get_peak_bytes_reserved"]
    assert values["get_peak_bytes_in_use"] <= reserved <= most <= values["get_bytes_reservable_limit"]
    kind, text = values["get_bytes_defragged"]
    assert (kind, text.partition(":")[0]) == ("NoStatisticError", "get_bytes_defragged")
    assert "gpu_id is 3; this process sees 0 GPU(s)" in seen["other gpu"][1]
    assert "numa_node is 8; a process has one pool" in seen["other node"][1]


@pytest.mark.tensorflow
def test_settings(seen: dict[str, Any]) -> None:
    assert "tf.config.experimental.set_lms_enabled" in seen["installed"]
    assert "tf.compat.v1.experimental.get_num_allocs" in seen["installed"]
    assert seen["again"] == []
    on = [seen["before"], seen["within"], seen["behind"], seen["after"]]
    assert on == [[False, False], [True], False, [False, True]]
    assert (seen["allocator"], seen["allocator after"]) == (["cuda_malloc_async", True], None)
    assert "TensorFlow has initialised its devices" in seen["late defrag"][1]


@pytest.mark.tensorflow
def test_classes_as_keras_callbacks(seen: dict[str, Any]) -> None:
    assert "[LMS][0] n_tensors: 4" in seen["first_lines"]
    assert "[LMS][0] 4 tensors will be swapped out(in) to(from) the host" in seen["first_lines"]
    assert any("operations to the model (" in line for line in seen["second_lines"])
    assert seen["plot"]


@pytest.mark.tensorflow
def test_a_size_that_one_callback_assumes_is_not_the_next_ones(seen: dict[str, Any]) -> None:
    assert not any("not necessary" in line for line in seen["second_lines"])
    assert "[LMS][0] LMS is not necessary. Turned LMS off." in seen["real size again"]


@pytest.mark.tensorflow
def test_a_callback_without_tensors_keeps_lms_off_for_its_training(seen: dict[str, Any]) -> None:
    lines, edited, why = seen["kept off"]
    assert lines == ["[LMS][0] LMS is disabled and will not modify the model."]
    assert edited == 0 and set(why) == {"n_tensors is 0"}
    assert seen["back"] > 0


@pytest.mark.tensorflow
def test_rules_that_the_policy_does_not_go_by_are_a_warning(seen: dict[str, Any]) -> None:
    edited, (warning,), _ = seen["idle"]
    assert edited > 0
    assert warning.startswith("n_tensors, sync_mode: of no effect with policy 'all'")
    assert "LMS_POLICY=threshold" in warning


@pytest.mark.tensorflow
def test_who_asks_for_no_tensors_is_not_warned_that_none_is_swapped(seen: dict[str, Any]) -> None:
    assert seen["none asked"] == [0, [], "nothing is edited: n_tensors is 0"]


def test_unknown_stays_unknown_in_sums() -> None:
    one = StepStats(2.0, None, 4, 0, 1.0)
    assert (one + one).over(2) == one
    assert (one - one).allocs is None


def test_what_a_gpu_does_not_count_is_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorflow")
    from lms import callbacks
    from lms.engine import installation as hook

    def planned(*edited: Any) -> None:
        monkeypatch.setattr(
            hook, "engine", lambda: SimpleNamespace(report=lambda: SimpleNamespace(edited=edited))
        )

    counted, uncounted = StepStats(2.0, 9, 4, 0, 1.0), StepStats(2.0, 9, 0, 0, None)
    planned(SimpleNamespace(tensors=7, bytes_out=1 << 20), SimpleNamespace(tensors=3, bytes_out=1 << 29))
    assert callbacks._with_plan(uncounted) == StepStats(2.0, 9, 3, 0, 0.5)
    assert callbacks._with_plan(counted) == counted
    planned()
    assert callbacks._with_plan(uncounted) == uncounted


def test_a_training_without_counted_steps_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LMSStatsAverage(tmp_path / "x.csv", 32).on_train_end()
    assert "no step counted" in capsys.readouterr().out
    assert not (tmp_path / "x.csv").exists()


def test_every_method_that_keras_calls_is_there() -> None:
    keras = pytest.importorskip("keras")
    for name in dir(keras.callbacks.Callback):
        if name.startswith("on_") or name.startswith("set_"):
            assert callable(getattr(EitherKeras, name)), name


def test_a_file_that_cannot_be_written_is_refused_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for make in (LMSStatsLogger, lambda path: LMSStatsAverage(path, 32)):
        with pytest.raises(PlaceError, match="cannot write .* needed in a callback's logfile"):
            make(tmp_path / "file" / "steps.csv")
    LMSStatsAverage(tmp_path / "new" / "average.csv", 32)
    assert (tmp_path / "new").is_dir()
