"""The manifest: everything a host must know about an artifact before it opens it.

One JSON document per key and variant, schema-versioned. A worker reads how to
call the two graphs of an artifact from here alone: the archive itself carries
no calling convention that aotcache relies on.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from aotcache.envelope import MANIFEST_TYPE, Envelope
from aotcache.errors import ManifestError
from aotcache.key import Component, KeyParts
from aotcache.types import CacheKey, Digest, Mode, Target, Toolchain, Variant, is_digest, sha256

SCHEMA = 2
"""Version of the documents written here."""

_READABLE = (1, 2)
"""Versions that can be read: the first knows no random inputs, no buffer updates and no aliases."""

_STRICT = ConfigDict(extra="forbid")

_SHA256 = re.compile(rb',"unsigned_sha256":"([0-9a-f]{64})"}\Z')
"""Its name comes last in the order of names, also when a service has written the document anew."""
_SHA256_BYTES = 100

_FILE_NAME = re.compile(r"[A-Za-z0-9_.+-]{1,200}\Z")


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class Draw:
    """How the numbers of a random input are drawn before a graph runs.

    Attributes:
        operator: One of the operators of `graph/draws.py`, by its registered name.
        numbers: Its number arguments (a probability, bounds), in its own order.
    """

    operator: str
    numbers: tuple[int | float | None, ...]


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class InputSlot:
    """One tensor that a graph takes; each distinct tensor of a call has one slot.

    Attributes:
        kind: Where the worker finds it: a parameter or buffer of the region (by
            qualified name), a tensor of the call, or one lifted out of a closure,
            a block mask or a plain attribute. Numbers that eager would draw (`random`)
            come after all of these, in the order in which they are drawn.
        name: Qualified name, or the path inside the call, e.g. `hidden_states` or
            `block_mask.mask_mod.document_ids`.
        dtype: e.g. `float32`.
        shape: Sizes.
        stride: Strides in elements.
        requires_grad: Whether a gradient is taken for it (always False in `infer`).
        draw: How it is drawn, for kind `random`.
    """

    kind: Literal["parameter", "buffer", "input", "lifted", "random"]
    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    draw: Draw | None = None


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class OutputSlot:
    """One tensor that the forward graph hands out: the region's results that are tensors of
    their own, in the order of its output tree, then the new values of updated buffers."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    differentiable: bool


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class Mutation:
    """Output `output` is the new value of the tensor in input slot `input`, written after the forward.

    Attributes:
        late: Whether eager writes it after the last tensor that it saves for a backward. A
            checkpoint that recomputes stops there, so what is late it does not write again.
    """

    input: int
    output: int
    late: bool = False


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class View:
    """A view of a tensor, relative to it: sizes, strides and offset in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class Alias:
    """A tensor of the result that no graph returns, because it lies in another's memory.

    Attributes:
        position: Its place among the tensors of the output tree.
        of: Whether that other tensor is an input slot or an output slot.
        index: Which one.
        view: How it lies there; None where it is the very tensor.
        flow: Whether autograd records the view, takes it for one without a gradient (`detach`),
            or does not record it (a view made under `no_grad`).
    """

    position: int
    of: Literal["input", "output"]
    index: int
    view: View | None
    flow: Literal["recorded", "detached", "unrecorded"] = "recorded"


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class PairContract:
    """How the backward graph is called.

    The forward returns the output slots followed by `intermediates` saved tensors.
    The backward takes, in this order, the inputs named by `saved_inputs`, the outputs
    named by `saved_outputs`, the saved intermediates, and one incoming gradient for each
    output in `tangents`; it returns one gradient for each input in `gradients`. Outputs
    are saved as the very tensors that the caller gets, so that autograd notices when one
    of them is changed in place before the backward.

    `paths` has for each of `gradients` the outputs whose incoming gradients it is made from.
    Where none of them came in, eager has no gradient rather than one of zeros, which an
    optimizer would take for a step. Empty in artifacts that do not know.
    """

    saved_inputs: tuple[int, ...]
    intermediates: int
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    saved_outputs: tuple[int, ...] = ()
    paths: tuple[tuple[int, ...], ...] = ()


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class HostContract:
    """What a host must offer to run the artifact.

    Attributes:
        cpu_features: Feature flags as Linux names them, e.g. `avx2`, `avx512f`.
        glibc: Lowest version that has every symbol used, e.g. `2.17`, or None.
        libstdcxx: Highest GLIBCXX symbol version used, e.g. `3.4.21`, or None.
        libraries: Shared libraries the artifact is linked to (DT_NEEDED).
        operators: Custom operators used, by name, with their schema and the module
            that registered them on the builder.
        driver: Lowest CUDA driver version, or None.
    """

    cpu_features: tuple[str, ...]
    glibc: str | None
    libstdcxx: str | None
    libraries: tuple[str, ...]
    operators: dict[str, dict[str, str]]
    driver: str | None = None


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class Measurement:
    """Errors of one output or gradient against the float64 reference.

    Both are maximum absolute errors divided by the reference's largest entry:
    of the artifact, and of eager in the artifact's own precision.
    """

    what: str
    artifact: float
    eager: float


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class Certificate:
    """The numerics check the artifact passed before it was published."""

    batches: int
    tolerance: float
    worst: tuple[Measurement, ...]


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class Provenance:
    """How it was built. Nothing here takes part in any decision."""

    torch: str
    python: str
    triton: str | None
    compiler: str
    created: float
    seconds: dict[str, float]


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class Manifest:
    """One artifact for one key and variant.

    Attributes:
        key: The key; recomputed from `components` and compared at every load.
        components: The key's components, for explaining a miss.
        region: The region's name in the drafter it was built from.
        mode: `train` (members `forward` and `backward`) or `infer` (`forward`).
        bucket: Named sizes, for people; the key holds the shapes that count.
        digest, size: Of the archive, in bytes.
        members: sha256 of every member of the archive by its name in it.
        output_tree: The tree of the region's return value, see `graph/tree.py`. Its tensors are the
            outputs, new values aside, with the aliases put in at their positions.
        content: Key over the canonical graphs: equal for identical graphs.
        runner: `native` (aotcache's GIL-free runner) or `torch` (torch's own loader,
            needed where a graph calls operators through the proxy executor).
        envelope: What the manifest was read from, if it came with signatures. No part of the
            manifest's value: not compared, not written by `to_json`, and lost by `replace`.
    """

    key: CacheKey
    components: tuple[dict[str, Any], ...]
    target: Target
    toolchain: Toolchain
    region: str
    mode: Mode
    bucket: dict[str, int]
    digest: Digest
    size: int
    members: dict[str, Digest]
    host: HostContract
    inputs: tuple[InputSlot, ...]
    outputs: tuple[OutputSlot, ...]
    output_tree: Any
    pair: PairContract | None
    content: Digest
    runner: Literal["native", "torch"]
    certificate: Certificate
    provenance: Provenance
    mutations: tuple[Mutation, ...] = ()
    aliases: tuple[Alias, ...] = ()
    schema: int = SCHEMA
    envelope: Envelope | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def variant(self) -> Variant:
        """Target and toolchain."""
        return Variant(self.target, self.toolchain)

    @property
    def called(self) -> tuple[InputSlot, ...]:
        """The inputs that a call brings along: all but those that are drawn."""
        return tuple(slot for slot in self.inputs if slot.kind != "random")

    @property
    def results(self) -> int:
        """How many tensors the output tree holds."""
        return len(self.outputs) - len(self.mutations) + len(self.aliases)

    @property
    def parts(self) -> KeyParts:
        """The key's components as a value that can be compared."""
        return KeyParts.from_json(self.components)

    def component(self, name: str) -> Component | None:
        """One component of the key, by name; None where it has none, as another version's may."""
        return next((part for part in self.parts.components if part.name == name), None)

    def to_json(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces."""
        values = asdict(self)
        del values["envelope"]
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()

    def document(self) -> bytes:
        """What a store writes: the envelope as it came, or for a manifest without one its JSON.

        That one ends with its own sha256: nobody signed it, so nothing else would tell a contract
        with one wrong bit from another contract.
        """
        if self.envelope is not None:
            return self.envelope.to_json()
        data = self.to_json()
        return data[:-1] + b',"unsigned_sha256":"%b"}' % sha256(data).encode()

    def with_envelope(self, envelope: Envelope) -> Manifest:
        """The same manifest as the payload of `envelope`, which is not looked into."""
        copy = replace(self)
        object.__setattr__(copy, "envelope", envelope)
        return copy

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> Manifest:
        """Read and check a manifest, bare or in an envelope, whose signatures are not verified.

        Args:
            data: The bytes.
            where: What to call them in an error: a path or an address.

        Raises:
            ManifestError: for anything that is not a manifest of this schema, or
                whose key is not the hash of its components, or whose variant or archive cannot name a file.
        """
        try:
            found = json.loads(data)
            if isinstance(found, dict) and "payloadType" in found:
                envelope = Envelope.from_json(data, where=where)
                if envelope.kind != MANIFEST_TYPE:
                    raise ManifestError(
                        f"{where}: a signed document of type {envelope.kind!r}, expected {MANIFEST_TYPE!r}"
                    )
                return cls._from_payload(envelope.payload, where=where).with_envelope(envelope)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{where}: not a manifest: {error}") from error
        return cls._from_payload(data, where=where)

    @classmethod
    def _from_payload(cls, data: bytes, *, where: str) -> Manifest:
        data = _checked(data, where)
        try:
            found = json.loads(data)
            if isinstance(found, dict) and "unsigned_sha256" in found:
                raise ManifestError(
                    f"{where}: the manifest is damaged: its sha256 is not at its end, where it was written; "
                    "delete it and warm again"
                )
            schema = found.get("schema") if isinstance(found, dict) else None
            if schema not in _READABLE:
                readable = " or ".join(map(str, _READABLE))
                raise ManifestError(
                    f"{where}: manifest schema {schema!r}, expected {readable}; upgrade aotcache or rebuild it"
                )
            manifest = _MANIFEST.validate_json(data)
            key = manifest.parts.key
        except (ValueError, ValidationError, KeyError, TypeError, RecursionError) as error:
            raise ManifestError(f"{where}: not a manifest: {error}") from error
        if key != manifest.key:
            raise ManifestError(
                f"{where}: the manifest says key {manifest.key} but its components hash to {key}",
                expected=manifest.key,
                found=key,
            )
        if not is_digest(manifest.digest) or manifest.size < 0:
            raise ManifestError(
                f"{where}: its archive is {manifest.digest[:80]!r} of {manifest.size} bytes, expected 64 lower-case "
                "hex characters and a size"
            )
        # It becomes a file's name, also of a copy of a manifest that nobody vouches for.
        if _FILE_NAME.match(str(manifest.variant)) is None:
            raise ManifestError(
                f"{where}: its target and toolchain make up the name {str(manifest.variant)[:300]!r}, "
                "expected at most 200 letters, digits and _ . + -"
            )
        return manifest


def _checked(data: bytes, where: str) -> bytes:
    """A bare manifest without the sha256 that `document` ends it with, if it has one. Raises ManifestError."""
    data = data.rstrip()
    end = _SHA256.search(data, max(0, len(data) - _SHA256_BYTES))
    if end is None:
        return data
    bare = data[: end.start()] + b"}"
    expected, found = end[1].decode(), sha256(bare)
    if found != expected:
        raise ManifestError(
            f"{where}: the manifest is damaged: it ends with sha256 {expected}, its bytes have {found}; delete it "
            "and warm again",
            expected=expected,
            found=found,
        )
    return bare


_MANIFEST = TypeAdapter(Manifest)


__all__ = [
    "SCHEMA",
    "Alias",
    "Certificate",
    "Component",
    "Draw",
    "HostContract",
    "InputSlot",
    "Manifest",
    "Measurement",
    "Mutation",
    "OutputSlot",
    "PairContract",
    "Provenance",
    "View",
]
