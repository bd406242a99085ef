"""What a Python function reads, straight from its bytecode.

Reading bytecode instead of running the function keeps a worker able to compute
a key in microseconds per function, and lets the key follow exactly the globals
that the code can reach: a helper patched in from outside changes the key, an
unrelated global of the same file does not.
"""

from __future__ import annotations

import dis
import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

_LOAD_GLOBAL = {dis.opmap[name] for name in ("LOAD_GLOBAL", "LOAD_NAME") if name in dis.opmap}
_LOAD_ATTR = {dis.opmap[name] for name in ("LOAD_ATTR", "LOAD_METHOD") if name in dis.opmap}
_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
_LOAD_CONST = dis.opmap["LOAD_CONST"]
_NO_EFFECT = {dis.opmap[name] for name in ("PRECALL",) if name in dis.opmap}
_CALLS = {dis.opmap[name] for name in ("CALL", "CALL_FUNCTION") if name in dis.opmap}
_GLOBAL_SHIFT = 1 if sys.version_info >= (3, 11) else 0
_ATTR_SHIFT = 1 if sys.version_info >= (3, 12) else 0
_TABLES = frozenset({"globals", "eval", "exec"})
_DYNAMIC = frozenset({"vars", "__dict__", "globals", "locals", "eval", "exec", "__getattribute__"})


@dataclass(frozen=True, slots=True)
class CodeFacts:
    """What one code object, nested ones included, reads.

    Attributes:
        digest: sha256 over the code, without file names and line numbers.
        chains: Reads that start at a global: `("F", "silu")` for `F.silu`.
        names: Every attribute, global and string constant that could name an attribute.
        imports: Modules imported inside the function, each with what is taken out of it;
            nothing for a plain `import`. A relative name keeps its leading dots.
        by_table: Whether it can read globals as entries of a table.
        dynamic: Whether it can read attributes whose names do not stand in it.
        files: Source files of the code.
    """

    digest: str
    chains: tuple[tuple[str, ...], ...]
    names: frozenset[str]
    imports: tuple[tuple[str, tuple[str, ...]], ...]
    by_table: bool
    dynamic: bool
    files: tuple[str, ...]


@lru_cache(maxsize=16384)
def _facts(code: CodeType, _identity: int) -> CodeFacts:
    digest = hashlib.sha256()
    chains: dict[tuple[str, ...], None] = {}
    names: set[str] = set()
    imports: dict[tuple[str, tuple[str, ...]], None] = {}
    dynamic = False
    files: dict[str, None] = {}
    for inner in _nested(code):
        _digest_into(digest, inner)
        for chain in _chains(inner):
            chains[chain] = None
        names.update(inner.co_names)
        for text in inner.co_consts:
            # `attrgetter("config.scale")` names two attributes.
            if isinstance(text, str) and all(part.isidentifier() for part in text.split(".")):
                names.update(text.split("."))
        imports.update(dict.fromkeys(_imports(inner)))
        dynamic = dynamic or _reads_by_made_up_name(inner)
        files[inner.co_filename] = None
    return CodeFacts(
        digest=digest.hexdigest(),
        chains=tuple(chains),
        names=frozenset(names),
        imports=tuple(imports),
        by_table=not _TABLES.isdisjoint(names),
        dynamic=dynamic or not _DYNAMIC.isdisjoint(names),
        files=tuple(files),
    )


def facts(code: CodeType) -> CodeFacts:
    """The facts of `code`; remembered per code object for the life of the process."""
    # Two code objects can be equal and come from different files, hence the identity.
    return _facts(code, id(code))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _nested(const)


def _digest_into(digest: hashlib._Hash, code: CodeType) -> None:
    consts = [_const_text(c) for c in code.co_consts]
    for part in (
        code.co_code,
        repr(consts).encode(),
        repr(
            (
                code.co_name,
                code.co_names,
                code.co_varnames,
                code.co_freevars,
                code.co_cellvars,
                code.co_argcount,
                code.co_posonlyargcount,
                code.co_kwonlyargcount,
                code.co_flags,
                getattr(code, "co_exceptiontable", b""),
            )
        ).encode(),
    ):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)


