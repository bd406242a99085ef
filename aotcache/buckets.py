"""Buckets: the smallest compiled shape that holds a batch, padding and cutting.

Works on anything that looks like a torch tensor and imports no torch. Nothing is
padded but the axes that the spec names.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotcache.errors import NoBucket, SpecError
from aotcache.spec import InputAxes, Pad, Spec, cells, did_you_mean, load_spec

_INTEGER_RANGES = {
    "torch.bool": (0, 1),
    "torch.uint8": (0, 2**8 - 1),
    "torch.uint16": (0, 2**16 - 1),
    "torch.uint32": (0, 2**32 - 1),
    "torch.uint64": (0, 2**64 - 1),
    "torch.int8": (-(2**7), 2**7 - 1),
    "torch.int16": (-(2**15), 2**15 - 1),
    "torch.int32": (-(2**31), 2**31 - 1),
    "torch.int64": (-(2**63), 2**63 - 1),
}


@dataclass(frozen=True, slots=True)
class Padded:
    """A batch that fills a bucket.

    Attributes:
        batch: As the batch given, with the named axes padded.
        bucket: Size of every dimension of the ladder.
        sizes: The batch's own sizes, for `Buckets.cut`.
    """

    batch: Any
    bucket: dict[str, int]
    sizes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Buckets:
    """The ladder of named dimensions and the batch axes that follow them.

    Immutable; may be used from any number of threads.

    Attributes:
        ladders: Sizes of each dimension, ascending.
        axes: Which batch inputs follow which dimensions.
    """

    ladders: Mapping[str, tuple[int, ...]]
    axes: tuple[InputAxes, ...] = ()

    @classmethod
    def from_spec(cls, spec: Spec | str | Path | None = None) -> Buckets:
        """The buckets of a spec, or of the one at a path. Raises SpecError."""
        loaded = spec if isinstance(spec, Spec) else load_spec(spec)
        return cls(loaded.buckets, loaded.axes)

    def cells(self) -> list[dict[str, int]]:
        """Every bucket there is."""
        return cells(self.ladders)

    def choose(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The smallest bucket that holds `sizes`.

        A dimension that `sizes` lacks gets its only rung, if it has but one.

        Raises:
            NoBucket: naming the dimension, its size and its ladder.
        """
        for name in sizes:
            if name not in self.ladders:
                raise NoBucket(
                    f"there is no dimension {name!r}{did_you_mean(name, self.ladders)}; "
                    f"the ladder has {', '.join(self.ladders) or 'none'}",
                    dimension=name,
                )
        return {dim: _rung(dim, ladder, sizes.get(dim)) for dim, ladder in self.ladders.items()}

    def sizes(self, batch: Any) -> dict[str, int]:
        """The size of every dimension that an axis of `batch` follows.

        Raises:
            NoBucket: if two axes disagree; both are named.
            SpecError: if an input that the spec names is missing or has no such axis.
        """
        found: dict[str, tuple[int, str]] = {}
        for rule, tensor in self._tensors(batch):
            for axis, dim in rule.axes:
                size = int(tensor.shape[_axis(rule.name, axis, tensor)])
                place = f"axis {axis} of {rule.name!r}"
                first = found.setdefault(dim, (size, place))
                if first[0] != size:
                    raise NoBucket(
                        f"dimension {dim!r} has size {first[0]} at {first[1]} but {size} at {place}; "
                        "make the inputs agree, or name different dimensions for them in [axes]",
                        dimension=dim,
                        sizes=(first[0], size),
                    )
        return {dim: size for dim, (size, _) in found.items()}

    def pad(self, batch: Any, *, sizes: Mapping[str, int] | None = None) -> Padded:
        """Pad a batch up to the smallest bucket that holds it.

        Inputs that fill the bucket already, and all that no axis is named for, are
        passed on as they are. A padded tensor keeps dtype and device and is
        contiguous; gradients flow back through it to the tensor it was made from. A
        tensor that stands in the batch twice, under equal rules, is still one.

        Args:
            batch: Nested mappings, lists and tuples of tensors; not changed.
            sizes: Sizes of dimensions that no axis follows.

        Raises:
            NoBucket: nothing fits, or inputs disagree.
            SpecError: the spec does not fit the batch, or a padding value the dtype.
        """
        measured = {**(sizes or {}), **self.sizes(batch)}
        bucket = self.choose(measured)
        done: dict[tuple[int, tuple[tuple[int, str], ...], Pad], Any] = {}
        padded = batch
        for rule, tensor in self._tensors(batch):
            known = (id(tensor), rule.axes, rule.pad)
            if known not in done:
                done[known] = _fill(rule, tensor, bucket)
            if done[known] is not tensor:
                padded = _replace(padded, rule.name.split("."), done[known])
        return Padded(padded, bucket, measured)

    def cut(self, outputs: Any, axes: Mapping[str, Mapping[int, str]], sizes: Mapping[str, int]) -> Any:
        """Cut outputs of a padded batch back to the batch's own sizes.

        Args:
            outputs: A tensor, or nested mappings, lists and tuples of them.
            axes: For each output, by dotted name (positions in sequences are numbers;
                `""` is a bare tensor), the dimension that each axis follows.
            sizes: `Padded.sizes`.

        Returns:
            `outputs` with views in the place of what was named.

        Raises:
            SpecError: an output or a size that is named is not there.
        """
        result = outputs
        for name, followed in axes.items():
            path = name.split(".") if name else []
            tensor = _get(outputs, path, name, "output")
            for axis, dim in followed.items():
                if dim not in sizes:
                    raise SpecError(
                        f"output {name!r}: there is no size for dimension {dim!r}; there are {dict(sizes)}"
                    )
                tensor = tensor.narrow(_axis(name, axis, tensor), 0, sizes[dim])
            result = _replace(result, path, tensor)
        return result

    def _tensors(self, batch: Any) -> Iterator[tuple[InputAxes, Any]]:
        for rule in self.axes:
            tensor = _get(batch, rule.name.split("."), rule.name, "input")
            # An input that is None was left out on purpose.
            if tensor is not None:
                yield rule, tensor


