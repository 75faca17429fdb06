"""Grading one response with the Math-Verify library: what `MathVerifier`'s workers run.

Imported by the workers only, at their start: so a missing library fails at once and by name, and
no item's time limit has to pay for the import.
"""

import functools
import logging
import re

from math_verify import parse, verify

from rl_speed.latex import braced_fractions, closing_brace

# The library warns in every process that its own time limit is off, which is the point here.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# What makes the library look inside a text for LaTeX; anything else is taken as one expression.
_MARKUP = re.compile(r"\$[^$]+\$|(?<!\\)\\[(\[]|\\boxed|\\fbox")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_UPRIGHT = re.compile(r"_\s*\{\s*\\(?:mathrm|text|textrm|rm)\s*\{\s*(\w+)\s*\}\s*\}")
# A name, perhaps with subscripts, perhaps applied to something, and an equals sign.
_LABEL = re.compile(
    r"(\\?[A-Za-z]+(?:_(?:\w|\\[A-Za-z]+|\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}))?\s*(?:\([^()=]*\))?)\s*="
)
_EXTREME = re.compile(
    r"(\|?[A-Za-z]+\|?_(?:\s*\\(?:max|min)|\{[^{}=]*\\(?:max|min)[^{}=]*\})\s*(?:\([^()=]*\))?)\s*="
)
# A maximum or a minimum, named before an equals sign: an operator, a subscript, or a word; "min"
# alone may be minutes.
_KIND = re.compile(
    r"\\(max|min)(?![A-Za-z])"
    r"|_\s*(?:\{[^{}=]*(?:\{[^{}=]*)?)?(?<![A-Za-z])(max|min)(?![A-Za-z])"
    r"|(?<![A-Za-z])(max|min)im(?:um|al)(?![A-Za-z])",
    re.IGNORECASE,
)
_BETWEEN_PARTS = re.compile(
    r"(?:[\s$,;&]|\\[\\,;:!()]|\\q?quad|\\text\{\s*(?:and|or)\s*\}|and|or)*"
)


def warm_up():
    """Grades one answer of each kind: the libraries import parts and build tables at the first of a
    kind, for up to 0.3 s.
    """
    for gold, answer in [
        ("0.5", r"\frac{1}{2}"),
        ("x^2+3x+2", "(x+1)(x+2)"),
        ("(1, 2)", "(2, 1)"),
        (r"\{1,2\}", r"\{2,1\}"),
        ("[1,2)", "(1,2]"),
        (r"2\sqrt{3}", r"\sqrt{12}"),
        (r"\sin x", r"\cos x"),
    ]:
        grade(rf"\boxed{{{answer}}}", gold, "boxed", 6, True, False)


def grade(
    response: str, gold: str, mode: str, float_rounding: int, strict: bool, allow_set_relation: bool
):
    """Grades one response. Returns its value, or (value, cause); see `MathVerifier`."""
    options = (gold, mode, float_rounding, strict, allow_set_relation)
    if mode == "free":
        return _judge(response, *options)
    return _judge_again(last_box(response), *options)


def _judge(answer, gold, mode, float_rounding, strict, allow_set_relation):
    gold_parsed, gold_is_mathematics, label = _parse_gold(gold)
    if answer is not None and _contradicts(answer, gold, mode):
        return 0.0
    if (
        answer is not None
        and (extreme := _extreme(answer))
        and label in ("", _plain(extreme.group(1)))
    ):
        answer = rf"\boxed{{{_bare(answer)[extreme.end() :]}}}"
    elif label and answer is not None:
        answer = _without_label(answer, label)
    parsed = _parse(answer) if answer is not None else []
    equal = bool(parsed) and verify(
        gold_parsed,
        parsed,
        float_rounding=float_rounding,
        strict=strict,
        allow_set_relation_comp=allow_set_relation,
        timeout_seconds=None,
    )
    if not gold_is_mathematics:
        # The library compares what it could read of both, which may be their beginnings.
        found, wanted = _plain(answer or ""), _plain(gold)
        same = equal and wanted in found if mode == "free" else bool(wanted) and wanted == found
        return float(same), "gold_unparsable"
    if not parsed:
        return 0.0, "no_answer"
    return float(equal)


# Samples of a prompt often end in the same box. What is kept is what was found: a time-out, a crash
# or a lack of memory is not.
_judge_again = functools.lru_cache(maxsize=4096)(_judge)


