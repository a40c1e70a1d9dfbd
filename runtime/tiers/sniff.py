"""What a file that is not a checkpoint looks like, in words for an error message.

Belongs here: magic numbers. Never: a decision to accept a file; that takes a full parse.
"""

from __future__ import annotations

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "zip"),
    (b"PK\x05\x06", "zip"),
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstandard"),
    (b"7z\xbc\xaf\x27\x1c", "7z"),
    (b"version https://git-lfs", "a Git LFS pointer"),
    (b"GGUF", "gguf"),
    (b"\x89HDF", "hdf5"),
    (b"\x93NUMPY", "npy"),
    (b"\x7fELF", "elf"),
    (b"%PDF", "pdf"),
)

_PICKLE_PROTOCOLS = range(2, 6)


def looks_like(head: bytes) -> str:
    """Name the kind of file that starts with `head` (64 bytes are enough); an empty string when nothing matches."""
    if not head:
        return "an empty file"
    if not any(head):
        return "zeros"
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[0] == 0x80 and len(head) > 1 and head[1] in _PICKLE_PROTOCOLS:  # noqa: PLR2004 -- PROTO opcode
        return "pickle"
    return _looks_like_text(head)


def _looks_like_text(head: bytes) -> str:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "html"
    if text.startswith(b"<"):
        return "xml"
    if text.startswith((b"{", b"[")):
        return "json"
    if text and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head):  # noqa: PLR2004 -- printable ASCII
        return "text"
    return ""
