"""Words and numbers for people: borders of rounding and units, none, one and many."""

import pytest

from common.say import (
    bandwidth_text,
    bytes_text,
    count,
    counts,
    duration_text,
    factor_text,
    listed,
    minutes_text,
    percent,
    range_text,
    ranks_text,
    rate_text,
    spans,
)
from lab.units import parse_latency, parse_rate


def test_one_is_singular_and_all_else_plural() -> None:
    assert [count(number, "node") for number in (0, 1, 2, 4096)] == [
        *("0 nodes", "1 node", "2 nodes", "4,096 nodes")
    ]
    assert counts([3, 2, 3], "rank") == "2 and 3 ranks"
    assert counts([4, 1, 2], "rank") == "1, 2 and 4 ranks"
    assert counts([1, 1], "rank") == "1 rank"
    assert counts([0], "rank") == "0 ranks"
    assert counts([], "rank") == "no ranks"


def test_lists_name_the_first_and_count_the_others() -> None:
    assert listed([]) == ""
    assert listed(["a"]) == "a"
    assert listed(["a", "b"]) == "a and b"
    assert listed(letter for letter in "abc") == "a, b and c"
    assert listed("abc", most=3) == "a, b and c"
    assert listed("abcd", most=3) == "a, b, c and 1 more"
    assert listed(range(2021)).endswith("18, 19 and 2,001 more")


def test_ranks_keep_their_order_and_stay_short() -> None:
    assert ranks_text([]) == "no rank"
    assert ranks_text([0]) == "rank 0"
    assert ranks_text(iter([2, 0])) == "ranks 2 and 0"
    assert ranks_text(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6 and 7"
    assert ranks_text(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_spans_join_neighbours() -> None:
    assert spans([]) == []
    assert spans([4]) == ["4"]
    assert spans([0, 1, 2, 5, 7, 8]) == ["0-2", "5", "7-8"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (0, "0 s"),
        (1e-10, "0.1 ns"),
        (1.234e-5, "12.3 µs"),
        (0.00099949, "999 µs"),
        (0.0009996, "1 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (59.96, "60 s"),
        (1234, "1,230 s"),
        (3600, "1 h"),
        (1e7, "2,780 h"),
    ],
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_ranges_have_the_unit_of_the_typical_time() -> None:
    assert range_text(0.182, 0.24) == "182 to 240 ms"
    assert range_text(0.9, 1.2) == "0.9 to 1.2 s"
    assert range_text(0.9, 1.2, between="–", typical=0.95) == "900–1,200 ms"
    assert range_text(0, 0) == "0 to 0 s"


def test_waits_carry_whole_seconds_into_minutes_and_hours() -> None:
    texts = [minutes_text(seconds) for seconds in (-90, 0.4, 59.4, 59.6, 125, 3599.6, 11520)]
    assert texts == ["0 s", "0 s", "59 s", "1 min 00 s", "2 min 05 s", "1 h 00 min", "3 h 12 min"]


def test_rates_and_bytes_change_the_unit_where_rounding_does() -> None:
    assert rate_text(2e8) == "200 Mbit/s"
    assert rate_text(9.994e8) == "999 Mbit/s"
    assert rate_text(9.996e8) == "1 Gbit/s"
    assert rate_text(1.23456e8) == "123 Mbit/s"
    assert rate_text(1.23456e8, digits=6) == "123.456 Mbit/s"
    assert rate_text(4e14) == "400 Tbit/s"
    assert rate_text(0) == "0 bit/s"
    assert bytes_text(0) == bytes_text(-1) == "0 B"
    assert bytes_text(999) == "999 B"
    assert bytes_text(36_924_456) == "36.9 MB"
    assert bandwidth_text(8.07e-10) == "1.24 GB/s"
    assert bandwidth_text(0) == "unlimited"


@pytest.mark.parametrize("bits", [1.0e5, 2e8, 2.5e9, 1e13])
def test_a_rate_reads_back(bits: float) -> None:
    assert parse_rate(rate_text(bits, digits=6)) == pytest.approx(bits)


@pytest.mark.parametrize("seconds", [2e-9, 5e-5, 0.0002, 3.5])
def test_a_latency_reads_back(seconds: float) -> None:
    assert parse_latency(duration_text(seconds)) == pytest.approx(seconds)


def test_shares_and_factors() -> None:
    assert percent(0.254) == "25 %"
    assert percent(0.254, 1) == "25.4 %"
    assert percent(-0.031, 1) == "-3.1 %"
    assert percent(0.031, 1, signed=True) == "+3.1 %"
    assert percent(1) == "100 %"
    values = (0, 0.0099, 0.01, 1.356, 9.99, 10, 16.66, 100, 1234.4)
    assert [factor_text(value) for value in values] == [
        *("<0.01", "<0.01", "0.01", "1.36", "9.99", "10.0", "16.7", "100", "1,234")
    ]
