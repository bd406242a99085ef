"""Requests to a service: tries, limits, errors, events, forks. What never leaks is case D9."""

from __future__ import annotations

import gzip
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path

import httpx
import pytest
import zstandard

from aotcache.errors import (
    ConfigError,
    CorruptArtifact,
    LeaseHeld,
    LeaseLost,
    NotStored,
    ServiceError,
    ServiceUnavailable,
    StoreError,
)
from aotcache.store import open_store
from aotcache.store.answers import retry_after, service_url
from aotcache.store.circuit import circuit_for
from aotcache.store.session import Limits, ServiceSession, session_for
from aotcache.types import sha256
from tests.store.faulty import Answer, Asked, Faulty, faulty

QUICK = Limits(connect=2, read=0.5, call=3, attempts=3, retry_after=1)


@pytest.fixture
def session_to() -> Iterator[Callable[..., ServiceSession]]:
    made: list[ServiceSession] = []

    def make(server: Faulty | str, token: str | None = None, limits: Limits = QUICK) -> ServiceSession:
        made.append(ServiceSession(server if isinstance(server, str) else server.url, token, limits=limits))
        return made[-1]

    yield make
    for session in made:
        session.close()


Make = Callable[..., ServiceSession]


def error(kind: str, **details: object) -> bytes:
    said = {"type": kind, "message": f"said {kind}", "details": details, "request_id": "r-17"}
    return json.dumps({"error": said}).encode()


def closed_port() -> str:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{held.getsockname()[1]}"


def test_one_connection_serves_many_requests(session_to: Make) -> None:
    ports: set[int] = set()

    def answer(answer: Answer, asked: Asked) -> None:
        ports.add(answer.client_address[1])
        answer.send(200, b'{"n": 1}')

    with faulty(answer) as server:
        session = session_to(server, "aot_t")
        assert [session.json("GET", "/v1/x", params={"a": "b+c", "none": None}) for _ in range(5)] == [
            {"n": 1}
        ] * 5
        session.close()
    assert len(ports) == 1
    assert {asked.path for asked in server.asked} == {"/v1/x?a=b%2Bc"}
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer aot_t"}
    assert len({asked.headers["x-request-id"] for asked in server.asked}) == 5


def test_a_service_below_a_path_is_asked_there(session_to: Make) -> None:
    with faulty(lambda answer, asked: answer.send(204)) as server:
        session = session_to(server.url + "/cache/")
        assert session.json("DELETE", "/v1/x") is None
        session.close()
    assert server.asked[0].path == "/cache/v1/x"


@pytest.mark.parametrize(
    ("status", "kind", "details", "expected"),
    [
        (404, "not_stored", {}, NotStored),
        (404, "not_found", {}, ServiceError),
        (401, "unauthorized", {}, ServiceError),
        (403, "untrusted", {}, ServiceError),
        (409, "lease_lost", {}, LeaseLost),
        (409, "conflict", {"holder": "host-a", "expires_in": 3.0}, LeaseHeld),
        (409, "conflict", {}, ServiceError),
        (422, "corrupt", {"expected": "x", "message": "y"}, CorruptArtifact),
    ],
)
def test_an_error_of_the_service_is_typed_and_tried_once(
    session_to: Make, status: int, kind: str, details: dict[str, object], expected: type[StoreError]
) -> None:
    with faulty(lambda answer, asked: answer.send(status, error(kind, **details))) as server:
        session = session_to(server)
        with pytest.raises(StoreError, match=rf"said {kind} .*r-17") as caught:
            session.json("PUT", "/v1/x", body={"a": 1})
        session.close()
    assert type(caught.value) is expected
    assert caught.value.details["request_id"] == "r-17"
    assert caught.value.details["status"] == status
    assert caught.value.details["type"] == kind
    assert len(server.asked) == 1


@pytest.mark.parametrize("body", [b"<html>Bad Gateway</html>", b"[1]", b'{"error": "no"}', b'{"error": {}}'])
def test_an_error_of_something_else_is_named_as_such(session_to: Make, body: bytes) -> None:
    with faulty(lambda answer, asked: answer.send(404, body)) as server:
        session = session_to(server)
        with pytest.raises(ServiceError, match="answered 404 Not Found, without the error of an aotcache"):
            session.json("GET", "/v1/x")
        session.close()


def test_what_an_error_says_moves_no_cursor_and_its_details_have_any_names(session_to: Make) -> None:
    said = {
        "type": "invalid",
        "message": "a\x1b[2J\nb",
        "details": {"self": 1, "message": 2},
        "request_id": "\x1b]0;",
    }
    with faulty(lambda answer, asked: answer.send(422, json.dumps({"error": said}).encode())) as server:
        session = session_to(server)
        with pytest.raises(ServiceError) as caught:
            session.json("GET", "/v1/x")
        session.close()
    assert str(caught.value).startswith("a?[2J\nb (GET")
    assert "\x1b" not in str(caught.value)
    assert caught.value.details["self"] == 1


