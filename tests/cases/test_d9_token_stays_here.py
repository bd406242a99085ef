"""D9: a token goes to its service alone, and neither it nor a signed address is ever written down."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from aotcache.trust import sign
from aotcache.types import sha256
from tests.manifests import make_manifest
from tests.services.s3 import S3, s3_server
from tests.services.serving import Serving, serving
from tests.store.faulty import Answer, Asked, Faulty, faulty

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "aot_T0kenThatNobodyMaySee_0123456789abcdef"
SIGNATURE = "X-Amz-Signature=5ecret0fTheAddress"
DATA = b"the archive" * 1000
DIGEST = sha256(DATA)


def run_client(url: str, digest: str, folder: Path, token: str = TOKEN, *how: str) -> tuple[int, str]:
    """Exit status of a client at debug level, and all that it has written. Its home is in the folder."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cases.token_client", url, digest, str(folder / "copy"), *how],
        cwd=ROOT,
        env={**os.environ, "AOTCACHE_TOKEN": token, "AOTCACHE_HOME": str(folder / "home")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


def success(answer: Answer, asked: Asked) -> None:
    answer.send(200, DATA, Content_Disposition=f'"{asked.path}"')


def refusal(answer: Answer, asked: Asked) -> None:
    answer.send(403, f"<Error>SignatureDoesNotMatch {asked.path} {dict(asked.headers)}</Error>".encode())


def refusal_in_its_phrase(answer: Answer, asked: Asked) -> None:
    answer.send_response(403, f"Not {asked.path}")
    answer.send_header("Content-Length", "0")
    answer.end_headers()


def timeout(answer: Answer, asked: Asked) -> None:
    time.sleep(0.8)


def crash(answer: Answer, asked: Asked) -> None:
    answer.send(200, DATA[:100], length=len(DATA), Location=asked.path)


def nonsense(answer: Answer, asked: Asked) -> None:
    answer.wfile.write(f"{asked.path} {asked.headers}\r\n\r\n".encode())
    answer.close_connection = True


@pytest.mark.parametrize(
    ("second", "status", "said"),
    [
        (success, 0, "fetched"),
        (refusal, 1, "answered 403"),
        (refusal_in_its_phrase, 1, "answered 403 Forbidden"),
        (timeout, 1, "not a byte for 0.4 s"),
        (crash, 1, "closed early"),
        (nonsense, 1, "closed early, or what came was not HTTP"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_redirect_takes_no_token_along_and_leaves_no_trace(
    tmp_path: Path, second: Callable[[Answer, Asked], None], status: int, said: str
) -> None:
    with faulty(second) as bucket:

        def first(answer: Answer, asked: Asked) -> None:
            answer.send(307, Location=f"{bucket.url}{asked.path}?X-Amz-Credential=x&{SIGNATURE}")

        with faulty(first) as service:
            ended, written = run_client(service.url, DIGEST, tmp_path)
    # The secrets were in play ...
    assert {asked.headers["authorization"] for asked in service.asked} == {f"Bearer {TOKEN}"}
    assert len(bucket.asked) >= 2
    assert all(SIGNATURE in asked.path for asked in bucket.asked)
    # ... and stayed where they belong.
    for asked in bucket.asked:
        assert "authorization" not in asked.headers
        assert TOKEN not in str(asked)
    assert ended == status, written
    assert said in written
    assert f"{bucket.url}/v1/blobs/{DIGEST}" in written
    for secret in (TOKEN, TOKEN.removeprefix("aot_"), SIGNATURE, "5ecret"):
        assert secret not in written


def test_a_redirect_back_from_elsewhere_brings_no_token(tmp_path: Path) -> None:
    back: list[Faulty] = []
    with faulty(lambda a, asked: a.send(302, Location=f"{back[0].url}/again")) as elsewhere:

        def first(answer: Answer, asked: Asked) -> None:
            if asked.path == "/again":
                answer.send(200, DATA)
            else:
                answer.send(307, Location=f"{elsewhere.url}/there")

        with faulty(first) as service:
            back.append(service)
            run_client(service.url, DIGEST, tmp_path)
    again = [asked for asked in service.asked if asked.path == "/again"]
    assert again
    assert all("authorization" not in asked.headers for asked in again)


def test_another_port_or_scheme_of_the_same_host_is_elsewhere(tmp_path: Path) -> None:
    with faulty(success) as other:
        assert urlsplit(other.url).hostname == "127.0.0.1"
        with faulty(lambda a, asked: a.send(307, Location=f"//{urlsplit(other.url).netloc}/x")) as service:
            ended, _ = run_client(service.url, DIGEST, tmp_path)
    assert ended == 0
    assert all("authorization" not in asked.headers for asked in other.asked)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


_AT_DEBUG_LEVEL = """
import functools, logging
from aotcache.api import logs
logs.configure = functools.partial(logs.configure, level=logging.DEBUG)
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, s3: S3) -> Iterator[Serving]:
    """A service over a bucket that writes down as much as it can."""
    folder = tmp_path_factory.mktemp("service")
    (folder / "debug").mkdir()
    (folder / "debug" / "sitecustomize.py").write_text(_AT_DEBUG_LEVEL)
    environment = {**s3.environment, "PYTHONPATH": str(folder / "debug")}
    with serving(folder, store=s3.bucket(), environment=environment) as server:
        yield server


@pytest.mark.parametrize("second", [refusal, crash, nonsense], ids=lambda answer: answer.__name__)
def test_what_opens_a_bucket_is_neither_said_nor_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: Callable[[Answer, Asked], None]
) -> None:
    secret = "secretAccessKey0OfTheBucket"
    with faulty(second) as bucket:
        for name, value in {
            "AWS_ENDPOINT_URL": bucket.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_SESSION_TOKEN": f"session-{secret}",
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        ended, written = run_client("s3://bucket/cache", DIGEST, tmp_path, TOKEN, "through copies")
    assert ended == 1, written
    signatures = {
        found[1] for asked in bucket.asked if (found := re.search(r"Signature=(\w+)", str(asked.headers)))
    }
    assert signatures, "no signed request reached the bucket"
    kept = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(TOKEN in str(asked) for asked in bucket.asked)
    for secret_text in (secret, TOKEN, *signatures):
        assert not any(secret_text in text for text in (written, *kept))


def ask(
    url: str, method: str, path: str, token: str, body: bytes = b""
) -> tuple[int, http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        connection.request(method, path, body or None, {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode(errors="replace")
    finally:
        connection.close()


def test_a_service_writes_no_token_and_no_signed_address(tmp_path: Path, service: Serving, s3: S3) -> None:
    admin = service.token("admin")
    reader = service.token("read")
    unknown = "aot_unknown_S3cretAllTheSame_0123456789"
    said: list[str] = []

    def asked(status: int, method: str, path: str, token: str, body: bytes = b"") -> http.client.HTTPMessage:
        found, headers, text = ask(service.url, method, path, token, body)
        assert found == status, (method, path, text)
        said.append(text)
        return headers

    manifest = sign(make_manifest(DATA), service.signing_key)
    asked(201, "PUT", f"/v1/blobs/{DIGEST}", admin, DATA)
    asked(201, "PUT", f"/v1/artifacts/{manifest.key}", admin, manifest.document())
    # A success, refusals of every kind, and answers to what makes no sense.
    address = asked(307, "GET", f"/v1/blobs/{DIGEST}", reader)["Location"]
    signature = re.search(r"X-Amz-Signature=([0-9a-f]+)", address)
    assert signature is not None
    asked(403, "DELETE", f"/v1/artifacts/{manifest.key}", reader)
    asked(401, "GET", "/v1/artifacts", unknown)
    asked(404, "GET", f"/v1/nothing?token={reader}", reader)
    asked(422, "POST", "/v1/resolve", reader, f'{{"keys": ["{reader}"]}}'.encode())
    for how in ([], ["through copies"]):
        ended, client_log = run_client(service.url, DIGEST, tmp_path, reader, *how)
        assert ended == 0, client_log
        said.append(client_log)
    # The bucket goes away while the service is asked: what it does then is written down as well.
    s3.process.kill()
    s3.process.wait()
    found, _, text = ask(service.url, "GET", f"/v1/artifacts/{manifest.key}", reader)
    assert found == 503, text
    said.append(text)
    ended, client_log = run_client(service.url, "1" * 64, tmp_path, reader)
    assert ended == 1
    said.append(client_log)
    said.append(ask(service.url, "GET", "/metrics", admin)[2])
    service.close()

    written = {
        str(path): path.read_bytes()
        for folder in (service.folder, tmp_path)
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert any(f"/blobs/{DIGEST[:2]}/{DIGEST}" in path for path in written), "this host has kept no copy"
    assert b"/v1/blobs/{digest}" in written[str(service.folder / "log")]
    assert any(path.endswith(".db") for path in written)
    assert b'"level": "debug"' in written[str(service.folder / "log")]
    followed = set(re.findall(r"X-Amz-Signature=([0-9a-f]+)", s3.log.read_text()))
    assert followed, "no client was sent to the bucket"
    secrets = [admin, reader, unknown, signature[1], *followed, s3.environment["AWS_SECRET_ACCESS_KEY"]]
    for secret in secrets:
        for place, text in (
            *written.items(),
            *((f"answer {n}", text.encode()) for n, text in enumerate(said)),
        ):
            assert secret.encode() not in text, f"{secret[:12]}... is in {place}"
