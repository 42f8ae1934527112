"""Text that every Python installation has: prose, program sources and chat, without a download.

Calibration and evaluation never share text: the topics of ``pydoc_data`` are cut in the middle, and
the standard library's modules are listed apart.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from calib.dialogues import conversations
from calib.sources import module_source
from oscar_jax.models import Tokenizer

CALIBRATION_SOURCES = ("argparse", "tarfile", "mailbox", "configparser", "shutil", "smtplib")
EVALUATION_SOURCES = ("typing", "inspect", "subprocess", "zipfile", "optparse", "pickle")
# Longer than any tokenizer's tokens are on average, so that this much text always suffices.
CHARACTERS_PER_TOKEN = 8


@dataclasses.dataclass(frozen=True)
class Text:
    """A document and the domain it is reported under."""

    domain: str  # "prose", "code", "chat", or "data" for a user's own
    source: str
    text: str


def _topics() -> str:
    """The language reference's topics in alphabetical order, every paragraph once.

    Topics quote each other: a fifth of the second half's long lines would also be in the first.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("this Python has no pydoc_data to calibrate on; pass --data") from None

    seen, kept = set(), []
    for paragraph in "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n"):
        words = " ".join(paragraph.split())
        if words not in seen:
            kept.append(paragraph)
        seen.add(words)
    return "\n\n".join(kept)


def calibration_texts(tokenizer: Tokenizer | None = None) -> list[Text]:
    """Prose (first half of the topics), code (CALIBRATION_SOURCES) and, of a model whose tokenizer
    has a chat template, conversations as that template writes them."""
    topics = _topics()
    prose = Text("prose", "pydoc_data.topics, first half", topics[: len(topics) // 2])
    texts = [prose, *(Text("code", name, module_source(name)) for name in CALIBRATION_SOURCES)]
    if tokenizer is not None and tokenizer.has_chat_template:
        # ids to text and, in ``sequences``, back: special tokens keep their ids in both directions
        rendered = [
            tokenizer.decode(
                tokenizer.chat(messages, add_generation_prompt=False), skip_special_tokens=False
            )
            for messages in conversations()
        ]
        texts.append(Text("chat", "questions about the standard library", "".join(rendered)))
    return texts


def evaluation_texts() -> list[Text]:
    """Prose (second half of the topics) and code (EVALUATION_SOURCES)."""
    topics = _topics()
    prose = Text("prose", "pydoc_data.topics, second half", topics[len(topics) // 2 :])
    return [prose, *(Text("code", name, module_source(name)) for name in EVALUATION_SOURCES)]


def read_texts(files: Iterable[Path]) -> list[Text]:
    """A user's own files, UTF-8, joined to one document of the domain "data".

    Raises:
        ValueError: a file that is missing, empty or not UTF-8.
    """
    files, texts = list(files), []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--data {file}: cannot be read as UTF-8 text ({error})") from None
        if not text.strip():
            raise ValueError(f"--data {file}: is empty")
        texts.append(text)
    return [Text("data", ", ".join(map(str, files)), "\n\n".join(texts))] if texts else []


def sequences(
    encode: Callable[[str], Sequence[int]], texts: Sequence[Text], *, length: int, count: int
) -> dict[str, np.ndarray]:
    """Up to ``count`` token sequences i32[<= count, length] of every domain.

    A domain's documents are read in turn, one sequence each, until there are enough or none has
    ``length`` tokens left. Every sequence starts with the tokens that ``encode("")`` gives (a BOS
    where the tokenizer adds one).

    Raises:
        ValueError: a domain without a single full sequence.
    """
    prefix = list(encode(""))
    own = length - len(prefix)
    domains: dict[str, np.ndarray] = {}
    for domain in dict.fromkeys(text.domain for text in texts):
        documents = [text.text for text in texts if text.domain == domain]
        limit = CHARACTERS_PER_TOKEN * length * -(-count // len(documents))
        queues = []
        for document in documents:
            tokens = list(encode(document[:limit]))[len(prefix) :]
            queues.append([tokens[i : i + own] for i in range(0, len(tokens) - own + 1, own)])
        rows = [
            prefix + queue[turn]
            for turn in range(max(map(len, queues)))
            for queue in queues
            if turn < len(queue)
        ]
        if not rows:
            raise ValueError(f"{domain}: has fewer than {length} tokens; pass more text")
        domains[domain] = np.array(rows[:count], np.int32)
    return domains


def data_hash(rows: Iterable[np.ndarray]) -> str:
    """SHA-256 over the token ids that were used, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.ascontiguousarray(row, np.int32).tobytes())
    return digest.hexdigest()
