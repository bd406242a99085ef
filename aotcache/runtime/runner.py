"""Runs AOTInductor libraries through their C interface, without the GIL and without a tracer.

torch's own loader holds the GIL while a graph runs and checks nothing. Here a
library is opened once per process; each thread gets a small container of its own
and calls `...RunSingleThreaded`, which never waits for another thread. `...Run` is
never called: on a shared container it can hang the others after an error in one.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch

from aotcache.errors import CallRefused, RejectedArtifact

# private torch names, tried on 2.13.0
_to_handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
_from_handles = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs

_CAPSULE_POINTER = 16
"""Bytes from the start of a capsule object to the pointer in it, in CPython to this day."""

# Prototypes of our own: the attributes of `ctypes.pythonapi` are shared with the whole process.
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)

_CPU = torch.device("cpu")

_CREATE = "AOTInductorModelContainerCreateWithDevice"
_DELETE = "AOTInductorModelContainerDelete"
_RUN = "AOTInductorModelContainerRunSingleThreaded"
_INPUTS = "AOTInductorModelContainerGetNumInputs"
_OUTPUTS = "AOTInductorModelContainerGetNumOutputs"
_LAST_ERROR = "AOTInductorGetLastError"


@cache
def _slots_readable() -> bool:
    """Whether a capsule's pointer can be read and written in place.

    Asking the C API through ctypes costs a third of a microsecond each, and a call has dozens
    of tensors. Where an interpreter lays capsules out in another way, the C API is asked.
    """
    marks = (0x1234567890, 0x1234567898)
    capsule = _new_capsule(marks[0], None, None)
    if object.__sizeof__(capsule) < _CAPSULE_POINTER + 8:
        return False
    slot = _slot_of(capsule)
    if slot.value != marks[0]:
        return False
    slot.value = marks[1]
    return bool(_pointer_of(capsule, None) == marks[1])


def _slot_of(capsule: Any) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(id(capsule) + _CAPSULE_POINTER)


class _Container:
    """One thread's container on one device, with the arrays and capsules its calls reuse."""

    __slots__ = ("_delete", "capsules", "handle", "inputs", "outputs", "slots")

    def __init__(self, library: Library, device: str) -> None:
        self.handle = handle = ctypes.c_void_p()
        self._delete = library.delete
        code = library.create(ctypes.byref(handle), 1, device.encode(), None)
        if code:
            raise RejectedArtifact(
                f"{library.path}: a container for {device} could not be made: {library.last_error()}",
                path=str(library.path),
            )
        self.inputs = (ctypes.c_void_p * library.inputs)()
        self.outputs = (ctypes.c_void_p * library.outputs)()
        self.capsules = [_new_capsule(1, None, None) for _ in range(library.outputs)]
        self.slots = [_slot_of(capsule) for capsule in self.capsules] if _slots_readable() else []

    def __del__(self) -> None:
        # Ends with the thread that made it: its thread-local dictionary goes.
        if self.handle:
            self._delete(self.handle)