def _const_text(const: object) -> str:
    if isinstance(const, CodeType):
        return "<code>"
    if isinstance(const, frozenset):
        return "frozenset:" + repr(sorted(_const_text(item) for item in const))
    if isinstance(const, tuple):
        return "tuple:" + repr([_const_text(item) for item in const])
    return f"{type(const).__name__}:{const!r}"


def _instructions(code: CodeType) -> Iterator[tuple[int, int]]:
    """(opcode, argument) pairs, caches left out, extended arguments joined."""
    raw = code.co_code
    extended = 0
    for i in range(0, len(raw), 2):
        op = raw[i]
        arg = raw[i + 1] | extended
        if op == dis.EXTENDED_ARG:
            extended = arg << 8
            continue
        extended = 0
        if op != 0:
            yield op, arg


def _chains(code: CodeType) -> Iterator[tuple[str, ...]]:
    chain: list[str] = []
    for op, arg in _instructions(code):
        if op in _LOAD_GLOBAL:
            if chain:
                yield tuple(chain)
            shift = _GLOBAL_SHIFT if op == dis.opmap["LOAD_GLOBAL"] else 0
            chain = [code.co_names[arg >> shift]]
        elif op in _LOAD_ATTR and chain:
            shift = _ATTR_SHIFT if op == dis.opmap["LOAD_ATTR"] else 0
            chain.append(code.co_names[arg >> shift])
        elif chain:
            yield tuple(chain)
            chain = []
    if chain:
        yield tuple(chain)


def _imports(code: CodeType) -> Iterator[tuple[str, tuple[str, ...]]]:
    """`(module, names)` of every import statement in the code."""
    instructions = list(_instructions(code))
    for i, (op, arg) in enumerate(instructions):
        if op != _IMPORT_NAME:
            continue
        level_op, level = instructions[i - 2]
        dots = (code.co_consts[level] if level_op == _LOAD_CONST else level) or 0
        fromlist = code.co_consts[instructions[i - 1][1]]
        yield "." * dots + code.co_names[arg], tuple(fromlist or ())


def _reads_by_made_up_name(code: CodeType) -> bool:
    """Whether `getattr` is called with a name that is not a text in the code, or handed on."""
    instructions = list(_instructions(code))
    for i, (op, arg) in enumerate(instructions):
        if op in _LOAD_GLOBAL:
            shift = _GLOBAL_SHIFT if op == dis.opmap["LOAD_GLOBAL"] else 0
            if code.co_names[arg >> shift] == "getattr" and not _named(code, instructions[i + 1 :]):
                return True
    return False


def _named(code: CodeType, rest: list[tuple[int, int]]) -> bool:
    """Whether what follows a `getattr` calls it, with a constant as the second argument.

    Follows the depth of the stack; where a jump makes that wrong the answer is no.
    """
    depth = 0
    constant = False
    for op, arg in rest:
        if op in _NO_EFFECT:
            continue
        if op in _CALLS and depth == arg and arg in (2, 3):
            return constant
        try:
            effect = dis.stack_effect(op, arg if op >= dis.HAVE_ARGUMENT else None, jump=False)
        except ValueError:
            return False
        before, depth = depth, depth + effect
        if depth < 0 or (before < 2 and depth > 2):
            return False
        if depth == 2:
            # The second argument is complete, or was made into something else.
            constant = before == 1 and op == _LOAD_CONST and isinstance(code.co_consts[arg], str)
    return False


@lru_cache(maxsize=4096)
def _file_digest(path: str, _mtime_ns: int, _size: int) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def file_digest(path: str) -> str | None:
    """sha256 of a source file, or None where there is none (code made by `exec`)."""
    try:
        stat = os.stat(path)
        return _file_digest(path, stat.st_mtime_ns, stat.st_size)
    except OSError:
        return None