@pytest.mark.parametrize("coding", ["zstd", "gzip, gzip"])
def test_a_coded_answer_is_not_unpacked(session_to: Make, coding: str) -> None:
    bomb = (
        zstandard.compress(bytes(1 << 28))
        if coding == "zstd"
        else gzip.compress(gzip.compress(bytes(1 << 28)))
    )
    with faulty(lambda answer, asked: answer.send(200, bomb, Content_Encoding=coding)) as server:
        session = session_to(server)
        began = time.monotonic()
        with pytest.raises(ServiceError, match=f"coded as '{coding}', which was not asked for"):
            session.json("GET", "/v1/x")
        assert time.monotonic() - began < 1
        session.close()
    assert server.asked[0].headers["accept-encoding"] == "identity"


def test_an_answer_that_is_no_json_is_an_error(session_to: Make) -> None:
    with faulty(lambda answer, asked: answer.send(200, b"<html>Welcome</html>")) as server:
        session = session_to(server)
        with pytest.raises(ServiceError, match="is an aotcache service at this address"):
            session.json("GET", "/v1/x")
        session.close()


def test_temporary_errors_are_tried_again_a_few_times(session_to: Make) -> None:
    statuses = iter([503, 500, 200, 502, 502, 502, 502])

    def answer(answer: Answer, asked: Asked) -> None:
        status = next(statuses)
        answer.send(status, b"{}" if status == 200 else error("unavailable"))

    with faulty(answer) as server:
        session = session_to(server)
        assert session.json("POST", "/v1/resolve", body={"keys": []}) == {}
        assert len(server.asked) == 3
        with pytest.raises(ServiceUnavailable, match="said unavailable"):
            session.json("GET", "/v1/x")
        assert len(server.asked) == 3 + QUICK.attempts
        session.close()


def test_what_may_not_be_repeated_is_not(session_to: Make) -> None:
    with faulty(lambda answer, asked: time.sleep(1)) as server:
        session = session_to(server)
        with pytest.raises(ServiceUnavailable, match=r"not a byte for 0\.5 s"):
            session.json("POST", "/v1/builds/claim", body={}, retry=False)
        session.close()
    assert len(server.asked) == 1


@pytest.mark.parametrize("date", [False, True])
def test_retry_after_is_waited_for(session_to: Make, date: bool) -> None:
    def answer(answer: Answer, asked: Asked) -> None:
        if len(server.asked) == 1:
            when = formatdate(time.time() + 1.4, usegmt=True) if date else "1"
            answer.send(503, error("unavailable"), Retry_After=when)
        else:
            answer.send(200, b"{}")

    with faulty(answer) as server:
        session = session_to(server, limits=Limits(retry_after=3))
        began = time.monotonic()
        assert session.json("GET", "/v1/x") == {}
        assert time.monotonic() - began > 0.2
        session.close()


@pytest.mark.parametrize("ahead", [-3600, 3600])
def test_a_retry_after_is_by_the_services_own_clock(ahead: float) -> None:
    now = 1_800_000_000.0
    headers = {
        "Date": formatdate(now + ahead, usegmt=True),
        "Retry-After": formatdate(now + ahead + 4, usegmt=True),
    }
    assert retry_after(httpx.Response(503, headers=headers), now) == 4.0


def test_a_retry_after_that_is_no_number_is_none(session_to: Make) -> None:
    statuses = iter([503, 200])
    with faulty(lambda answer, asked: answer.send(next(statuses), b"{}", Retry_After="\xb2")) as server:
        session = session_to(server)
        assert session.json("GET", "/v1/x") == {}
        session.close()


def test_a_retry_after_that_is_too_long_is_not_waited_for(session_to: Make) -> None:
    with faulty(lambda a, asked: a.send(429, error("busy"), Retry_After="3600")) as server:
        session = session_to(server)
        began = time.monotonic()
        with pytest.raises(ServiceUnavailable, match="said busy"):
            session.json("GET", "/v1/x")
        assert time.monotonic() - began < 2
        session.close()
    assert len(server.asked) == 1


def test_a_connection_that_is_reset_is_tried_again(session_to: Make) -> None:
    def answer(answer: Answer, asked: Asked) -> None:
        if len(server.asked) < 3:
            answer.connection.shutdown(socket.SHUT_RDWR)
            answer.close_connection = True
        else:
            answer.send(200, b"{}")

    with faulty(answer) as server:
        session = session_to(server)
        assert session.json("GET", "/v1/x") == {}
        session.close()


