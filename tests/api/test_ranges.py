"""Ranges and conditions, by the examples of RFC 9110."""

from __future__ import annotations

import pytest

from aotcache.api.ranges import Range, Unsatisfiable, accepts, matches, parse_range, range_applies


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-499", (0, 500)),
        ("bytes=500-999", (500, 1000)),
        ("bytes=-500", (9500, 10000)),
        ("bytes=9500-", (9500, 10000)),
        ("bytes=0-0", (0, 1)),
        ("bytes=9999-20000", (9999, 10000)),
        ("bytes=-20000", (0, 10000)),
        ("BYTES = 1 - 2", (1, 3)),
    ],
)
def test_a_range_is_read_as_the_rfc_says(header: str, expected: tuple[int, int]) -> None:
    found = parse_range(header, 10000)
    assert found == Range(*expected, 10000)
    assert found.length == expected[1] - expected[0]


def test_content_range_counts_the_last_byte_in() -> None:
    assert Range(0, 500, 1234).content_range == "bytes 0-499/1234"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "bytes",
        "bytes=",
        "bytes=-",
        "bytes=5-2",
        "bytes=0-1,5-6",
        "items=0-1",
        "bytes=a-b",
        "bytes=1-2-3",
    ],
)
def test_what_is_no_single_range_asks_for_the_whole(header: str | None) -> None:
    assert parse_range(header, 10) is None


@pytest.mark.parametrize(
    ("header", "size"), [("bytes=10-", 10), ("bytes=10-12", 10), ("bytes=-0", 10), ("bytes=0-", 0)]
)
def test_a_range_behind_the_end_is_unsatisfiable(header: str, size: int) -> None:
    with pytest.raises(Unsatisfiable):
        parse_range(header, size)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ('"a"', True),
        ('W/"a"', True),
        ('"x", "a"', True),
        ("*", True),
        ('"b"', True),
        ('"ab"', False),
        ("a", False),
        (None, False),
    ],
)
def test_if_none_match_compares_weakly(header: str | None, expected: bool) -> None:
    assert matches(header, ('"a"', '"b"')) is expected


def test_if_range_compares_strongly() -> None:
    assert range_applies(None, '"a"')
    assert range_applies('"a"', '"a"')
    assert not range_applies('W/"a"', '"a"')
    assert not range_applies("Wed, 21 Oct 2015 07:28:00 GMT", '"a"')


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("zstd", True),
        ("gzip, ZSTD;q=0.5", True),
        ("gzip, zstd;q=0", False),
        ("gzip, zstd; q=0.000", False),
        ("gzip", False),
        ("", False),
        (None, False),
        ("xzstd", False),
    ],
)
def test_a_coding_is_accepted_if_it_is_named_and_not_refused(header: str | None, expected: bool) -> None:
    assert accepts(header, "zstd") is expected
