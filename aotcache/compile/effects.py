"""Step one and a half: what a call does besides computing is taken out of its graph.

Three things a compiled graph cannot do are done around it by the worker:

- numbers that eager draws from a generator become inputs (`graph/draws.py`);
- tensors that the region keeps and changes in place, such as running statistics, are
  copied on entry, and their new values become outputs;
- results that lie in the memory of an input or of another result are no outputs: the
  worker makes them again.

A call that does any of this is exported twice: as it is, to find it all, and then as
its first program run by an interpreter that leaves it out. What a worker could not do
faithfully is refused here, by operator and line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import fx
from torch.export import ExportedProgram

from aotcache.compile import attention_dropout
from aotcache.compile.export import FlatCall, export_flat, refusal
from aotcache.compile.graphs import (
    MemoryUse,
    call_nodes,
    clean_trace,
    is_block,
    maker,
    memory_use,
    nested,
    output_nodes,
    storage_key,
)
from aotcache.errors import CompileFailed
from aotcache.graph import draws
from aotcache.manifest import Alias, InputSlot, View

Flow = Literal["recorded", "detached", "unrecorded"]

_IN_PLACE = "Compute a new tensor instead, or leave this part out of the region"
_KEPT = ("buffer", "lifted")
"""Kinds of slots that a region may change: what it keeps, and no caller hands in."""


@dataclass(frozen=True, slots=True)
class Effects:
    """What a worker does around the graphs of a call.

    Attributes:
        draws: Inputs to draw, after those of the call, in the order in which eager draws.
        mutated: Positions of the inputs whose new values are the last outputs, in this order.
        late: Which of those are written after all that eager saves for a backward.
        aliases: Results that no graph returns. Those of an output count the outputs that are left.
    """

    draws: tuple[InputSlot, ...] = ()
    mutated: tuple[int, ...] = ()
    late: frozenset[int] = frozenset()
    aliases: tuple[Alias, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.draws or self.mutated or self.aliases)


@dataclass(frozen=True, slots=True)
class Exported:
    """A pure program, and what it leaves to the worker.

    Attributes:
        program: Takes the call's tensors, then one tensor per draw; returns the results that
            are no aliases, then one new value per mutated input.
        noise: A tensor for each draw.
    """

    program: ExportedProgram
    effects: Effects
    noise: tuple[torch.Tensor, ...] = ()


def export_call(
    fn: FlatCall,
    examples: Sequence[torch.Tensor],
    names: Sequence[str],
    *,
    region: str,
    train: bool,
    kinds: Sequence[str] | None = None,
    shared: Sequence[int] = (),
) -> Exported:
    """Exports a flat call, its effects taken out.

    Args:
        fn, examples, region, train: As for `export_flat`.
        names: One name per argument, for messages.
        kinds: The kind of each argument's slot; arguments of the call if left out.
        shared: Positions of arguments whose memory another argument lies in as well: all
            examples are tensors of their own, which does not show it.

    Raises:
        UnsupportedGraph: if the region does what an artifact cannot, naming the
            operator and the line of the model's source.
        CompileFailed: if export fails for any other reason.
    """
    program = export_flat(fn, examples, region=region, train=train)
    found = _Finder(program, examples, names, kinds or ["input"] * len(examples), shared, region, train)
    effects = found.effects()
    if not effects:
        return Exported(program, effects)
    with torch.random.fork_rng(devices=[]):
        noise = tuple(draws.draw(slot, examples[0].device if examples else _CPU) for slot in effects.draws)
    for slot, made in zip(effects.draws, noise, strict=True):
        if made.stride() != slot.stride or str(made.dtype) != f"torch.{slot.dtype}":
            raise CompileFailed(
                f"region {region!r}: {slot.draw} draws {made.dtype} with strides {made.stride()}, expected "
                f"{slot.dtype} with strides {slot.stride}",
                region=region,
            )
    first = program.module(check_guards=False)
    assert isinstance(first, fx.GraphModule)
    given = [*examples, *noise]
    exposed: frozenset[int] = frozenset()
    while True:
        pure = _Pure(first, effects, len(examples), exposed)
        with clean_trace():
            again = export_flat(pure, given, region=region, train=train)
        use = memory_use(again.graph_module)
        offset = len(list(again.graph_module.graph.find_nodes(op="placeholder"))) - len(given)
        touched = {p - offset for p, _ in use.written} | {p - offset for p in use.output_of_input.values()}
        if not touched and not use.output_of_output:
            return Exported(again, effects, noise)
        if use.output_of_output or not touched - exposed or min(touched) < len(examples):
            raise CompileFailed(
                f"region {region!r}: its effects could not be taken out of its graph ({use}). This is a fault of "
                "aotcache's; please report it with the region's source",
                region=region,
            )
        # Numbers drawn are changed in place or handed out: they need a copy.
        exposed |= touched


_CPU = torch.device("cpu")


class _Finder:
    """Looks for the effects of an exported call."""

    def __init__(
        self,
        program: ExportedProgram,
        examples: Sequence[torch.Tensor],
        names: Sequence[str],
        kinds: Sequence[str],
        shared: Sequence[int],
        region: str,
        train: bool,
    ) -> None:
        self.module = program.graph_module
        self.names = names
        self.kinds = kinds
        self.shared = shared
        self.region = region
        users = list(program.graph_signature.user_inputs)
        placeholders = [n.name for n in self.module.graph.find_nodes(op="placeholder")]
        self.position = [users.index(name) if name in users else None for name in placeholders]
        self.outputs = output_nodes(self.module.graph)
        self.train = train
        # Without gradients all inputs want one: a view of what wants one does so too, and a detached one not.
        self.wanted = [
            p is not None and (examples[p].requires_grad if train else examples[p].is_floating_point())
            for p in self.position
        ]
        self.use: MemoryUse

    def effects(self) -> Effects:
        drawn = tuple(self._draws())
        self.use = memory_use(self.module, self.wanted, grad=self.train)
        mutated = tuple(self._mutated())
        late = frozenset(m for m in mutated if self.position.index(m) in self.use.late)
        return Effects(drawn, mutated, late, self._aliases())

    def _draws(self) -> Iterator[InputSlot]:
        nodes = list(_random_nodes(self.module))
        for node in call_nodes(self.module):
            if node not in nodes and draws.is_random(node.target, node.args, node.kwargs):
                raise self._random(node, "random numbers are drawn inside of another operator")
        for index, node in enumerate(nodes):
            if node.target is attention_dropout.OPERATOR:
                made = attention_dropout.slot(node, f"random.{index}")
                if made is None:
                    raise self._random(node, "random numbers are drawn")
                yield made
                continue
            recipe = draws.recipe(node.target, node.args, node.kwargs)
            if recipe is None:
                raise self._random(node, "random numbers are drawn")
            like = node.meta["val"]
            operand = draws.operand(node.target, node.args)
            form = draws.table()[recipe.operator].form
            if form == "factor":
                like = torch.empty_like(operand.meta["val"])
            elif form == "fill":
                like = operand.meta["val"]
            yield InputSlot(
                kind="random",
                name=f"random.{index}",
                dtype=str(like.dtype).removeprefix("torch."),
                shape=tuple(int(s) for s in like.shape),
                stride=tuple(int(s) for s in like.stride()),
                requires_grad=False,
                draw=recipe,
            )

    def _random(self, node: fx.Node, what: str) -> Exception:
        return refusal(
            self.region,
            node,
            what,
            "Only operators whose randomness depends on no tensor's values can be drawn outside of a graph, such as "
            "dropout and torch.rand: set its probability to 0, draw the numbers outside the region and pass them "
            "in, or leave this part out of the region",
        )

    def _label(self, placeholder: int) -> str:
        position = self.position[placeholder]
        return "a constant" if position is None else self.names[position]

    def _mutated(self) -> Iterator[int]:
        for placeholder, node in self.use.written:
            position = self.position[placeholder]
            label = self._label(placeholder)
            if position is None or self.kinds[position] not in _KEPT:
                raise refusal(self.region, node, f"{label} is changed in place", _IN_PLACE)
            before = next(
                n for i, n in enumerate(self.module.graph.find_nodes(op="placeholder")) if i == placeholder
            ).meta["val"]
            after = self.use.inputs[placeholder]
            if (before.shape, before.stride()) != (after.shape, after.stride()):
                raise refusal(self.region, node, f"{label} gets another shape in place", _IN_PLACE)
            if after.requires_grad and not self.wanted[placeholder]:
                raise refusal(
                    self.region,
                    node,
                    f"{label} gets a value in place that needs a gradient",
                    "Write a detached value, or leave this part out of the region",
                )
            if position in self.shared:
                raise refusal(
                    self.region,
                    node,
                    f"{label}, in whose memory another tensor of the region lies, is changed in place",
                    "Give each a memory of its own",
                )
            yield position

    def _aliases(self) -> tuple[Alias, ...]:
        results = [r for r in self.use.results if r is not None]
        nodes = [n for n in self.outputs if n is not None]
        inputs = {storage_key(t): i for i, t in enumerate(self.use.inputs)}
        owners = self._owners(results, inputs)
        found: list[tuple[int, str, int, torch.Tensor]] = []
        own: dict[int, int] = {}  # position among the results to position among the outputs that are left
        for position, value in enumerate(results):
            key = storage_key(value)
            if key in inputs:
                found.append((position, "input", inputs[key], self.use.inputs[inputs[key]]))
            elif owners[key] != position:
                owner = owners[key]
                if owner is None:
                    first = next(i for i, r in enumerate(results) if storage_key(r) == key)
                    if first == position:
                        continue
                    raise self._shares(maker(nodes[position]), f"outputs {first} and {position} share memory")
                found.append((position, "output", owner, results[owner]))
            else:
                own[position] = len(own)
        made = []
        for position, of, index, base in found:
            what = (
                f"output {position} shares memory with {self._label(index)}"
                if of == "input"
                else f"outputs {min(index, position)} and {max(index, position)} share memory"
            )
            node = maker(nodes[position])
            view = self._view(results[position], base, node, what)
            flow: Flow = "recorded" if view is None else self._flow(results[position], base, node, what)
            if of == "output":
                made.append(Alias(position, "output", own[index], view, flow))
                continue
            slot = self.position[index]
            if slot is None:
                raise self._shares(node, what)
            made.append(Alias(position, "input", slot, view, flow))
        return tuple(made)

    @staticmethod
    def _owners(results: Sequence[Any], inputs: Any) -> dict[int, int | None]:
        """For each piece of memory that no input owns, the result that fills it, if one does."""
        owners: dict[int, int | None] = {}
        for position, value in enumerate(results):
            key = storage_key(value)
            whole = value.storage_offset() == 0 and (
                value.numel() * value.element_size() == value.untyped_storage().nbytes()
            )
            if key not in inputs and owners.get(key) is None:
                alone = sum(storage_key(r) == key for r in results) == 1
                owners[key] = position if whole or alone else None
        return owners

    def _view(self, value: torch.Tensor, base: torch.Tensor, node: fx.Node, what: str) -> View | None:
        """How `value` lies in `base`; None where it is the very tensor."""
        if value is base:
            return None
        if (value.dtype, value.is_conj(), value.is_neg()) != (base.dtype, base.is_conj(), base.is_neg()):
            raise self._shares(node, what)
        return View(
            shape=tuple(int(s) for s in value.shape),
            stride=tuple(int(s) for s in value.stride()),
            offset=int(value.storage_offset()),
        )

    def _flow(self, value: torch.Tensor, base: torch.Tensor, node: fx.Node, what: str) -> Flow:
        """What autograd knows of a view."""
        if not value.requires_grad:
            return "detached" if base.requires_grad else "recorded"
        if not base.requires_grad or _root(value) is not _root(base):
            # One that went ways of its own, such as a detached one that was then changed in place.
            raise self._shares(node, what)
        # Without gradients nothing is recorded anyway.
        return "unrecorded" if self.train and value.grad_fn is None else "recorded"

    def _shares(self, node: fx.Node, what: str) -> Exception:
        return refusal(
            self.region,
            node,
            f"{what}, made",
            "Return a copy of one of them (`.clone()`), or compute it outside the region",
        )


def _root(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that autograd takes a view for a view of."""
    return tensor if tensor._base is None else tensor._base


