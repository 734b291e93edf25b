"""The configuration: every field by every road, and every wrong value by its name."""

import dataclasses
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lms.config import ConfigError, LMSConfig, env_name

NAMES = [field.name for field in dataclasses.fields(LMSConfig)]
OTHER: dict[str, Any] = {
    "enabled": True,
    "mode": "graph",
    "policy": "threshold",
    "budget_bytes": 1 << 34,
    "margin": 0.25,
    "recompute": "off",
    "optimizer_state": "host",
    "variables": "host",
    "xla": "auto",
    "batch_size": 16,
    "min_tensor_bytes": 0,
    "bandwidth_gb_s": 60.0,
    "exclude_bytes": 5,
    "transport": "file",
    "store_dir": '/scratch/a "b" \\ c\t',
    "stats_file": "stats.csv",
    "tensorboard": "board",
    "host_mem_limit_mb": 38038,
    "defrag": True,
    "arithmetic_optimization": True,
    "swapout_threshold": 40,
    "swapin_groupby": 0,
    "swapin_ahead": 3,
    "sync_mode": 3,
    "serialization": ("1", "3:5", "7"),
    "serialization_by_size": 0.5,
    "n_tensors": 0,
    "lb": 3,
    "ub": 40,
    "ctrld_strategy": "direct_order",
    "fuse_swapins": True,
    "swap_branches": True,
    "branch_threshold": 12,
    "optimizer_scopes": ("adam", "gradients/"),
    "starting_scope": "block1",
    "starting_op_names": ("x", "block1/y"),
    "excl_scopes": ("a", "b/c"),
    "incl_scopes": ("a",),
    "excl_types": ("Relu", "Add"),
    "incl_types": ("Conv2D",),
    "excl_output_by_scopes": ("a1",),
    "excl_output_by_types": ("Relu",),
    "excl_input_by_scopes": ("a2",),
    "excl_input_by_types": ("MaxPool",),
    "incl_output_by_scopes": ("a3",),
    "incl_output_by_types": ("Conv2D",),
    "incl_input_by_scopes": ("a4",),
    "incl_input_by_types": ("Conv2DBackpropFilter",),
    "debug": True,
}


def test_the_table_above_knows_every_field() -> None:
    assert list(OTHER) == NAMES
    assert all(getattr(LMSConfig(), name) != value for name, value in OTHER.items())


def test_defaults_need_no_variable() -> None:
    assert LMSConfig().to_env() == {}
    assert LMSConfig.from_env({}) == LMSConfig()


@pytest.mark.parametrize("name", NAMES)
def test_each_field_survives_environment_and_toml(name: str, tmp_path: Path) -> None:
    config = LMSConfig(**{name: OTHER[name]})
    environ = config.to_env()
    assert len(environ) == 1
    assert LMSConfig.from_env(environ) == config
    file = tmp_path / "lms.toml"
    file.write_text(config.to_toml(), encoding="utf-8")
    assert LMSConfig.from_toml(file) == config


def test_all_fields_together(tmp_path: Path) -> None:
    config = LMSConfig(**OTHER)
    assert LMSConfig.from_env(config.to_env()) == config
    file = tmp_path / "lms.toml"
    file.write_text(config.to_toml(), encoding="utf-8")
    assert LMSConfig.from_toml(file, LMSConfig(lb=2)) == config


@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1), st.floats(0, 0.99)
)
def test_any_path_and_fraction_come_back(path: str, margin: float) -> None:
    config = LMSConfig(store_dir=path, margin=margin)
    assert LMSConfig.from_env(config.to_env()) == config


def test_names_of_variables() -> None:
    names = {field.name: env_name(field) for field in dataclasses.fields(LMSConfig)}
    assert (names["enabled"], names["store_dir"], names["swapin_ahead"]) == (
        "LMS_ENABLED",
        "LMS_STORE",
        "LMS_SWAPIN_AHEAD",
    )
    assert len(set(names.values())) == len(names)


def test_help_tells_every_field() -> None:
    told = pydoc.plain(pydoc.render_doc(LMSConfig))
    for field in dataclasses.fields(LMSConfig):
        assert f"    {field.name} ({env_name(field)}, {field.default!r}):\n" in told
        assert field.metadata["help"] in told


@pytest.mark.parametrize("word", ["1", "true", "YES", " on "])
def test_words_for_yes(word: str) -> None:
    assert LMSConfig.from_env({"LMS_ENABLED": word}).enabled


def test_the_environment_wins_over_its_base_and_leaves_the_rest() -> None:
    environ = {"LMS_LB": "7", "LMS_POLICY": "", "LMS_SOMETHING_ELSE": "x", "PATH": "/bin"}
    assert LMSConfig.from_env(environ, LMSConfig(lb=2, policy="all")) == LMSConfig(lb=7, policy="all")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (".".join("a" * 50_000) + " = 1", "has a key of more than 32 parts in line 1; needed fewer"),
        (f"a = {'[' * 50_000}", "is not TOML: "),
        (f"#{' ' * (1 << 20)}", "is larger than 1 MiB; needed a small TOML file"),
    ],
)
def test_a_hostile_file_is_refused_at_once(tmp_path: Path, text: str, told: str) -> None:
    (path := tmp_path / "lms.toml").write_text(text)
    with pytest.raises(ConfigError, match=f"lms.toml {told}"):
        LMSConfig.from_toml(path)


def test_blanks_round_a_variable_do_no_harm() -> None:
    environ = {"LMS_POLICY": " all ", "LMS_MARGIN": " 0.2 ", "LMS_STATS_FILE": " a b "}
    assert LMSConfig.from_env(environ) == LMSConfig(policy="all", margin=0.2, stats_file=" a b ")


