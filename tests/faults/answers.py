"""A server that stalls, resets, answers 500, announces wrong lengths, ignores ranges or sends other bytes.

Each download ends with the right bytes or a typed error, within its limit, and nothing half-way under its
name; once the server has come to its senses the same download works.
"""

from __future__ import annotations

import io
import random
import socket
import struct
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

from aotcache.errors import AotcacheError
from aotcache.store.download import download
from aotcache.store.session import Limits, ServiceSession
from aotcache.types import Digest, sha256
from tests.faults.tally import Tally
from tests.store.faulty import Answer, Asked, faulty

SIZE = 400_000
LIMITS = Limits(connect=2, read=0.4, call=4, attempts=3, retry_after=1)
LIMIT = 30.0
"""Seconds for a download and its recovery: while a place was out of reach it is not asked for 5 s."""

Mood = Callable[[Answer, Asked, bytes], None]


def stalls(answer: Answer, asked: Asked, data: bytes) -> None:
    """Sends half, and nothing more for longer than a read may take."""
    _begin(answer, len(data))
    answer.wfile.write(data[: len(data) // 2])
    answer.wfile.flush()
    time.sleep(2 * LIMITS.read)
    answer.close_connection = True


def says_nothing(answer: Answer, asked: Asked, data: bytes) -> None:
    """Takes the request and answers nothing."""
    time.sleep(2 * LIMITS.read)
    answer.close_connection = True


def resets(answer: Answer, asked: Asked, data: bytes) -> None:
    """Sends a third and resets the connection."""
    _begin(answer, len(data))
    answer.wfile.write(data[: len(data) // 3])
    answer.wfile.flush()
    answer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    answer.connection.close()
    answer.close_connection = True


def fails(answer: Answer, asked: Asked, data: bytes) -> None:
    """500."""
    answer.send(500, b"out of order")


def is_busy(answer: Answer, asked: Asked, data: bytes) -> None:
    """503, and asks for an hour's patience."""
    answer.send(503, b"busy", Retry_After="3600")


def announces_more(answer: Answer, asked: Asked, data: bytes) -> None:
    """Announces one byte more than it sends."""
    answer.send(200, data, length=len(data) + 1)


def announces_less(answer: Answer, asked: Asked, data: bytes) -> None:
    """Announces one byte less than there is."""
    answer.send(200, data[:-1])


def announces_no_number(answer: Answer, asked: Asked, data: bytes) -> None:
    """Announces a length that is none."""
    answer.send_response(200)
    answer.send_header("Content-Length", "all of it")
    answer.end_headers()
    answer.wfile.write(data)
    answer.close_connection = True


def ignores_ranges(answer: Answer, asked: Asked, data: bytes) -> None:
    """Breaks off half-way, and answers what follows with all of it."""
    if "range" in asked.headers:
        answer.send(200, data)
    else:
        answer.send(200, data[: len(data) // 2], length=len(data))


def answers_another_range(answer: Answer, asked: Asked, data: bytes) -> None:
    """Breaks off half-way, and goes on from somewhere else."""
    if "range" in asked.headers:
        answer.send(206, data[10:], Content_Range=f"bytes 10-{len(data) - 1}/{len(data)}")
    else:
        answer.send(200, data[: len(data) // 2], length=len(data))


def sends_other_bytes(answer: Answer, asked: Asked, data: bytes) -> None:
    """All of it, with one bit another."""
    answer.send(200, data[:7] + bytes([data[7] ^ 1]) + data[8:])


def sends_too_much(answer: Answer, asked: Asked, data: bytes) -> None:
    """More than there is, chunk by chunk."""
    answer.send_response(200)
    answer.send_header("Transfer-Encoding", "chunked")
    answer.end_headers()
    for piece in (data, data, b""):
        answer.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))


def claims_zstd(answer: Answer, asked: Asked, data: bytes) -> None:
    """Says that it is zstd, which it is not."""
    answer.send(200, data, Content_Encoding="zstd")


MOODS: tuple[Mood, ...] = (
    stalls, says_nothing, resets, fails, is_busy, announces_more, announces_less, announces_no_number,
    ignores_ranges, answers_another_range, sends_other_bytes, sends_too_much, claims_zstd,
)  # fmt: skip


def _begin(answer: Answer, length: int) -> None:
    answer.send_response(200)
    answer.send_header("Content-Length", str(length))
    answer.end_headers()


def answers(
    folder: Path, rounds: int, *, seed: int = 0, progress: Callable[[str], None] = lambda text: None
) -> list[Tally]:
    """Download from a server in every mood, `rounds` times: for one answer, for two, or until it is mended."""
    # The server's own complaints about connections that it was told to break are no news.
    with redirect_stderr(io.StringIO()):
        return [_mood(mood, folder / mood.__name__, rounds, random.Random(seed), progress) for mood in MOODS]


def _mood(
    mood: Mood, folder: Path, rounds: int, chance: random.Random, progress: Callable[[str], None]
) -> Tally:
    tally = Tally("server", mood.__name__.replace("_", " "), limit=LIMIT)
    for number in range(rounds):
        data = chance.randbytes(SIZE)
        digest = sha256(data)
        # How many answers are in this mood: one, two, or all until somebody mends the server.
        moody = (1, 2, 1 << 30)[number % 3]
        seen = [0]
        mended = [False]

        def answer(
            answering: Answer, asked: Asked, data: bytes = data, moody: int = moody, seen: list[int] = seen,
            mended: list[bool] = mended,
        ) -> None:  # fmt: skip
            seen[0] += 1
            if seen[0] <= moody and not mended[0]:
                mood(answering, asked, data)
            else:
                answering.send(200, data)

        dest = folder / f"{number}.pt2"
        with faulty(answer) as server:
            session = ServiceSession(server.url, limits=LIMITS)
            began = time.monotonic()
            try:
                tally.rounds += 1
                tally.hit += 1
                known = SIZE if number % 2 else None
                first = _get(session, digest, dest, known)
                if first is None:
                    tally.acknowledged += 1
                elif isinstance(first, str):
                    tally.note([first], f"round {number}: ")
                tally.note(_at(dest, data, there=first is None), f"round {number}: ")
                mended[0] = True
                while _get(session, digest, dest, known) is not None:
                    if time.monotonic() - began > LIMIT:
                        tally.note([f"unusable: it does not work {LIMIT:g} s after the server was mended"])
                        break
                    time.sleep(0.1)
                tally.note(_at(dest, data, there=True), f"round {number}, mended: ")
            finally:
                session.close()
            tally.took(time.monotonic() - began)
        progress(f"server {tally.name}: {number + 1} of {rounds}, {len(tally.problems)} problems")
    return tally


def _get(session: ServiceSession, digest: Digest, dest: Path, size: int | None) -> AotcacheError | str | None:
    """None for success, the typed error, or a problem."""
    try:
        download(session, f"/v1/blobs/{digest}", digest, dest, size=size)
    except AotcacheError as error:
        return error
    except Exception as error:
        return f"unusable: {type(error).__name__} is no error of aotcache's: {error}"
    return None


def _at(dest: Path, data: bytes, *, there: bool) -> list[str]:
    if not dest.exists():
        return ["lost: the download was done, and there is no file"] if there else []
    if dest.read_bytes() != data:
        return ["wrong: the file has other bytes"]
    return [] if there else ["partial: there is a file, and the download failed"]
