"""What a builder gets of its parent's environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from aotcache.compile.sandbox import Sandbox, scrubbed
from aotcache.errors import ConfigError
from aotcache.trust import SigningKey


def test_what_would_change_the_code_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="TORCHINDUCTOR_MAX_AUTOTUNE, TRITON_INTERPRET"):
        scrubbed({"PATH": "/bin", "TRITON_INTERPRET": "1", "TORCHINDUCTOR_MAX_AUTOTUNE": "1"})


def test_folders_that_torch_itself_sets_are_left_out() -> None:
    kept = scrubbed({"PATH": "/bin", "TORCHINDUCTOR_CACHE_DIR": "/c", "TRITON_CACHE_DIR": "/t", "RANK": "1"})
    assert kept == {"PATH": "/bin"}


def test_no_secret_and_no_place_of_one_reaches_the_builder() -> None:
    kept = scrubbed(
        {
            "AOTCACHE_HOME": "/home",
            "AOTCACHE_TOKEN": "aot_secret",
            "AOTCACHE_CONFIG_HOME": "/keys",
            "XDG_CONFIG_HOME": "/config",
            "AOTCACHE_STORE": "https://user:password@host",
            "AOTCACHE_DATABASE": "postgresql://user:password@host",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
    )
    assert kept == {"AOTCACHE_HOME": "/home"}


def test_a_running_builder_has_neither_key_nor_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    SigningKey.generate().save(keys / "signing.pem")
    monkeypatch.setenv("AOTCACHE_CONFIG_HOME", str(keys))
    monkeypatch.setenv("AOTCACHE_TOKEN", "aot_secret")
    staging, headers = tmp_path / "staging", tmp_path / "headers"
    staging.mkdir()
    headers.mkdir()
    with Sandbox({}, staging, headers=headers, seconds=60, memory=None) as builder:
        text = Path(f"/proc/{builder._process.pid}/environ").read_bytes().decode()
    assert "aot_secret" not in text
    assert str(keys) not in text
    seen = dict(line.split("=", 1) for line in text.split("\0") if line)
    assert not Path(seen["AOTCACHE_CONFIG_HOME"]).exists()
    assert "XDG_CONFIG_HOME" not in seen


def test_a_refused_environment_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    with pytest.raises(ConfigError):  # a file left open would be a warning, which is an error here
        Sandbox({}, tmp_path, headers=tmp_path, seconds=1, memory=None)
    assert list(tmp_path.iterdir()) == []
