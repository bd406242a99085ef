"""Step two: an exported program becomes a forward and a backward graph.

The backward needs tensors from the forward. Which of them leave the forward library
decides whether autograd can see a later in-place change, so they are chosen here and
not by what the partitioner happens to cut:

- what is an input, or a view of one, is taken from the input, and the view is made
  again in the backward;
- the old value of what the region changes in place is saved as a copy, since the
  change comes before the backward;
- what is an output of the region is taken from that output;
- of any other tensor the memory's owner is saved once, and views are made again;
- no two results of either graph share memory, nor do they share it with an input.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from aotcache.compile.export import fresh_examples
from aotcache.compile.graphs import (
    attribute,
    blank,
    clean_trace,
    memory_use,
    output_nodes,
    view_root,
    write_values,
)
from aotcache.compile.rewrite import assert_logsumexp, require_logsumexp, rewrite_scatters
from aotcache.errors import CompileFailed, UnsupportedGraph
from aotcache.manifest import OutputSlot, PairContract

# private torch names, tried on 2.13.0


def _joint_graph(
    stack: ExitStack, module: torch.nn.Module, examples: Sequence[torch.Tensor]
) -> fx.GraphModule:
    import torch._functorch.config as functorch_config
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._inductor.decomposition import select_decomp_table

    # Gradients come in with the strides of their outputs; torch 2.11 would have them contiguous.
    with functorch_config.patch(guess_tangent_strides_as_outputs=True):
        joint = aot_export_joint_with_descriptors(
            stack, module, tuple(examples), decompositions=select_decomp_table()
        )
    return joint.graph_module


def _partition(
    joint: fx.GraphModule, outputs: int, memory_budget: float
) -> tuple[fx.GraphModule, fx.GraphModule]:
    import torch._functorch.config as functorch_config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with functorch_config.patch(activation_memory_budget=memory_budget):
        return min_cut_rematerialization_partition(joint, None, num_fwd_outputs=outputs)


def _input_index(descriptor: Any) -> int | None:
    """Position of the argument that a descriptor stands for; None if it is none's."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    return descriptor.idx if isinstance(descriptor, PlainAOTInput) else None


def _output_index(descriptor: Any) -> int | None:
    from torch._functorch._aot_autograd.descriptors import PlainAOTOutput

    return descriptor.idx if isinstance(descriptor, PlainAOTOutput) else None


# end of private torch names


