"""Whose request is which: clients number their own from zero, the core numbers all of them in order of arrival."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import numpy as np

from deepinfer.engine.step_output import FINISH_CODE, NO_TOKEN, Rounds, StepOutput
from deepinfer.engine.stop import FinishReason


class Route:
    """One request in the core: whose it is, under which number, and which completions have not ended."""

    __slots__ = ("client", "number", "open")

    def __init__(self, client: bytes, number: int, completions: int) -> None:
        self.client = client
        self.number = number
        self.open = set(range(completions))


class Routes:
    """Requests under way, of all clients that are connected."""

    def __init__(self) -> None:
        self._numbers = count()
        self._routes: dict[int, Route] = {}  # by the core's number
        self._clients: dict[bytes, dict[int, int]] = {}  # the core's numbers by the client's

    def __len__(self) -> int:
        return len(self._routes)

    @property
    def clients(self) -> list[bytes]:
        return list(self._clients)

    def join(self, client: bytes) -> None:
        self._clients.setdefault(client, {})

    def knows(self, client: bytes) -> bool:
        return client in self._clients

    def leave(self, client: bytes) -> list[int]:
        """Forgets a client -> the core's numbers of the requests that it leaves behind."""
        left = list(self._clients.pop(client, {}).values())
        for number in left:
            del self._routes[number]
        return left

    def next_number(self) -> int:
        """For the core: numbers grow with the order of arrival."""
        return next(self._numbers)

    def add(self, client: bytes, theirs: int, number: int, completions: int) -> None:
        self._clients[client][theirs] = number
        self._routes[number] = Route(client, theirs, completions)

    def find(self, client: bytes, theirs: int) -> int | None:
        """The core's number of a client's request, None if it has ended or never was."""
        return self._clients[client].get(theirs)

    def end(self, number: int, indices: Iterable[int] | None = None) -> None:
        """Completions have ended, None = all of them; with the last one the request is forgotten."""
        route = self._routes[number]
        route.open -= route.open if indices is None else set(indices)
        if not route.open:
            del self._routes[number]
            del self._clients[route.client][route.number]

    def take(self, number: int) -> tuple[bytes, int] | None:
        """Forgets a request -> whose it was and the client's number of it; None if it has ended."""
        route = self._routes.get(number)
        if route is None:
            return None
        self.end(number)
        return route.client, route.number

    def take_all(self) -> dict[bytes, list[int]]:
        """Forgets every request -> by client, its own numbers of them."""
        taken = {client: list(numbers) for client, numbers in self._clients.items() if numbers}
        for numbers in self._clients.values():
            numbers.clear()
        self._routes.clear()
        return taken

    def divide(self, output: StepOutput) -> list[tuple[bytes, StepOutput]]:
        """What a step brought to each client, under the client's numbers. Rows of requests that were aborted since are
        dropped; requests that ended are forgotten."""
        routes = [self._routes.get(number) for number in output.numbers.tolist()]
        clients = {route.client for route in routes if route is not None}
        for notes in (output.events, output.prompt_scores):
            clients.update(self._routes[note.number].client for note in notes if note.number in self._routes)
        shares = [(client, self._share(output, routes, client)) for client in clients]
        for row in np.flatnonzero(output.finish).tolist():
            number = int(output.numbers[row])
            if number in self._routes:
                self.end(number, (int(output.indices[row]),))
        return shares

    def _share(self, output: StepOutput, routes: list[Route | None], client: bytes) -> StepOutput:
        rows = [at for at, route in enumerate(routes) if route is not None and route.client == client]
        numbers = np.array([route.number for route in routes if route is not None and route.client == client], np.int64)
        take = slice(None) if len(rows) == len(routes) else np.array(rows, np.int64)
        top = output.top
        return StepOutput(
            numbers=numbers,
            indices=output.indices[take],
            token_ids=output.token_ids[take],
            logprobs=output.logprobs[take],
            finish=output.finish[take],
            top=None if top is None else [top[at] for at in rows],
            events=[e._replace(number=own) for e in output.events if (own := self._own(e.number, client)) is not None],
            prompt_scores=[
                s._replace(number=own) for s in output.prompt_scores if (own := self._own(s.number, client)) is not None
            ],
            rounds=None if output.rounds is None else self._rounds(output.rounds, client),
        )

    def _rounds(self, rounds: Rounds, client: bytes) -> Rounds | None:
        own = [self._own(number, client) for number in rounds.numbers.tolist()]
        rows = np.array([row for row, number in enumerate(own) if number is not None], np.int64)
        if not len(rows):
            return None
        return rounds.take(rows, np.array([number for number in own if number is not None], np.int64))

    def _own(self, number: int, client: bytes) -> int | None:
        """The client's number of a request, None if it is not the client's."""
        route = self._routes.get(number)
        return route.number if route is not None and route.client == client else None

    def ends(self, reason: FinishReason) -> tuple[list[int], StepOutput]:
        """The end of everything that is under way: the core's numbers, and the output that says so."""
        rows = [(number, index) for number, route in self._routes.items() for index in sorted(route.open)]
        output = StepOutput(
            numbers=np.array([number for number, _ in rows], np.int64),
            indices=np.array([index for _, index in rows], np.int32),
            token_ids=np.full(len(rows), NO_TOKEN, np.int64),
            logprobs=np.zeros(len(rows), np.float32),
            finish=np.full(len(rows), FINISH_CODE[reason], np.int8),
        )
        return list(self._routes), output
