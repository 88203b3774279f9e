"""The length that the header of a WAV file declares.

libsndfile reports the samples that are in a file, so a file that was cut short looks intact.
"""

from __future__ import annotations

import struct

from tessera.data.files import FileSignature, open_file

UNKNOWN_SIZES = (0, 0xFFFFFFFF)
"""Sizes of files that were written to a stream, whose length was not known yet."""


def declared_ratio(signature: FileSignature) -> float:
    """Return how much longer than its content a WAV file declares to be; 1 for other files."""
    size = signature.bytes
    with open_file(signature.file) as file:
        head = file.read(12)
        if len(head) < 12 or head[:4] != b"RIFF" or head[8:] != b"WAVE":
            return 1.0
        while len(chunk := file.read(8)) == 8:
            name, length = struct.unpack("<4sI", chunk)
            if name == b"data":
                present = size - file.tell()
                return 1.0 if length in UNKNOWN_SIZES else max(1.0, length / max(1, present))
            file.seek(length + length % 2, 1)
    return 1.0
