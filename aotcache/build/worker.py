"""The builder: captures, compiles and certifies, in a process of its own, on one thread.

Started by `compile.sandbox`, spoken to in JSON lines. It holds no secret and publishes
nothing: it leaves archives in its staging folder and tells the parent about them.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from aotcache import host
from aotcache.build.drafter import Drafter
from aotcache.compile import pipeline
from aotcache.compile.certify import certify
from aotcache.compile.checkpoints import left_out
from aotcache.compile.flex_operator import operator_attention
from aotcache.errors import AotcacheError, CaptureError
from aotcache.graph.redirect import redirect_flex
from aotcache.graph.region import Call
from aotcache.graph.strides import canonical_strides
from aotcache.graph.tree import flatten_output, require_rebuilds, to_json
from aotcache.manifest import Certificate, Manifest, Provenance
from aotcache.runtime import registry
from aotcache.runtime.dense import dense_attention
from aotcache.runtime.dispatch import require_fits
from aotcache.spec import load_spec
from aotcache.types import CacheKey, Target

_BATCHES = 3
"""Batches an artifact is checked on: two full ones, and a shorter one padded."""

_ATTENTION = {"cuda": operator_attention}
"""What flex attention is exported as, where the device's compiler has kernels of its own for it."""

Send = Callable[[Mapping[str, Any]], None]
Receive = Callable[[], dict[str, Any]]


class FlatCall:
    """A captured call as a function of its tensors alone: what is exported."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.output: Any = None

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        region = self.call.region
        with redirect_flex(_ATTENTION.get(self.call.device, dense_attention)), left_out(region.name):
            result = region.run(self.call, tensors)
        flat: list[torch.Tensor] = []
        template = flatten_output(result, flat, region.name)
        require_rebuilds(result, template, flat, region.name)
        self.output = to_json(template)
        return tuple(flat)


def shared_slots(call: Call) -> list[int]:
    """Slots in whose memory another slot lies as well, which fresh examples do not show."""
    found: dict[int, list[int]] = {}
    for slot, tensor in enumerate(call.tensors):
        if tensor.numel():
            found.setdefault(tensor.untyped_storage().data_ptr(), []).append(slot)
    return [slot for slots in found.values() if len(slots) > 1 for slot in slots]


def example_tensors(call: Call) -> list[torch.Tensor]:
    """Fresh tensors with the call's values, in the compiled layout, one per slot."""
    made = []
    for tensor, grad in zip(call.tensors, call.requires_grad(), strict=True):
        fresh = torch.empty_strided(
            tensor.shape, canonical_strides(tensor), dtype=tensor.dtype, device=tensor.device
        )
        made.append(fresh.copy_(tensor.detach()).requires_grad_(grad))
    return made