def test_an_answer_without_end_is_given_up(session_to: Make) -> None:
    def answer(answer: Answer, asked: Asked) -> None:
        answer.send_response(200)
        answer.send_header("Connection", "close")
        answer.end_headers()
        answer.close_connection = True
        for _ in range(200):
            answer.wfile.write(b" ")
            time.sleep(0.02)

    with faulty(answer) as server:
        session = session_to(server, limits=Limits(call=0.3, attempts=1))
        with pytest.raises(ServiceUnavailable, match=r"had not ended its answer after 0\.3 s"):
            session.json("GET", "/v1/x")
        session.close()


@pytest.mark.parametrize(
    "line", [b"X-A: b\r\n", b"HTTP/1.1 103 Early Hints\r\n\r\n"], ids=["headers", "early hints"]
)
def test_an_answer_that_never_begins_is_given_up(session_to: Make, line: bytes) -> None:
    def answer(answer: Answer, asked: Asked) -> None:
        answer.close_connection = True
        if line.startswith(b"X"):
            answer.wfile.write(b"HTTP/1.1 200 OK\r\n")
        for _ in range(100):
            answer.wfile.write(line)
            time.sleep(0.05)

    with faulty(answer) as server:
        session = session_to(server, limits=Limits(read=2, call=0.4, attempts=2))
        began = time.monotonic()
        with pytest.raises(ServiceUnavailable, match=r"the answer had not begun after 0\.4 s"):
            session.json("GET", "/v1/x")
        assert time.monotonic() - began < 4
        session.close()


def test_forty_requests_to_a_service_that_is_down_wait_once(session_to: Make) -> None:
    session = session_to(closed_port())
    began = time.monotonic()
    for _ in range(40):
        with pytest.raises(ServiceUnavailable, match="refused"):
            session.json("GET", "/v1/x")
    assert time.monotonic() - began < 3


def test_a_service_that_comes_back_is_found_by_one_request(
    session_to: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("aotcache.store.circuit.time.monotonic", lambda: now[0])
    down = [True]

    def answer(answer: Answer, asked: Asked) -> None:
        answer.send(503, error("unavailable")) if down[0] else answer.send(200, b"{}")

    with faulty(answer) as server:
        session = session_to(server, limits=Limits(attempts=2))
        with pytest.raises(ServiceUnavailable, match="said"):
            session.json("GET", "/v1/x")
        assert len(server.asked) == 2
        with pytest.raises(ServiceUnavailable, match="not asked again for 5"):
            session.json("GET", "/v1/x")
        now[0] += 5.1
        with pytest.raises(ServiceUnavailable, match="said"):
            session.json("GET", "/v1/x")
        assert len(server.asked) == 3
        now[0] += 5.1
        with pytest.raises(ServiceUnavailable, match=r"not asked again for 4\.9"):
            session.json("GET", "/v1/x")
        now[0] += 5.1
        down[0] = False
        assert session.json("GET", "/v1/x") == {}
        assert session.json("GET", "/v1/x") == {}
        assert len(server.asked) == 5
        session.close()


def test_while_one_request_finds_out_the_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("aotcache.store.circuit.time.monotonic", lambda: now[0])
    circuit = circuit_for("http://nowhere.test:1")
    circuit.failed("refused", probe=False)
    now[0] += 6
    assert circuit.enter(10)
    with pytest.raises(ServiceUnavailable):
        circuit.enter(10)
    now[0] += 11
    assert circuit.enter(10)


def test_an_upload_is_the_files_bytes_with_their_length(session_to: Make, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    (tmp_path / "archive").write_bytes(data)
    statuses = iter([503, 201, 200])
    with faulty(lambda answer, asked: answer.send(next(statuses), b"{}")) as server:
        session = session_to(server)
        assert session.upload("/v1/blobs/x", tmp_path / "archive", sha256(data))
        assert not session.upload("/v1/blobs/x", tmp_path / "archive", sha256(data))
        session.close()
    assert [asked.body == data for asked in server.asked] == [True] * 3
    assert server.asked[0].headers["content-length"] == str(len(data))


def test_events_go_on_after_the_last_one_when_the_connection_breaks(session_to: Make) -> None:
    def answer(answer: Answer, asked: Asked) -> None:
        last = int(asked.headers.get("last-event-id", "0"))
        lines = [
            f'id: {n}\nevent: stage\ndata: {{"n":\ndata: {n}}}\n\n: ping\n\n' for n in (last + 1, last + 2)
        ]
        body = "".join(lines).encode() + (b"id: 9\ndata: cut off" if last < 4 else b"")
        answer.send(200, body, length=len(body) + (100 if last < 4 else 0), Content_Type="text/event-stream")

    with faulty(answer) as server:
        session = session_to(server)
        found = list(session.events("/v1/builds/b/events"))
        session.close()
    assert [event["data"]["n"] for event in found] == [1, 2, 3, 4, 5, 6]
    assert found[0] == {"id": "1", "event": "stage", "data": {"n": 1}}
    assert [asked.headers.get("last-event-id") for asked in server.asked] == [None, "2", "4"]


def test_an_event_whose_id_no_header_can_hold_is_an_event_all_the_same(session_to: Make) -> None:
    def answer(answer: Answer, asked: Asked) -> None:
        answer.send(
            200, "id: \u00e9\u2603\ndata: 1\n\n".encode(), length=100 if len(server.asked) == 1 else None
        )

    with faulty(answer) as server:
        session = session_to(server)
        assert [(event["id"], event["data"]) for event in session.events("/v1/e")] == [("", 1), ("", 1)]
        session.close()


def test_events_of_a_service_that_is_gone_end_with_an_error(session_to: Make) -> None:
    with pytest.raises(ServiceUnavailable):
        list(session_to(closed_port()).events("/v1/builds/b/events"))


def test_a_process_that_was_forked_makes_connections_of_its_own(session_to: Make) -> None:
    ports: list[int] = []

    def answer(answer: Answer, asked: Asked) -> None:
        ports.append(answer.client_address[1])
        answer.send(200, b"{}")

    with faulty(answer) as server:
        session = session_to(server)
        session.json("GET", "/v1/x")
        child = os.fork()
        if child == 0:
            try:
                session.json("GET", "/v1/x")
                os._exit(0)
            except BaseException:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        session.json("GET", "/v1/x")
        session.close()
    assert ports[0] == ports[2] != ports[1]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("http://host/", "http://host"),
        ("https://Host:443/a/", "https://host/a"),
        ("http://[::1]:8080", "http://[::1]:8080"),
    ],
)
def test_addresses_are_written_in_one_way(text: str, found: str) -> None:
    assert service_url(text) == found


