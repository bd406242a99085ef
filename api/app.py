"""The application: its routes, what is around them, and what runs beside them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from aotcache.api import artifacts, blobs, builds, deaths, gc, health, leases, recalls
from aotcache.api.errors import add_error_handlers
from aotcache.api.middleware import Observed
from aotcache.api.state import Service, ServiceConfig
from aotcache.errors import AotcacheError

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 2.0
"""How often hits and misses are written."""

REFRESH_SECONDS = 10.0
"""How old what `/metrics` says of the store and of builds may be."""

_ABOUT = """\
A shared store of compiled drafter regions. Archives are named by their digest and never change; entries name
an archive for a key and a variant, and are signed. Every error has one body, with a type for programs.
"""


def create_app(config: ServiceConfig) -> FastAPI:
    """The application over one store and one database, whose tables must be there.

    Opens its connections when it starts and closes them when it ends; between, `app.state.service`
    has them.
    """

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        service = Service(config)
        app.state.service = service
        await run_in_threadpool(_read_recalls, service)
        try:
            async with (
                _repeated(service.flush, FLUSH_SECONDS),
                _repeated(service.watching.look, builds.LOOK_SECONDS),
                _repeated(lambda: _refresh(service), REFRESH_SECONDS),
            ):
                yield
        finally:
            await run_in_threadpool(service.close)

    app = FastAPI(
        title="aotcache", version=version("aotcache"), description=_ABOUT, lifespan=life, redoc_url=None
    )
    app.add_middleware(Observed)
    add_error_handlers(app)
    for part in (artifacts, blobs, leases, builds, deaths, recalls, health, gc):
        app.include_router(part.router)
    return app


def _read_recalls(service: Service) -> None:
    """Before the first look-up is answered: what was recalled while no service ran, or the database was another."""
    try:
        service.recalls.read(service.store, service.config.trusted)
    except AotcacheError as error:
        logger.warning("%s", error)


def _refresh(service: Service) -> None:
    _read_recalls(service)
    service.metrics.totals(service.index.totals())
    service.metrics.builds(service.builds.counts())
    service.publishes.finish()


@asynccontextmanager
async def _repeated(work: Callable[[], object], seconds: float) -> AsyncIterator[None]:
    """Do `work` in a thread at once and then every so many seconds, until the block ends.

    Work that has begun is waited for: it holds a connection.
    """
    ended = asyncio.Event()

    async def run() -> None:
        while not ended.is_set():
            try:
                await run_in_threadpool(work)
            except AotcacheError as error:
                logger.warning("%s", error)
            except Exception:
                # A defect; the next time may do all the same, and nobody else would do it.
                logger.exception("what is done every %g s failed", seconds)
            try:
                await asyncio.wait_for(ended.wait(), seconds)
            except asyncio.TimeoutError:
                continue

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        ended.set()
        await task
