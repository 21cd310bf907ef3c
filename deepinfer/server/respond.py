"""One request that generates, from its parsed body to the last byte of its answer; whoever leaves takes it along."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from uuid import uuid4

from deepinfer.codec.body import Body
from deepinfer.codec.errors import RequestError
from deepinfer.codec.generation import AnswerWriter, GenerationRequest, WriterContext
from deepinfer.codec.sse import json_bytes
from deepinfer.engine.client import AsyncEngineClient
from deepinfer.grammar.errors import GrammarError
from deepinfer.server.access_log import RequestRecord, note_error, record_of
from deepinfer.server.asgi import Message, Receive, Scope, Send, send_error
from deepinfer.server.bodies import LARGE_BODY
from deepinfer.server.errors import as_request_error, unavailable
from deepinfer.server.gate import Admission
from deepinfer.server.generate import Answer, parser_maker
from deepinfer.server.prepare import TOO_LONG, Job, prepare
from deepinfer.server.protocols import Protocol
from deepinfer.server.state import ServerState

BYTES_PER_TOKEN = 4  # about: what a body will cost, as long as it is not encoded
LOGGED_TOKENS = 2000  # of a prompt, where the log has prompts


class Exchange:
    """An ASGI response, for one request. size: bytes of the request's body."""

    def __init__(self, state: ServerState, protocol: Protocol, body: Body, size: int) -> None:
        self._state = state
        self._protocol = protocol
        self._body = body
        self._size = size
        self._writer: AnswerWriter | None = None
        self._began = False  # bytes of the answer are out

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._send = scope, send
        self._record = record_of(scope)
        work = asyncio.create_task(self._work())
        gone = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            work.cancel()  # does nothing to one that is done
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            work.result()

    async def _work(self) -> None:
        try:
            with self._state.answering():
                await self._answer()
        except Exception as error:
            await self._fail(as_request_error(error, self._protocol.names))

    async def _answer(self) -> None:
        state, record = self._state, self._record
        client = state.host.client
        await self._resolve()
        generation = await self._generation()
        _note_request(record, self._protocol, generation)
        state.model.check_name(generation.model)
        async with state.gate.admit(
            self._scope["state"]["principal"],
            prompt_tokens_estimate=self._size // BYTES_PER_TOKEN,
            max_tokens=generation.max_tokens or client.max_model_len,
            kind=self._protocol.name,
        ) as admission:
            job = await self._prepare(client, generation)
            admission.resize(job.prompt_tokens, job.params.max_tokens)
            answer = self._make_answer(generation, job, admission)
            head = self._head(generation, admission)
            try:
                with state.metrics.open_answer(generation.stream):
                    record.submitted = time.monotonic()
                    answering = self._stream if generation.stream else self._complete
                    await answering(head, answer, client)
            finally:
                _note_answer(record, answer)
                admission.settle(answer.usage)

    async def _resolve(self) -> None:
        """For protocols whose requests refer to something that the server keeps. RequestError."""

    async def _keep(self, writer: AnswerWriter) -> None:
        """The answer is whole, and its end is not sent yet."""

    async def _generation(self) -> GenerationRequest:
        """What the body asks for. Thousands of messages take a tenth of a second, in which others' streams go on."""
        take_apart = self._protocol.to_generation
        if self._size <= LARGE_BODY:
            return take_apart(self._body)
        return await asyncio.get_running_loop().run_in_executor(self._state.threads, take_apart, self._body)

    async def _prepare(self, client: AsyncEngineClient, generation: GenerationRequest) -> Job:
        state, began = self._state, time.monotonic()
        try:
            job = await prepare(
                generation, state.model, state.settings, context=client.max_model_len, threads=state.threads
            )
            self._record.encoding = (began, time.monotonic())
            if job.structure is not None:
                await state.checker.check(job.structure)
        except RequestError as error:
            if error.code == TOO_LONG:
                field = self._protocol.names.get(error.param or "prompt_token_ids", error.param)
                raise RequestError(f"{field}: {error.message}", param=field, code=TOO_LONG) from None
            raise
        except GrammarError as error:
            if error.kind == "busy":
                raise unavailable(error.message, code="overloaded") from None
            raise _bad_grammar(generation, error) from None
        # What holds where the request left it open, or the policy changed it: Responses says it in its answer.
        generation.sampling |= {"temperature": job.params.temperature, "top_p": job.params.top_p}
        if state.settings.log_content:
            self._record.prompt = state.model.tokenizer.decode(job.prompts[0][:LOGGED_TOKENS].tolist(), False)
        return job

    def _make_answer(self, generation: GenerationRequest, job: Job, admission: Admission) -> Answer:
        model = self._state.model
        own_id = uuid4().hex
        self._record.engine_id = own_id
        context = WriterContext(
            id=generation.request_id or own_id,
            created=int(time.time()),
            model=generation.model,
            token_bytes=model.tokenizer.token_bytes,
            fingerprint=model.fingerprint,
        )
        self._writer = self._protocol.writer(self._body, generation, context)
        make_parser = parser_maker(
            job,
            model.tokenizer,
            plain=self._protocol.is_plain,
            make_id=self._protocol.make_call_id,
            promote_unterminated=self._state.settings.promote_unterminated,
        )
        salt = admission.cache_salt(generation.cache_salt)
        return Answer(
            job,
            self._writer,
            make_parser,
            request_id=own_id,
            tenant=admission.tenant,
            salt=salt,
            on_start=lambda: self._note_start(admission),
        )

    def _note_start(self, admission: Admission) -> None:
        admission.started()
        self._record.saw_first_token()

    async def _end(self, answer: Answer) -> bytes:
        """The body's last bytes, when nothing more is to come."""
        assert self._writer is not None
        end = self._writer.end(answer.usage)
        await self._keep(self._writer)
        return end

    # -- the two ways to answer ---------------------------------------------------------------------------------------

    async def _stream(self, head: Message, answer: Answer, client: AsyncEngineClient) -> None:
        writer, send = self._writer, self._send
        assert writer is not None
        head["headers"] += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

        async def begin() -> None:
            self._began = True
            await send(head)

        async def beat() -> None:
            if not self._began:
                await begin()
            await send({"type": "http.response.body", "body": writer.heartbeat(), "more_body": True})

        interval = min(self._state.settings.heartbeat, self._protocol.heartbeat)
        with self._state.heart.keeping(interval, beat) as stream:
            async with aclosing(answer.pieces(client)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    if piece:
                        if not self._began:
                            await begin()
                        stream.spoke()
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
            end = await self._end(answer)
        if not self._began:
            await begin()
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _complete(self, head: Message, answer: Answer, client: AsyncEngineClient) -> None:
        async with aclosing(answer.pieces(client)) as pieces:  # type: ignore[type-var]
            body = b"".join([piece async for piece in pieces])
        body += await self._end(answer)
        head["headers"].append((b"content-length", str(len(body)).encode()))
        self._began = True
        await self._send(head)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _fail(self, error: RequestError) -> None:
        note_error(self._scope, error)
        self._record.finish = "error"
        if not self._began:
            error.status = self._protocol.errors.status(error)
            return await send_error(self._send, error, json_bytes(self._protocol.errors.body(error)))
        assert self._writer is not None
        await self._send({"type": "http.response.body", "body": self._writer.error(error), "more_body": False})

    def _head(self, generation: GenerationRequest, admission: Admission) -> Message:
        assert self._writer is not None
        headers = [(b"content-type", self._writer.media_type.encode())]
        headers += [(name.encode(), value.encode()) for name, value in admission.headers()]
        if generation.ignored:
            headers.append((b"x-ignored-fields", ",".join(generation.ignored).encode("ascii", "replace")))
        return {"type": "http.response.start", "status": 200, "headers": headers}


async def _disconnect(receive: Receive) -> None:
    """Returns when the client has left (or has its whole answer)."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _bad_grammar(generation: GenerationRequest, error: GrammarError) -> RequestError:
    param = "tools" if generation.format is None or error.part == "tools" else generation.format.param
    return RequestError(f"{param}: {error.message}", param=param, code="invalid_grammar")


def _note_request(record: RequestRecord, protocol: Protocol, generation: GenerationRequest) -> None:
    record.operation = "text_completion" if protocol.is_plain else "chat"
    record.model, record.stream = generation.model[:256], generation.stream
    record.ignored = generation.ignored or None
    names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seq_seed": "seed"}
    given = {shown: generation.sampling[name] for name, shown in names.items() if name in generation.sampling}
    record.parameters = given if generation.max_tokens is None else {**given, "max_tokens": generation.max_tokens}


def _note_answer(record: RequestRecord, answer: Answer) -> None:
    record.usage = answer.usage
    record.finish = answer.finish_reasons[0] if answer.finish_reasons else "abort"
    record.decoding_seconds = answer.busy_seconds
    if answer.outputs:
        metrics = answer.outputs[0].metrics
        record.queue_seconds = metrics.queue
        if metrics.drafts.drafted:
            record.accepted_ratio = metrics.drafts.accepted / metrics.drafts.drafted
