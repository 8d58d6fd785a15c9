import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.stream import ItemPositions

F, T = False, True


def test_without_a_mask_every_position_has_a_row() -> None:
    span = ItemPositions(10, 4)
    assert span.row_count() == 4
    assert span.row_slice(1, 3) == (1, 3)
    assert span.end == 14


def test_the_worked_example() -> None:
    span = ItemPositions(0, 5, [F, T, F, T, T])
    assert span.rows_until == [0, 1, 1, 2, 3]
    assert type(span.rows_until) is list
    assert span.row_slice(3, 5) == (1, 3)
    assert span.row_count() == 3


def test_zero_guards_at_both_ends() -> None:
    span = ItemPositions(0, 3, [T, T, F])
    assert span.row_slice(0, 0) == (0, 0)
    assert span.row_slice(0, 1) == (0, 1)
    assert span.row_slice(0, 3) == (0, 2)


def test_an_empty_mask_has_no_rows() -> None:
    span = ItemPositions(7, 0, [])
    assert span.row_count() == 0
    assert span.row_slice(0, 0) == (0, 0)


def test_budgets_count_rows_not_positions() -> None:
    mask = [index % 13 == 0 for index in range(100)]
    assert ItemPositions(0, 100, mask).row_count() == 8


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 1), (0, 6)])
def test_positions_outside_the_range_are_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="not inside a range of 5"):
        ItemPositions(0, 5).row_slice(start, end)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, -1)])
def test_negative_ranges_are_refused(offset: int, length: int) -> None:
    with pytest.raises(ValueError, match="offset and length >= 0"):
        ItemPositions(offset, length)


def test_a_mask_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="2 entries for a range of 3"):
        ItemPositions(0, 3, [T, F])


@given(st.lists(st.booleans(), max_size=40), st.data())
def test_rows_follow_the_mask(mask: list[bool], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(mask)))
    end = data.draw(st.integers(start, len(mask)))
    rows = list(range(100, 100 + sum(mask)))
    expected, row = [], 0
    for flag in mask:
        expected.append(rows[row] if flag else -1)
        row += flag
    assert ItemPositions(0, len(mask), mask).rows_of(start, end, rows, silence=-1) == expected[start:end]


def test_rows_without_a_mask() -> None:
    assert ItemPositions(5, 3).rows_of(1, 3, [7, 8, 9], silence=0) == [8, 9]
