"""Finding the answer in a completion, and reading it as a number. Pure text work: no evaluation, no exceptions.

Whatever a policy thinks aloud is no answer: text up to the last </think> is left out, and all of it when the thinking
was never closed.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_NUMBER_CHARS = 1000  # Python refuses to read integers of more than 4300 digits

# A sign counts as one only where it cannot be a subtraction: not in "12-5".
_SIGN = r"(?:(?<![\w.)])[-+\u2212])?"
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(rf"{_SIGN}(?:{_PLAIN})(?:[eE][-+]?\d{{1,3}}(?!\d)|\s?/\s?\d+(?:\.\d+)?(?![\d/]))?")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([-+]?[\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}")
_LATEX_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)")  # \frac12, which LaTeX reads as 1/2
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}")
_LATEX_NOISE = re.compile(r"\\[,;!: ]|\\left|\\right|\\%|\\\$|[$]|\{,\}")
_BRACE = re.compile(r"[{}]")
_BOX = re.compile(r"\\boxed\s*\{")
_AFTER_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
# What may follow a number that is all of an answer: a percent or degree sign, or words, the names of units.
_UNIT = re.compile(r"\s*(?:[%\u00b0]|(?!pi\b)[a-zA-Z]{2,})?(?:\s+[a-zA-Z.]+(?:\s*\^\s*\{?\d\}?)?)*[\s.]*")
_PHRASE = re.compile(r"\banswer(?:\s{1,9}is)?\s{0,9}[:=]?", re.IGNORECASE)


def visible(completion: str) -> str:
    """The completion without its thinking."""
    return completion.rpartition("</think>")[2].partition("<think>")[0]


def after_hashes(text: str) -> str | None:
    """What follows the last `####`, up to the end of its line: the form of GSM8K."""
    _, found, rest = text.rpartition("####")
    return rest.strip().split("\n", 1)[0].strip() if found and rest.strip() else None


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} whose braces are balanced."""
    found = _boxes(text)
    return found[-1] if found else None


def _boxes(text: str) -> list[str]:
    ends: dict[int, int] = {}  # of the braces that are closed, by where they open
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            opened.append(brace.start())
        elif opened:
            ends[opened.pop()] = brace.start()
    begins = [box.end() - 1 for box in _BOX.finditer(text)]
    return [text[begin + 1 : ends[begin]].strip() for begin in begins if begin in ends]


def tagged(text: str) -> str | None:
    """The content of the last <answer>...</answer>."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return text[begin + len("<answer>") : end].strip() if begin >= 0 else None


def declared(text: str) -> str | None:
    """The answer by the form it is given in: `####`, a box, a tag, or the words "answer is"; None for none of them."""
    for find in (after_hashes, boxed, tagged):
        if (found := find(text)) is not None:
            return found
    for phrase in reversed(list(_PHRASE.finditer(text))):
        if rest := text[phrase.end() :].lstrip():
            return rest.split("\n", 1)[0].strip()
    return None


def first_number(text: str) -> Fraction | None:
    """The first number in a text that is an answer: "$1,000.50 in all" is 1000.5, "72%" is 72."""
    found = _NUMBER.search(strip_latex(text))
    return _value(found.group()) if found else None


def last_number(text: str) -> Fraction | None:
    """The last number in a text that ends with an answer."""
    found = _NUMBER.findall(strip_latex(text))
    return _value(found[-1]) if found else None


def number(text: str) -> Fraction | None:
    """The number that is the whole text, but for a unit behind it: "72 cm" is one, "(1, 2)" and "2^{10}" are not."""
    text = strip_latex(text).strip()
    found = _NUMBER.search(text)
    if found is None or text[: found.start()].strip() or not _UNIT.fullmatch(text, found.end()):
        return None
    return _value(found.group())


def key(text: str) -> str:
    """The same text for answers that are the same: the number it is, or its words without their dress."""
    value = number(text)
    return _bare(text) if value is None else str(value)


def all_declared(completion: str) -> set[str]:
    r"""Keys of every answer given in a box that is closed or after `####`: more than one contradict each other."""
    text = visible(completion)
    return {key(found) for found in [*_boxes(text), *_AFTER_HASHES.findall(text)]}


def strip_latex(text: str) -> str:
    r"""The text with \\frac{a}{b} as a/b and without the LaTeX that only dresses it."""
    if "\\" not in text and "$" not in text and "{" not in text:
        return text
    text = _LATEX_SHORT_FRACTION.sub(r"\1/\2", _LATEX_FRACTION.sub(r"\1/\2", text))
    return _LATEX_NOISE.sub("", _LATEX_TEXT.sub(r" \1 ", text))


def same_text(one: str, other: str) -> bool:
    """Whether two answers are the same but for spaces, case, LaTeX dressing and a final full stop."""
    return _bare(one) == _bare(other)


def _bare(text: str) -> str:
    return re.sub(r"\s+", "", strip_latex(text)).casefold().rstrip(".")


def _value(text: str) -> Fraction | None:
    if len(text) > MAX_NUMBER_CHARS:
        return None
    text = text.replace(",", "").replace("\u2212", "-").replace(" ", "")
    above, divided, below = text.partition("/")
    if divided:
        return Fraction(above) / Fraction(below) if Fraction(below) else None
    return Fraction(above)
