"""One parser under a coverage-guided fuzzer (atheris): `python -m tests.fuzz.guided PARSER [libFuzzer's arguments]`.

The fuzzer ends its process itself; `python -m tests.fuzz` starts one for each parser.
"""

from __future__ import annotations

import random
import sys

import atheris

with atheris.instrument_imports(include=["aotcache", "zipfile"]):
    from tests.fuzz.parsers import PARSERS, feed

from tests.faults import mutations


def main() -> None:
    """Fuzz until the time is over, or until something comes out that is no typed error."""
    name, *arguments = sys.argv[1:]
    parser = PARSERS[name]

    def one(data: bytes) -> None:
        feed(parser, data)

    def mutate(data: bytes, most: int, number: int) -> bytes:
        """The fuzzer's own change, or the kind of harm that comes to documents."""
        chance = random.Random(number)
        if chance.random() < 0.5:
            return bytes(atheris.Mutate(data, most))
        try:
            return chance.choice([*mutations.BYTES, *mutations.FIELDS])(chance, data)[:most]
        except (ValueError, RecursionError):
            return bytes(atheris.Mutate(data, most))

    atheris.Setup([sys.argv[0], *arguments], one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
