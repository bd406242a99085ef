"""What a handle says once, it says once: also what a service words anew with each request."""

from __future__ import annotations

import pytest

from aotcache.runtime.resolve import lasting


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (
            "no token (POST http://h/v1/resolve: 401, request 83fd)",
            "no token (POST http://h/v1/resolve: 401, request a-1)",
        ),
        (
            "http://h is not asked again for 3.4 s: it was not reached",
            "http://h is not asked again for 0.2 s: it was not reached",
        ),
    ],
)
def test_one_trouble_of_a_store_is_one_reason_at_every_call(first: str, again: str) -> None:
    assert lasting(first) == lasting(again)


def test_other_troubles_are_other_reasons() -> None:
    assert lasting("no token (401, request a)") != lasting("no right (403, request a)")
