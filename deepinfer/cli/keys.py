"""`deepinfer keys`: the file of API keys that `deepinfer serve --keys FILE` reads."""

from __future__ import annotations

import json
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deepinfer.server.keys import KeyEntry, add_key, read_key_file, revoke_key
from deepinfer.server.quota import KeyLimits

LIMITS = "Limits of the new key"
DAY = 86400


class Action(StrEnum):
    ADD = "add"
    LIST = "list"
    REVOKE = "revoke"


def keys(
    action: Annotated[
        Action, typer.Argument(help="add TENANT: make a key, shown once. list: all keys. revoke ID: let it in no more.")
    ],
    name: Annotated[str | None, typer.Argument(help="Tenant of the new key, or id of the key to revoke.")] = None,
    file: Annotated[
        Path, typer.Option("--file", help="The file; holds hashes, not keys. `add` makes it if it is not there.")
    ] = Path("keys.json"),
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Whatever they ask for.", rich_help_panel=LIMITS)
    ] = None,
    input_tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Without those that the prefix cache had.", rich_help_panel=LIMITS)
    ] = None,
    output_tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Reasoning is counted too.", rich_help_panel=LIMITS)
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests at a time.", rich_help_panel=LIMITS)] = None,
    days: Annotated[
        int | None, typer.Option(min=1, help="It is valid for so long; default: until revoked.", rich_help_panel=LIMITS)
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Add, list and revoke API keys. A server that runs follows the file within a second.

    A key belongs to a tenant: its requests share cached prefixes, stored responses and idempotency keys with those of
    the same tenant only. Limits count per key.
    """
    if action is Action.LIST:
        if name is not None:
            raise typer.BadParameter("list takes no name")
        for entry in read_key_file(file).entries.values():
            typer.echo(_as_json(entry) if json_output else _as_line(entry))
        return
    if name is None:
        raise typer.BadParameter("add needs a tenant, revoke the id of a key (see `deepinfer keys list`)")
    if action is Action.REVOKE:
        entry = revoke_key(file, name)
        typer.echo(_as_json(entry) if json_output else f"revoked {entry.id} of {entry.tenant}")
        return
    limits = KeyLimits(requests_per_minute, input_tokens_per_minute, output_tokens_per_minute, concurrency)
    key, entry = add_key(file, name, limits, None if days is None else int(time.time()) + days * DAY)
    if json_output:
        typer.echo(json.dumps({"key": key, **json.loads(_as_json(entry))}))
    else:
        typer.echo(key)
        typer.echo(f"for {entry.tenant}, in {file}; it is shown this once", err=True)


def _as_line(entry: KeyEntry) -> str:
    day = time.strftime("%Y-%m-%d", time.gmtime(entry.created))
    limits = ", ".join(f"{name} {limit}" for name, limit in entry.limits._asdict().items() if limit is not None)
    return f"{entry.id}  {entry.state(time.time()):8}{day}  {entry.tenant}  {limits or 'no limits'}"


def _as_json(entry: KeyEntry) -> str:
    return json.dumps(
        {
            "id": entry.id,
            "tenant": entry.tenant,
            "state": entry.state(time.time()),
            "created": entry.created,
            "expires": entry.expires,
            "revoked": entry.revoked,
            "limits": entry.limits._asdict(),
        }
    )
