"""Arguments of a drafter's call, written down and put together again.

Tensors go to one safetensors file for each call; everything else becomes JSON, in which a tensor is
a name. Nothing is pickled: what is neither a tensor, a plain value nor a container of them is kept
as `module:qualname`, or refused by the name of the argument.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import os
import sys
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from aotcache.errors import CaptureError, ManifestError
from aotcache.graph import generators
from aotcache.graph.strides import has_strides
from aotcache.recorded import Example

_PLAIN = (type(None), bool, int, str)

# Those that every supported safetensors can hold.
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in plain containers, with its path."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(f"{name}.{key}" if name else str(key), item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from tensors_of(f"{name}[{i}]", item)


def write_example(
    folder: Path,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    grad: bool,
    drawn: Mapping[str, Any],
) -> Example:
    """Write one call of `model` into a folder.

    Args:
        folder: Where to; created if need be.
        model: The drafter, in the modes that it had.
        args, kwargs: What it was given.
        grad: Whether gradients were on.
        drawn: Where the generators of random numbers stood, see `generators.read`.

    Raises:
        CaptureError: an argument that cannot be kept, by name.
        OSError: the file cannot be written.
    """
    writer = _Writer(model)
    with torch.no_grad():
        written = [writer.visit(f"args[{i}]", value) for i, value in enumerate(args)]
        named = {name: writer.visit(name, value) for name, value in kwargs.items()}
    folder.mkdir(parents=True, exist_ok=True)
    file = f"{uuid.uuid4().hex[:16]}.safetensors"
    draft = folder / f".{file}"
    try:
        save_file(writer.tensors | generators.as_tensors(drawn), draft)
        os.replace(draft, folder / file)
    finally:
        draft.unlink(missing_ok=True)
    others = [name for name, module in model.named_modules() if module.training != model.training]
    return Example(file, written, named, grad, model.training, others)


class _Writer:
    """Takes the arguments of one call apart."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._own = {
            id(tensor): name
            for named in (model.named_parameters, model.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        }

    def visit(self, path: str, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, Tensor):
            return self._tensor(path, value)
        if kind in (list, tuple, torch.Size):
            return {kind.__name__: [self.visit(f"{path}[{i}]", item) for i, item in enumerate(value)]}
        if kind is dict:
            return {"dict": self._pairs(path, value.items())}
        if kind is torch.dtype:
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": value.type}
        if isinstance(value, enum.Enum):
            return {"enum": [self._name(path, kind), value.name]}
        if kind is functools.partial:
            items = [value.func, value.args, value.keywords]
            return {"partial": [self.visit(f"{path}.{k}", i) for k, i in zip(_PARTIAL, items, strict=True)]}
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            return {"import": self._name(path, value)}
        if _is_named_tuple(kind):
            items = [self.visit(f"{path}.{n}", i) for n, i in zip(kind._fields, value, strict=True)]
            return {"named tuple": [self._name(path, kind), items]}
        if dataclasses.is_dataclass(kind) and _is_its_fields(value):
            return {"dataclass": [self._name(path, kind), self._pairs(path, vars(value).items())]}
        raise _refusal(path, f"a {kind.__module__}.{kind.__qualname__}", path)

    def _pairs(self, path: str, items: Any) -> list[Any]:
        return [
            [self.visit(f"a key of {path}", key), self.visit(f"{path}.{key}", item)] for key, item in items
        ]

    def _tensor(self, path: str, value: Tensor) -> Any:
        if id(value) in self._own:
            return {"of the model": self._own[id(value)]}
        dtype = str(value.dtype).removeprefix("torch.")
        plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_meta
        if not plain or dtype not in _DTYPES:
            raise _refusal(
                path, f"a {type(value).__module__}.{type(value).__qualname__} of {value.dtype}", path
            )
        name = self._names.get(id(value))
        if name is None:
            # What is expanded is written once.
            once = value.detach()
            for axis, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
                if stride == 0 and size > 1:
                    once = once.narrow(axis, 0, 1)
            name = self._names[id(value)] = f"{len(self.tensors)} {path}"
            # Memory of its own: the file cannot hold tensors that share one.
            self.tensors[name] = torch.empty(once.shape, dtype=value.dtype, device="cpu").copy_(once)
        return {
            "tensor": name,
            "shape": list(value.shape),
            "strides": list(value.stride()),
            "grad": value.requires_grad,
        }

    def _name(self, path: str, value: Any) -> str:
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        found: Any = sys.modules.get(str(module))
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not value or module == "__main__":
            where = "the script itself" if module == "__main__" else f"{module}"
            raise _refusal(path, f"{name or value!r} of {where}, which no other process can import", path)
        return f"{module}:{name}"


_PARTIAL = ("func", "args", "keywords")


