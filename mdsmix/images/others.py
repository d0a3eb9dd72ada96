"""What a file is that is no image which is read, in words: none of its bytes are told, since a record may name any file of a machine."""

from __future__ import annotations

import re

READ = "JPEG, PNG, WebP, GIF, BMP and TIFF"
_BEGINS = (
    (rb"version https://git-lfs", "a pointer of Git LFS: git lfs pull brings the file itself"),
    (rb"\s*<(!doctype html|html|head|body)\b", "a page of HTML, as servers send without an image"),
    (rb"\s*(<\?xml.{0,999})?<svg\b", f"SVG, which is not read: {READ} are"),
    (rb"....ftyp(avif|avis)", f"AVIF, which is not read: {READ} are"),
    (rb"....ftyp(hei[cfmsvx]|hev[cmsx]|mif1|msf1)", f"HEIC, which is not read: {READ} are"),
    (rb"....ftyp", "a video"),
    (rb"\x00\x00\x00\x0cjP  |\xff\x4f\xff\x51", f"JPEG 2000, which is not read: {READ} are"),
    (rb"\x00\x00\x00\x0cJXL |\xff\x0a", f"JPEG XL, which is not read: {READ} are"),
    (rb"%PDF-", f"PDF, which is not read: {READ} are"),
    (rb"8BPS", f"a file of Photoshop, which is not read: {READ} are"),
    (rb"\s*<\?xml|<Error>", "XML, as stores send without an object"),
    (rb"\x00\x00\x01\x00", f"an icon, which is not read: {READ} are"),
    (rb"[{\[]", "text, perhaps JSON"),
    (rb"\x1f\x8b|PK\x03\x04|\x28\xb5\x2f\xfd", "an archive"),
)
_HEADS = (
    (rb"\xff\xd8\xff", "a JPEG"),
    (rb"\x89PNG", "a PNG"),
    (rb"RIFF....WEBP", "a WebP"),
    (rb"GIF8", "a GIF"),
    (rb"BM", "a BMP"),
    (rb"II\*\x00|MM\x00\*", "a TIFF"),
)


def said(data: bytes) -> str:
    """What these bytes are, by how they begin."""
    head = data[:4096]
    for begin, name in _HEADS:
        if re.match(begin, head, re.DOTALL):
            return f"it begins as {name} does, and its header cannot be read"
    for begin, name in _BEGINS:
        if re.match(begin, head, re.DOTALL | re.IGNORECASE):
            return f"it is {name}"
    if not head.strip(b"\0"):
        return "it holds zeros, as after a download or a copy that was not finished"
    return f"it begins as none of {READ} does"
