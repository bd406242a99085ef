"""The description of the API, and that the server does what it says, checked by schemathesis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from tests.api.conftest import Api
from tests.services.serving import serving

EXAMPLES = {GenerationMode.POSITIVE: 5, GenerationMode.NEGATIVE: 4}
SECONDS = 30.0

DEEPER = {
    ("GET", "/v1/artifacts"),
    ("GET", "/v1/builds"),
    ("PUT", "/v1/artifacts/{key}"),
    ("PUT", "/v1/blobs/{digest}"),
    ("PUT", "/v1/recalls"),
    ("POST", "/v1/builds"),
    ("POST", "/v1/gc"),
    ("POST", "/v1/keys/{key}/why"),
}
"""Operations with a cursor, a signature, a digest, a target or components: more than a schema can say."""


@pytest.mark.slow
def test_the_server_does_what_its_description_says(tmp_path: Path) -> None:
    """Every operation, with requests that fit the description and with some that do not."""
    seen = 0
    with serving(tmp_path) as server:
        headers = {"Authorization": f"Bearer {server.token('admin')}"}
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", timeout=SECONDS)
        # The token is sent with every request: one without it would be no wrong one.
        schema.config.generation.with_security_parameters = False
        for result in schema.get_all_operations():
            operation = result.ok()
            for mode, examples in EXAMPLES.items():
                if mode is GenerationMode.NEGATIVE and not _can_be_wrong(operation):
                    continue
                _exercise(operation, mode, examples, headers)
                seen += 1
        assert server.process.poll() is None
        assert not [line for line in server.requests() if line["status"] >= 500]
    assert seen > 30


def _exercise(operation: Any, mode: GenerationMode, examples: int, headers: dict[str, str]) -> None:
    deeper = (operation.method.upper(), operation.path) in DEEPER

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        excluded = [positive_data_acceptance] if deeper else []
        if case.meta.generation.mode is GenerationMode.NEGATIVE and not _is_wrong_here(case):
            excluded.append(negative_data_rejection)
        case.call_and_validate(headers=headers, timeout=SECONDS, excluded_checks=excluded)

    check()


def _is_wrong_here(case: Any) -> bool:
    """Whether more is wrong than a query, which may hold any names that nobody asks for."""
    wrong = {place for place, how in case.meta.components.items() if how.mode is GenerationMode.NEGATIVE}
    return bool(wrong - {ParameterLocation.QUERY})


def _can_be_wrong(operation: Any) -> bool:
    return bool(operation.path_parameters or operation.query or operation.body)


def test_every_operation_has_a_summary_and_every_error_the_one_body(api: Api) -> None:
    document = api.client.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], (method, path)
            body = operation["responses"]["default"]["content"]["application/json"]["schema"]
            assert body["$ref"].endswith("/ErrorBody"), (method, path)


def test_every_body_that_is_sent_or_answered_has_examples(api: Api) -> None:
    schemas = api.client.get("/openapi.json").json()["components"]["schemas"]
    bare = []
    for name, model in schemas.items():
        fields = model.get("properties", {})
        plain = {
            field: value
            for field, value in fields.items()
            if value.get("type") in ("string", "integer", "number")
            and "const" not in value
            and "enum" not in value
        }
        if plain and "example" not in model and not any("examples" in value for value in plain.values()):
            bare.append(name)
    assert bare == []
