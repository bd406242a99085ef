"""One service with a builder beside it, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aotcache.store.builds import BuildService
from tests.services.building import Building, building, client_of

LAYERS = "abcdefz"
"""Of the service's spec; `z` cannot be built."""


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Building]:
    """The service; this process is one of its clients only with `client`."""
    with building(tmp_path_factory.mktemp("service"), LAYERS) as made:
        yield made


@pytest.fixture
def client(served: Building, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Building]:
    """This process as a host of its own, with nothing in its home."""
    with client_of(served, tmp_path_factory.mktemp("client") / "home"):
        yield served


@pytest.fixture
def service(served: Building) -> Iterator[BuildService]:
    """Calls of the service."""
    made = served.service
    yield made
    made.session.close()
