"""Lengths of time and sizes as people write them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from aotcache.cli.quantities import byte_size, duration
from aotcache.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("90s", timedelta(seconds=90)),
        ("15m", timedelta(minutes=15)),
        ("12h", timedelta(hours=12)),
        ("30d", timedelta(days=30)),
        ("2w", timedelta(days=14)),
    ],
)
def test_lengths_of_time(written: str, meant: timedelta) -> None:
    assert duration(written) == meant


@pytest.mark.parametrize("written", ["", "30", "d", "-1d", "1.5h", "30 days", "1y"])
def test_what_is_no_length_of_time(written: str) -> None:
    with pytest.raises(ConfigError, match="30d"):
        duration(written)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("0", 0),
        ("1234", 1234),
        ("12B", 12),
        ("3kB", 3_000),
        ("3 KiB", 3_072),
        ("500MB", 500_000_000),
        ("50GiB", 53_687_091_200),
        ("1.5GB", 1_500_000_000),
        ("2TiB", 2_199_023_255_552),
    ],
)
def test_sizes(written: str, meant: int) -> None:
    assert byte_size(written) == meant


@pytest.mark.parametrize(
    "written", ["", "GiB", "-1GB", "5 gib", "5Gi", "1e9", "5GB5", "1.", "inf", "nan", "5PB"]
)
def test_what_is_no_size(written: str) -> None:
    with pytest.raises(ConfigError, match="50GiB"):
        byte_size(written)
