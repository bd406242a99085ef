"""First training step of a fresh process: aotcache, torch.compile and its aot_compile.

The clock runs from `attach`, or the first compiled call, to the end of the first backward.
Imports and model building are over by then, the peers' compiler modules imported as well.
Kernels run on one OpenMP thread on every side, as they do in a process of several workers.
"""

from __future__ import annotations

import os
from statistics import median
from time import perf_counter
from typing import Any

from bench import subjects
from bench.common import Bar, Report, fresh, main, text_of_seconds

MODULE = "bench.first_step"


def run(quick: bool) -> Report:
    """Every side in processes of its own; the median where a side repeats."""
    few, many = (1, 3) if quick else (2, 7)
    seconds: dict[str, list[float]] = {}
    place = subjects.warmed("layer")

    def inductor(name: str) -> dict[str, str]:
        return {"TORCHINDUCTOR_CACHE_DIR": str(place.root / name)}

    def measure(label: str, side: str, times: int, env_of: Any, **args: Any) -> None:
        seconds[label] = [
            fresh(MODULE, side, env=env_of(i), spec=str(place.spec), **args)["seconds"] for i in range(times)
        ]

    measure("torch.compile, cold", "compile", few, lambda i: inductor(f"cold{i}"))
    measure("torch.compile, warm local caches", "compile", many, lambda i: inductor("cold0"))
    fresh(MODULE, "aot_save", env=inductor("saving"), spec=str(place.spec), path=str(place.root / "saved"))
    measure(
        "aot_compile, loaded on a fresh host",
        "aot_load",
        few,
        lambda i: inductor(f"load{i}"),
        path=str(place.root / "saved"),
    )
    measure(
        "aotcache, fresh host",
        "aotcache",
        many,
        lambda i: {"AOTCACHE_HOME": str(place.root / f"home{i}")},
        store=place.store.as_uri(),
    )
    measure(
        "aotcache, unpacked before",
        "aotcache",
        many,
        lambda i: {"AOTCACHE_HOME": str(place.root / "home0")},
        store=place.store.as_uri(),
    )
    middle = {label: median(values) for label, values in seconds.items()}
    fresh_host, again = middle["aotcache, fresh host"], middle["aotcache, unpacked before"]
    return Report(
        name="first_step",
        title="First training step of a fresh process, one decoder layer",
        columns=("side", "first step", "runs", "over aotcache on a fresh host"),
        rows=[
            (label, text_of_seconds(value), str(len(seconds[label])), f"{value / fresh_host:.3g} x")
            for label, value in middle.items()
        ],
        bars=[
            Bar("against torch.compile cold", fresh_host / middle["torch.compile, cold"], 1 / 500),
            Bar(
                "against torch.compile with warm local caches",
                again / middle["torch.compile, warm local caches"],
                1 / 40,
            ),
            Bar(
                "against aot_compile loaded on a fresh host",
                fresh_host / middle["aot_compile, loaded on a fresh host"],
                1 / 500,
            ),
        ],
        data={"seconds": seconds},
    )


def side_compile(spec: str) -> dict[str, Any]:
    """torch.compile of the layer; whether that is cold or warm is for its cache folder to say."""
    subject = _load(spec)
    _import_compiler()
    model, batch = subject.build(), subject.batch()
    start = perf_counter()
    model.region.compile()
    model(**batch).backward()
    return {"seconds": perf_counter() - start}


def side_aot_save(spec: str, path: str) -> dict[str, Any]:
    """Compile the layer with torch's aot_compile and save the result."""
    import torch

    subject = _load(spec)
    model = subject.build()
    compiled = torch.compile(model.region.forward, fullgraph=True)
    result = compiled.aot_compile(((), subject.batch()))
    result.save_compiled_function(path)
    return {"bytes": os.path.getsize(path)}


def side_aot_load(spec: str, path: str) -> dict[str, Any]:
    """Load what `side_aot_save` saved and train one step with it."""
    import torch

    subject = _load(spec)
    _import_compiler()
    model, batch = subject.build(), subject.batch()
    start = perf_counter()
    with open(path, "rb") as file:
        layer = torch.compiler.load_compiled_function(file)
    layer(model.region, **batch).square().mean().backward()
    return {"seconds": perf_counter() - start}


def side_aotcache(spec: str, store: str) -> dict[str, Any]:
    """Attach and train one step from the store."""
    from aotcache import attach

    subject = _load(spec)
    model, batch = subject.build(), subject.batch()
    start = perf_counter()
    handle = attach(model, subject.spec, store=store)
    model(**batch).backward()
    seconds = perf_counter() - start
    subjects.check(handle)
    return {"seconds": seconds}


def _load(spec: str) -> subjects.Subject:
    import torch

    torch.set_num_threads(1)
    return subjects.load(spec)


def _import_compiler() -> None:
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401


if __name__ == "__main__":
    main(
        "first_step",
        run,
        {
            "compile": side_compile,
            "aot_save": side_aot_save,
            "aot_load": side_aot_load,
            "aotcache": side_aotcache,
        },
    )
