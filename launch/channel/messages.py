"""What the keeper of a rank and the supervisor of its job tell each other: one JSON object a line.

Every rank of another launcher imports this at its start, so it imports little.
"""

import json
from collections.abc import Mapping

VARIABLE = "LMSRUN_CONTROL"
"""Where the supervisor listens: the path of a socket, or ``HOST PORT`` pairs, separated by commas."""
SOCKET = "control"
"""The socket's name in the receipts' folder."""
STREAMS = ("stdout", "stderr")
"""Names what may come over a connection of its own, byte for byte, once a message has named it."""
_MAX_LINE_BYTES = 4096


def encode(message: Mapping[str, object]) -> bytes:
    """Write one message."""
    return json.dumps(dict(message)).encode() + b"\n"


def to_count(value: object, limit: int) -> int | None:
    """Accept a whole number from 0 to below ``limit``; None for all else: a message is data from outside."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 <= value < limit else None  # type: ignore[operator, return-value]


class Reader:
    """Puts messages together from pieces of a stream. Use one a connection."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[dict[str, object]]:
        """Take in a piece; returns the messages that are whole.

        Raises:
            ValueError: If it is no message.
        """
        *lines, self._held = (self._held + data).split(b"\n")
        if any(len(line) > _MAX_LINE_BYTES for line in (*lines, self._held)):
            raise ValueError(f"a line of more than {_MAX_LINE_BYTES} bytes")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError:
            raise ValueError("a line of brackets in brackets") from None
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a line that is no object")
        return messages
