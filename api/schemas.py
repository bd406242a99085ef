"""What requests and responses look like: the models that OpenAPI shows, with examples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from aotcache.api.errors import ErrorType

_HEX = "[0-9a-f]{64}"
_KEY = "3f" * 32
_DIGEST = "a1" * 32
_VARIANT = "cpu-x86_64-avx2+torch2.13.0-cccccccc-cpu"
_LEASE = "9b1deb4d3b7d4bad9bdd2b0d7b3dcb6d"
_BUILD = "b1946ac92492d2347c6235b4d2611184"

Hex64 = Annotated[str, StringConstraints(pattern=f"^{_HEX}$", min_length=64, max_length=64)]
Name = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]*$", min_length=1, max_length=200)]
"""One line of text without control characters."""

Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$", max_length=1 << 18)]
"""Any text that every database can hold."""

KeyPath = Annotated[
    str, Path(pattern=f"^{_HEX}$", description="64 lower-case hex characters", examples=[_KEY])
]
DigestPath = Annotated[
    str,
    Path(
        pattern=f"^{_HEX}$",
        description="sha256 of the archive, 64 lower-case hex characters",
        examples=[_DIGEST],
    ),
]
IdPath = Annotated[str, Path(pattern="^[A-Za-z0-9_-]{1,64}$", examples=[_BUILD])]
Cursor = Annotated[
    str | None, Query(max_length=600, description="`next` of the page before", pattern="^[A-Za-z0-9_=-]*$")
]
Limit = Annotated[int, Query(ge=1, le=1000, description="Entries of a page")]
Fencing = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]


class Answer(BaseModel):
    """Base of all bodies: what is not known is refused in a request and never sent in an answer."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    """See docs/operations.md for each type."""

    type: ErrorType
    message: str = Field(examples=["nothing is stored for this key; aotcache why explains a miss"])
    details: dict[str, Any]
    request_id: str


class ErrorBody(Answer):
    """The one body of every error."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "error": {
                    "type": "not_stored",
                    "message": f"nothing is stored for key {_KEY}; aotcache why explains a miss",
                    "details": {"key": _KEY},
                    "request_id": "5f0c8a2be1d94c1c",
                }
            }
        }
    )

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorBody, "description": "Any error: one body, whatever went wrong."},
    422: {"model": ErrorBody, "description": "The request, or the bytes in it, are not what they should be."},
}
"""For `responses=` of every route."""


class Stored(Answer):
    """Whether the request stored something, or it was there already."""

    stored: bool = Field(examples=[True])


class Deleted(Answer):
    """How many entries were removed."""

    deleted: int = Field(examples=[1])


class ResolveRequest(Answer):
    """Keys to look up; each once."""

    keys: list[Hex64] = Field(max_length=1000, examples=[[_KEY]])


class Ref(Answer):
    """One variant of a key: enough to decide whether to fetch it."""

    variant: str = Field(examples=[_VARIANT])
    digest: Hex64 = Field(examples=[_DIGEST])
    size: int = Field(examples=[48213])
    document: Hex64 = Field(description="sha256 of the ref document", examples=["d0" * 32])


class ResolveAnswer(Answer):
    """Every key asked for is in one of the two."""

    found: dict[str, list[Ref]]
    missing: dict[str, str] = Field(examples=[{"00" * 32: "nothing is stored for this key"}])
    recalls: Hex64 | None = Field(
        description="`tag` of GET /v1/recalls: another one whenever the recall lists are; null without any",
        examples=["e5" * 32],
    )


class RecallListRow(Answer):
    """One recall list."""

    signer: Hex64 = Field(
        description="Hex of the fingerprint of the key that signed it", examples=["7c" * 32]
    )
    number: int = Field(examples=[3])
    document: dict[str, Any] = Field(description="The list in its DSSE envelope")


class RecallsAnswer(Answer):
    """Every recall list, by signer and number."""

    tag: Hex64 | None = Field(examples=["e5" * 32])
    recalls: list[RecallListRow]


class RecallStored(Answer):
    """Whether the list is new here."""

    stored: bool = Field(examples=[True])
    number: int = Field(examples=[3])