def last_box(text: str) -> str | None:
    r"""The last \boxed{...} or \fbox{...} of a text, as "\boxed{content}"; None if there is none.

    Boxes with nothing between them but a comma, "and" or the like are one answer of several parts;
    a box and its correction ("\boxed{1}, no: \boxed{2}") are not, though the library would join
    them. An open last box means that the response was cut inside its answer: an earlier box is
    then not what it meant to say.
    """
    contents, later_start = [], None
    for box in reversed(list(_BOX.finditer(text))):
        end = closing_brace(text, box.end())
        if later_start is None and end is None:
            return None
        if later_start is not None and (
            end is None or not _BETWEEN_PARTS.fullmatch(text, end + 1, later_start)
        ):
            break
        contents.append(text[box.end() : end].strip())
        later_start = box.start()
    if not contents:
        return None
    return rf"\boxed{{{','.join(dict.fromkeys(reversed(contents)))}}}"


@functools.lru_cache(maxsize=4096)  # a group's samples share one gold answer
def _parse_gold(gold):
    r"""Returns (candidates, whether any of them is a mathematical object rather than a string, the
    label left out or "").

    A label is the name of a quantity before an equals sign, "I_{\max} = ". The library drops those
    of one letter itself; where a gold answer cannot be read with its label, it is read without.
    """
    if extreme := _extreme(gold):
        without = _parse_gold_text(_bare(gold)[extreme.end() :])
        if _is_mathematics(without):
            return without, True, _plain(extreme.group(1))
    parsed = _parse_gold_text(gold)
    if _bare(gold).count("=") > 1 and _EXTREME.search(_bare(gold)):
        return parsed, False, ""  # of a maximum and a minimum the library would read one
    label = _LABEL.match(_bare(gold))
    if label and not _is_mathematics(parsed):
        without = _parse_gold_text(_bare(gold)[label.end() :])
        if _is_mathematics(without):
            return without, True, _plain(label.group(1))
    return parsed, _is_mathematics(parsed), ""


def _extreme(text):
    r"""The label of a maximum or minimum, as in S_{\triangle,\max} = 2\sqrt{3}:
    the library cannot read it, and takes a number out of the rest for the answer.
    """
    bare = _bare(text)
    return _EXTREME.match(bare) if bare.count("=") == 1 else None


def _contradicts(answer, gold, mode):
    """Whether the gold answer is a maximum by its label and the answer a minimum by its own, or the
    other way round: the library compares what stands behind the labels. An answer without a label,
    or with both, contradicts nothing.
    """
    wanted = _kinds(gold)
    # Reasoning speaks of many quantities.
    if len(wanted) != 1 or (mode == "free" and not _EXTREME.match(_bare(answer))):
        return False
    found = _kinds(answer)
    return bool(found) and not found & wanted


def _kinds(text):
    """Which of "max" and "min" the labels of a text name."""
    labels = _bare(text).rpartition("=")[0]
    return {found.group(found.lastindex).lower() for found in _KIND.finditer(labels)}


def _without_label(answer, label):
    """The answer without that label, where it has it."""
    found = _LABEL.match(_bare(answer))
    return (
        rf"\boxed{{{_bare(answer)[found.end() :]}}}"
        if found and _plain(found.group(1)) == label
        else answer
    )


def _bare(text):
    r"""What stands inside a box, dollars, \( \) or \[ \] that are all there is."""
    before = None
    while text != before:
        before, text = text, text.strip().strip("$").strip()
        box = _BOX.match(text)
        if box and closing_brace(text, box.end()) == len(text) - 1:
            text = text[box.end() : -1]
        elif text[:2] in ("\\(", "\\[") and text[-2:] == {"(": "\\)", "[": "\\]"}[text[1]]:
            text = text[2:-2]
    return text


def _plain(text):
    """For a comparison of texts: without what is layout alone."""
    return re.sub(
        r"\\(?:text|mathrm|textbf|left|right)(?![A-Za-z])|\\[,;:! ]|[\s${}]", "", _bare(text)
    ).rstrip(".")


def _is_mathematics(parsed):
    return any(not isinstance(candidate, str) for candidate in parsed)


def _parse_gold_text(gold):
    if not _MARKUP.search(gold):
        # Left plain, "3\sqrt{13}" would be searched for a number and found to be 3. The library's
        # inline pattern does not cross lines; what dollar sign is left is a currency.
        gold = f"${' '.join(gold.replace('$', ' ').split())}$" if gold.strip() else ""
    return _parse(gold)


def _parse(text):
    # Upright subscripts are subscripts; the library takes one at the end for a unit, and cuts the
    # name in two.
    return parse(_UPRIGHT.sub(r"_{\1}", braced_fractions(text)), parsing_timeout=None)
