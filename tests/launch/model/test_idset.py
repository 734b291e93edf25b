import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.model.idset import MAX_ID, format_ids, parse_ids, parse_mask


@pytest.mark.parametrize(
    ("text", "ids"),
    [("", set()), ("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), (" 0,8,250-255\n", {0, 8, *range(250, 256)})],
)
def test_list_format(text: str, ids: set[int]) -> None:
    assert parse_ids(text) == ids


@pytest.mark.parametrize(
    "text", ["a", "-1", "3-1", "0-", "1-2-3", "0-30:2/4", "٣", "0x3", f"{MAX_ID + 1}", "0-99999999999", "1 2"]
)
def test_damaged_list(text: str) -> None:
    with pytest.raises(ValueError, match="id"):
        parse_ids(text)


def test_a_hostile_list_costs_little() -> None:
    with pytest.raises(ValueError, match="range"):
        parse_ids(f"0-{MAX_ID}," * 1000)


@given(st.frozensets(st.integers(0, 2000), max_size=40))
def test_format_and_parse_are_inverse(ids: frozenset[int]) -> None:
    assert parse_ids(format_ids(ids)) == ids


@given(st.frozensets(st.integers(0, 500), max_size=40))
def test_mask_against_an_independent_writer(ids: frozenset[int]) -> None:
    words = [sum(1 << (i % 32) for i in ids if i // 32 == word) for word in reversed(range(16))]
    assert parse_mask(",".join(f"{word:08x}" for word in words)) == ids
    # hwloc's way: no leading zero words, an empty word for zero.
    text = ",".join(f"0x{word:08x}" if word else "" for word in words).lstrip(",")
    assert parse_mask(text or "0x0") == ids


@pytest.mark.parametrize("text", ["xyz", "-5", "0x-1", "0xf...f", "1_0", "f" * (MAX_ID // 4 + 1)])
def test_damaged_mask(text: str) -> None:
    with pytest.raises(ValueError, match="mask"):
        parse_mask(text)
