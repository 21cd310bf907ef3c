"""`deepinfer serve`: the HTTP server."""

from pathlib import Path
from typing import Annotated

import typer

from deepinfer.cli import options

SERVER = "Server"
LIMITS = "Limits"


def serve(
    model: options.Model = None,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; one that other machines reach needs --keys.", rich_help_panel=SERVER),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 = any free one.", rich_help_panel=SERVER)] = 8000,
    keys: Annotated[
        Path | None, typer.Option(help="File of API keys, made by `deepinfer keys add`.", rich_help_panel=SERVER)
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name that requests may use; may be repeated; * = any. Default: the model's own.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name by which requests may call a server without keys, besides localhost; may be repeated.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    sampling_policy: Annotated[
        str,
        typer.Option(
            help="honour: requests choose temperature and top_p. hosted: as the vendor's service, which fixes them.",
            rich_help_panel=SERVER,
        ),
    ] = "honour",
    promote_unterminated_reasoning: Annotated[
        bool,
        typer.Option(
            "--promote-unterminated-reasoning",
            help="Reasoning that never ends is sent as content, too.",
            rich_help_panel=SERVER,
        ),
    ] = False,
    tool_grammar: Annotated[
        bool,
        typer.Option(
            "--tool-grammar/--no-tool-grammar",
            help="Hold what begins as a call to the form of one.",
            rich_help_panel=SERVER,
        ),
    ] = True,
    store: Annotated[
        Path | None,
        typer.Option(
            help="SQLite file that keeps the answers of /v1/responses; default: memory.", rich_help_panel=SERVER
        ),
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="A line per request on stderr.", rich_help_panel=SERVER)
    ] = True,
    log_content: Annotated[
        bool, typer.Option("--log-content", help="Prompts in the access log.", rich_help_panel=SERVER)
    ] = False,
    trace_endpoint: Annotated[
        str | None,
        typer.Option(
            help="OTLP collector for traces, as http://localhost:4318; needs deepinfer\\[tracing].",  # no markup
            rich_help_panel=SERVER,
        ),
    ] = None,
    trace_share: Annotated[
        float,
        typer.Option(
            help="Share of requests that are traced, 0 to 1; failed and slow ones always are.", rich_help_panel=SERVER
        ),
    ] = 0.01,
    max_running: Annotated[int, typer.Option(help="Requests inside at once.", rich_help_panel=LIMITS)] = 1024,
    max_queued_requests: Annotated[
        int, typer.Option(help="Those of them without a first token.", rich_help_panel=LIMITS)
    ] = 512,
    max_queued_tokens: Annotated[int, typer.Option(help="Prompt tokens of those.", rich_help_panel=LIMITS)] = 4_000_000,
    request_timeout: Annotated[
        float,
        typer.Option(help="Seconds that an answer may take; then it ends with what it has.", rich_help_panel=LIMITS),
    ] = 3600.0,
    first_token_timeout: Annotated[
        float,
        typer.Option(help="Seconds to the first token; who cannot have it by then is refused.", rich_help_panel=LIMITS),
    ] = 60.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that SIGTERM leaves to open answers.", rich_help_panel=LIMITS)
    ] = 300.0,
    drain_grace: Annotated[
        float, typer.Option(help="Seconds that /ready says no before the end, at least.", rich_help_panel=LIMITS)
    ] = 0.0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = 32,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.85,
    wide_outputs: options.WideOutputs = None,
    expert_cache: options.ExpertCache = None,
    prefix_mode: options.PrefixMode = "exact",
    kv_format: options.KvFormat = "auto",
    yoco_truncation: options.Truncation = None,
    overlap: options.Overlap = None,
    nextn: options.Nextn = None,
    mtp_varlen: options.MtpVarlen = None,
    batch_invariant: options.BatchInvariant = None,
    ep: options.Ep = 1,
    dp: options.Dp = None,
    cp: options.Cp = 1,
    disable_eplb: options.DisableEplb = False,
    debug: options.Debug = False,
) -> None:
    """Answers Chat Completions, Completions, Responses and Messages until SIGTERM or Ctrl-C."""
    from deepinfer.engine.model_core import ModelCore
    from deepinfer.server.run import serve
    from deepinfer.server.settings import ServerSettings

    settings = ServerSettings(
        host=host,
        port=port,
        keys=keys,
        allowed_hosts=tuple(allowed_host or ()),
        model_names=tuple(served_model_name or ()),
        sampling_policy=sampling_policy,
        promote_unterminated=promote_unterminated_reasoning,
        tool_grammar=tool_grammar,
        store=store,
        access_log=access_log,
        log_content=log_content,
        trace_endpoint=trace_endpoint,
        trace_share=trace_share,
        max_running=max_running,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        request_timeout=request_timeout,
        first_token_timeout=first_token_timeout,
        drain_timeout=drain_timeout,
        drain_grace=drain_grace,
    )
    core = ModelCore.of(
        model,
        verbose=True,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        wide_outputs=wide_outputs,
        expert_cache=expert_cache,
        kv_format=kv_format,
        yoco_truncation=yoco_truncation,
        overlap=overlap,
        queue_policy="fair" if keys is not None else "first-come",
        nextn=nextn,
        mtp_varlen=mtp_varlen,
        batch_invariant=batch_invariant,
        seed=None,
        ep=ep,
        dp=dp,
        cp=cp,
        **options.prefix_caching(prefix_mode),
    )
    raise typer.Exit(serve(core, settings))
