"""A process that opens the artifact of `dying.c` and trains one step: `dying.py MANIFEST STORE HOME [exit]`."""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from aotcache.host import host_toolchain
from aotcache.manifest import InputSlot, Manifest, OutputSlot, PairContract
from aotcache.runtime import registry
from aotcache.store import open_store
from aotcache.types import sha256
from tests.manifests import make_manifest


@dataclass(frozen=True)
class Dying:
    """The artifact: its manifest and its archive."""

    manifest: Manifest
    archive: Path


def build(folder: Path) -> Dying:
    """Compile both graphs, which takes the C compiler a moment, and describe them."""
    folder.mkdir()
    archive, members = folder / "archive.pt2", {}
    with zipfile.ZipFile(archive, "w") as package:
        for graph in ("forward", "backward"):
            library = folder / f"{graph}.so"
            subprocess.run(
                ["cc", "-shared", "-fPIC", f'-DDYING_GRAPH="{graph}"', str(Path(__file__).with_name("dying.c")),
                 "-o", str(library)],
                check=True,
                timeout=60,
            )  # fmt: skip
            name = f"archive/data/aotinductor/{graph}/{graph}.so"
            package.write(library, name)
            members[name] = sha256(library.read_bytes())
    slot = ("float32", (2, 3), (3, 1), True)
    manifest = make_manifest(
        archive.read_bytes(),
        toolchain=host_toolchain(),
        members=members,
        inputs=(InputSlot("input", "x", *slot),),
        outputs=(OutputSlot(*slot),),
        output_tree={"t": 0},
        pair=PairContract((), 0, (0,), (0,)),
    )
    return Dying(manifest, archive)


def step(manifest: Manifest, store: str, home: Path) -> torch.Tensor | None:
    """Open it, and run its forward and its backward twice."""
    executable, _ = registry.open_artifact(manifest, open_store(store), home)
    x = torch.ones(2, 3, requires_grad=True)
    for _ in range(2):
        (out,) = executable.train([x])
        out.sum().backward()
    return x.grad


def main(manifest: str, store: str, home: str, *how: str) -> None:
    """See the module."""
    read = Manifest.from_json(Path(manifest).read_bytes(), where=manifest)
    if not how:
        step(read, store, Path(home))
        return
    # The main thread ends the process as it should, while another is in the middle of it.
    threading.Thread(target=step, args=(read, store, Path(home)), daemon=True).start()
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