@pytest.mark.parametrize(
    "text",
    [
        "http://",
        "http://h:port",
        "ftp://h",
        "http://[h",
        "http://h o",
        "http://h/\x1b[2J",
        "http://h/?token=secret",
        "http://u:secret@h",
        "http://u:secret/x@h",
        "http://u:secret?x@h",
        "http://u:12#secret@h",
        "s3://key:secret/x@bucket/folder",
        "s3://key:secret@bucket/folder",
        "s3://[bucket",
        "htps://u:secret@h",
        "file://u:secret@h/x",
    ],
)
def test_addresses_that_are_none_or_hold_secrets_are_refused(text: str) -> None:
    for read in (service_url, open_store):
        with pytest.raises(StoreError) as caught:
            read(text)
        assert "secret" not in f"{caught.value} {caught.value.details}"


def test_the_token_is_the_settings_or_its_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTCACHE_CONFIG_HOME", str(tmp_path))
    with faulty(lambda answer, asked: answer.send(200, b"{}")) as server:
        path = tmp_path / "tokens" / server.url.removeprefix("http://").replace(":", "_")
        path.parent.mkdir()
        path.write_text("aot_of_file\n")
        path.chmod(0o644)
        with pytest.raises(ConfigError, match="mode 0644, expected 0600"):
            session_for(server.url)
        path.chmod(0o600)
        of_file = session_for(server.url)
        assert session_for(server.url + "/") is of_file
        of_file.json("GET", "/v1/x")
        monkeypatch.setenv("AOTCACHE_TOKEN", "aot_of_setting")
        of_setting = session_for(server.url)
        of_setting.json("GET", "/v1/x")
        # Where another service is the store, the setting's token is that one's.
        monkeypatch.setenv("AOTCACHE_STORE", "https://team.example/aotcache")
        assert session_for(server.url) is of_file
        monkeypatch.setenv("AOTCACHE_STORE", server.url)
        assert session_for(server.url) is of_setting
        of_file.close()
        of_setting.close()
    assert [asked.headers["authorization"] for asked in server.asked] == [
        "Bearer aot_of_file",
        "Bearer aot_of_setting",
    ]


def test_a_token_that_would_cross_the_network_in_plain_text_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AOTCACHE_TOKEN", "aot_secret")
    for url in ("https://plain.example", "http://127.0.0.1:9", "http://localhost:9", "http://[::1]:9"):
        session_for(url)
    assert caplog.text == ""
    session_for("http://plain.example")
    assert "http://plain.example crosses the network unencrypted" in caplog.text
    assert "aot_secret" not in caplog.text


@pytest.mark.parametrize("proxy", ["socks5://u:secret@127.0.0.1:1", "foo://u:secret@127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used_is_a_typed_error(
    session_to: Make, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    session = session_to("http://service.example")
    with pytest.raises(ConfigError, match="cannot be asked through the proxy") as caught:
        session.json("GET", "/v1/x")
    assert "secret" not in str(caught.value)


def test_a_token_that_no_header_can_hold_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        ServiceSession("http://host", "aot_secret\n")
    assert "secret" not in str(caught.value)