class ArtifactRow(Answer):
    """One entry of a listing."""

    key: Hex64 = Field(examples=[_KEY])
    variant: str = Field(examples=[_VARIANT])
    digest: Hex64 = Field(examples=[_DIGEST])
    size: int = Field(examples=[48213])
    document: Hex64 = Field(examples=["d0" * 32])
    region: str = Field(examples=["layers.0"])
    mode: str = Field(examples=["train"])
    bucket: dict[str, int] = Field(examples=[{"seq": 256}])
    target: str = Field(examples=["cpu:x86_64-avx2"])
    torch: str = Field(examples=["2.13.0"])
    created: float = Field(examples=[1767225600.0])
    last_used: float | None = Field(examples=[1767225600.0])
    hits: int = Field(examples=[12])
    deaths: int = Field(description="Workers that are known to have died with its archive", examples=[0])


class Death(Answer):
    """One worker that ended while it opened an archive, or in the first run of one of its graphs."""

    id: str = Field(
        pattern="^[0-9a-f]{32}$", description="Its own; told twice, it counts once", examples=["0f" * 16]
    )
    digest: Hex64 = Field(examples=[_DIGEST])
    stage: Literal["open", "forward", "backward"]
    at: float = Field(ge=0, lt=253402300800.0, description="By the worker's clock", examples=[1767225600.0])


class DeathsRequest(Answer):
    """What is to be told."""

    deaths: list[Death] = Field(max_length=100)


class DeathsAnswer(Answer):
    """How many of them were new and of archives that are known here."""

    recorded: int = Field(examples=[1])


class ArtifactPage(Answer):
    """In the order of key and variant."""

    artifacts: list[ArtifactRow]
    next: str | None = Field(description="`cursor` of the next page; null at the end")


class VariantDocument(Answer):
    """One variant with its whole ref document."""

    variant: str = Field(examples=[_VARIANT])
    document: Hex64 = Field(examples=["d0" * 32])
    modified: float = Field(examples=[1767225600.0])
    envelope: dict[str, Any] = Field(description="The ref document: a DSSE envelope around the manifest")


class ArtifactDetail(Answer):
    """Everything that is stored for one key."""

    key: Hex64 = Field(examples=[_KEY])
    variants: list[VariantDocument]


class WhyRequest(Answer):
    """The components of a key that missed."""

    mode: Literal["train", "infer"] | None = None
    components: list[dict[str, Any]] = Field(
        max_length=100, examples=[[{"name": "call", "items": [["hidden_states", "float32[2, 256, 128]"]]}]]
    )


class TrustedKeyRow(Answer):
    """A key whose signatures entries of this service carry."""

    fingerprint: str = Field(examples=["ed25519:" + "7c" * 32])
    public: str = Field(examples=["MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE="])
    name: str = Field(examples=["builder-1"])


class TrustAnswer(Answer):
    """To be compared with what the operator says, before trusting them."""

    keys: list[TrustedKeyRow]


class LeaseRequest(Answer):
    """Who wants to build what."""

    key: Hex64 = Field(examples=[_KEY])
    variant: Name = Field(examples=[_VARIANT])
    holder: Name = Field(examples=["host-7:4242"])


class LeaseToken(Answer):
    """The fencing token of a lease."""

    token: Fencing = Field(examples=[17])


class LeaseAnswer(Answer):
    """A lease, to be renewed before `seconds` are over."""

    lease: str = Field(examples=[_LEASE])
    token: int = Field(examples=[17])
    seconds: float = Field(examples=[30.0])


class Renewed(Answer):
    """How long the lease holds from now on."""

    seconds: float = Field(examples=[30.0])


class SpecRow(Answer):
    """A spec that builds may name."""

    name: str = Field(examples=["drafter"])
    registered: float = Field(examples=[1767225600.0])


class SpecsAnswer(Answer):
    """What the operator registered."""

    specs: list[SpecRow]


class ToolchainBody(Answer):
    """The toolchain that an artifact is wanted for."""

    torch: Name = Field(examples=["2.13.0"])
    git: Annotated[str, StringConstraints(pattern="^[0-9a-f]{40}$")] = Field(examples=["c" * 40])
    cuda: Name | None = Field(default=None, examples=[None])


class BuildRequest(Answer):
    """A cell of a registered spec, by its key. No code and no factory argument comes from a client."""

    spec: Name = Field(examples=["drafter"])
    key: Hex64 = Field(examples=[_KEY])
    target: Name = Field(examples=["cpu:x86_64-avx2"])
    toolchain: ToolchainBody


class BuildError(Answer):
    """Why a build failed."""

    type: Name = Field(examples=["CompileFailed"])
    message: Text = Field(examples=["g++ ended with status 1"])


