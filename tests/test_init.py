from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import aotcache

HEAVY = ("torch", "numpy", "pydantic", "obstore", "fastapi", "sqlalchemy", "typer", "rich")


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_importing_aotcache_loads_nothing_heavy() -> None:
    assert loaded_after("import aotcache").isdisjoint(HEAVY)


@pytest.mark.parametrize("name", ["Buckets", "load_spec", "open_store", "AotcacheError"])
def test_specs_buckets_and_stores_need_no_torch(name: str) -> None:
    assert "torch" not in loaded_after(f"from aotcache import {name}")


def test_every_public_name_is_there_and_listed() -> None:
    assert aotcache.__all__ == sorted(aotcache.__all__)
    for name in aotcache.__all__:
        assert getattr(aotcache, name) is not None
        assert name in dir(aotcache)


def test_all_and_the_lazy_table_agree() -> None:
    assert sorted(aotcache._HOMES) == aotcache.__all__


def test_other_names_are_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        aotcache.nothing_of_this_name  # noqa: B018
