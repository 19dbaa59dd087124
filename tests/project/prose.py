"""What people must read: words and lines of each page, and sentences that are too long.

``python -m tests.project.prose`` prints a table; ``--sentences`` lists the long ones. Code, tables and pictures are no
prose, but their words count for the size of a page.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONG = 30
"""Words of a sentence that is read twice."""

README_LINES, DOCS_WORDS = 200, 42_000


@dataclass(frozen=True)
class Page:
    """A page: its name, its words with code and tables, its lines, and the sentences of its prose."""

    name: str
    words: int
    lines: int
    sentences: tuple[str, ...]

    @property
    def long(self) -> list[str]:
        """The sentences that are too long."""
        return [one for one in self.sentences if len(one.split()) > LONG]


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page's prose. A list item is one paragraph.

    >>> [*sentences("# A page\\n\\nOne is here. Two\\nfollows: three.\\n\\n| a | table |\\n\\n* An item.")]
    ['One is here.', 'Two follows:', 'three.', 'An item.']
    """
    prose = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.S)
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )", prose):
        line = re.sub(r"\]\([^)]*\)", "]", " ".join(part.split()))
        if line and not line.startswith(("|", "#", "!", ":", "{")):
            yield from re.split(r"(?<=[.:;?!])\s+", re.sub(r"^(?:[*-]|\d+\.) ", "", line))


def page(path: Path) -> Page:
    """A page as it is read."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    return Page(name, len(text.split()), len(text.splitlines()), tuple(sentences(text)))


def main() -> int:
    """Print the table; exit with 1 where a limit is exceeded."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--sentences", action="store_true", help="list the sentences that are too long")
    args = cli.parse_args()
    docs = [page(path) for path in sorted((ROOT / "docs").glob("*.md"))]
    readme, *rest = [page(ROOT / name) for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    print(f"{'page':32} {'words':>7} {'lines':>6} {'sentences':>10} {'long':>5}")
    for each in (readme, *rest, *docs):
        print(f"{each.name:32} {each.words:7,} {each.lines:6} {len(each.sentences):10} {len(each.long):5}")
        for one in each.long if args.sentences else ():
            print(f"    {len(one.split())} words: {one}")
    total = sum(each.words for each in docs)
    print(f"docs/ has {total:,} words, of {DOCS_WORDS:,} at most; README.md {readme.lines} lines, of {README_LINES}")
    return int(bool(readme.long) or readme.lines > README_LINES or total > DOCS_WORDS)


if __name__ == "__main__":
    sys.exit(main())
