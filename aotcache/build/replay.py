"""Recorded calls in place of batches: what the drafter is given, and whether it leads where it led."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aotcache.errors import CaptureError
from aotcache.graph.examples import Given, read_example
from aotcache.key import Difference
from aotcache.recorded import EXAMPLES, RecordedCall, read_index
from aotcache.spec import CALL, Spec

if TYPE_CHECKING:
    from aotcache.graph.region import Call

_BATCHES = 2
"""Times that a call is made at least, on whatever examples there are; warming makes its batches so, too."""

_FILE = re.compile(r"file \d+")


class Replay:
    """The recorded calls of a spec.

    Raises:
        ManifestError: they are not there or damaged.
    """

    def __init__(self, spec: Spec, folder: Path) -> None:
        self._spec = spec
        self._folder = folder
        self._index = read_index(folder)

    def call(self, bucket: Mapping[str, int]) -> RecordedCall:
        """The recorded call that a bucket is."""
        number = bucket[CALL]
        if number not in self._index.numbers():
            raise CaptureError(
                f"{self._spec.path}: there is no recorded call {number} in {self._folder}, expected one of "
                f"{self._index.numbers()}; record again, or take it out of buckets.{CALL}",
                call=number,
            )
        return self._index.calls[number - 1]

    def examples(self, call: RecordedCall, model: Any, device: Any) -> Iterator[Given]:
        """Every example of a call, and from the first one again where there are too few."""
        times = min(max(_BATCHES, len(call.examples)), EXAMPLES)
        for example in itertools.islice(itertools.cycle(call.examples), times):
            yield read_example(self._folder, example, model, device, resolve=self._spec.resolve_argument)

    def require_made(self, call: RecordedCall, made: Sequence[Call]) -> None:
        """Check that a call led to what it led to in the run; code that was edited since may be another.

        Raises:
            CaptureError: naming the region and what differs: what is built would not serve the run.
        """
        for key in call.keys:
            if any(other.parts.key == key for other in made):
                continue
            wanted, parts = self._index.keys[key], self._index.parts(key)
            differences = [
                parts.diff(other.parts)
                for other in made
                if other.region.name in wanted.regions and other.mode == wanted.mode
            ]
            nearest = min(differences, key=len, default=[])
            if any(map(_is_of_source, nearest)):
                continue
            names = ", ".join(repr(name) for name in wanted.regions)
            what = "; ".join(str(difference) for difference in nearest[:3]) or "no such call is made"
            raise CaptureError(
                f"{self._spec.path}: a recorded call no longer leads to the call of region {names} ({wanted.mode}) "
                f"that the run made; the run / this drafter: {what}. Let the factory build what the run trained "
                "(frozen parts, adapters, settings) and context set what it ran under, or record again",
                key=key,
                differences=[str(difference) for difference in nearest],
            )


def _is_of_source(difference: Difference) -> bool:
    return _FILE.fullmatch(difference.item) is not None
