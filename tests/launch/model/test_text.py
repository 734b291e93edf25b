"""Text of programs, on its way to a person."""

import pytest

from launch.model.text import name_ids, shown_line

KERAS = (
    "\x1b[1m 9/10\x1b[0m \x1b[32m\u2501\u2501\x1b[0m \x1b[1m0s\x1b[0m 52ms/step" + "\b" * 12 + "\r"
    "\x1b[1m10/10\x1b[0m \x1b[32m\u2501\u2501\x1b[0m\x1b[37m\x1b[0m \x1b[1m1s\x1b[0m 55ms/step"
)
"""What Keras 3 writes in place of one line, also into files."""


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (KERAS, "10/10 \u2501\u2501 1s 55ms/step"),
        ("step 1\rstep 2\r", "step 2"),
        ("\x1b]0;a title\x07said", "said"),
        ("\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b[1mbold\x1b(B\x1b[m \x1b7kept\x1b8", "bold kept"),
        ("cut off \x1b[3", "cut off ?[3"),
        ("a\tb\x00", "a\tb?"),
        ("\x1b[2J \r", ""),
    ],
)
def test_a_line_is_shown_without_what_drives_a_terminal(line: str, shown: str) -> None:
    assert shown_line(line, keep="\t") == shown


def test_ids_are_named_in_the_right_number() -> None:
    assert [name_ids("node", ids) for ids in ("0", "0,8", "")] == ["node 0", "nodes 0,8", "no node"]
