"""Structured output: how long grammars take to compile and masks to fill, beside xgrammar on the same texts.

At a vocabulary of 129,280 (a BPE that is trained on the sources of Python's standard library and of numpy, half a
minute, kept for the next run) and at nano's 8,192. Compile: from the text of a grammar to a matcher whose first mask is
filled, nothing cached. Fill: the mask of one row at every token of an answer of each grammar (grammar_cases.py), one
thread; P50 and P99 over all rows of all answers. Step: the masks of 32 sequences at once, plain and with 5 drafts each.

Run it on an idle machine; the load average is recorded in the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from grammar_cases import ANSWERS, CALL_VALUES, CHOICES, GRAMMARS, MATCHES, REGEXES, SCHEMAS, SENTENCES, TOOLS
from report import ROOT, commit, machine

from deepinfer.grammar.compiler import build_parts
from deepinfer.grammar.fill import MaskFiller
from deepinfer.grammar.prototype import Prototype
from deepinfer.grammar.structure import Grammar, Structure, ToolGrammar
from deepinfer.grammar.vocabulary import Vocabulary
from deepinfer.model.tokenizer_writer import BOS, EOS, FIRST_ADDED, PAD, control_tokens

WIDE = 129_280
EOS_ID = 1
BATCH, DRAFTS = 32, 5
MARK = "\x00"  # the DSML token in texts here
Json = dict[str, Any]


def wide_vocabulary(directory: Path) -> Vocabulary:
    """A vocabulary of the released size; its tokenizer.json is kept in `directory`."""
    path = directory / "wide_tokenizer.json"
    if not path.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(train_tokenizer()), encoding="utf-8")
    return Vocabulary.from_tokenizer_file(path, WIDE, EOS_ID)


def train_tokenizer() -> Json:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=FIRST_ADDED,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    library = [p for p in Path(sysconfig.get_path("stdlib")).glob("**/*.py") if "site-packages" not in p.parts]
    sources = sorted([*library, *Path(np.__file__).parent.glob("**/*.py")])
    tokenizer.train_from_iterator((path.read_text(encoding="utf-8", errors="ignore") for path in sources), trainer)
    definition: Json = json.loads(tokenizer.to_str())
    if len(definition["model"]["vocab"]) != FIRST_ADDED:
        raise SystemExit(f"the sources gave {len(definition['model']['vocab'])} tokens, not {FIRST_ADDED}")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for token, (spelling, special) in control_tokens(WIDE).items():
        definition["added_tokens"].append({"id": token, "content": spelling, **flags, "special": special})
    return definition


def cases() -> dict[str, tuple[Structure, str]]:
    """name -> (structure, an answer of it with MARK for the DSML token)."""
    found = {}
    for name, schema in SCHEMAS.items():
        found[f"json: {name}"] = (Structure(content=Grammar("json_schema", json.dumps(schema))), ANSWERS[name])
    found["json object"] = (Structure(content=Grammar("json_object")), ANSWERS["person"])
    for name, pattern in REGEXES.items():
        found[f"regex: {name}"] = (Structure(content=Grammar("regex", pattern)), MATCHES[name])
    for name, source in GRAMMARS.items():
        found[f"ebnf: {name}"] = (Structure(content=Grammar("ebnf", source)), SENTENCES[name])
    found["choice"] = (Structure(content=Grammar("choice", json.dumps(CHOICES))), CHOICES[2])
    for strict in (True, False):
        tools = tuple(ToolGrammar(name, json.dumps(schema), strict) for name, schema in TOOLS.items())
        found[f"tools, strict {strict}"] = (Structure(tools=tools, tool_mode="required"), calls(CALL_VALUES))
    return found


def calls(values: Iterable[tuple[str, Json]]) -> str:
    invokes = []
    for name, arguments in values:
        lines = [
            f'<{MARK} parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
            f"{value if isinstance(value, str) else json.dumps(value)}</{MARK} parameter>\n"
            for key, value in arguments.items()
        ]
        invokes.append(f'<{MARK} invoke name="{name}">\n' + ("".join(lines) or "\n") + f"</{MARK} invoke>")
    return f"\n\n<{MARK} calls>\n" + "\n".join(invokes) + f"\n</{MARK} calls>"


def encoded(text: str, vocabulary: Vocabulary) -> list[int]:
    assert vocabulary.dsml is not None
    ids: list[int] = []
    for number, part in enumerate(text.split(MARK)):
        ids += ([vocabulary.dsml] if number else []) + (vocabulary.tokenizer.tokenize_str(part) if part else [])
    return ids


def microseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def spread(values: Sequence[float]) -> Json:
    return {
        "p50": round(float(np.percentile(values, 50)), 1),
        "p99": round(float(np.percentile(values, 99)), 1),
        "max": round(max(values), 1),
        "mean": round(statistics.fmean(values), 1),
        "count": len(values),
    }


def measure_ours(vocabulary: Vocabulary, repeat: int) -> Json:
    vocabulary.tokenizer.tokenize_str("built")
    filler = MaskFiller(vocabulary, threads=1)
    compile_times: list[float] = []
    fills: list[float] = []
    accepts: list[float] = []
    by_case: Json = {}
    rows = np.empty((1, vocabulary.words), np.int32)
    paths: list[tuple[Prototype, list[int]]] = []
    for name, (structure, text) in cases().items():
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            prototype = Prototype(structure, vocabulary, build_parts(structure, vocabulary))
            times.append((time.perf_counter() - start) * 1e6)
        ids = encoded(text, vocabulary)
        paths.append((prototype, ids))
        here = []
        for _ in range(repeat):
            automaton = prototype.content or prototype.block
            assert automaton is not None
            automaton = automaton.copy()
            for token in ids:
                here.append(microseconds(lambda: automaton.fill(rows, 0, [])))  # noqa: B023
                if not int(rows[0][token // 32]) >> token % 32 & 1:
                    raise SystemExit(f"{name}: token {token} of its answer is not allowed")
                accepts.append(microseconds(lambda: automaton.consume([token])))  # noqa: B023
        fills += here
        compile_times += times
        by_case[name] = {"compile_us": spread(times), "fill_us": spread(here)}
    batch = {}
    for drafts in (0, DRAFTS):
        times = []
        for step in range(4, 4 + 10 * repeat):
            some = []
            for number in range(BATCH):
                prototype, ids = paths[(number + step) % len(paths)]
                at = (step * 7 + number * 3) % max(1, len(ids) - drafts)
                some.append((prototype.start(ids[:at]), ids[at : at + drafts]))
            times.append(microseconds(lambda: filler.fill(some)))  # noqa: B023
        batch[f"{BATCH} sequences, {drafts} drafts"] = spread(times)
    filler.close()
    return {
        "compile_us": spread(compile_times),
        "fill_us": spread(fills),
        "accept_us": spread(accepts),
        "step_us": batch,
        "cases": by_case,
    }


def measure_xgrammar(vocabulary: Vocabulary, repeat: int) -> Json | None:
    """The same JSON schemas, regexes and GBNF through xgrammar; None where it is not installed."""
    try:
        import xgrammar
    except ImportError:
        return None
    tokens = [vocabulary.token_bytes(token) for token in range(vocabulary.vocab_size)]
    info = xgrammar.TokenizerInfo(
        tokens, xgrammar.VocabType.RAW, stop_token_ids=[EOS_ID], vocab_size=vocabulary.vocab_size
    )
    bitmask = xgrammar.allocate_token_bitmask(1, vocabulary.vocab_size)
    compile_times: list[float] = []
    fills: list[float] = []
    refused = []
    for name, (structure, text) in cases().items():
        grammar = structure.content
        if grammar is None or grammar.kind in ("choice", "json_object"):
            continue
        for _ in range(repeat):
            compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            start = time.perf_counter()
            try:
                match grammar.kind:
                    case "json_schema":
                        compiled = compiler.compile_json_schema(grammar.source, any_whitespace=True, strict_mode=False)
                    case "regex":
                        compiled = compiler.compile_regex(grammar.source)
                    case _:
                        compiled = compiler.compile_grammar(grammar.source)
            except RuntimeError as error:
                refused.append(f"{name}: {str(error).splitlines()[0][-120:]}")
                break
            matcher = xgrammar.GrammarMatcher(compiled)
            matcher.fill_next_token_bitmask(bitmask)
            compile_times.append((time.perf_counter() - start) * 1e6)
            for token in encoded(text, vocabulary):
                fills.append(microseconds(lambda: matcher.fill_next_token_bitmask(bitmask)))  # noqa: B023
                if not matcher.accept_token(token):
                    refused.append(f"{name}: does not accept its answer")
                    break
    return {"compile_us": spread(compile_times), "fill_us": spread(fills), "refused": sorted(set(refused))}


def measure(options: argparse.Namespace) -> Json:
    load = os.getloadavg()[0]
    nano = Vocabulary.from_tokenizer_file(ROOT / "models/nano/tokenizer.json", 8192, EOS_ID)
    result: Json = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(load),
        "vocabularies": {},
    }
    for vocabulary in (nano, wide_vocabulary(options.keep)):
        setup = microseconds(lambda: vocabulary.tokenizer)  # noqa: B023
        result["vocabularies"][str(vocabulary.vocab_size)] = {
            "tokenizer_set_up_ms": round(setup / 1e3),
            "llguidance": measure_ours(vocabulary, options.repeat),
            "xgrammar": None if options.no_peer else measure_xgrammar(vocabulary, options.repeat),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--keep", type=Path, default=ROOT / "results", help="where the trained tokenizer is kept")
    parser.add_argument("--no-peer", action="store_true", help="without xgrammar")
    parser.add_argument("--output", type=Path, help="a file for the JSON")
    options = parser.parse_args()
    result = measure(options)
    text = json.dumps(result, indent=1)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n", encoding="utf-8")
    for size, found in result["vocabularies"].items():
        for name in ("llguidance", "xgrammar"):
            if found[name] is not None:
                print(f"{size} ids, {name}: compile {found[name]['compile_us']}, fill {found[name]['fill_us']} us")
        for name, times in found["llguidance"]["step_us"].items():
            print(f"{size} ids, a step of {name}: {times} us")
    if not options.output:
        print(text)


if __name__ == "__main__":
    main()
