"""Servers for the tests of object stores: one of each kind a process, started when the first test asks for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.remote import servers

if TYPE_CHECKING:
    from tests.ranks.pool import Pool


@pytest.fixture(scope="session", params=["weed", "moto"])
def either(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """The port of each server in turn."""
    yield from _server(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of the real server."""
    yield from _server("weed", tmp_path_factory)


def _server(name: str, factory: pytest.TempPathFactory) -> Iterator[int]:
    needed = "weed" if name == "weed" else "moto_server"
    if servers.program(needed) is None:
        warnings.warn(
            f"NOT TESTED against {name}: its server is not installed (requirements/test.txt)",
            stacklevel=1,
        )
        pytest.skip(f"{needed} is not installed")
    start: Callable[[Path], object] = getattr(servers, name)
    with start(factory.mktemp(name)) as port:  # type: ignore[attr-defined]
        yield port


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[servers.Proxy]:
    """A proxy before the real server; what the environment points at."""
    with servers.Proxy(server) as between:
        for name, value in servers.environment(between.port).items():
            monkeypatch.setenv(name, value)
        yield between


@pytest.fixture
def where(proxy: servers.Proxy) -> dict[str, str]:
    """What points a rank at the proxy."""
    return servers.environment(proxy.port)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks."""
    from tests.ranks.pool import SHARED

    yield SHARED
    SHARED.close()


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """A place of its own for a test."""
    return f"s3://{servers.BUCKET}/{abs(hash(request.node.nodeid)):x}/step-1"
