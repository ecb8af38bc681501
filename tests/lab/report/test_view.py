"""Numbers as a report writes them."""

import pytest

from lab.report.view import bandwidth_text, duration_text, small_text


@pytest.mark.parametrize(
    ("seconds_per_byte", "expected"),
    [(8.07e-10, "1.24 GB/s"), (8e-8, "12.5 MB/s"), (1.0005e-6, "1 MB/s"), (0.0, "unlimited")],
)
def test_bandwidths_are_units_that_people_read(seconds_per_byte, expected):
    assert bandwidth_text(seconds_per_byte) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (1.23e-5, "12.3 µs"),
        (0.5634, "563 ms"),
        (0.9999, "1 s"),
        (9e-10, "0.9 ns"),
        (7200, "2 h"),
        (1234, "1,230 s"),
        (0, "0 s"),
    ],
)
def test_durations_are_units_that_people_read(seconds, expected):
    assert duration_text(seconds) == expected


def test_tiny_numbers_have_no_leading_zero_in_the_exponent():
    assert [small_text(value) for value in (2.61e-5, 0.0171, 3.2)] == ["2.6e-5", "0.017", "3.2"]
    assert small_text(2.6e-5, 1) == "3e-5"
