from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aotcache.config import Settings, default_home, settings
from aotcache.errors import ConfigError

ROOT = Path(__file__).parents[1]


def test_the_store_is_below_home_unless_it_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AOTCACHE_HOME", str(tmp_path))
    monkeypatch.delenv("AOTCACHE_STORE", raising=False)
    assert settings().store == (tmp_path / "store").as_uri()
    assert settings().locks == tmp_path / "locks"
    monkeypatch.setenv("AOTCACHE_STORE", "s3://bucket/prefix")
    assert settings().store == "s3://bucket/prefix"


def test_a_changed_environment_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTCACHE_LOCK_SECONDS", "1")
    assert settings().lock_seconds == 1
    monkeypatch.setenv("AOTCACHE_LOCK_SECONDS", "2")
    assert settings().lock_seconds == 2


def test_relative_homes_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AOTCACHE_HOME", "here")
    assert settings().home == tmp_path / "here"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AOTCACHE_BUILD_SECONDS", "soon"),
        ("AOTCACHE_BUILD_SECONDS", "0"),
        ("AOTCACHE_BUILD_MEMORY_GIB", "-1"),
        ("AOTCACHE_TRUST_SHARED_STORE", "maybe"),
    ],
)
def test_a_wrong_value_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}='{value}'"):
        settings()


def test_settings_cannot_be_changed_after_they_are_read() -> None:
    with pytest.raises(ValueError, match="frozen"):
        settings().store = "other"  # type: ignore[misc]


def test_every_setting_is_described() -> None:
    assert all(f"        {name}:" in (Settings.__doc__ or "") for name in Settings.model_fields)


def test_the_default_home_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_home() == tmp_path / "aotcache"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_home() == tmp_path / ".cache" / "aotcache"


_UNNAMED = """
import os
from aotcache.config import settings
settings()  # everything is imported while the interpreter's own files can be read
os.setgroups([]); os.setgid(54321); os.setuid(54321)
print(settings().home)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without an account")
@pytest.mark.parametrize("home", [None, "/", "/root"])
def test_a_uid_without_an_account_gets_the_documented_fallback(home: str | None, tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    if home is not None:
        env["HOME"] = home
    done = subprocess.run(
        [sys.executable, "-c", _UNNAMED], env=env, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()).name == "aotcache-54321"
    assert "aotcache-<uid>" in (Settings.__doc__ or "")
