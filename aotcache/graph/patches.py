"""What somebody put in the place of torch's own functions.

torch's code belongs to the toolchain and is not in the key. A function of somebody else's
that stands where torch's modules would call torch's is.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from aotcache.graph.code import facts
from aotcache.graph.fingerprint import NO_MEMBERS, Walker
from aotcache.graph.values import is_foreign_code


def torch_function(walker: Walker, function: Any) -> None:
    """A function of torch's own: only what somebody put in the place of one that it calls counts."""
    table = vars(torch.nn.functional)
    todo, seen = [function], set[str]()
    while todo:
        code = getattr(todo.pop(), "__code__", None)
        for name in sorted(facts(code).names - seen if code is not None else ()):
            seen.add(name)
            called = table.get(name)
            if not callable(called):
                continue
            walker.checks.item(table, name, called)
            if is_foreign_code(called):
                walker.visit(f"torch.nn.functional.{name}", called)
            elif isinstance(called, types.FunctionType):
                todo.append(called)


def tensor_methods(walker: Walker) -> None:
    """What somebody put in the place of a tensor's methods. Call it when all names are known."""
    methods = vars(torch.Tensor)
    walker.checks.length(methods)
    for name in sorted(walker.names & methods.keys() - NO_MEMBERS):
        walker.checks.item(methods, name, methods[name])
        if is_foreign_code(methods[name]):
            walker.visit(f"torch.Tensor.{name}", methods[name])