@dataclass(frozen=True, slots=True)
class Pair:
    """The graphs to compile, and how they are called.

    Attributes:
        forward: Takes the arguments; returns outputs and, for training, saved tensors.
        backward: See `PairContract`; None for inference.
        outputs: One slot per tensor that the region returns.
        contract: How the backward is called; None for inference.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    outputs: tuple[OutputSlot, ...]
    contract: PairContract | None


def example_inputs(module: fx.GraphModule) -> tuple[torch.Tensor, ...]:
    """Tensors of zeros for the placeholders of a graph, for the compiler to look at."""
    made = []
    for node in module.graph.find_nodes(op="placeholder"):
        tensor = blank(node.meta["val"])
        write_values(tensor, None)
        made.append(tensor)
    return tuple(made)


def infer_graph(program: ExportedProgram) -> Pair:
    """The forward of a program exported without gradients, functional and alone."""
    with clean_trace():
        functional = program.run_decompositions({})
    values = [n for n in output_nodes(functional.graph) if n is not None]
    slots = tuple(_slot(n.meta["val"], differentiable=False) for n in values)
    module = functional.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    _return_only(module, [n for n in output_nodes(module.graph) if n is not None])
    return Pair(module, None, slots, None)


def make_pair(
    program: ExportedProgram,
    examples: Sequence[torch.Tensor],
    *,
    region: str,
    memory_budget: float = 1.0,
    mutated: Sequence[int] = (),
) -> Pair:
    """Splits a program into a forward and a backward graph.

    Args:
        program: Exported with `train=True`.
        examples: As given to the export, with `requires_grad` set.
        region: The region's name, for messages.
        memory_budget: Share of the saved activations to keep, from 0 (recompute all
            that can be) to 1 (recompute what costs nothing).
        mutated: Positions of the arguments that the caller changes after the forward.

    Raises:
        UnsupportedGraph: if no output can be differentiated.
        CompileFailed: if the joint trace fails.
    """
    module = program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    _return_only(module, [n for n in output_nodes(module.graph) if n is not None])
    require_logsumexp(module)
    if not any(e.requires_grad for e in examples):
        raise UnsupportedGraph(
            f"region {region!r}: nothing that it takes needs a gradient, so there is no backward to compile. "
            "Build it in mode infer",
            region=region,
        )
    with ExitStack() as stack, torch.enable_grad(), clean_trace():
        try:
            joint = _joint_graph(stack, module, fresh_examples(examples))
        except Exception as error:
            raise CompileFailed(
                f"region {region!r}: the joint trace of forward and backward failed: "
                f"{type(error).__name__}: {error}",
                region=region,
            ) from error
        return _split(joint, region, memory_budget, frozenset(mutated))


def _return_only(module: fx.GraphModule, values: list[fx.Node]) -> None:
    """Makes a graph return `values` as a flat tuple, whatever tree it returned before."""
    returned = next(iter(module.graph.find_nodes(op="output")))
    returned.args = (tuple(values),)
    module.graph.set_codegen(fx.graph.CodeGen())
    module.recompile()


def _split(joint: fx.GraphModule, region: str, memory_budget: float, mutated: frozenset[int]) -> Pair:
    (returned,) = joint.graph.find_nodes(op="output")
    described = list(returned.meta["desc"])
    count = sum(_output_index(d) is not None for d in described)
    if any(_output_index(d) != i for i, d in enumerate(described[:count])):
        raise CompileFailed(
            f"region {region!r}: the joint graph returns {described}, expected the outputs first, in order; "
            "this torch version builds joint graphs in another way than those tried",
            region=region,
        )
    tangents = []
    for node in joint.graph.find_nodes(op="placeholder"):
        descriptor = node.meta["desc"]
        if hasattr(descriptor, "output"):
            tangents.append(_output_index(descriptor.output))
    # Inputs without a gradient have None in both places.
    grads_of = [_input_index(d.grad_of) if hasattr(d, "grad_of") else None for d in described[count:]]
    unknown = [
        d
        for d, value, of in zip(described[count:], output_nodes(joint.graph)[count:], grads_of, strict=True)
        if value is not None and of is None
    ]
    if unknown or None in tangents:
        raise CompileFailed(
            f"region {region!r}: unexpected slots in the joint graph: {described}", region=region
        )
    if not tangents:
        raise UnsupportedGraph(
            f"region {region!r}: no output depends on an input that needs a gradient, so there is no "
            "backward to compile. Build it in mode infer",
            region=region,
        )
    forward, backward = _partition(joint, count, memory_budget)
    assert_logsumexp(forward)
    contracted = _Contracted(forward, backward, region, mutated)
    return contracted.finish(count, tangents, grads_of)  # type: ignore[arg-type]


class _Contracted:
    """Rebuilds a partitioned pair so that it fulfils a `PairContract`."""

    def __init__(
        self, forward: fx.GraphModule, backward: fx.GraphModule, region: str, mutated: frozenset[int]
    ) -> None:
        self.forward = forward
        self.backward = backward
        self.region = region
        self.mutated = mutated
        self.inputs = list(forward.graph.find_nodes(op="placeholder"))

    def finish(self, count: int, tangents: list[int], grads_of: list[int | None]) -> Pair:
        returned = output_nodes(self.forward.graph)
        outputs, saved = list(returned[:count]), list(returned[count:])
        backward_inputs = list(self.backward.graph.find_nodes(op="placeholder"))
        tangent_inputs = backward_inputs[len(saved) :]
        if [n.name for n in backward_inputs[: len(saved)]] != [n.name for n in saved] or len(
            tangent_inputs
        ) != len(tangents):
            raise CompileFailed(
                f"region {self.region!r}: the backward takes {[n.name for n in backward_inputs]}, expected "
                f"{[n.name for n in saved]} and {len(tangents)} incoming gradients",
                region=self.region,
            )
        from_inputs, from_outputs, intermediates = self._owners(saved, outputs)
        kept = self._emit(outputs, intermediates, from_outputs)
        paths = _paths(self.backward, dict(zip(tangent_inputs, tangents, strict=True)), grads_of)
        gradients = self._backward(from_inputs, from_outputs, intermediates, saved, tangent_inputs, grads_of)
        slots = tuple(_slot(node.meta["val"], differentiable=i in tangents) for i, node in enumerate(outputs))
        for position, node in zip(tangents, tangent_inputs, strict=True):
            wanted = tuple(node.meta["val"].stride())
            if wanted != slots[position].stride:
                raise CompileFailed(
                    f"region {self.region!r}: the backward wants the gradient of output {position} with "
                    f"strides {wanted}, but the output has {slots[position].stride}",
                    region=self.region,
                )
        for module in (self.forward, self.backward):
            rewrite_scatters(module)
            module.graph.eliminate_dead_code()
            module.graph.lint()
            module.recompile()
            self._assert_separate(module)
        contract = PairContract(
            saved_inputs=tuple(from_inputs),
            saved_outputs=tuple(from_outputs),
            intermediates=kept,
            tangents=tuple(tangents),
            gradients=tuple(gradients),
            paths=tuple(paths[position] for position in gradients),
        )
        return Pair(self.forward, self.backward, slots, contract)

    def _owners(
        self, saved: list[fx.Node], outputs: list[fx.Node]
    ) -> tuple[list[int], list[int], list[fx.Node]]:
        """Inputs, outputs and other nodes whose memory the saved tensors lie in."""
        inputs: set[int] = set()
        results: set[int] = set()
        others: dict[fx.Node, None] = {}
        for node in saved:
            root, _ = view_root(node)
            if root.op == "placeholder" and self.inputs.index(root) not in self.mutated:
                inputs.add(self.inputs.index(root))
            elif root in outputs:
                results.add(outputs.index(root))
            elif root.op != "get_attr":
                others[root] = None
        return sorted(inputs), sorted(results), list(others)

    def _emit(self, outputs: list[fx.Node], intermediates: list[fx.Node], from_outputs: list[int]) -> int:
        """Makes the forward return the outputs, then the intermediates; returns their number."""
        graph = self.forward.graph
        (end,) = graph.find_nodes(op="output")
        del from_outputs  # Already among the outputs.
        shared = {view_root(node)[0] for node in outputs}
        emitted = []
        for node in intermediates:
            if node in shared or node.op == "placeholder":
                # An input gets its new value before the backward. Of which an output is a view, would be
                # handed out as it is: a change of that output would change what the backward reads, and
                # nobody would notice.
                with graph.inserting_before(end):
                    copied = graph.call_function(torch.ops.aten.clone.default, (node,))
                copied.meta["val"] = node.meta["val"]
                node = copied
            emitted.append(node)
        end.args = ((*outputs, *emitted),)
        end.meta.pop("desc", None)
        return len(emitted)

    def _backward(
        self,
        from_inputs: list[int],
        from_outputs: list[int],
        intermediates: list[fx.Node],
        saved: list[fx.Node],
        tangents: list[fx.Node],
        grads_of: list[int | None],
    ) -> list[int]:
        """Rebuilds the backward on the memory's owners; returns the inputs that get a gradient."""
        outputs = output_nodes(self.forward.graph)
        owners = [
            *(self.inputs[i] for i in from_inputs),
            *(outputs[i] for i in from_outputs),
            *intermediates,
        ]
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for index, node in enumerate(owners):
            made[node] = graph.placeholder(f"saved_{index}")
            made[node].meta["val"] = node.meta["val"]
        env: dict[fx.Node, fx.Node] = {}
        for index, node in enumerate(tangents):
            env[node] = graph.placeholder(f"tangent_{index}")
            env[node].meta = copy.copy(node.meta)
        holder = torch.nn.Module()
        old_inputs = list(self.backward.graph.find_nodes(op="placeholder"))
        for node, old in zip(saved, old_inputs, strict=False):
            env[old] = self._again(graph, node, made, holder)
        for node in self.backward.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            env[node] = graph.node_copy(node, lambda n: env[n])
            if node.op == "get_attr":
                _set_attribute(holder, str(node.target), attribute(self.backward, str(node.target)))
        results, gradients = _separate(graph, output_nodes(self.backward.graph), grads_of, env)
        graph.output(tuple(results))
        self.backward = fx.GraphModule(holder, graph)
        return gradients

    def _again(
        self, graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node], holder: torch.nn.Module
    ) -> fx.Node:
        """Makes a saved view again from its owner, in the backward graph."""
        root, chain = view_root(node)
        if root.op == "get_attr" and root not in made:
            made[root] = graph.node_copy(root)
            _set_attribute(holder, str(root.target), attribute(self.forward, str(root.target)))
        for step in chain:
            if step not in made:
                made[step] = graph.node_copy(step, lambda n: made[n])
        return made[node]

    def _assert_separate(self, module: fx.GraphModule) -> None:
        use = memory_use(module)
        if use.written or use.output_of_input or use.output_of_output:
            raise CompileFailed(
                f"region {self.region!r}: results of a graph share memory although none should: {use}. "
                "This is a fault of aotcache's; please report it with the region's source",
                region=self.region,
            )


