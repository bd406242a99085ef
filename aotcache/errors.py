"""Every exception that aotcache raises on purpose.

AotcacheError
├── ConfigError               a setting or an environment variable is wrong
├── SpecError                 a spec file, or what it names, is wrong
├── UnsupportedTorch          this torch version was never tried
├── BuildError                an artifact could not be made
│   ├── CaptureError          the drafter could not be built or run
│   ├── Unfingerprintable     something that shapes the graph has no stable value
│   ├── UnsupportedGraph      mutation, random operators, aliasing outputs, hooks, ...
│   ├── CompileFailed         export, AOTInductor or the C++ compiler failed
│   ├── CertificateFailed     the artifact disagrees with eager beyond tolerance
│   └── BuilderDied           the builder process crashed or ran out of time or memory
├── StoreError                a store could not be read or written
│   ├── NotStored             no such key or digest
│   ├── CorruptArtifact       bytes do not match their digest
│   ├── ServiceError          the service answered with an error
│   │   └── ServiceUnavailable   a service or bucket was not reached, or is out of order
│   ├── ManifestError         a manifest or lock file cannot be understood
│   ├── LeaseLost             the right to build or publish an entry is gone
│   ├── LeaseHeld             somebody else has that right now
│   ├── RecallConflict        another recall list by the same key came first
│   └── BadCursor             a cursor that no page of this listing handed out
├── DatabaseError             the service's database did not answer, or is not as it must be
├── RejectedArtifact          this host must not open that artifact
│   ├── RecalledArtifact      somebody who is trusted here took it back
│   └── DisagreesWithEager    its first call gives something else than the region's own code
├── ArtifactMiss              nothing covers this call (on_miss="raise")
├── CallRefused               a call does not fit the artifact it was meant for
│   └── ArgumentsRefused      its arguments do not fit forward's signature; also a TypeError
├── NoBucket                  no bucket holds this batch
└── TracingForbidden          something tried to trace in a worker
"""

from __future__ import annotations

from typing import Any


class AotcacheError(Exception):
    """Root of every error that users can meet.

    Attributes:
        details: What the message was made from, for programs: plain values only.
    """

    def __init__(self, message: str, /, **details: Any) -> None:
        super().__init__(message)
        self.details: dict[str, Any] = details


class ConfigError(AotcacheError):
    """A setting or an environment variable is wrong."""


class SpecError(AotcacheError):
    """A spec file, or what it names, is wrong."""


class UnsupportedTorch(AotcacheError):
    """This torch version was never tried with the private names that aotcache uses."""


class BuildError(AotcacheError):
    """An artifact could not be made."""


class CaptureError(BuildError):
    """The drafter could not be built or run."""


class Unfingerprintable(BuildError):
    """Something that shapes the graph has no value that is stable between processes."""


class UnsupportedGraph(BuildError):
    """The region does something that an artifact cannot do faithfully."""


class CompileFailed(BuildError):
    """Export, AOTInductor or the C++ compiler failed."""


class CertificateFailed(BuildError):
    """The artifact disagrees with eager beyond tolerance, so it is not published."""


class BuilderDied(BuildError):
    """The builder process crashed, or ran out of time or memory."""


class StoreError(AotcacheError):
    """A store could not be read or written."""


class NotStored(StoreError):
    """The store has no such key or digest."""


class CorruptArtifact(StoreError):
    """Bytes do not match the digest that names them."""


class ManifestError(StoreError):
    """A manifest or lock file cannot be understood."""


class ServiceError(StoreError):
    """The service answered with an error.

    `details` has `status` (of HTTP), `type` (of the error, as in docs of the REST interface) and
    `request_id`, where there was an answer.
    """


class ServiceUnavailable(ServiceError):
    """A service or bucket was not reached, did not answer in time, or answered that it is out of order."""


class LeaseLost(StoreError):
    """The right to build or publish an entry is gone: it ran out, was given back or never was."""


class LeaseHeld(StoreError):
    """Somebody else holds the right to build or publish an entry; `details` has holder and expires_in."""


class RecallConflict(StoreError):
    """Another recall list by the same key came first: one that follows it has to be made."""


class BadCursor(StoreError):
    """A cursor that no page of this listing handed out."""


class DatabaseError(AotcacheError):
    """The service's database did not answer in time, or is not as it must be."""


class RejectedArtifact(AotcacheError):
    """This host must not open that artifact; the message holds every reason."""


class RecalledArtifact(RejectedArtifact):
    """Somebody whose key is trusted here took the artifact back; the message says who and why."""


class DisagreesWithEager(RejectedArtifact):
    """The first call of an artifact gives something else than the region's own code (`verify="first-use"`).

    `details` has `region`, `key`, `digest` and `mode`; where numbers differ `what`, `error` and `bound`.
    """


class ArtifactMiss(AotcacheError):
    """Nothing in the store covers this call, and `on_miss` is "raise"."""


class CallRefused(AotcacheError):
    """A call does not fit the artifact it was meant for."""


class ArgumentsRefused(CallRefused, TypeError):
    """Arguments do not fit the signature of a region's forward. Also a TypeError, as eager raises."""


class NoBucket(AotcacheError):
    """No bucket of the ladder holds this batch."""


class TracingForbidden(AotcacheError):
    """Something tried to trace or compile where tracing is forbidden."""


def named(kind: str, message: str, /, **details: Any) -> AotcacheError:
    """An error that crossed a pipe or the network as text.

    Args:
        kind: Name of its class; one that is none of these becomes a BuildError.
        message, details: Its own.
    """
    found = globals().get(kind)
    if not (isinstance(found, type) and issubclass(found, AotcacheError)):
        found = BuildError
    return found(message, **details)
