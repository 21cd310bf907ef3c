"""The command line as a user meets it: what is printed, and one clear line when something is wrong."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deepinfer.cli import COMMANDS, hyphenated, main
from deepinfer.cli.doctor import examine
from deepinfer.cli.generate import force_top_k, read_prompts
from deepinfer.engine.sampling_params import SamplingParams


def deepinfer(*arguments: str) -> int:
    """Exit code of a command run in this process."""
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return int(left.value.code or 0)


@pytest.fixture
def generate(tiny_checkpoint: Path, capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        length = [] if "--max-model-len" in arguments else ["--max-model-len", "256"]
        code = deepinfer("generate", *arguments, "--model", str(tiny_checkpoint), *length, "-q")
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def test_json_prints_one_object_with_the_named_fields(generate) -> None:
    code, out, err = generate("def fibonacci(n):", "--max-tokens", "3", "--temperature", "0", "--json")
    (line,) = out.splitlines()
    record = json.loads(line)
    assert code == 0 and err == ""
    assert len(record["token_id"]) == len(record["token_logprobs"]) == 3
    assert record["finish_reason"] == "length" and record["prompt_len"] > 1
    assert {"text", "request_id", "draft_tok", "accept_tok", "cached_tokens", "metrics"} <= set(record)


def test_plain_output_is_the_text_and_equals_json(generate) -> None:
    flags = ["--max_tokens=3", "--temperature=0"]  # underscores as in the vendor's examples
    _, plain, _ = generate("abc", *flags)
    _, as_json, _ = generate("abc", *flags, "--json")
    assert plain == json.loads(as_json)["text"] + "\n"


def test_prompts_come_from_arguments_files_and_stdin(generate, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("first\n\nsecond\n")
    code, out, _ = generate("zero", "--prompts", str(file), "--max-tokens", "1", "--json", "--temperature", "0")
    assert code == 0 and [json.loads(line)["prompt"] for line in out.splitlines()] == ["zero", "first", "second"]
    monkeypatch.setattr(
        "sys.stdin", io.StringIO('{"prompt": "a", "max_tokens": 2}\n{"prompt_token_ids": [3, 4], "n": 2}\n')
    )
    code, out, _ = generate("--prompts", "-", "--max-tokens", "1", "--json", "--seed", "5")
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [(r["index"], len(r["token_id"])) for r in records] == [(0, 2), (0, 1), (1, 1)]
    assert records[1]["prompt_len"] == 2


@pytest.mark.parametrize(
    "flags", [["--overlap"], ["--prefix-mode=off"], ["--prefix_mode", "bounded"], ["--yoco-truncation", "compact"]]
)
def test_flags_of_the_engine_change_speed_and_not_the_text_of_a_short_prompt(generate, flags: list[str]) -> None:
    """A short prompt is neither cached nor longer than what truncation keeps, so even the approximations are exact."""
    common = ["abc", "--max-tokens", "4", "--temperature", "0"]
    _, plain, _ = generate(*common)
    code, changed, err = generate(*common, *flags)
    assert code == 0 and err == "" and changed == plain


def test_json_says_what_the_cache_spared(generate) -> None:
    prompts = ["one two three " * 40 + end for end in ("x", "y", "z")]
    sizes = ["--max-model-len", "512", "--max-num-batched-tokens", "128", "--max-tokens", "1"]
    _, out, _ = generate(*prompts, "--json", *sizes)
    records = [json.loads(line) for line in out.splitlines()]
    assert records[0]["cached_tokens"] == 0 and max(record["cached_tokens"] for record in records) >= 128
    assert {"queue", "ttft", "tbt", "replay_tokens", "preemptions", "drafts"} == set(records[0]["metrics"])
    _, out, _ = generate(*prompts, "--json", *sizes, "--prefix-mode", "off")
    assert all(json.loads(line)["cached_tokens"] == 0 for line in out.splitlines())


def test_json_shows_what_was_drafted_and_kept_step_by_step_and_in_sum(draft_checkpoint: Path, capsys) -> None:
    options = ["--model", str(draft_checkpoint), "--max-model-len", "256", "--max-tokens", "24", "--temperature", "0"]
    shown = {}
    for flags in (("--nextn", "0"), ("--nextn=3", "--no_mtp_varlen"), ("--mtp_varlen",)):
        assert deepinfer("generate", "abc", *options, *flags, "--ignore-eos", "--json", "-q") == 0
        shown[flags[0]] = json.loads(capsys.readouterr().out)
    off, fixed, free = shown.values()
    assert off["text"] == fixed["text"] == free["text"] and off["token_logprobs"] == fixed["token_logprobs"]
    assert off["draft_tok"] == off["accept_tok"] == [] and off["metrics"]["drafts"] is None
    for record in (fixed, free):
        drafted, accepted, drafts = record["draft_tok"], record["accept_tok"], record["metrics"]["drafts"]
        assert len(drafted) == len(accepted) == drafts["rounds"]
        assert all(kept <= sent <= 5 for sent, kept in zip(drafted, accepted, strict=True))
        assert (drafts["drafted"], drafts["accepted"]) == (sum(drafted), sum(accepted))
        assert drafts["rounds"] + sum(accepted) == 24 - 1  # the first token comes with the prompt
        assert drafts["accept_length"] == pytest.approx(23 / drafts["rounds"])
    assert max(fixed["draft_tok"]) == 3 == len(fixed["metrics"]["drafts"]["verified_at"])


def test_the_offline_example_prints_numbers_and_writes_them_down(draft_checkpoint: Path, tmp_path: Path) -> None:
    script, file = Path(__file__).parents[2] / "examples" / "offline_inference.py", tmp_path / "result.jsonl"
    flags = ["--max_tokens", "12", "--max_model_len", "384", "--disable_eplb", "--ep", "1", "--yoco_clip"]
    shown = subprocess.run(
        [sys.executable, str(script), "--model_name", str(draft_checkpoint), *flags, "--result_jsonl", str(file)],
        capture_output=True, text=True, check=True, env={**os.environ, "DEEPINFER_ENABLE_MTP_VARLEN": "0"},
    ).stdout  # fmt: skip
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    found = re.findall(r"output_tokens=(\d+); accept_rate=([\d.]+); decode_ppl=([\d.]+)$", shown, re.MULTILINE)
    assert len(found) == len(records) == 4
    for (_, rate, ppl), record in zip(found, records, strict=True):
        mean = sum(record["token_logprobs"]) / len(record["token_logprobs"])
        assert float(ppl) == pytest.approx(math.exp(-mean), abs=1e-3) and record["decode_ppl"] >= 1
        assert float(rate) == pytest.approx(sum(record["accept_tok"]) / sum(record["draft_tok"]), abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--nextn", "3"], "error: nextn: 3 tokens cannot be drafted, the checkpoint has no draft stages"),
        (["x", "--nextn", "6"], "error: nextn: must be a whole number from 0 to 5"),
        (["x", "--batch_invariant", "--dtype", "bfloat16"], "error: batch_invariant: matrix products in bfloat16"),
        (["x", "--temperature", "nan"], "error: temperature: must be a finite number"),
        (["x", "--max-tokens", "0"], "error: max_tokens: must be a whole number >= 1"),
        ([], "error: no prompt"),
        ([""], "error: prompt 0, prompt: is empty"),
        (["x", "--ep", "8"], "error: ep: 8 needs several ranks"),
        (["x", "--logit-bias", "[1]"], "error: logit_bias: must be a JSON object"),
        (["x", "--prompts", "/no/such/file"], "No such file"),
        (["x", "--prefix-mode", "fast"], "error: prefix_mode: 'fast' is not one of off, exact, bounded"),
        (["x", "--kv-format", "packed"], "error: kv_format: 'packed' would round"),
        (["x", "--yoco-truncation", "yes"], "error: yoco_truncation: 'yes' is not one of compact, off"),
        (["word " * 400], "error: prompt 0, prompt: has"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(generate, arguments: list[str], message: str) -> None:
    code, out, err = generate(*arguments)
    assert code == 2 and out == ""
    assert message in err and len(err.splitlines()) == 1


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such directory"):
        main(["generate", "x", "--model", str(tmp_path / "none"), "-q", "--debug"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ('{"prompt": "a"}\nplain\n', "line 2"),
        ('{"text": "a"}\n', 'line 1: needs either "prompt" or "prompt_token_ids"'),
        ('{"prompt": "a", "temprature": 1}\n', "line 1: temprature: is not a sampling parameter"),
        ('{"prompt": "a"}\n\n{"prompt": "a", "top_p": 3}\n', "line 3: top_p"),
    ],
)
def test_a_bad_prompt_file_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(str(file), SamplingParams())


def test_json_prompts_override_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "temperature": 0, "logit_bias": {"7": -1}}\n')
    ((prompt, params),) = read_prompts(str(file), SamplingParams(top_p=0.5))
    assert (prompt, params.temperature, params.top_p, params.logit_bias) == ("a", 0, 0.5, {7: -1.0})


def test_force_topk_only_narrows() -> None:
    assert [force_top_k(SamplingParams(top_k=k), 40).top_k for k in (0, 10, 100)] == [40, 10, 40]


def test_vendor_spellings_become_ours() -> None:
    assert hyphenated(["--model_name=a_b", "--max_tokens", "3_0", "--", "--x_y"]) == [
        "--model-name=a_b", "--max-tokens", "3_0", "--", "--x_y",
    ]  # fmt: skip


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from deepinfer.cli import main\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_says_what_it_changes(name: str) -> None:
    import typer

    from deepinfer.cli import build_app

    command = typer.main.get_command(build_app(name)).commands[name]  # type: ignore[attr-defined]
    for parameter in command.params:
        if parameter.name != "help":
            assert len(getattr(parameter, "help", "") or "") > 15, parameter.name


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_word_also_those_in_brackets(name: str) -> None:
    import typer
    from rich.text import Text

    from deepinfer.cli import build_app

    command = typer.main.get_command(build_app(name)).commands[name]  # type: ignore[attr-defined]
    for text in (command.help, *(parameter.help for parameter in command.params if parameter.name != "help")):
        assert Text.from_markup(text).plain == text.replace("\\[", "[")


def test_doctor_says_what_runs_and_why_the_rest_does_not() -> None:
    findings = {finding.what: finding for finding in examine()}
    assert findings["python"].state == findings["torch"].state == findings["cpu"].state == "ok"
    assert all(finding.detail for finding in findings.values())
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    needed = {re.split("[<>=]", requirement)[0] for requirement in project["dependencies"]}
    assert needed <= findings.keys(), "doctor looks at everything that the package needs"
    assert deepinfer("doctor") == 0


def test_chat_streams_turns_and_obeys_its_commands(tiny_checkpoint: Path, monkeypatch, capsys) -> None:
    lines = iter(["hello", "/think on", "again", "/reset", "/what", "fresh", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    code = deepinfer(
        "chat", "--model", str(tiny_checkpoint), "--max-tokens", "2", "--max-model-len", "256", "--seed", "1", "-q"
    )
    shown = capsys.readouterr()
    assert code == 0
    assert "/reset forgets" in shown.err and "error" not in shown.err


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"prompt": 5}', "line 1: prompt must be a text, got 5"),
        ('{"prompt": "a"}\n{"prompt_token_ids": "abc"}', "line 2: prompt_token_ids must be a list of whole numbers"),
        ('{"prompt_token_ids": [1, true]}', "line 1: prompt_token_ids must be a list of whole numbers"),
    ],
)
def test_a_prompt_of_the_wrong_type_is_refused_and_never_run_as_something_else(tmp_path, text, message) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_prompts(str(file), SamplingParams())


def test_marks_and_separators_inside_a_prompt_file_change_nothing(tmp_path: Path) -> None:
    """A byte order mark before the first line, a form feed and U+2028 inside prompts, Windows line ends."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('\ufeff{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\r\n', encoding="utf-8", newline="")
    assert [prompt for prompt, _ in read_prompts(str(file), SamplingParams())] == ["a\u2028b", "c"]
    file.write_text("one\x0ctwo\nthree", encoding="utf-8")
    assert [prompt for prompt, _ in read_prompts(str(file), SamplingParams())] == ["one\x0ctwo", "three"]
