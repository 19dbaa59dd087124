"""The two languages of patterns: dotted globs name units, regular expressions name paths of leaves.

What is written in the wrong one gets an error with the right words for it.
"""

import difflib
import functools
import re
from collections.abc import Collection, Iterable, Sequence

from fshard.errors import PlanError


def glob(pattern: str) -> str:
    r"""The regular expression for the paths that a glob names: leaves, or all leaves of subtrees.

    Whatever takes a regular expression for paths takes the result: rules, ``clip_norm=``, ``init=``, ``only=``.

    Args:
        pattern: parts between dots, as units are named: ``*`` stands for any characters of one part, ``?`` for one of
            them, ``[0-3]`` for one of a set, and ``**`` as a whole part for any number of parts, none among them.

    Raises:
        PlanError: it is not a glob.

    >>> import re
    >>> [path for path in ("layers.0.w", "layers.0.attn.w", "head.w") if re.fullmatch(fs.glob("layers.*"), path)]
    ['layers.0.w', 'layers.0.attn.w']
    >>> fs.glob("**.bias")
    '(?:.*\\.)?bias(?:\\..*)?'
    """
    problem = "" if isinstance(pattern, str) and pattern else "it is not a glob"
    if not problem and "\\" in pattern:
        problem = "it is a regular expression already, which paths take as it is"
    if problem:
        raise PlanError(f"fs.glob({pattern!r}): {problem}; a glob is a str such as 'layers.*' or '**.bias'")
    found = _regex(pattern)
    return found if pattern.endswith("**") else rf"{found}(?:\..*)?"


def bad_regex(pattern: object) -> str | None:
    """Say why a value is not a regular expression, and what was meant if it is a glob; None if it is one.

    >>> bad_regex("*.weight")
    "'*.weight' is a glob, not a regular expression: write r'.*\\\\.weight'"
    >>> bad_regex(r".*\\.weight"), bad_regex(3)
    (None, '3 is not a regular expression, which is a str')
    >>> bad_regex("*.(bias")
    "'*.(bias' is not a regular expression: nothing to repeat at position 0"
    """
    if not isinstance(pattern, str):
        return f"{pattern!r} is not a regular expression, which is a str"
    try:
        re.compile(pattern)
    except re.error as error:
        if "*" in pattern and (meant := regex_of(pattern)) != pattern and _compiles(meant):
            return f"{pattern!r} is a glob, not a regular expression: write r'{meant}'"
        return f"{pattern!r} is not a regular expression: {error}"
    return None


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def bad_regexes(patterns: Iterable[object]) -> list[str]:
    """The problems that ``bad_regex`` finds."""
    return [problem for pattern in patterns if (problem := bad_regex(pattern))]


Hits = dict[str, tuple[int, re.Match[str]] | None]
"""For each name the number of the pattern that decides it, with the match; None if none does."""


def first_matches(patterns: Sequence[str], names: Iterable[str]) -> Hits:
    """For each name the number of the first pattern that matches all of it, with the match; None if none does.

    >>> {name: hit and hit[0] for name, hit in first_matches(["a.*", ".*c"], ["ac", "bc", "b"]).items()}
    {'ac': 0, 'bc': 1, 'b': None}
    """
    rules = [re.compile(pattern) for pattern in patterns]
    hits = ((name, ((i, m) for i, rule in enumerate(rules) if (m := rule.fullmatch(name)))) for name in names)
    return {name: next(found, None) for name, found in hits}


def idle(count: int, hits: Hits) -> list[int]:
    """The numbers of those of ``count`` patterns that decide no name.

    >>> idle(3, first_matches(["a", "a.*", "b"], ["a", "ac"]))
    [2]
    """
    used = {hit[0] for hit in hits.values() if hit is not None}
    return [number for number in range(count) if number not in used]


def regex_of(glob: str) -> str:
    """The regular expression that matches what a glob does.

    >>> regex_of("layers.*.weight")
    'layers\\\\..*\\\\.weight'
    """
    parts = re.split(r"(\\.|\.\*|\*|\?|\.)", glob)
    spelled = {"*": ".*", "?": ".", ".": r"\.", ".*": r"\..*"}
    return "".join(spelled.get(part, part) for part in parts)


