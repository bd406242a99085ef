"""A thread that keeps tracing functions of its own, as another library in the process would."""

from __future__ import annotations

import threading

import torch
from torch.fx.experimental.proxy_tensor import make_fx


def unrelated(x: torch.Tensor) -> torch.Tensor:
    """What is traced."""
    return (x.sin() ** 3).cumsum(0).relu()


class Tracer:
    """Traces unrelated functions with `make_fx` from the start of the `with` block to its end.

    Attributes:
        traces: How many it finished.
        errors: What it met: tracing beside training must work as well.
    """

    def __init__(self) -> None:
        self.traces = 0
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tracer")

    def __enter__(self) -> Tracer:
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                make_fx(unrelated)(torch.ones(8))
                self.traces += 1
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            self._begun.set()
