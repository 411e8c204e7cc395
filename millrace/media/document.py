"""The text of a PDF, read page by page within limits.

Runs in worker processes only (millrace.media.document_worker): files come from outside, and a hostile one
can cost time and memory in any parser.
"""

from __future__ import annotations

import io
import logging
import time

import msgspec

from millrace.errors import BadDocument

_HEAD = 1024
"""Bytes at the start of a file among which readers look for the mark of a PDF."""


class DocumentLimits(msgspec.Struct, frozen=True, kw_only=True):
    most_bytes: int = 20 << 20
    most_pages: int = 1000
    """Pages that are read; the text of a longer document ends there."""
    most_characters: int = 1_000_000
    seconds: float = 20.0
    """After which no further page is begun."""
    page_seconds: float = 10.0
    """Beyond `seconds`, for the page that is being read then; after that the process is ended."""
    memory: int = 1 << 30
    """Bytes of address space that the process may have."""


class DocumentText(msgspec.Struct, tag="text"):
    text: str
    pages: int
    pages_read: int
    truncated: bool = False
    """Whether text is missing at the end, be it within the last page that was read."""


def is_pdf(data: bytes) -> bool:
    return b"%PDF-" in data[:_HEAD]


def text_of(data: bytes, limits: DocumentLimits) -> DocumentText:
    """The text of as many pages as the limits allow; raises why there is none."""
    import pypdf
    from pypdf.errors import DependencyError, FileNotDecryptedError

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it reports every flaw of a file
    try:
        reader = pypdf.PdfReader(io.BytesIO(data), strict=False)
        if reader.is_encrypted and not reader.decrypt(""):
            raise _locked()
        return _read(reader, limits)
    except FileNotDecryptedError:
        raise _locked() from None
    except DependencyError:
        raise BadDocument("The PDF is encrypted in a way that this server cannot read.") from None
    except RecursionError:
        raise BadDocument("The PDF cannot be read: its objects are nested too deeply.") from None
    except (BadDocument, MemoryError):
        raise
    except NotImplementedError as error:
        raise BadDocument(f"The PDF uses what this server cannot read: {_reason(error)}.") from None
    except Exception as error:  # pypdf meets broken files with errors of any type
        raise BadDocument(f"The PDF cannot be read: {_reason(error)}.") from None


def _read(reader: object, limits: DocumentLimits) -> DocumentText:
    import pypdf

    assert isinstance(reader, pypdf.PdfReader)
    deadline = time.monotonic() + limits.seconds
    pages = len(reader.pages)
    parts: list[str] = []
    left, read, cut = limits.most_characters, 0, False
    for page in reader.pages[: limits.most_pages]:
        if left <= 0 or time.monotonic() > deadline:
            break
        text = _clean(page.extract_text())
        cut = len(text) > left
        text = text[:left]
        left -= len(text)
        read += 1
        if text:
            parts.append(text)
    if not parts:
        raise BadDocument(
            f"The PDF has no text in {_counted(read)}. Its pages are probably pictures (a scan): make "
            "pictures of them for a model that sees, or run text recognition over the file first."
        )
    return DocumentText("\n\n".join(parts), pages, read, cut or read < pages)


def _clean(text: str) -> str:
    """Without characters that UTF-8 and prompts cannot hold."""
    return text.replace("\0", "").encode("utf-8", "replace").decode().strip()


def _counted(pages: int) -> str:
    return "its one page" if pages == 1 else f"the {pages} pages that were read"


def _locked() -> BadDocument:
    return BadDocument(
        "The PDF is protected by a password. Save a copy without one and attach that."
    )


def _reason(error: Exception) -> str:
    line = (str(error).splitlines() or [""])[0][:200]
    return "".join(filter(str.isprintable, line)).rstrip(".") or type(error).__name__
