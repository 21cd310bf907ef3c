"""API keys: a file of their hashes, with the tenant and the quotas of each.

A key reads `di-<id>-<secret>`: the id is public (lists and logs show it), the secret has 256 random bits, so a plain
SHA-256 of the whole key is as good as a slow hash. The file is JSON, readable for its owner only, written by
`deepinfer keys`; the server looks at it once a second and takes over what changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deepinfer.server.quota import UNLIMITED, KeyLimits
from deepinfer.server.refusal import Refusal

logger = logging.getLogger(__name__)

HeaderSource = Mapping[str, str] | Iterable[tuple[bytes, bytes]]
"""Starlette's Headers, a dict with names in lower case, or the list of an ASGI scope."""

VERSION = 1  # of the file
_RELOAD_SECONDS = 1.0
_KEY = re.compile(r"di-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")
_TENANT = re.compile(r"[A-Za-z0-9._:@/-]{1,128}")
_NOBODY = hashlib.sha256(secrets.token_bytes(32)).hexdigest()


class KeyFileError(ValueError):
    """The file cannot be used; the message names it and the entry."""


class Principal(NamedTuple):
    """Who asks."""

    tenant: str  # whose share a request counts against
    salt: str  # divides the prefix cache between tenants; "" = the public part
    limits: KeyLimits
    key_id: str

    def cache_salt(self, given: str = "") -> str:
        """The salt of a request: of the tenant, and within it of what the client gave as cache_salt."""
        if not given:
            return self.salt
        return hmac.new(self.salt.encode(), given.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


NOBODY = Principal("", "", UNLIMITED, "")
"""Everybody, where the server has no keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """A line of the file."""

    id: str
    sha256: str
    """Of the whole key, hexadecimal."""
    tenant: str
    created: int
    """Unix seconds, as the next two."""
    expires: int | None = None
    revoked: int | None = None
    limits: KeyLimits = UNLIMITED

    def state(self, now: float) -> str:
        """ "active", "revoked" or "expired"."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and now >= self.expires else "active"


class KeyFile(NamedTuple):
    """What a file says. secret: of the server, hexadecimal; the salts come from it."""

    secret: str
    entries: dict[str, KeyEntry]  # by id

    def salt(self, tenant: str) -> str:
        return hmac.new(bytes.fromhex(self.secret), tenant.encode(), hashlib.sha256).hexdigest()


def read_key_file(path: Path) -> KeyFile:
    """Raises KeyFileError for a file that is missing, malformed, or readable for everybody."""
    try:
        mode = path.stat().st_mode
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"{path}: cannot be read as a file of keys ({error}); make one with `deepinfer keys add`"
        raise KeyFileError(message) from error
    if mode & 0o007:
        raise KeyFileError(f"{path}: everybody may read it; run `chmod 600 {path}`")
    try:
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']!r}, this server reads {VERSION}")
        secret = data["secret"]
        if len(bytes.fromhex(secret)) < 32:
            raise ValueError("secret must have 32 bytes")
        entries = [_entry(number, item) for number, item in enumerate(data["keys"])]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise KeyFileError(f"{path}: {type(error).__name__}: {error}") from error
    by_id = {entry.id: entry for entry in entries}
    if len(by_id) != len(entries):
        raise KeyFileError(f"{path}: two keys have the same id")
    return KeyFile(secret, by_id)


def _entry(number: int, item: dict[str, Any]) -> KeyEntry:
    try:
        limits = item.get("limits", {})
        for name, limit in limits.items():
            if name not in KeyLimits._fields:
                raise ValueError(f"limits.{name} is not one of {', '.join(KeyLimits._fields)}")
            if limit is not None and (type(limit) is not int or limit < 1):
                raise ValueError(f"limits.{name} must be an integer >= 1 or null")
        entry = KeyEntry(**{**item, "limits": KeyLimits(**limits)})
        if not re.fullmatch("[0-9a-f]{12}", entry.id) or not re.fullmatch("[0-9a-f]{64}", entry.sha256):
            raise ValueError("id must be 12 and sha256 64 hexadecimal digits")
        check_tenant(entry.tenant)
        for time_field in (entry.created, entry.expires, entry.revoked):
            if time_field is not None and type(time_field) is not int:
                raise ValueError("created, expires and revoked are Unix seconds")
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"keys.{number}: {error}") from error
    return entry


def check_tenant(tenant: object) -> None:
    """Raises ValueError for a name that cannot stand in logs, metrics and requests to the engine."""
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise ValueError(f"tenant {tenant!r}: use 1 to 128 of letters, digits and . _ : @ / -")