def meant_by(pattern: str, paths: Collection[str]) -> str:
    """Return what a regular expression that matches none of the paths as a whole may have been meant to be; or nothing.

    >>> meant_by("weight", ["a.weight", "b.weight"])
    ": r'.*weight.*' matches 2, such as 'a.weight'"
    """
    tries = [regex_of(pattern), f".*{pattern}", f"{pattern}.*", f".*{pattern}.*"]
    for meant in dict.fromkeys(tries):
        try:
            hits = [path for path in paths if re.fullmatch(meant, path)]
        except re.error:
            continue
        if hits and meant == f".*{pattern}":
            meant = f".*{pattern}.*"
            hits = [path for path in paths if re.fullmatch(meant, path)]
        if hits:
            return f": r'{meant}' matches {len(hits)}, such as {hits[0]!r}"
    return closest(pattern.replace("\\", ""), paths)


def closest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like this one, if one is.

    >>> closest("block.*", ["blocks.*", "head"])
    "; the closest is 'blocks.*'"
    """
    found = difflib.get_close_matches(name, list(dict.fromkeys(known)), 1, 0.6)
    return f"; the closest is {found[0]!r}" if found else ""


def glob_meant(pattern: str, modules: Collection[str]) -> str:
    """Return what a glob that matches no module may have been meant to be.

    One without the escapes of a regular expression, or
    without the name of a parameter at its end, or one that is spelled another way; or nothing.

    >>> glob_meant(r"blocks\\.\\d+", ["blocks.0", "blocks.1"])
    "; these are globs, not regular expressions: write 'blocks.*'"
    """
    plain = re.sub(r"^\^?\.[*+]", "**.*", pattern)  # the start of a name, of whatever parts
    plain = {"**.*": "**", "**.*$": "**"}.get(plain, plain).replace(r"**.*\.", "**.")
    plain = re.sub(r"\\d[+*]?|\[0-9\][+*]?|\(.*\)|(?<=\\\.)\.[*+]", "*", plain).replace("\\.", ".")
    plain = plain.removesuffix("$").removeprefix("^")
    if plain != pattern and any(glob_matches(plain, path) for path in modules):
        return f"; these are globs, not regular expressions: write {plain!r}"
    above = pattern.rpartition(".")[0]
    if pattern.endswith((".weight", ".bias")) and any(glob_matches(above, path) for path in modules):
        return f"; units are modules, not parameters: write {above!r}"
    return closest(pattern, [".".join("*" if p.isdigit() else p for p in path.split(".")) for path in modules])


def glob_matches(glob: str, path: str) -> bool:
    """Tell whether a glob matches the whole of a path or of a unit's name, part by part.

    >>> glob_matches("blocks.*", "blocks.0"), glob_matches("blocks.*", "blocks.0.attn"), glob_matches("**.attn", "attn")
    (True, False, True)
    """
    return re.fullmatch(_regex(glob), path) is not None


def escaped(name: str) -> str:
    """The glob that matches this name alone.

    >>> glob_matches(escaped("a[0].*"), "a[0].*"), glob_matches(escaped("a.*"), "a.b")
    (True, False)
    """
    return re.sub(r"[*?\[]", r"[\g<0>]", name)


@functools.cache
def _regex(glob: str) -> str:
    """The regular expression of a glob for whole paths."""
    parts = re.sub(r"(^|(?<=\.))(\*\*\.)+(?=\*\*(\.|$))", "", glob).split(".")  # "**" twice is "**"
    out = ""
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":  # with the dot that it brings; a last one brings that before it
            out = (out.removesuffix(r"\.") + (r"(?:\..*)?" if out else ".*")) if last else out + r"(?:.*\.)?"
        else:
            out += "".join(map(_token, re.findall(r"\[[^\]]+\]|.", part, re.DOTALL))) + ("" if last else r"\.")
    try:
        re.compile(out)
    except re.error as error:
        raise PlanError(f"{glob!r} is not a glob: {error}") from None
    return out


def _token(token: str) -> str:
    """The regular expression of one character of a glob, or of a set."""
    if len(token) > 1:
        within = token[1:-1].replace("\\", r"\\")
        return f"[^.{within[1:]}]" if within.startswith("!") else f"[{within.replace('[', chr(92) + '[')}]"
    return {"*": "[^.]*", "?": "[^.]"}.get(token) or re.escape(token)
