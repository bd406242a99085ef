"""The same picture with torch.compile: threads call it while another thread keeps tracing.

Forward under `no_grad` alone, because torch has no backward of flex attention on CPU. Each
call that fails is counted: as the race where torch says that it met FX tracing of another
thread, else apart.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

RACE = "FX to symbolically trace a dynamo-optimized function"
"""In the message of the error that another thread's trace causes, torch 2.11 to 2.13."""


def main() -> None:
    """Call, count, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--result", type=Path, help="write the result here as JSON instead of printing it")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as cold:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cold  # read by torch when it first compiles
        result = measure(wanted.threads, wanted.steps)
    text = json.dumps(result, indent=2)
    if wanted.result is None:
        print(text)
    else:
        wanted.result.write_text(text)


def measure(threads: int, steps: int) -> dict[str, int | float | None]:
    """Errors of `threads` times `steps` calls, and seconds until the first that succeeded."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention
    from tracer import Tracer

    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    firsts: list[float] = []
    lock = threading.Lock()

    def work(seed: int) -> None:
        torch.get_num_threads()
        compiled = torch.compile(flex_attention)
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(2, 4, 128, 32, generator=generator) for _ in range(3))
        for _ in range(steps):
            try:
                with torch.no_grad():
                    compiled(q, k, v)
                outcome = "done"
            except Exception as error:
                outcome = "race" if RACE in str(error) else "other"
            with lock:
                counts[outcome] += 1
                if outcome == "done" and not firsts:
                    firsts.append(time.perf_counter() - started)

    with Tracer():
        started = time.perf_counter()
        workers = [threading.Thread(target=work, args=(i,), name=f"compile-{i}") for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return {
        "calls": threads * steps,
        "fx_race_errors": counts["race"],
        "other_errors": counts["other"],
        "first_step_seconds": firsts[0] if firsts else None,
    }


if __name__ == "__main__":
    main()
