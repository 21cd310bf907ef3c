"""`deepinfer bench` where there is nothing to measure."""

from __future__ import annotations

import pytest

from deepinfer.cli import main


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "Start one with `deepinfer serve --model nano`"),
        (("--server", "127.0.0.1:1"), "nobody listens there"),
        (("--server", "http://a/?b"), "is not an address"),
        (("--server", "127.0.0.1:1", "--rate", "0"), "rate: must be"),
        (("--server", "127.0.0.1:1", "--rate", "nan"), "rate: must be"),
        (("--server", "127.0.0.1:1", "--effort", "some"), "effort: must be"),
        (("--server", "127.0.0.1:1", "--prompts", "/no/such/file"), "/no/such/file"),
    ],
)
def test_without_a_server_it_starts_nothing_and_says_what_to_do(arguments: tuple[str, ...], words: str, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", *arguments])
    error = capsys.readouterr().err
    assert left.value.code == 2 and words in error and error.count("\n") == 1
