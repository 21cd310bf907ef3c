"""`deepinfer chat`: talk with the model in the terminal, streamed."""

import sys
from typing import Annotated

import typer

from deepinfer.cli import options

HELP = "/reset forgets the conversation, /think on|off switches the reasoning, /exit (or Ctrl-D) leaves."


def chat(
    model: options.Model = None,
    system: Annotated[str | None, typer.Option(help="System message that leads the conversation.")] = None,
    thinking: Annotated[
        bool, typer.Option("--thinking/--no-thinking", help="Let the model reason before it answers.")
    ] = False,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.6,
    top_k: options.TopK = 0,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    prefix_mode: options.PrefixMode = "exact",
    kv_format: options.KvFormat = "auto",
    yoco_truncation: options.Truncation = None,
    overlap: options.Overlap = None,
    nextn: options.Nextn = None,
    mtp_varlen: options.MtpVarlen = None,
    batch_invariant: options.BatchInvariant = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No settings on stderr.")] = False,
    debug: options.Debug = False,
) -> None:
    """Reads lines, streams answers."""
    from deepinfer.codec.conversation import Conversation, Turn
    from deepinfer.codec.encoder import encode
    from deepinfer.codec.template import render
    from deepinfer.engine.sampling_params import SamplingParams
    from deepinfer.llm import LLM

    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, max_tokens=max_tokens, seq_seed=seed
    )
    llm = LLM(
        model,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=1,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_format=kv_format,
        yoco_truncation=yoco_truncation,
        overlap=overlap,
        nextn=nextn,
        mtp_varlen=mtp_varlen,
        batch_invariant=batch_invariant,
        **options.prefix_caching(prefix_mode),
        verbose=not quiet,
    )
    start = [Turn(role="system", text=system)] if system else []
    messages = list(start)

    def prompt(turns: list[Turn]) -> list[int]:
        return encode(render(Conversation(turns=tuple(turns), thinking=thinking)), llm.tokenizer).tolist()

    prompt([*messages, Turn(role="user")])  # a tokenizer without roles fails here, not later
    print(HELP, file=sys.stderr)
    while (line := _read()) is not None:
        command, _, argument = line.strip().partition(" ")
        if command == "/exit":
            break
        if command == "/reset":
            messages = list(start)
            continue
        if command == "/think" and argument in ("on", "off"):
            thinking = argument == "on"
            continue
        if command.startswith("/"):
            print(HELP, file=sys.stderr)
            continue
        if not command:
            continue
        messages.append(Turn(role="user", text=line))
        answer = ""
        try:
            for delta in llm.stream(prompt(messages), params):
                answer += delta.text
                print(delta.text, end="", flush=True)
        except ValueError as error:  # the conversation outgrew the context, or the line was no text
            messages.pop()
            print(f"error: {error}; /reset starts anew", file=sys.stderr)
            continue
        except KeyboardInterrupt:
            pass  # stop this answer, keep what it said
        print()
        reasoning, closed, content = answer.partition("</think>")
        content = content if thinking and closed else "" if thinking else reasoning
        messages.append(Turn(role="assistant", text=content))


def _read() -> str | None:
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        return None
