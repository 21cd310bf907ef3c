"""`deepinfer generate`: complete prompts offline, as one batch."""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer.cli import options

if TYPE_CHECKING:
    from deepinfer.engine.outputs import CompletionOutput, RequestOutput
    from deepinfer.engine.sampling_params import SamplingParams
    from deepinfer.metrics.drafts import DraftStats

_SAMPLING = options.SAMPLING
_STOPPING = options.STOPPING


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Texts to continue.")] = None,
    model: options.Model = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help='More prompts, one per line, or JSON objects {"prompt": ..., "temperature": ...}; - reads stdin.',
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per completion and line.")] = False,
    max_tokens: options.MaxTokens = 128,
    min_tokens: Annotated[int, typer.Option(help="No stop before this many tokens.", rich_help_panel=_STOPPING)] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="End the output at this text, which is left out; may be repeated.", rich_help_panel=_STOPPING
        ),
    ] = None,
    stop_token_ids: Annotated[
        list[int] | None,
        typer.Option(
            "--stop-token-id",
            "--stop-token-ids",
            help="End the output at this token id; may be repeated.",
            rich_help_panel=_STOPPING,
        ),
    ] = None,
    include_stop: Annotated[
        bool,
        typer.Option(
            "--include-stop-str-in-output", help="Keep the stop text in the output.", rich_help_panel=_STOPPING
        ),
    ] = False,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not stop at the end token.", rich_help_panel=_STOPPING)
    ] = False,
    deadline: Annotated[
        float | None,
        typer.Option(help="End each request this many seconds after its submission.", rich_help_panel=_STOPPING),
    ] = None,
    ttft_deadline: Annotated[
        float | None,
        typer.Option(
            help="Drop a request that cannot have its first token this many seconds after its submission.",
            rich_help_panel=_STOPPING,
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Completions per prompt.", rich_help_panel=_SAMPLING)] = 1,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtracted from logits of tokens in the output.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Subtracted once per occurrence in the output.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 makes tokens of prompt and output less likely.", rich_help_panel=_SAMPLING)
    ] = 1.0,
    logit_bias: Annotated[
        str | None,
        typer.Option(
            help="JSON object from token id to a number added to its logit: '{\"17\": -100}'.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    sampler_force_topk: Annotated[
        int | None,
        typer.Option(
            help="No row chooses among more than this many tokens, whatever its top_k.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(help="Also report this many most likely tokens per position.", rich_help_panel=_SAMPLING),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same for the prompt's own tokens.", rich_help_panel=_SAMPLING)
    ] = None,
    keep_special: Annotated[
        bool, typer.Option("--keep-special-tokens", help="Show special tokens in the text.")
    ] = False,
    no_bos: Annotated[
        bool, typer.Option("--no-bos", help="Do not put the begin token in front of the prompts.")
    ] = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = 32,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    prefix_mode: options.PrefixMode = "exact",
    kv_format: options.KvFormat = "auto",
    yoco_truncation: options.Truncation = None,
    overlap: options.Overlap = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.85,
    wide_outputs: options.WideOutputs = None,
    expert_cache: options.ExpertCache = None,
    nextn: options.Nextn = None,
    mtp_varlen: options.MtpVarlen = None,
    batch_invariant: options.BatchInvariant = None,
    ep: options.Ep = 1,
    dp: options.Dp = None,
    cp: options.Cp = 1,
    disable_eplb: options.DisableEplb = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No settings and no progress on stderr, warnings alone.")
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Reads the flags, runs LLM.generate, prints."""
    from deepinfer.engine.sampling_params import SamplingParams

    params = SamplingParams(
        n=n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop or (),
        stop_token_ids=stop_token_ids or (),
        include_stop_str_in_output=include_stop,
        ignore_eos=ignore_eos,
        logit_bias=_bias(logit_bias),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        seq_seed=seed,
        skip_special_tokens=not keep_special,
        deadline=deadline,
        ttft_deadline=ttft_deadline,
    )
    work: list[tuple[str | list[int], SamplingParams]] = [(text, params) for text in prompts or []]
    if prompts_file is not None:
        work += read_prompts(prompts_file, params)
    if not work:
        raise ValueError("no prompt: give one as an argument, or --prompts FILE")
    if sampler_force_topk is not None:
        work = [(prompt, force_top_k(own, sampler_force_topk)) for prompt, own in work]

    from deepinfer.llm import LLM

    llm = LLM(
        model,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_format=kv_format,
        yoco_truncation=yoco_truncation,
        overlap=overlap,
        **options.prefix_caching(prefix_mode),
        gpu_memory_utilization=gpu_memory_utilization,
        wide_outputs=wide_outputs,
        expert_cache=expert_cache,
        nextn=nextn,
        mtp_varlen=mtp_varlen,
        batch_invariant=batch_invariant,
        ep=ep,
        dp=dp,
        cp=cp,
        verbose=not quiet,
    )
    outputs = llm.generate(
        [prompt for prompt, _ in work], [own for _, own in work], use_tqdm=not quiet, add_bos=not no_bos
    )
    for request in outputs:
        for completion in request.outputs:
            if as_json:
                print(json.dumps(as_record(request, completion), ensure_ascii=False))
            else:
                if len(outputs) > 1 or len(request.outputs) > 1:
                    print(f"--- {request.request_id}.{completion.index} ({completion.finish_reason})")
                print(completion.text)


def read_prompts(name: str, params: "SamplingParams") -> list[tuple[str | list[int], "SamplingParams"]]:
    """Prompts of a file: one per line, or, if its first line is a JSON object, one object per line.

    An object holds "prompt" (text) or "prompt_token_ids", and any sampling parameters that replace those of the
    command line. Empty lines are passed over. Raises ValueError naming the line.
    """
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: is not UTF-8 text ({error})") from None
    # Not splitlines(): form feeds and U+2028 may stand inside a prompt. A byte order mark is no part of the first one.
    lines = [line.removesuffix("\r") for line in text.removeprefix("\ufeff").split("\n")]
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"{name}: holds no prompt")
    if not numbered[0][1].lstrip().startswith("{"):
        return [(line, params) for _, line in numbered]
    work: list[tuple[str | list[int], SamplingParams]] = []
    for number, line in numbered:
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not a JSON object")
            given = [key for key in ("prompt", "prompt_token_ids") if key in record]
            if len(given) != 1:
                raise ValueError('needs either "prompt" or "prompt_token_ids"')
            prompt = record.pop(given[0])
            if given[0] == "prompt" and not isinstance(prompt, str):
                raise ValueError(f"prompt must be a text, got {prompt!r}")
            if given[0] == "prompt_token_ids" and not (
                isinstance(prompt, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)
            ):
                raise ValueError(f"prompt_token_ids must be a list of whole numbers, got {prompt!r}")
            if "logit_bias" in record:
                record["logit_bias"] = _bias(json.dumps(record["logit_bias"]))
            work.append((prompt, params.with_changes(**record)))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{name} line {number}: {error}") from error
    return work


def force_top_k(params: "SamplingParams", limit: int) -> "SamplingParams":
    """The parameters with top_k no larger than `limit`."""
    if limit < 1:
        raise ValueError(f"sampler_force_topk: must be a whole number >= 1, got {limit}")
    return params.with_changes(top_k=min(params.top_k or limit, limit))


def as_record(request: "RequestOutput", completion: "CompletionOutput") -> dict[str, Any]:
    """One completion as a JSON object."""
    record: dict[str, Any] = {
        "request_id": request.request_id,
        "index": completion.index,
        "prompt": request.prompt,
        "prompt_len": request.prompt_len,
        "text": completion.text,
        "token_id": completion.token_id,
        "token_logprobs": [_number(value) for value in completion.token_logprobs],
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "draft_tok": completion.draft_tok,
        "accept_tok": completion.accept_tok,
        "cached_tokens": request.cached_tokens,
        "metrics": asdict(request.metrics) | {"drafts": _drafts(request.metrics.drafts)},
    }
    if request.error is not None:
        record["error"] = request.error
    if completion.logprobs is not None:
        record["logprobs"] = [_entry(entry) for entry in completion.logprobs]
    if request.prompt_logprobs is not None:
        record["prompt_logprobs"] = [None if entry is None else _entry(entry) for entry in request.prompt_logprobs]
    return record


def _drafts(drafts: "DraftStats") -> dict[str, Any] | None:
    """Counts of the whole request, and what they come to; None where drafting was off."""
    if not drafts.rounds:
        return None
    return {
        "rounds": drafts.rounds,
        "drafted": drafts.drafted,
        "accepted": drafts.accepted,
        "accept_rate": drafts.acceptance_rate,
        "accept_length": drafts.accept_length,
        "verify_length": drafts.verify_length,
        "verified_at": drafts.verified_at,
        "accepted_at": drafts.accepted_at,
        "calibration_error": drafts.calibration_error,
    }


def _entry(entry: dict[int, float]) -> dict[str, float | None]:
    return {str(token): _number(value) for token, value in entry.items()}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity


def _bias(text: str | None) -> dict[int, float]:
    if text is None:
        return {}
    try:
        return {int(token): float(value) for token, value in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"logit_bias: must be a JSON object from token id to number, got {text!r}") from error
