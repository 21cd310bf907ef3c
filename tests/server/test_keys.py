"""Who gets in with which key, and what the file of keys may look like."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from starlette.datastructures import Headers
from typer.testing import CliRunner

from deepinfer.cli.keys import keys as keys_command
from deepinfer.server import keys as keys_module
from deepinfer.server.keys import KeyFileError, KeyRing, Principal, add_key, read_key_file, revoke_key
from deepinfer.server.quota import UNLIMITED, KeyLimits
from deepinfer.server.refusal import Refusal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def refusal_of(ring: KeyRing, headers) -> Refusal:  # type: ignore[no-untyped-def]
    with pytest.raises(Refusal) as caught:
        ring.authenticate(headers)
    return caught.value


def look_again(ring: KeyRing) -> None:
    ring._next_look = 0.0  # the second is over


def test_a_key_is_its_tenants_whichever_header_carries_it(path: Path) -> None:
    key, entry = add_key(path, "team-a", KeyLimits(requests_per_minute=5))
    ring = KeyRing.load(path)
    ways = [
        bearer(key),
        {"authorization": f"bearer  {key} "},
        {"x-api-key": key},
        Headers({"Authorization": f"Bearer {key}"}),
        Headers({"X-Api-Key": key}),
        [(b"host", b"here"), (b"authorization", b"Bearer " + key.encode())],
        [(b"x-api-key", key.encode())],
    ]
    (principal,) = {ring.authenticate(way) for way in ways}
    assert principal == Principal("team-a", principal.salt, KeyLimits(requests_per_minute=5), entry.id)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer "},
        {"authorization": "Basic dXNlcjpwYXNz"},
        {"x-api-key": "sk-something"},
        {"x-api-key": "di-" + "0" * 12 + "-" + "A" * 43},
        {"x-api-key": "\xff\xfe\udc80"},
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"x-api-key", b"")],
    ],
)
def test_without_a_good_key_nobody_gets_in(path: Path, headers) -> None:  # type: ignore[no-untyped-def]
    add_key(path, "team-a", UNLIMITED)
    error = refusal_of(KeyRing.load(path), headers)
    assert (error.status, error.kind, error.code) == (401, "authentication_error", "invalid_api_key")
    assert error.headers == (("www-authenticate", "Bearer"),)


def test_one_letter_more_or_less_or_another_does_not_get_in(path: Path) -> None:
    key, _ = add_key(path, "team-a", UNLIMITED)
    ring = KeyRing.load(path)
    other = key[:-1] + ("A" if key[-1] != "A" else "B")
    for wrong in (key[:-1], key + "A", other, key.upper(), key + "\n"):
        if wrong.strip() != key:
            refusal_of(ring, bearer(wrong))
    assert ring.authenticate(bearer(key)).tenant == "team-a"


def test_the_secret_of_one_key_does_not_open_another(path: Path) -> None:
    first, _ = add_key(path, "team-a", UNLIMITED)
    second, _ = add_key(path, "team-b", UNLIMITED)
    mixed = "-".join([*first.split("-", 2)[:2], second.split("-", 2)[2]])
    refusal_of(KeyRing.load(path), bearer(mixed))


def test_the_file_holds_no_key_and_nobody_else_reads_it(path: Path) -> None:
    key, entry = add_key(path, "team-a", UNLIMITED)
    text = path.read_text()
    assert key not in text and key.split("-", 2)[2] not in text and entry.sha256 in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_that_is_revoked_is_out_within_a_second(path: Path) -> None:
    key, entry = add_key(path, "team-a", UNLIMITED)
    ring = KeyRing.load(path)
    assert len(ring) == 1
    revoke_key(path, entry.id)
    look_again(ring)
    refusal_of(ring, bearer(key))
    assert len(ring) == 0


def test_the_file_is_looked_at_again_after_a_second_and_not_for_every_request(path: Path) -> None:
    add_key(path, "team-a", UNLIMITED)
    ring = KeyRing.load(path)
    new, _ = add_key(path, "team-b", UNLIMITED)
    refusal_of(ring, bearer(new))
    until = time.monotonic() + 20
    while True:
        try:
            assert ring.authenticate(bearer(new)).tenant == "team-b"
            break
        except Refusal:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_key_expires_on_its_day(path: Path) -> None:
    now = 1_000_000.0
    key, _ = add_key(path, "team-a", UNLIMITED, expires=int(now) + 10)
    ring = KeyRing.load(path, now=lambda: now)
    assert ring.authenticate(bearer(key)).tenant == "team-a"
    now += 10
    refusal_of(ring, bearer(key))


def test_a_slip_in_the_file_locks_nobody_out_and_is_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key, _ = add_key(path, "team-a", UNLIMITED)
    ring = KeyRing.load(path)
    for text in ("{", "", "[]"):
        path.write_text(text)
        look_again(ring)
        with caplog.at_level(logging.ERROR):
            assert ring.authenticate(bearer(key)).tenant == "team-a"
        assert "stay as they were" in caplog.text
        caplog.clear()
        look_again(ring)
        ring.authenticate(bearer(key))
        assert caplog.text == ""  # once per change
    path.unlink()
    look_again(ring)
    assert ring.authenticate(bearer(key)).tenant == "team-a"


def spoil(path: Path, **changes: object) -> None:
    data = json.loads(path.read_text())
    data["keys"][0] |= changes
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"limits": {"requests_per_minute": 0}}, "limits.requests_per_minute"),
        ({"limits": {"requests_per_minute": "5"}}, "limits.requests_per_minute"),
        ({"limits": {"requests_per_minute": True}}, "limits.requests_per_minute"),
        ({"limits": {"tokens": 5}}, "limits.tokens"),
        ({"limits": 5}, "keys.0"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": "a\nb"}, "tenant"),
        ({"sha256": "abc"}, "sha256"),
        ({"id": "../../../etc"}, "id"),
        ({"expires": "tomorrow"}, "expires"),
        ({"role": "admin"}, "role"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(path: Path, changes: dict[str, object], named: str) -> None:
    add_key(path, "team-a", UNLIMITED)
    spoil(path, **changes)
    with pytest.raises(KeyFileError, match=named) as caught:
        KeyRing.load(path)
    assert str(path) in str(caught.value) and "keys.0" in str(caught.value)


def test_a_file_that_everybody_reads_is_refused(path: Path) -> None:
    add_key(path, "team-a", UNLIMITED)
    path.chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        KeyRing.load(path)


@pytest.mark.parametrize("text", ["", "null", "[]", '{"version": 2, "secret": "", "keys": []}', '{"version": 1}'])
def test_a_file_of_something_else_is_refused(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match=r"keys\.json"):
        KeyRing.load(path)
    with pytest.raises(KeyFileError, match=r"missing\.json"):
        KeyRing.load(path.with_name("missing.json"))


def test_tenants_share_no_salt_and_keys_of_one_tenant_do(path: Path) -> None:
    made = [add_key(path, tenant, UNLIMITED)[0] for tenant in ("team-a", "team-a", "team-b")]
    ring = KeyRing.load(path)
    first, second, other = (ring.authenticate(bearer(key)) for key in made)
    assert first.salt == second.salt != other.salt
    assert len({first.salt, first.cache_salt("x"), first.cache_salt("y"), other.cache_salt("x")}) == 4
    assert first.cache_salt() == first.salt and first.cache_salt("x") == second.cache_salt("x")
    assert all(len(principal.cache_salt("x" * 10_000)) <= 256 for principal in (first, other))
    assert KeyRing.load(path).authenticate(bearer(made[0])).salt == first.salt  # prefixes survive a restart


def test_a_client_cannot_reach_another_tenants_cache_by_its_cache_salt(path: Path) -> None:
    made = [add_key(path, tenant, UNLIMITED)[0] for tenant in ("team-a", "team-b")]
    ring = KeyRing.load(path)
    victim, attacker = (ring.authenticate(bearer(key)) for key in made)
    assert attacker.cache_salt(victim.salt) != victim.salt


def test_two_who_add_keys_at_the_same_time_both_have_theirs(path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from deepinfer.server.keys import add_key, UNLIMITED\n"
        "[add_key(Path(sys.argv[1]), sys.argv[2], UNLIMITED) for _ in range(20)]"
    )
    workers = [subprocess.Popen([sys.executable, "-c", script, str(path), tenant]) for tenant in ("a", "b")]
    assert [worker.wait(60) for worker in workers] == [0, 0]
    assert len(read_key_file(path).entries) == 40


def test_a_write_that_fails_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_key(path, "team-a", UNLIMITED)
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(keys_module.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        add_key(path, "team-b", UNLIMITED)
    assert path.read_text() == before
    assert sorted(os.listdir(path.parent)) == ["keys.json", "keys.json.lock"]


# deepinfer keys


def command(*arguments: str) -> tuple[int, str]:
    import typer

    app = typer.Typer()
    app.command()(keys_command)
    result = CliRunner().invoke(app, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_the_command_makes_a_key_that_works_and_revokes_it(path: Path) -> None:
    code, output = command("add", "team-a", "--file", str(path), "--concurrency", "3", "--days", "7", "--json")
    made = json.loads(output)
    assert code == 0 and made["limits"]["concurrency"] == 3
    assert made["expires"] == pytest.approx(time.time() + 7 * 86400, abs=60)
    ring = KeyRing.load(path)
    assert ring.authenticate(bearer(made["key"])).limits == KeyLimits(concurrency=3)
    code, output = command("list", "--file", str(path))
    assert made["id"] in output and "active" in output and "team-a" in output and "concurrency 3" in output
    assert made["key"].split("-", 2)[2] not in output
    assert command("revoke", made["id"], "--file", str(path))[0] == 0
    assert "revoked" in command("list", "--file", str(path))[1]
    look_again(ring)
    refusal_of(ring, bearer(made["key"]))


@pytest.mark.parametrize(
    "arguments", [["add"], ["revoke"], ["list", "x"], ["forget", "x"], ["add", "team-a", "--concurrency", "0"]]
)
def test_the_command_refuses_what_makes_no_sense(path: Path, arguments: list[str]) -> None:
    code, _ = command(*arguments, "--file", str(path))
    assert code == 2 and not path.exists()


def test_the_command_names_a_key_that_is_not_there_and_a_tenant_that_cannot_be(path: Path) -> None:
    with pytest.raises(ValueError, match="tenant"):
        command("add", "a b", "--file", str(path))
    command("add", "team-a", "--file", str(path))
    with pytest.raises(ValueError, match="abcdef"):
        command("revoke", "abcdef", "--file", str(path))
    with pytest.raises(ValueError, match="missing"):
        command("revoke", "abcdef", "--file", str(path.with_name("missing.json")))