BuildState = Literal["queued", "running", "done", "failed", "cancelled"]


class BuildAnswer(Answer):
    """One build."""

    id: str | None = Field(
        examples=[_BUILD], description="null where the artifact was there before any build"
    )
    spec: str = Field(examples=["drafter"])
    key: Hex64 = Field(examples=[_KEY])
    variant: str = Field(examples=[_VARIANT])
    state: BuildState
    stage: str | None = Field(examples=["compile"])
    expected_seconds: float | None = Field(examples=[42.0])
    attempts: int = Field(examples=[1])
    error: BuildError | None
    log: str | None
    created: float = Field(examples=[1767225600.0])
    updated: float = Field(examples=[1767225600.0])
    expires: float | None


class BuildPage(Answer):
    """Newest first."""

    builds: list[BuildAnswer]
    next: str | None


class ClaimRequest(Answer):
    """What a builder can build."""

    specs: list[Name] = Field(max_length=1000, examples=[["drafter"]])
    variants: list[Name] = Field(max_length=1000, examples=[[_VARIANT]])
    holder: Name = Field(examples=["builder-1:977"])


class ClaimAnswer(Answer):
    """A build and the lease to work under."""

    build: BuildAnswer
    lease: str = Field(examples=[_LEASE])
    token: int = Field(examples=[17])
    seconds: float = Field(examples=[60.0])


class ProgressRequest(Answer):
    """A heartbeat, and what the builder is doing."""

    lease: Name = Field(examples=[_LEASE])
    token: Fencing = Field(examples=[17])
    stage: Name = Field(examples=["compile"])
    expected_seconds: float | None = Field(default=None, ge=0, le=1e9, allow_inf_nan=False, examples=[42.0])


class ProgressAnswer(Answer):
    """Whether to go on, and how long the lease holds."""

    cancelled: bool
    seconds: float = Field(examples=[60.0])


class FinishRequest(Answer):
    """How a build ended."""

    lease: Name = Field(examples=[_LEASE])
    token: Fencing = Field(examples=[17])
    error: BuildError | None = None
    log: Text = ""
    retry: bool = Field(
        default=False,
        description="Whether another attempt could go better; without an error: given back, as if never begun",
    )


class GcRequest(Answer):
    """What is to be kept. Without limits only what nothing names goes."""

    max_bytes: int | None = Field(
        default=None, ge=0, le=(1 << 63) - 1, description="Of all archives", examples=[50 << 30]
    )
    max_age: float | None = Field(
        default=None,
        ge=0,
        le=1e12,
        allow_inf_nan=False,
        description="Seconds that an entry may go unused",
        examples=[2592000.0],
    )
    locked: list[Hex64] = Field(default=[], max_length=10_000, description="Digests that lock files name")
    dry_run: bool = False
    cursor: str | None = Field(default=None, max_length=600, pattern="^[A-Za-z0-9_=-]*$")


class GcRow(Answer):
    """Something that goes, or that only its protection keeps."""

    kind: Literal["entry", "archive"]
    key: Hex64 | None = Field(examples=[_KEY])
    variant: str | None = Field(examples=[_VARIANT])
    digest: Hex64 | None = Field(examples=[_DIGEST])
    size: int | None = Field(examples=[48213])
    last_used: float = Field(examples=[1767225600.0])
    what: str | None = Field(examples=["layers.0 train seq=256"])
    remove: bool
    reason: str = Field(examples=["age"])


class GcAnswer(Answer):
    """What one round did, or would do. Bytes are of all archives that entries name."""

    decisions: list[GcRow]
    before: int = Field(examples=[96426])
    after: int = Field(examples=[48213])
    over: int = Field(description="Bytes above the limit still", examples=[0])
    next: str | None = Field(description="`cursor` of the next round; null at the end")
    notes: list[str]


class PinRequest(Answer):
    """Why it is pinned, for whoever looks later."""

    reason: str = Field(default="", max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$", examples=["release 4"])


class PinRow(Answer):
    """A key whose entries stay, or a digest whose entries do."""

    what: Hex64 = Field(examples=[_KEY])
    reason: str = Field(examples=["release 4"])
    at: float = Field(examples=[1767225600.0])


class PinsAnswer(Answer):
    """Everything that is pinned."""

    pins: list[PinRow]


class Health(Answer):
    """It answers."""

    status: Literal["ok"] = "ok"