def _random_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Calls that take numbers from a generator, in the order in which they run."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if is_block(node.target):
            for inner in nested(node):
                yield from _random_nodes(inner)
        elif draws.is_random(node.target, node.args, node.kwargs):
            yield node


class _Pure:
    """A call without its effects: runs its first program, which has them."""

    def __init__(self, module: fx.GraphModule, effects: Effects, count: int, exposed: frozenset[int]) -> None:
        self.module = module
        self.mutated = effects.mutated
        self.aliased = {alias.position for alias in effects.aliases}
        self.count = count
        self.exposed = exposed

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = [t.clone() if i in self.mutated else t for i, t in enumerate(tensors[: self.count])]
        noise = [t.clone() if i in self.exposed else t for i, t in enumerate(tensors)][self.count :]
        results = _Undrawn(self.module, iter(noise)).run(*given)
        left = [r for r in results if r is not None]
        return (
            *(r for i, r in enumerate(left) if i not in self.aliased),
            # A copy: the new value may be one of the results as well.
            *(given[i].clone() for i in self.mutated),
        )


class _Undrawn(fx.Interpreter):
    """Runs a graph with numbers that are given in place of those it would draw."""

    def __init__(self, module: fx.GraphModule, noise: Iterator[torch.Tensor]) -> None:
        super().__init__(module)
        self._noise = noise

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_block(target):
            args = tuple(_Undrawn(a, self._noise).run if isinstance(a, fx.GraphModule) else a for a in args)
        elif draws.is_random(target, args, kwargs):
            if target is attention_dropout.OPERATOR:
                return attention_dropout.attention(next(self._noise), *args, **kwargs)
            operand = cast("torch.Tensor | None", draws.operand(target, args))
            return draws.table()[str(target)].put(next(self._noise), operand)
        return super().call_function(target, args, kwargs)


__all__ = ["Effects", "Exported", "export_call"]