class KeyRing:
    """Knows keys. With a path it follows the file; a change that cannot be read is logged and leaves the keys as they
    were, so that a slip of an editor locks nobody out, and lets nobody in.
    """

    def __init__(self, content: KeyFile, path: Path | None = None, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._now = now
        self._seen: tuple[int, ...] | None = None
        self._next_look = 0.0
        self._use(content)

    @classmethod
    def load(cls, path: str | Path, now: Callable[[], float] = time.time) -> KeyRing:
        """Raises KeyFileError."""
        path = Path(path)
        seen = _fingerprint(path)
        ring = cls(read_key_file(path), path, now)
        ring._seen, ring._next_look = seen, time.monotonic() + _RELOAD_SECONDS
        return ring

    def __len__(self) -> int:
        """Keys that let somebody in."""
        return sum(entry.state(self._now()) == "active" for entry in self._content.entries.values())

    def authenticate(self, headers: HeaderSource) -> Principal:
        """Who sent `headers`, by "Authorization: Bearer KEY" or "x-api-key: KEY". Raises Refusal 401."""
        self._follow_file()
        key = key_of(headers)
        if key is None:
            raise _unauthorised("No API key: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`.")
        match = _KEY.fullmatch(key)
        entry = self._content.entries.get(match[1]) if match else None
        # The same work whether there is such an id or not: how long it takes says nothing.
        digest = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
        fits = hmac.compare_digest(digest, entry.sha256 if entry else _NOBODY)
        if entry is None or not fits or entry.state(self._now()) != "active":
            raise _unauthorised("The API key is not known, or no longer valid.")
        return Principal(entry.tenant, self._salts[entry.tenant], entry.limits, entry.id)

    def _follow_file(self) -> None:
        if self._path is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _RELOAD_SECONDS
        seen = _fingerprint(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._use(read_key_file(self._path))
        except KeyFileError as error:
            logger.error("API keys stay as they were: %s", error)
        else:
            logger.info("API keys read again from %s: %d active", self._path, len(self))

    def _use(self, content: KeyFile) -> None:
        self._content = content
        self._salts = {entry.tenant: content.salt(entry.tenant) for entry in content.entries.values()}


def key_of(headers: HeaderSource) -> str | None:
    """The key that a request carries; x-api-key where both are there."""
    authorization = key = None
    if isinstance(headers, Mapping):
        authorization, key = headers.get("authorization"), headers.get("x-api-key")
    else:
        for name, value in headers:
            if name == b"x-api-key":
                key = value.decode("latin-1")
            elif name == b"authorization":
                authorization = value.decode("latin-1")
    if key:
        return key.strip()
    scheme, _, rest = (authorization or "").partition(" ")
    return rest.strip() or None if scheme.lower() == "bearer" else None


def _fingerprint(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _unauthorised(message: str) -> Refusal:
    return Refusal(
        message,
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
        headers=(("www-authenticate", "Bearer"),),
    )


# Changing the file: `deepinfer keys`.


def add_key(path: Path, tenant: str, limits: KeyLimits, expires: int | None = None) -> tuple[str, KeyEntry]:
    """Makes a key and writes its hash into the file, which is made if it is not there. Returns (key, entry): the key
    is nowhere kept, so it must be shown now. Raises ValueError for a tenant that cannot be, KeyFileError, OSError.
    """
    check_tenant(tenant)
    with _editing(path) as content:
        key_id = secrets.token_hex(6)
        while key_id in content.entries:
            key_id = secrets.token_hex(6)
        key = f"di-{key_id}-{secrets.token_urlsafe(32)}"
        entry = KeyEntry(
            id=key_id,
            sha256=hashlib.sha256(key.encode()).hexdigest(),
            tenant=tenant,
            created=int(time.time()),
            expires=expires,
            limits=limits,
        )
        content.entries[key_id] = entry
    return key, entry


def revoke_key(path: Path, key_id: str) -> KeyEntry:
    """From within a second on the key lets nobody in. Raises KeyFileError for an id that is not there."""
    with _editing(path, make=False) as content:
        if key_id not in content.entries:
            raise KeyFileError(f"{path}: no key has the id {key_id!r}; see `deepinfer keys list`")
        entry = content.entries[key_id]
        if entry.revoked is None:
            entry = KeyEntry(**{**_fields(entry), "revoked": int(time.time())})
            content.entries[key_id] = entry
    return entry


def _fields(entry: KeyEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in KeyEntry.__dataclass_fields__}


@contextlib.contextmanager
def _editing(path: Path, make: bool = True) -> Iterator[KeyFile]:
    """The content, to be changed; written at the end, whole or not at all. One editor at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = KeyFile(secrets.token_hex(32), {}) if make and not path.exists() else read_key_file(path)
        yield content
        keys = [{**asdict(entry), "limits": entry.limits._asdict()} for entry in content.entries.values()]
        text = json.dumps({"version": VERSION, "secret": content.secret, "keys": keys}, indent=1) + "\n"
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")  # mode 600
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
