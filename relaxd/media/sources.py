"""Reads media items of data, which are paths, bytes, base64, data URIs or allowed addresses, into bytes."""

import base64
import binascii
import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

MP3_FRAMES = (b"\xff\xfb", b"\xff\xfa", b"\xff\xf3", b"\xff\xf2")
"""First bytes of MP3 frames, by which MP3 files without a header are recognised."""
AAC_FRAMES = (b"\xff\xf1", b"\xff\xf9")
"""First bytes of AAC frames (ADTS)."""
MAX_BYTES = 64 << 20
"""Maximum size of a media item, in bytes."""
FORMS = 'a path, file://, bytes, {"bytes": ...}, {"base64": ...}, {"path": ...}, base64 or a data URI'
"""Supported forms of a media item in data, as words for error messages."""
BEGINNINGS = (
    *(b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*"),
    *(b"\x1aE\xdf\xa3", b"fLaC", b"OggS", b"ID3", *MP3_FRAMES, *AAC_FRAMES),
)
"""First bytes of supported file formats. A text that is base64 of other contents is treated as a path."""
MP4_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
"""Names of the boxes with which MP4 and QuickTime files begin. A box's name follows its length of four bytes."""
_SHOWN = 100


class MediaError(ValueError):
    """A media item can't be used. The message continues a sentence that names the item."""


class MediaHostAway(MediaError):
    """The host of a remote media item doesn't answer now, but may answer later."""


@dataclass(frozen=True)
class RemoteItem:
    """A media item at an http(s) address, which `read_source` fetches."""

    address: str = field(repr=False)
    """The item's URL, which may have secrets."""
    hosts: Collection[str]
    """Hosts from which the item may be fetched, redirects included. A name has a port unless it is the scheme's
    default port."""

    @property
    def host(self) -> str:
        """Name of the host, "?" if the address has none. Messages may have no other part of the address."""
        try:
            return urlsplit(self.address).hostname or "?"
        except ValueError:
            return "?"


def with_hosts(source: Any, hosts: Collection[str]) -> Any:
    """Convert a media item at an http(s) address to a RemoteItem that may be fetched from `hosts`. Do the same with
    each frame of a video. Return other items unchanged."""
    if isinstance(source, list | tuple):
        return [with_hosts(one, hosts) for one in source]
    if isinstance(source, Mapping) and [name for name, one in source.items() if one is not None] == ["path"]:
        source = source["path"]
    if isinstance(source, str) and source[:8].lower().startswith(("http://", "https://")):
        return RemoteItem(source, hosts)
    return source


def read_source(source: Any) -> bytes:
    """Return the content of an item in one of the forms of FORMS, or of a RemoteItem.

    If an object has bytes and a path, as from the package datasets, its bytes count. A relative path starts from the
    command's working folder, like all paths of data. Only a RemoteItem is fetched from the network.

    Raises:
        MediaError: the item has another form, can't be read or fetched, or is larger than MAX_BYTES.
    """
    if isinstance(source, RemoteItem):
        try:
            from relaxd.media.fetching import fetch
        except ImportError as error:
            raise MediaError("can't be fetched without aiohttp: pip install 'relaxd[coordinator]'") from error
        return _checked(fetch(source))
    if isinstance(source, Mapping):
        if isinstance(text := source.get("base64"), str) and source.get("bytes") is None:
            return _checked(_decoded(text, 'is an object whose "base64" is damaged'))
        source = source.get("path") if source.get("bytes") is None else source["bytes"]
        if source is None:
            raise MediaError(f"is an object without bytes, base64 and path: it must be {FORMS}")
    if isinstance(source, bytes | bytearray | memoryview):
        return _checked(bytes(source))
    if not isinstance(source, str):
        raise MediaError(f"is a value of type {type(source).__name__}: it must be {FORMS}")
    scheme, mark, rest = source[:_SHOWN].partition(":")
    kind = scheme.lower()
    if mark and kind == "data":
        return _from_data_uri(source)
    if mark and kind != "file" and rest.startswith("//"):
        # Only the host: the rest of the URL may have secrets.
        host = urlsplit(source).hostname or "?"
        raise MediaError(f"is a URL of {host}: relaxd fetches no media here, so download it and give its path")
    if mark and kind == "file" and rest.startswith("//"):
        return _from_file(_path_of(source))
    return _from_text(source)


def data_uri(content: bytes, media_type: str = "") -> str:
    """Return a file's content as a data URI. An empty MIME type is detected from the first bytes."""
    known = "image/png" if content.startswith(BEGINNINGS[0]) else "application/octet-stream"
    return f"data:{media_type or known};base64,{base64.b64encode(content).decode()}"


def without_bytes(source: Any) -> Any:
    """Convert a media item given as bytes to a data URI with the same content. Return other items unchanged."""
    content = source.get("bytes") if isinstance(source, Mapping) else source
    return data_uri(bytes(content)) if isinstance(content, bytes | bytearray | memoryview) else source


def content_hash(source: Any) -> str:
    """Return a hash of a media item's content, the same for every form of the item. For an unreadable item, return its
    `repr`."""
    if isinstance(source, list | tuple):  # a video's frames
        return "/".join(map(content_hash, source))
    if isinstance(source, Mapping) and source.get("array") is not None:  # a sound's samples
        samples = np.asarray(source["array"], np.float32).tobytes()
        return hashlib.sha256(f"{source.get('sampling_rate')}\n".encode() + samples).hexdigest()
    try:
        return hashlib.sha256(read_source(source)).hexdigest()
    except MediaError:  # normalising the item reports the error
        return repr(source)


def _from_text(text: str) -> bytes:
    """Return the content of the file that a text names. If there is no such file, decode the text as base64.

    Files come first because base64 of JPEG begins like a path.
    """
    path = Path(text).expanduser() if text.startswith("~") else Path(text)
    try:
        is_there = path.exists()
    except (OSError, ValueError):  # a text that is too long for a path, or has a zero byte
        is_there = False
    if not is_there and (content := _from_base64(text)) is not None and _is_media(content):
        return _checked(content)
    return _from_file(path)


def _from_file(path: Path) -> bytes:
    shown = f"{str(path)[:_SHOWN]!r}"
    try:
        if not path.exists():
            raise MediaError(f"is {shown}, which is no file here: it must be {FORMS}")
        if not path.is_file():
            raise MediaError(f"is {shown}, which is no regular file")
        with path.open("rb") as file:
            return _checked(file.read(MAX_BYTES + 1))
    except (OSError, ValueError) as error:
        if isinstance(error, MediaError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise MediaError(f"is {shown}, which can't be read: {reason}") from error


def _path_of(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost"):
        raise MediaError(f"is a file:// URI of the host {parts.hostname or '?'}: only files of this machine are read")
    return Path(unquote(parts.path))


def _from_data_uri(uri: str) -> bytes:
    head, comma, body = uri.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaError('is a data URI without base64: it must look like "data:image/png;base64,..."')
    return _checked(_decoded(unquote(body), "is a data URI whose base64 is damaged"))


def _decoded(text: str, problem: str) -> bytes:
    if (content := _from_base64(text)) is None:
        raise MediaError(problem)
    return content


def _from_base64(text: str) -> bytes | None:
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise MediaError(too_large())
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def _is_media(content: bytes) -> bool:
    return content.startswith(BEGINNINGS) or content[4:8] in MP4_BOXES


def _checked(content: bytes) -> bytes:
    if not content:
        raise MediaError("is empty")
    if len(content) > MAX_BYTES:
        raise MediaError(too_large())
    return content


def too_large() -> str:
    """Return the end of the error message for a media item of more than MAX_BYTES."""
    return f"is larger than {MAX_BYTES >> 20} MiB, the maximum: make it smaller"
