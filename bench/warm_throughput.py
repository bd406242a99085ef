"""Warming several distinct graphs with two jobs, against one after another.

Every warm has a store and a home of its own, so that nothing is reused. Capturing the
drafter comes first and on one process in both.
"""

from __future__ import annotations

from statistics import median

from bench import subjects
from bench.common import Bar, Report, main, text_of_seconds


def run(quick: bool) -> Report:
    """One round when quick, three in turn otherwise; medians."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    builds = 0
    root = subjects.folder() / "throughput"
    root.mkdir()
    spec = subjects.lay_out(root, "lengths")
    for round_ in range(1 if quick else 3):
        for jobs, found in seconds.items():
            place = root / f"{round_}-{jobs}"
            done = subjects.warm(spec, place / "store", place / "home", jobs=jobs)
            found.append(done["seconds"])
            builds = done["builds"]
    middle = {jobs: median(found) for jobs, found in seconds.items()}
    return Report(
        name="warm_throughput",
        title=f"Warming {builds} distinct forward/backward pairs",
        columns=("jobs", "wall time", "each"),
        rows=[
            (str(jobs), text_of_seconds(took), text_of_seconds(took / builds))
            for jobs, took in middle.items()
        ],
        bars=[Bar("2 jobs against 1", middle[2] / middle[1], 0.6)],
        data={"seconds": {str(jobs): found for jobs, found in seconds.items()}, "builds": builds},
    )


if __name__ == "__main__":
    main("warm_throughput", run, {})