_OUT = ". [axes] names it: correct the name there, or put it into the batch (None where it is left out)"


def _rung(dim: str, ladder: tuple[int, ...], size: int | None) -> int:
    if size is None:
        if len(ladder) == 1:
            return ladder[0]
        raise NoBucket(
            f"the size of dimension {dim!r} is not known: no axis follows it, and its ladder has several "
            f"rungs ({_text(ladder)}); name an axis in [axes], or pass its size",
            dimension=dim,
            ladder=ladder,
        )
    for rung in ladder:
        if size <= rung:
            return rung
    raise NoBucket(
        f"no bucket holds {dim} = {size}: the ladder of {dim!r} is {_text(ladder)}; "
        f"add a size of at least {size} to [buckets] and warm again, or cut the batch",
        dimension=dim,
        size=size,
        ladder=ladder,
    )


def _text(ladder: Sequence[int]) -> str:
    return ", ".join(str(rung) for rung in ladder)


def _axis(name: str, axis: int, tensor: Any) -> int:
    rank = len(tensor.shape)
    if not -rank <= axis < rank:
        raise SpecError(
            f"{name!r} has {rank} axes (shape {tuple(tensor.shape)}), expected it to have axis {axis}; "
            "axes are counted from 0"
        )
    return axis % rank


def _fill(rule: InputAxes, tensor: Any, bucket: Mapping[str, int]) -> Any:
    shape = list(tensor.shape)
    for axis, dim in rule.axes:
        shape[_axis(rule.name, axis, tensor)] = bucket[dim]
    if shape == list(tensor.shape):
        return tensor
    _check_pad(rule, tensor)
    filled = tensor.new_full(shape, rule.pad)
    filled[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return filled


def _check_pad(rule: InputAxes, tensor: Any) -> None:
    limits = _INTEGER_RANGES.get(str(tensor.dtype))
    if limits is None:
        return
    low, high = limits
    if not (math.isfinite(rule.pad) and rule.pad == int(rule.pad) and low <= rule.pad <= high):
        raise SpecError(
            f"axes.{rule.name}.pad = {rule.pad!r} does not fit {tensor.dtype}: "
            f"expected a whole number from {low} to {high}"
        )


def _get(tree: Any, path: Sequence[str], name: str, what: str) -> Any:
    for part in path:
        if isinstance(tree, Mapping):
            if part not in tree:
                known = [str(key) for key in tree]
                raise SpecError(
                    f"{what} {name!r} is not there{did_you_mean(part, known)}; "
                    f"found {', '.join(known) or 'nothing'}{_OUT if what == 'input' else ''}"
                )
            tree = tree[part]
        elif isinstance(tree, list | tuple) and part.isdigit() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            raise SpecError(f"{what} {name!r}: there is no {part!r} in a {type(tree).__name__}")
    return tree


def _replace(tree: Any, path: Sequence[str], value: Any) -> Any:
    """`tree` with `value` at `path`; everything on the way copied, the rest shared."""
    if not path:
        return value
    part, rest = path[0], path[1:]
    if isinstance(tree, Mapping):
        changed: Any = copy.copy(tree)
        changed[part] = _replace(tree[part], rest, value)
        return changed
    items = list(tree)
    items[int(part)] = _replace(items[int(part)], rest, value)
    if isinstance(tree, list):
        return items
    make = getattr(type(tree), "_make", tuple)  # a named tuple stays one
    return make(items)
