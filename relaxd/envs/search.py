"""A search engine over a small corpus, which the model may query before it answers."""

import re
import threading
from collections import Counter, defaultdict
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relaxd.data.prompt_files import open_rows
from relaxd.envs.environment import BadEnvironmentError
from relaxd.envs.function_tools import FunctionTool, ToolsEnvironment

MAX_DOCUMENTS = 200_000
"""Maximum number of documents. Each host keeps them in memory and indexes about 10,000 per second."""
SATURATION, LENGTH_WEIGHT = 1.2, 0.75
"""k1 and b of BM25 (Robertson and Zaragoza, 2009, equation 3.15), as Lucene sets them."""
_WORD = re.compile(r"\w+")


class Search(ToolsEnvironment):
    """Answers calls of the tool `search` by BM25. A message without a call ends the conversation with the reward 0.

    Numbers: `calls`, and `errors` (calls that can't be parsed).
    """

    def __init__(
        self, corpus: str, *, text_key: str = "text", title_key: str = "title", results: int = 3, max_chars: int = 2000
    ) -> None:
        """Check the settings, and read the corpus, which happens once in a process.

        Args:
            corpus: a file in a format of data.path (JSONL, Parquet and others), with one document per row.
            text_key: column with a document's text.
            title_key: column with a document's title; rows may lack it.
            results: number of documents that a call returns.
            max_chars: maximum length of each document in a result, in characters; the rest is cut off.

        Raises ValueError: a setting is wrong; DataError: the corpus can't be read.
        """
        super().__init__([FunctionTool(self.search)])
        for name, value in (("results", results), ("max_chars", max_chars)):
            if value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        with _reading:
            self._index = _index_of(corpus, text_key, title_key)
        self._results, self._max_chars = results, max_chars

    def search(self, query: str) -> str:
        """Search a collection of documents. Returns the best ones.

        Args:
            query: the words to look for.
        """
        found = self._index.best(query, self._results)
        if not found:
            return "No document has any of these words."
        return "\n\n".join(f"[{rank}] {text[: self._max_chars]}" for rank, text in enumerate(found, 1))


class Bm25:
    """An index of documents by their words."""

    def __init__(self, documents: list[str]) -> None:
        self._documents = documents
        counts = [Counter(words(one)) for one in documents]
        lengths = np.array([one.total() for one in counts], np.float64)
        norms = SATURATION * (1 - LENGTH_WEIGHT + LENGTH_WEIGHT * lengths / max(lengths.mean(), 1.0))
        places: dict[str, list[int]] = defaultdict(list)
        times: dict[str, list[int]] = defaultdict(list)
        for number, one in enumerate(counts):
            for word, count in one.items():
                places[word].append(number)
                times[word].append(count)
        self._postings: dict[str, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}
        for word, numbers in places.items():
            rarity = np.log(1 + (len(documents) - len(numbers) + 0.5) / (len(numbers) + 0.5))
            often = np.array(times.pop(word), np.float64)
            score = rarity * often * (SATURATION + 1) / (often + norms[numbers])
            self._postings[word] = (np.array(numbers, np.int32), score.astype(np.float32))

    def best(self, query: str, count: int) -> list[str]:
        """Return the documents that match a query best: at most `count`, each with at least one word of the query."""
        scores = np.zeros(len(self._documents), np.float32)
        for word in words(query):
            if word in self._postings:
                numbers, score = self._postings[word]
                scores[numbers] += score
        order = np.argsort(-scores, kind="stable")[:count]
        return [self._documents[number] for number in order if scores[number] > 0]


def words(text: str) -> list[str]:
    """Return the words of a document or query in lower case."""
    return _WORD.findall(text.lower())


_reading = threading.Lock()


@lru_cache(maxsize=1)
def _index_of(corpus: str, text_key: str, title_key: str) -> Bm25:
    rows = open_rows(Path(corpus).expanduser(), "agent.settings.corpus")
    if len(rows) > MAX_DOCUMENTS:
        raise BadEnvironmentError(
            f"the corpus {corpus} has {len(rows)} rows: it may have {MAX_DOCUMENTS}; for more, "
            "ask a search service of your own with a function or an MCP server"
        )
    documents = []
    for number, row in enumerate(rows.scan()):
        text = row.get(text_key) if row is not None else None
        if not isinstance(text, str):
            there = f"has no text in {text_key!r}" if row is not None else "can't be read"
            raise BadEnvironmentError(
                f"the corpus's {rows.place(number)} {there}: each row is a document, as {{{text_key!r}: ...}}"
            )
        title = (row or {}).get(title_key)
        documents.append(f"{title}\n{text}" if isinstance(title, str) and title else text)
    return Bm25(documents)
