"""Bytes of an archive, against torch's stock `aoti_compile_and_package` of the same layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import subjects
from bench.common import Bar, Report, fresh, main

MODULE = "bench.archive"


def run(quick: bool) -> Report:
    """Sizes in the store and of the stock packages; nothing here depends on `quick`."""
    place = subjects.warmed("layer")
    env = {"TORCHINDUCTOR_CACHE_DIR": str(place.root / "inductor")}
    stock = fresh(MODULE, "stock", env=env, spec=str(place.spec), folder=str(place.root))
    (forward,) = subjects.manifests(place.store, "infer")
    (pair,) = subjects.manifests(place.store, "train")
    weights = stock["weights"]
    rows = [
        ("aoti_compile_and_package: forward and weights", stock["default"]),
        ("aoti_compile_and_package: forward, weights left out", stock["without_weights"]),
        ("aotcache: forward", forward.size),
        ("aotcache: forward and backward", pair.size),
    ]
    return Report(
        name="archive",
        title=f"Archive of one decoder layer (its weights are {weights:,} bytes)",
        columns=("archive", "bytes", "over stock without weights"),
        rows=[(what, f"{size:,}", f"{size / stock['without_weights']:.2f}") for what, size in rows],
        bars=[
            Bar(
                "aotcache forward against stock without weights",
                forward.size / stock["without_weights"],
                1 / 4,
            ),
            Bar("aotcache forward against stock", forward.size / stock["default"], 1 / 4),
        ],
        data={"bytes": dict(rows), "weights": weights},
    )


def side_stock(spec: str, folder: str) -> dict[str, Any]:
    """Package the layer as torch's own example does."""
    import torch

    subject = subjects.load(spec)
    model, batch = subject.build(), subject.batch()
    with torch.no_grad():
        program = torch.export.export(model.region.eval(), (), batch)
    sizes: dict[str, Any] = {"weights": sum(p.numel() * p.element_size() for p in model.region.parameters())}
    options: dict[str, dict[str, Any]] = {
        "default": {},
        "without_weights": {"aot_inductor.package_constants_in_so": False},
    }
    for name, chosen in options.items():
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(Path(folder) / f"{name}.pt2"), inductor_configs=chosen
        )
        sizes[name] = Path(path).stat().st_size
    return sizes


if __name__ == "__main__":
    main("archive", run, {"stock": side_stock})