def test_numbers_of_other_libraries_are_taken_as_pythons_own() -> None:
    np = pytest.importorskip("numpy")
    config = LMSConfig(budget_bytes=np.int64(5), margin=np.float32(0.25))
    assert config == LMSConfig(budget_bytes=5, margin=0.25)
    assert (type(config.budget_bytes), type(config.margin)) == (int, float)
    with pytest.raises(ConfigError, match="needed a whole number of bytes"):
        LMSConfig(budget_bytes=np.float64(5))


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"LMS_ENABLED": "maybe"}, "LMS_ENABLED is 'maybe'; needed true or false"),
        ({"LMS_LB": "2.5"}, "LMS_LB is '2.5'; needed a whole number"),
        ({"LMS_MARGIN": "a"}, "LMS_MARGIN is 'a'; needed a number"),
        ({"LMS_MODE": "grap"}, "mode is 'grap'; needed one of auto, native, graph, off (set by LMS_MODE)"),
        ({"LMS_MARGIN": "nan"}, "margin is nan; needed a finite number"),
        ({"LMS_BANDWIDTH_GB_S": "inf"}, "bandwidth_gb_s is inf; needed a finite number"),
        ({"LMS_MARGIN": "1"}, "margin is 1.0; needed a fraction below 1"),
        ({"LMS_BUDGET_BYTES": "0"}, "budget_bytes is 0; needed at least 1"),
        ({"LMS_SWAPOUT_THRESHOLD": "0"}, "swapout_threshold is 0; needed -1 (auto) or at least 1"),
        ({"LMS_SWAPIN_AHEAD": "0"}, "swapin_ahead is 0; needed -1 (auto) or at least 1"),
        ({"LMS_SWAPIN_GROUPBY": "-2"}, "swapin_groupby is -2; needed -1 (auto) or at least 0"),
        ({"LMS_SYNC_MODE": "4"}, "sync_mode is 4; needed 0, 1, 2 or 3"),
        ({"LMS_LB": "9", "LMS_UB": "3"}, "lb is 9 and ub is 3; needed lb <= ub (set by LMS_LB, LMS_UB)"),
        ({"LMS_POLICY": "budget"}, "policy is 'budget' without budget_bytes"),
        (
            {"LMS_ENABLED": "1", "LMS_LB": "2", "LMS_MARGIN": "2"},
            "margin is 2.0; needed a fraction below 1 (set by LMS_MARGIN)",
        ),
        (
            {"LMS_POLICY": "threshold", "LMS_RECOMPUTE": "only"},
            "recompute is 'only' with policy 'threshold', whose rules say what is swapped; needed recompute",
        ),
        ({"LMS_SERIALIZATION": "5:1"}, "serialization has '5:1', which names no level"),
        ({"LMS_SERIALIZATION": "7,5-3"}, "serialization has '5-3'; needed levels such as 7 or 3:5"),
        ({"LMS_SERIALIZATION": "x"}, "serialization has 'x'; needed levels"),
        ({"LMS_SERIALIZATION": "1:2:3:4"}, "serialization has '1:2:3:4'; needed levels"),
        ({"LMS_SERIALIZATION": "3:y"}, "serialization has '3:y'; needed levels"),
        ({"LMS_SERIALIZATION": "1:5:0"}, "serialization has '1:5:0'; needed levels"),
    ],
)
def test_wrong_variables_are_named(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LMSConfig.from_env(environ)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ("swapin_ahed = 3", "unknown key 'swapin_ahed'; did you mean swapin_ahead?"),
        ("zzz = 3", "unknown key 'zzz'; needed the name of a setting, such as policy or margin"),
        ("lb = true", "lb is True; needed a whole number"),
        ("enabled = 1", "enabled is 1; needed true or false"),
        ("store_dir = ''", "store_dir is ''; needed a text"),
        ("lb = [1]", "lb is ('1',); needed a whole number"),
        ("lms = 3", "lms is int; needed a table"),
        ("lb = ", "is not TOML: "),
    ],
)
def test_wrong_files_are_named(toml: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        LMSConfig.from_toml(file)
    assert str(caught.value).startswith(str(file))
    assert text in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read .*: No such file"):
        LMSConfig.from_toml(tmp_path / "none.toml")


def test_levels_may_be_numbers() -> None:
    assert LMSConfig(serialization=("-1", "2 :", ":", "1:9:2")).serialization[0] == "-1"
    assert LMSConfig.from_mapping({"serialization": [1, "3:5"]}).serialization == ("1", "3:5")
    assert LMSConfig.from_mapping({"serialization": (1, "3:5")}).serialization == ("1", "3:5")


def test_filters_may_be_sets_as_ibms_were() -> None:
    assert LMSConfig.from_mapping({"excl_scopes": {"b", "a"}}).excl_scopes == ("a", "b")
    assert LMSConfig.from_env({"LMS_EXCL_SCOPES": "a, b,"}).excl_scopes == ("a", "b")


@pytest.mark.parametrize("item", ["a,b", " a", "", 3])
def test_what_a_variable_could_not_hold_is_no_item_of_a_list(item: Any) -> None:
    with pytest.raises(ConfigError, match="excl_scopes has .*; needed texts without commas"):
        LMSConfig(excl_scopes=("x", item))
    with pytest.raises(ConfigError, match="excl_scopes is 'a'; needed a list of texts"):
        LMSConfig.from_mapping({"excl_scopes": "a"})


def test_lms_imports_no_tensorflow() -> None:
    source = (
        "import sys, lms; print({'tensorflow', 'keras', 'numpy'} & set(sys.modules), lms.enable.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "set() enable\n"
