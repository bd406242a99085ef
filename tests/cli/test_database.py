"""`aotcache db` and `aotcache token`, on both databases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aotcache.config import settings
from aotcache.db.engine import Database
from aotcache.service.index import Index
from aotcache.service.tokens import Tokens
from aotcache.store import open_store
from tests.cli.conftest import Run
from tests.manifests import make_manifest, write_archive
from tests.services.postgres import dialect, empty_url, postgres

__all__ = ["dialect", "empty_url", "postgres"]


def test_upgrade_check_and_upgrade_again(run: Run, empty_url: str) -> None:
    unmade = run("db", "check", "--database", empty_url, "--json")
    assert unmade.code == 1
    assert not unmade.json["ok"]
    assert "aotcache db upgrade" in unmade.json["problems"][0]
    made = run("db", "upgrade", "--database", empty_url, "--json")
    assert (made.code, made.json["before"]) == (0, None)
    again = run("db", "upgrade", "--database", empty_url)
    assert (again.code, "already" in again.out) == (0, True)
    checked = run("db", "check", "--database", empty_url)
    assert (checked.code, "as it must be" in checked.out) == (0, True)


def test_reindex_enters_what_the_store_has(run: Run, empty_url: str, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    manifest = make_manifest()
    store.publish(manifest, write_archive(tmp_path, b"archive"))
    run("db", "upgrade", "--database", empty_url)
    done = run("db", "reindex", "--database", empty_url, "--store", str(tmp_path / "store"), "--json")
    assert done.code == 0
    assert {name: done.json[name] for name in ("added", "removed", "kept", "unusable")} == {
        "added": 1,
        "removed": 0,
        "kept": 0,
        "unusable": 0,
    }
    database = Database(empty_url)
    assert [row.key for row in Index(database).page().artifacts] == [manifest.key]
    database.close()
    assert run("db", "reindex", "--database", empty_url, "--store", str(tmp_path / "store")).out == (
        f"{store.url}: added 0, removed 0, kept 1\n"
    )


def test_reindex_takes_the_store_that_serve_takes(run: Run, tmp_path: Path) -> None:
    # Another default would take every entry out of the index of a service that runs without configuration.
    store = open_store(settings().service / "store")
    store.publish(make_manifest(), write_archive(tmp_path, b"archive"))
    run("db", "upgrade")
    assert run("db", "reindex").out == f"{store.url}: added 1, removed 0, kept 0\n"
    assert run("db", "reindex", "--json").json["kept"] == 1


def test_reindex_from_a_directory_that_is_not_there_leaves_the_index(run: Run, tmp_path: Path) -> None:
    store = open_store(settings().service / "store")
    store.publish(make_manifest(), write_archive(tmp_path, b"archive"))
    run("db", "upgrade")
    run("db", "reindex")
    failed = run("db", "reindex", "--store", str(tmp_path / "mistyped"))
    assert (failed.code, "is no directory" in failed.err) == (2, True)
    assert run("db", "reindex", "--json").json["kept"] == 1


def test_a_service_is_no_store_to_index(run: Run) -> None:
    failed = run("db", "reindex", "--store", "http://127.0.0.1:1")
    assert failed.code == 2
    assert "directory or bucket" in failed.err


def test_a_database_that_is_not_there_is_an_error_and_not_a_trace(run: Run) -> None:
    failed = run("db", "upgrade", "--database", "postgresql://user:s3cret@127.0.0.1:1/none")
    assert failed.code == 1
    assert "DatabaseError" in failed.err
    assert "s3cret" not in failed.err + failed.out


def test_an_address_that_is_none_is_wrong_usage(run: Run) -> None:
    failed = run("db", "check", "--database", "mysql://host/name")
    assert failed.code == 2
    assert "expected sqlite:////absolute" in failed.err


def test_the_database_of_the_settings_is_the_default(run: Run, tmp_path: Path) -> None:
    assert run("db", "upgrade").code == 0
    assert (tmp_path / "home" / "service" / "aotcache.db").is_file()


def test_a_token_is_shown_once_and_works(run: Run, empty_url: str) -> None:
    made = run(
        "token",
        "create",
        "--scope",
        "read,publish",
        "--name",
        "ci",
        "--expires",
        "30d",
        "--database",
        empty_url,
    )
    assert made.code == 0
    shown = made.out.strip()
    assert "ci" in made.err
    database = Database(empty_url)
    granted = Tokens(database).check(shown)
    database.close()
    assert granted is not None
    assert granted.scopes == ("read", "publish")
    listed = run("token", "list", "--database", empty_url, "--json")
    [row] = listed.json["tokens"]
    assert (row["name"], row["scopes"], row["state"]) == ("ci", ["read", "publish"], "valid")
    assert row["expires"] - row["created"] == pytest.approx(30 * 24 * 3600)
    assert shown not in listed.out + run("token", "list", "--database", empty_url).out + made.err


def test_a_revoked_token_is_listed_as_such(run: Run, empty_url: str) -> None:
    made = run("token", "create", "--scope", "admin", "--name", "root", "--database", empty_url, "--json")
    assert made.json["expires"] is None
    revoked = run("token", "revoke", made.json["id"], "--database", empty_url, "--json")
    assert [one["id"] for one in revoked.json["revoked"]] == [made.json["id"]]
    again = run("token", "revoke", "root", "--database", empty_url)
    assert again.code == 2
    assert "no valid token" in again.err
    assert "revoked" in run("token", "list", "--database", empty_url).out


def test_without_tokens_the_list_says_who_is_served(run: Run, empty_url: str) -> None:
    run("db", "upgrade", "--database", empty_url)
    assert "loopback" in run("token", "list", "--database", empty_url).out


def test_a_wrong_scope_makes_no_token(run: Run, empty_url: str) -> None:
    failed = run("token", "create", "--scope", "read,write", "--name", "x", "--database", empty_url)
    assert failed.code == 2
    assert "read, publish, build, admin" in failed.err
    assert run("token", "list", "--database", empty_url, "--json").json["tokens"] == []


def test_without_the_services_packages_the_command_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "from aotcache.cli import main\n"
        f"sys.argv = ['aotcache', 'db', 'check', '--json', '--database', 'sqlite:///{tmp_path}/a.db']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "pip install 'aotcache[server]'" in json.loads(done.stdout)["error"]["message"]