class Worker:
    """Answers the requests of one parent."""

    def __init__(self, job: Mapping[str, Any], send: Send, receive: Receive) -> None:
        self.spec = load_spec(job["spec"])
        self.staging = Path(job["staging"])
        self.devices: list[str] = job["devices"]
        self.send = send
        self.receive = receive
        self.toolchain = host.host_toolchain()
        self._calls: dict[CacheKey, list[Call]] = {}
        self._context = self.spec.resolve_context()
        self._buckets: dict[CacheKey, dict[str, int]] = {}

    def capture(self) -> dict[str, Any]:
        """Run the drafter in every bucket and mode; answer with the cells."""
        cells: dict[tuple[str, str], dict[str, Any]] = {}
        for device in self.devices:
            self._capture_on(device, cells)
        return {"event": "done", "cells": list(cells.values())}

    def _capture_on(self, device: str, cells: dict[tuple[str, str], dict[str, Any]]) -> None:
        drafter = Drafter(self.spec, device)
        for bucket in self.spec.cells():
            for mode in self.spec.drafter.modes:
                self.send({"event": "stage", "stage": "capture", "bucket": bucket, "mode": mode})
                for batch in drafter.capture(bucket, mode):
                    seen = set()
                    for call in batch:
                        key = call.parts.key
                        if key not in seen:
                            # One call of each batch is what the numerics check needs.
                            seen.add(key)
                            self._calls.setdefault(key, []).append(call)
                        self._buckets.setdefault(key, dict(bucket))
                        cells.setdefault(
                            (call.region.name, key),
                            {
                                "region": call.region.name,
                                "mode": call.mode,
                                "bucket": bucket,
                                "device": device,
                                "key": key,
                                "components": call.parts.to_json(),
                            },
                        )

    def certify(self, manifest: Manifest, archive: Path) -> dict[str, Any]:
        """Check an artifact that was built before as `build` checks it; answer with what was measured now."""
        calls = self._captured(manifest.key)
        require_fits(calls[0], manifest)
        with self._stage("certify", manifest.key, {}):
            executable = registry.open_unshared(manifest, archive, self.staging / "home")
            certificate = certify(executable, calls[:_BATCHES], self._context)
        return {"event": "done", "certificate": asdict(certificate)}

    def _captured(self, key: CacheKey) -> list[Call]:
        """The calls of a key, on different batches."""
        if key not in self._calls:
            self.capture()
        if key not in self._calls:
            raise CaptureError(
                f"key {key} was captured by one builder process and not by another: the drafter's calls differ "
                "from run to run; make factory and batch build the same layouts every time",
                key=key,
            )
        calls = self._calls[key]
        with self._context():
            calls[0].region.require_unchanged(calls[0])
        return calls

    def build(self, key: CacheKey, target: Target) -> dict[str, Any]:
        """Build the artifact of one key for one target; answer with its manifest and archive."""
        calls = self._captured(key)
        call = calls[0]
        seconds: dict[str, float] = {}
        workdir = self.staging / f"{key[:16]}-{target.arch}"
        workdir.mkdir(parents=True, exist_ok=True)
        flat = FlatCall(call)
        with self._stage("export", key, seconds):
            examples = example_tensors(call)
            with self._context(), torch.set_grad_enabled(call.mode == "train"):
                exported = pipeline.export(
                    flat,
                    examples,
                    call.names,
                    region=call.region.name,
                    train=call.mode == "train",
                    kinds=call.kinds,
                    shared=shared_slots(call),
                )
        # Inductor's lowering reads the determinism flag that the context may have set.
        with self._stage("pair", key, seconds), self._context():
            prepared = pipeline.prepare(
                exported,
                examples,
                names=call.names,
                kinds=call.kinds,
                region=call.region.name,
                mode=call.mode,
                target=target,
                toolchain=self.toolchain,
                options=self.spec.compile_options(),
            )
        self.send({"event": "prepared", "key": key, "content": prepared.content})
        reply = self.receive()
        if reply["do"] == "reuse":
            archive = Path(reply["archive"])
            other = Manifest.from_json(reply["manifest"].encode(), where="content index")
            built = pipeline.reuse(prepared, other)
        else:
            with self._stage("compile", key, seconds), self._context():
                compiled = pipeline.compile_prepared(prepared, workdir)
            assert compiled.archive is not None
            built, archive = compiled, compiled.archive
        manifest = Manifest(
            key=key,
            components=tuple(call.parts.to_json()),
            target=target,
            toolchain=self.toolchain,
            region=call.region.name,
            mode=call.mode,
            bucket=self._buckets[key],
            digest=built.digest,
            size=built.size,
            members=built.members,
            host=built.host,
            inputs=prepared.inputs,
            outputs=prepared.outputs,
            output_tree=flat.output,
            pair=prepared.pair,
            mutations=prepared.mutations,
            aliases=prepared.aliases,
            content=prepared.content,
            runner=built.runner,
            certificate=Certificate(0, 0.0, ()),
            provenance=_provenance(seconds),
        )
        with self._stage("certify", key, seconds):
            executable = registry.open_unshared(manifest, archive, self.staging / "home")
            certificate = certify(executable, calls[:_BATCHES], self._context)
        manifest = replace(manifest, certificate=certificate, provenance=_provenance(seconds))
        return {"event": "done", "manifest": manifest.to_json().decode(), "archive": str(archive)}

    @contextmanager
    def _stage(self, stage: str, key: CacheKey, seconds: dict[str, float]) -> Iterator[None]:
        self.send({"event": "stage", "stage": stage, "key": key})
        started = time.perf_counter()
        yield
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started


def _provenance(seconds: Mapping[str, float]) -> Provenance:
    triton = sys.modules.get("triton")
    return Provenance(
        torch=torch.__version__,
        python=platform.python_version(),
        triton=getattr(triton, "__version__", None),
        compiler=pipeline.compiler_version(),
        created=time.time(),
        seconds={stage: round(took, 3) for stage, took in seconds.items()},
    )


def serve(job: Mapping[str, Any], send: Send, receive: Receive) -> None:
    """Answer requests until the parent closes its end."""
    worker: Worker | None = None
    while True:
        try:
            request = receive()
        except EOFError:
            return
        try:
            if worker is None:
                worker = Worker(job, send, receive)
            if request["do"] == "capture":
                send(worker.capture())
            elif request["do"] == "certify":
                manifest = Manifest.from_json(request["manifest"].encode(), where="the request")
                send(worker.certify(manifest, Path(request["archive"])))
            else:
                send(worker.build(CacheKey(request["key"]), Target.parse(request["target"])))
        except AotcacheError as error:
            traceback.print_exc()
            send(
                {
                    "event": "error",
                    "type": type(error).__name__,
                    "message": str(error),
                    "details": _plain(error.details),
                }
            )
        except Exception as error:  # noqa: BLE001 - reported to the parent, whatever it is
            traceback.print_exc()
            send(
                {
                    "event": "error",
                    "type": "BuildError",
                    "details": {},
                    "message": f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}",
                }
            )


def _plain(details: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: v if isinstance(v, str | int | float | bool | None | list) else str(v) for k, v in details.items()
    }


def _end_with_parent(requests: int) -> None:
    """From now on, end this process and its compilers once the parent is gone, however it went."""
    parent = select.poll()
    parent.register(requests, 0)  # hanging up is always reported, and nothing else is asked for

    def watch() -> None:
        parent.poll()
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="aotcache-parent", daemon=True).start()


def main(arguments: list[str]) -> None:
    """Entry point: two pipe descriptors, requests and answers."""
    _end_with_parent(int(arguments[0]))
    requests = os.fdopen(int(arguments[0]), encoding="utf-8")
    answers = os.fdopen(int(arguments[1]), "w", encoding="utf-8")

    def send(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    def receive() -> dict[str, Any]:
        line = requests.readline()
        if not line:
            raise EOFError
        message: dict[str, Any] = json.loads(line)
        return message

    serve(receive(), send, receive)


if __name__ == "__main__":
    main(sys.argv[1:])