def _refusal(path: str, what: str, argument: str) -> CaptureError:
    return CaptureError(
        f"argument {path} of the drafter is {what}; a record keeps tensors, plain values, lists, tuples, dicts, "
        "dataclasses, and functions and classes that can be imported: pass its parts, or build from a spec with "
        "a batch function",
        argument=argument,
    )


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make")


def _is_its_fields(value: Any) -> bool:
    """Whether a dataclass holds its fields and nothing else (one derived from dict, or with slots, does not)."""
    names = {field.name for field in dataclasses.fields(value)}
    return type(value).__bases__ == (object,) and getattr(value, "__dict__", {}).keys() == names


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A recorded call that can be made again.

    Attributes:
        args, kwargs: What the drafter is given.
        drawn: Where the generators of random numbers stood.
        example: What was recorded.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    drawn: dict[str, Tensor]
    example: Example

    @contextmanager
    def state(self, model: nn.Module) -> Iterator[None]:
        """Within it, modes, gradients and generators are as they were when the call was recorded."""
        example = self.example
        model.train(example.training)
        known = dict(model.named_modules())
        for name in example.others:
            if name not in known:
                raise ManifestError(
                    f"the recorded drafter has a module {name!r}, and the one that the factory builds has none; let "
                    "the factory build what the run trains, or record again"
                )
            known[name].training = not example.training
        with torch.set_grad_enabled(example.grad), generators.set_to(self.drawn):
            yield


def read_example(
    folder: Path, example: Example, model: nn.Module, device: torch.device, resolve: Callable[[str], Any]
) -> Given:
    """Read a recorded call.

    Args:
        folder: Where `write_example` wrote it.
        example: What that returned.
        model: The drafter that will be called: arguments may be weights of it.
        device: Where tensors go.
        resolve: Imports `module:qualname`.

    Raises:
        ManifestError: its file is not there, or it does not fit the model.
        SpecError: from `resolve`.
    """
    path = folder / example.file
    try:
        tensors = load_file(path)
        reader = _Reader(tensors, model, device, resolve)
        args = tuple(reader.build(tree) for tree in example.args)
        kwargs = {name: reader.build(tree) for name, tree in example.kwargs.items()}
        return Given(args, kwargs, {n: t for n, t in tensors.items() if n.startswith("random ")}, example)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ManifestError(
            f"the recorded call in {path} cannot be made again: {type(error).__name__}: {error}; record it again",
            path=str(path),
        ) from error


@dataclasses.dataclass(slots=True)
class _Reader:
    """The inverse of `_Writer`."""

    tensors: Mapping[str, Tensor]
    model: nn.Module
    device: torch.device
    resolve: Callable[[str], Any]
    made: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def build(self, tree: Any) -> Any:
        if type(tree) in (*_PLAIN, float):
            return tree
        if "tensor" in tree:
            return self._tensor(**tree)
        ((kind, value),) = tree.items()
        if kind == "of the model":
            return self._of_model(value)
        if kind == "float":
            return float(value)
        if kind in ("list", "tuple", "Size"):
            items = [self.build(item) for item in value]
            return items if kind == "list" else tuple(items) if kind == "tuple" else torch.Size(items)
        if kind == "dict":
            return {self.build(key): self.build(item) for key, item in value}
        if kind == "dtype":
            return _dtype(value)
        if kind == "device":
            return torch.device(value)
        if kind == "enum":
            return self.resolve(value[0])[value[1]]
        if kind == "import":
            return self.resolve(value)
        if kind == "partial":
            function, args, keywords = (self.build(item) for item in value)
            return functools.partial(function, *args, **keywords)
        if kind == "named tuple":
            return self.resolve(value[0])._make([self.build(item) for item in value[1]])
        if kind == "dataclass":
            made = object.__new__(self.resolve(value[0]))
            vars(made).update({self.build(name): self.build(item) for name, item in value[1]})
            return made
        raise ValueError(f"{kind!r} is no kind of value")

    def _of_model(self, name: str) -> Tensor:
        module, _, own = name.rpartition(".")
        found = getattr(self.model.get_submodule(module), own)
        if not isinstance(found, Tensor):
            raise TypeError(f"{name} of the model is a {type(found).__qualname__}, expected a tensor")
        return found

    def _tensor(self, tensor: str, shape: list[int], strides: list[int], grad: bool) -> Tensor:
        if tensor not in self.made:
            data = self.tensors[tensor]
            once = [
                1 if stride == 0 and size > 1 else size for size, stride in zip(shape, strides, strict=True)
            ]
            made = torch.empty_strided(once, strides, dtype=data.dtype, device=self.device)
            made = made.copy_(data).expand(shape)
            if not has_strides(made, tuple(strides)):
                raise ValueError(f"{tensor} has strides {made.stride()}, expected {strides}")
            self.made[tensor] = made.requires_grad_(grad)
        return self.made[tensor]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return found


__all__ = ["Given", "read_example", "tensors_of", "write_example"]