class Library:
    """One AOTInductor library, open for the life of the process.

    Thread-safe. Opening it runs its code: callers have verified it.

    Args:
        path: The `.so`.
        inputs, outputs: How many tensors its manifest says it takes and returns.

    Raises:
        RejectedArtifact: it cannot be opened, or is not what the manifest says.
    """

    def __init__(self, path: Path, *, inputs: int, outputs: int) -> None:
        self.path = path
        self.inputs = inputs
        self.outputs = outputs
        try:
            library = ctypes.CDLL(str(path))
            self.create = library[_CREATE]
            self.delete = library[_DELETE]
            self._run = library[_RUN]
            self._error = getattr(library, _LAST_ERROR, None)
            counts = [library[_INPUTS], library[_OUTPUTS]]
        except (OSError, AttributeError) as error:
            hint = _noexec(error, "its folder", "AOTCACHE_HOME")
            raise RejectedArtifact(f"{path} cannot be opened: {error}{hint}", path=str(path)) from error
        for function in (self.create, self.delete, self._run, *counts):
            function.restype = ctypes.c_int
        self.create.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_char_p]
        self.delete.argtypes = [ctypes.c_void_p]
        self._run.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t,
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
        self._local = threading.local()
        self._cuda = _names_cuda(path)
        container = self._container(torch.device("cuda") if self._cuda else _CPU)
        found = []
        for count in counts:
            count.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
            size = ctypes.c_size_t()
            count(container.handle, ctypes.byref(size))
            found.append(size.value)
        if found != [inputs, outputs]:
            raise RejectedArtifact(
                f"{path} takes {found[0]} tensors and returns {found[1]}; its manifest says {inputs} and {outputs}",
                path=str(path),
                expected=(inputs, outputs),
                found=tuple(found),
            )

    def _container(self, device: torch.device) -> _Container:
        containers: dict[Any, _Container] = self._local.__dict__
        container = containers.get(device)
        if container is None:
            # Initialises torch's thread count here: set_num_threads reaches a new thread only then.
            torch.get_num_threads()
            container = containers[device] = _Container(self, str(device))
        return container

    def last_error(self) -> str:
        """What the library said of its last failure in this thread."""
        if self._error is None:
            return "torch before 2.12 prints the reason to stderr"
        message = ctypes.c_char_p()
        if self._error(ctypes.byref(message)) or not message.value:
            return "no message"
        return message.value.decode(errors="replace")

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run the graph in this thread, the GIL released.

        Args:
            tensors: As many as `inputs`, as the guards of the caller have checked.

        Returns:
            As many tensors as `outputs`; None where the graph returns nothing.

        Raises:
            CallRefused: the library reports an error. Other threads are not affected.
        """
        if not self._cuda:
            return self._run_on(tensors, _CPU, None)
        # A scalar on the CPU may stand among the inputs of a CUDA graph.
        device = next((t.device for t in tensors if t.is_cuda), None)
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device())
        with torch.cuda.device(device):
            return self._run_on(tensors, device, torch.cuda.current_stream(device).cuda_stream)

    def _run_on(
        self, tensors: list[torch.Tensor], device: torch.device, stream: int | None
    ) -> list[torch.Tensor | None]:
        if len(tensors) != self.inputs:
            raise _wrong_count(self.path, self.inputs, len(tensors))
        container = self._container(device)
        inputs, outputs = container.inputs, container.outputs
        # The library takes over the handles that it is given, and frees them.
        capsules = _to_handles(tensors)
        if container.slots:
            at = ctypes.c_uint64.from_address
            inputs[:] = [at(id(capsule) + _CAPSULE_POINTER).value for capsule in capsules]
        else:
            inputs[:] = [_pointer_of(capsule, None) for capsule in capsules]
        code = self._run(container.handle, inputs, self.inputs, outputs, self.outputs, stream, None)
        if code:
            raise CallRefused(f"{self.path} failed: {self.last_error()}", path=str(self.path))
        return _take(container)


def _wrong_count(path: Path, expected: int, found: int) -> CallRefused:
    return CallRefused(
        f"{path} takes {expected} tensors, found {found}; its manifest does not fit it",
        expected=expected,
        found=found,
    )


def _take(container: _Container) -> list[torch.Tensor | None]:
    """The tensors whose handles a run has left in the container's outputs."""
    handles = container.outputs[:]
    if container.slots:
        for slot, handle in zip(container.slots, handles, strict=True):
            slot.value = handle or 0
        filled = container.capsules
    else:
        filled = [_new_capsule(handle, None, None) for handle in handles if handle]
    if None not in handles:
        return [*_from_handles(filled)]
    if container.slots:
        filled = [c for c, handle in zip(container.capsules, handles, strict=True) if handle]
    made = iter(_from_handles(filled))
    return [next(made) if handle else None for handle in handles]


class PackageRunner:
    """Runs one member of an archive through torch's own loader.

    For graphs that call operators through the proxy executor. It holds the GIL while
    the graph runs. Thread-safe, one call at a time.

    Raises:
        RejectedArtifact: the archive cannot be opened.
    """

    def __init__(self, archive: Path, member: str, *, inputs: int, outputs: int) -> None:
        self.path = archive
        self.inputs = inputs
        self.outputs = outputs
        self._lock = threading.Lock()
        try:
            # Single-threaded under our own lock: the loader's pool waits for a device event when its model
            # was just used, and after an error does not wake who waits for it.
            self._loader: Any = torch._C._aoti.AOTIModelPackageLoader(str(archive), member, True, 1, -1)
        except RuntimeError as error:
            hint = _noexec(error, "the temporary directory, to which it unpacks archives,", "TMPDIR")
            raise RejectedArtifact(
                f"{archive} cannot be opened by torch's loader: {error}{hint}", path=str(archive)
            ) from error

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """As `Library.run`."""
        if len(tensors) != self.inputs:
            raise _wrong_count(self.path, self.inputs, len(tensors))
        try:
            with self._lock:
                return list(self._loader.boxed_run(list(tensors)))
        except RuntimeError as error:
            raise CallRefused(f"{self.path} failed: {error}", path=str(self.path)) from error


Runner = Library | PackageRunner


def _noexec(error: Exception, where: str, setting: str) -> str:
    """What to do about a library that the linker cannot map because nothing may be executed there; else nothing."""
    if "failed to map segment" in str(error) or "Operation not permitted" in str(error):
        return f"; {where} may be mounted noexec: set {setting} to a place that is not"
    return ""


def _names_cuda(path: Path) -> bool:
    """Whether the file is linked to the CUDA driver; a plain search, since the name stands in it as text."""
    return b"libcuda.so.1" in path.read_bytes()
