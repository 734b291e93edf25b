import pytest
from hypothesis import given
from hypothesis import strategies as st

from lms.simulate.range_max import MemoryProfile

LENGTH = 700
RANGES = st.tuples(st.integers(0, LENGTH - 1), st.integers(0, LENGTH - 1))


@given(st.lists(st.tuples(RANGES, st.integers(-50, 50)), max_size=12), RANGES)
def test_a_profile_is_a_list_with_ranges(additions, asked):
    plain = [1000 + index % 97 for index in range(LENGTH)]  # memory is never negative
    profile = MemoryProfile(plain)
    for (first, last), nbytes in additions:
        profile.add(first, last, nbytes)
        for point in range(first, last + 1):
            plain[point] += nbytes
    first, last = asked
    assert len(profile) == LENGTH and profile[first] == plain[first]
    assert profile.largest(first, last) == max(plain[first : last + 1], default=0)


@pytest.mark.parametrize(("first", "last"), [(0, 127), (127, 128), (128, 255), (0, 699), (5, 4)])
def test_ranges_at_the_borders_of_blocks(first, last):
    profile = MemoryProfile([0] * LENGTH)
    profile.add(first, last, 7)
    assert [profile[point] for point in range(LENGTH)] == [7 * (first <= p <= last) for p in range(LENGTH)]
    assert profile.largest(0, LENGTH - 1) == (7 if first <= last else 0)
