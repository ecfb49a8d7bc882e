"""Bar charts as PNG images, generated with the standard library only, and questions about them."""

from __future__ import annotations

import base64
import random
import struct
import zlib

COLOURS = {"red": (200, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 200)}
WIDTH, HEIGHT, BAR = 96, 110, 20


def png(rows: list[bytes]) -> bytes:
    """Encode rows of 8-bit RGB as an image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", len(rows[0]) // 3, len(rows), 8, 2, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def chart(values: dict[str, int]) -> str:
    """Draw values from 0 to 100, one pixel per unit, as a data URL."""
    rows = []
    for y in range(HEIGHT):
        row = bytearray(b"\xff" * (3 * WIDTH))
        for place, (colour, value) in enumerate(values.items()):
            if HEIGHT - 5 - value <= y < HEIGHT - 5:
                start = 3 * (10 + place * (BAR + 8))
                row[start : start + 3 * BAR] = bytes(COLOURS[colour]) * BAR
        rows.append(bytes(row))
    return "data:image/png;base64," + base64.b64encode(png(rows)).decode()


def tasks(count: int = 64, seed: int = 0) -> list[dict[str, str]]:
    source = random.Random(seed)
    made = []
    for _ in range(count):
        values = {colour: source.randint(5, 100) for colour in COLOURS}
        colour = source.choice(list(COLOURS))
        question = f"The chart goes from 0 to 100. How high is the {colour} bar? Reply with a number alone."
        made.append({"image": chart(values), "question": question, "expected": str(values[colour])})
    return made


def val() -> list[dict[str, str]]:
    return tasks(16, seed=1)