def _paths(
    backward: fx.GraphModule, tangents: dict[fx.Node, int], grads_of: list[int | None]
) -> dict[int, tuple[int, ...]]:
    """For each input with a gradient, the outputs whose incoming gradients it is made from."""
    reached: dict[fx.Node, set[int]] = {}
    for node in backward.graph.nodes:
        reached[node] = {tangents[node]} if node in tangents else set()
        reached[node].update(*(reached[source] for source in node.all_input_nodes))
    return {
        position: tuple(sorted(reached[value]))
        for value, position in zip(output_nodes(backward.graph), grads_of, strict=True)
        if value is not None and position is not None
    }


def _separate(
    graph: fx.Graph, returned: Sequence[Any], grads_of: list[int | None], env: dict[fx.Node, fx.Node]
) -> tuple[list[fx.Node], list[int]]:
    """The gradients that exist, each in memory of its own.

    Two gradients in one piece of memory would be added to twice where autograd keeps
    them as `.grad` and accumulates in place.
    """
    results: list[fx.Node] = []
    gradients: list[int] = []
    taken: set[fx.Node] = set()
    for value, position in zip(returned, grads_of, strict=True):
        if value is None or position is None:
            continue
        node = env[value]
        root, _ = view_root(node)
        if root.op in ("placeholder", "get_attr") or root in taken:
            meta = node.meta["val"]
            node = graph.call_function(torch.ops.aten.clone.default, (node,))
            node.meta["val"] = meta
        taken.add(root)
        results.append(node)
        gradients.append(position)
    return results, gradients


def _set_attribute(module: torch.nn.Module, path: str, value: Any) -> None:
    """Sets a dotted attribute, making the modules on the way."""
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(module, parent):
            module.add_module(parent, torch.nn.Module())
        module = getattr(module, parent)
    setattr(module, name, value)


def _slot(value: torch.Tensor, *, differentiable: bool) -> OutputSlot:
    return OutputSlot(
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(int(s) for s in value.shape),
        stride=tuple(int(s) for s in value.stride()),
        differentiable=differentiable,
    )
