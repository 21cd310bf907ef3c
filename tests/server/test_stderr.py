"""What is written to standard error, by whomever, goes on in whole lines and never waits."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

from deepinfer.server.access_log import LogWriter
from deepinfer.server.stderr import LineStream


def test_lines_go_on_when_they_are_whole() -> None:
    lines: list[bytes] = []
    stream = LineStream(lines.append)
    print("one", "two", file=stream)
    print("thr", file=stream, end="")
    assert lines == [b"one two\n"]
    stream.write("ee\nfour\nfi")
    assert lines[1:] == [b"three\nfour\n"]
    stream.write("ve \ud800é\n")
    assert lines[2:] == ["five \\ud800é\n".encode()]
    handler = logging.StreamHandler(stream)
    handler.emit(logging.makeLogRecord({"msg": "six %d", "args": (7,)}))
    assert lines[3:] == [b"six 7\n"]


def test_lines_of_several_threads_are_not_mixed() -> None:
    lines: list[bytes] = []
    stream = LineStream(lines.append)

    def write(letter: str) -> None:
        for _ in range(200):
            stream.write(letter * 50 + "\n")

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines) == 800 and all(len(set(line.strip())) == 1 for line in lines)


def test_a_file_that_takes_a_part_or_nothing_for_now_gets_all_of_it_in_the_end() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "wb", buffering=0) as file:
        writer = LogWriter(file)
        line = b"x" * 99_999 + b"\n"  # more than a pipe holds
        for _ in range(3):
            writer.write(line)
        got = bytearray()
        thread = threading.Thread(target=lambda: got.extend(reader.read()))
        thread.start()
        writer.close()
        file.close()
        thread.join(20)
    assert bytes(got) == line * 3


SCRIPT = """
import logging, sys
from deepinfer.server.stderr import queue_stderr_for_good
queue_stderr_for_good()
for number in range(20000):
    print("line", number, file=sys.stderr)
logging.getLogger("x").error("told")
print("alive", flush=True)
sys.exit(7)
"""


def test_a_process_whose_standard_error_nobody_reads_goes_on_and_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.read() == b"alive\n"
        assert process.wait(20) == 7
