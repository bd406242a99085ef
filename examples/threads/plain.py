"""A plain trainer: one thread for each device, with a replica, an optimizer and data of its own.

    aotcache warm examples/dflash/dflash.toml
    python examples/threads/plain.py --spec examples/dflash/dflash.toml

Lengths differ from step to step and are padded to the buckets of the spec. Nothing is traced:
`attach` forbids it in the whole process, and a call that no artifact covers is an error.
"""

from __future__ import annotations

import argparse
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import aotcache
from aotcache.spec import Spec


def train(spec: Spec, lock: str, device: torch.device, steps: int, seed: int) -> dict[str, Any]:
    """One thread's work; returns its receipt."""
    torch.get_num_threads()  # a new thread takes over torch.set_num_threads only once it is asked for
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = spec.resolve_factory()(**spec.drafter.kwargs).to(device)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    make_batch, buckets, order = spec.resolve_batch(), aotcache.Buckets.from_spec(spec), random.Random(seed)
    with aotcache.attach(model, spec, lock=lock) as handle:
        handle.prefetch()
        for _ in range(steps):
            # Of each dimension that is padded, any size up to the largest there is.
            sizes = {
                dim: order.randint(max(ladder) // 2, max(ladder)) if dim in padded(spec) else max(ladder)
                for dim, ladder in spec.buckets.items()
            }
            args, batch = make_batch(sizes, device)
            loss = model(*args, **buckets.pad(batch, sizes=sizes).batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"device": str(device), "loss": float(loss.detach()), **handle.stats()}


def padded(spec: Spec) -> set[str]:
    """The dimensions that axes of the batch follow."""
    return {dim for rule in spec.axes for _, dim in rule.axes}


def main() -> None:
    """Train one thread on each GPU, or `--threads` of them on the CPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spec", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2, help="how many, where there is no GPU")
    wanted = parser.parse_args()

    spec = aotcache.load_spec(wanted.spec)
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    devices = devices or [torch.device("cpu")] * wanted.threads
    torch.set_num_threads(1)
    with ThreadPoolExecutor(len(devices)) as pool:
        started = [
            pool.submit(train, spec, f"{spec.path}.lock", device, wanted.steps, seed)
            for seed, device in enumerate(devices)
        ]
        for number, thread in enumerate(started):
            receipt = thread.result()
            shown = ("device", "loss", "hits", "misses", "eager_calls", "traces")
            print(f"thread {number}:", ", ".join(f"{name} {receipt[name]}" for name in shown))


if __name__ == "__main__":
    main()
