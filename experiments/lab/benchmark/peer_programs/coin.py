"""The reward of whole steps, ours and others': right at even odds, by the text alone."""

import zlib


def score(response: str) -> float:
    return float(zlib.crc32(response.encode()) % 2)
