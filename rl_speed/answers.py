r"""Reads an answer before any mathematics: the last box of a text, one normal form for the many
ways to write a number, and whether a parser reads all of it.

Gold answers (`data/gold.py`) and responses (`rewards/grading.py`) go through the same stages.
Standard library only: the workers that verify responses import it.
"""

import re
import unicodedata
from fractions import Fraction

_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace opens nothing
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
# Content of a box without braces: a number, a command with its arguments, or one character.
_BRACELESS = re.compile(r"[-+]?\d+(?:[.,/]?\d+)*|[-+]?\\[A-Za-z]+(?:\{[^{}]*\})*|[^\s\\{}$]|")
# Boxes separated only by these are parts of one answer.
_GAP = r"(?:[\s$,;&+]|\\[\\,;:!()]|\\q?quad|\\text\{[^{}]*(?<![A-Za-z])(?:and|or)\s*\}|and|or)*"
# A counted word and the name of the next part may also separate parts: "papers and", "and y =".
_BETWEEN_PARTS = re.compile(rf"{_GAP}(?:[A-Za-z]+ +(?:and|or){_GAP})?(?:[A-Za-z]\w*\s*=\s*)?")


def closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one opened just before `start`; None if none does."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.start()
    return None


def last_box(text: str) -> str | None:
    r"""Content of the last \boxed{...}, \fbox{...} or \boxed 7 of a text; None if it has no box.

    Boxes separated only by a comma, "and" or the like are parts of one answer, joined by commas. A
    box and its correction ("\boxed{1}, no: \boxed{2}") are not. A last box that is not closed or
    has no readable content means no answer: an earlier box is not the final answer.
    """
    parts: list[str] = []
    later = None
    text = re.sub(r"\\\\(?=boxed|fbox)", r"\\", text)  # escaped twice
    for box in reversed(list(_BOX.finditer(text))):
        if text[box.end() : box.end() + 1] == "{":
            start = box.end() + 1
            end = closing_brace(text, start)
            after = None if end is None else end + 1
        else:
            start = box.end()
            end = after = _BRACELESS.match(text, start).end() or None
        if later is None and (end is None or end == start and after == end):
            return None
        if later is not None and (end is None or not _BETWEEN_PARTS.fullmatch(text, after, later)):
            break
        parts.append(text[start:end].strip())
        later = box.start()
    return ",".join(dict.fromkeys(reversed(parts))) if parts else None


def bare(text: str) -> str:
    r"""The text without a box, dollars, \( \) or \[ \] that enclose all of it."""
    before = None
    while text != before:
        before = text
        text = re.sub(r"^[\s$]+|\s*(?<!\\)\$+\s*$", "", text).strip()
        box = _BOX.match(text)
        if box and text[box.end() :][:1] == "{":
            if closing_brace(text, box.end() + 1) == len(text) - 1:
                text = text[box.end() + 1 : -1]
        elif re.fullmatch(r"\\([(\[])(?:(?!\\[()\[\]]).)*\\[)\]]", text, re.DOTALL):
            text = text[2:-2]
    return text


# The stages of `normalise`, in order. Each takes text and returns text.

_SYMBOLS = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/",
        "°": r"^\circ ", "º": r"^\circ ", "∞": r"\infty ", "π": r"\pi ", "…": r"\ldots ",
        "⋯": r"\cdots ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", "∪": r"\cup ", "∩": r"\cap ",
        "²": "^2", "³": "^3", "′": "'", "’": "'", "∅": r"\emptyset ", "±": r"\pm ",
    }
)  # fmt: skip
_ROOT = re.compile(r"√\s*(\d+|[A-Za-z]|\([^()]*\))")
_SPACE = re.compile(
    r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![A-Za-z])|\\(?:thin|med|thick)space(?![A-Za-z])"
)
_LAYOUT = re.compile(
    r"\\(?:left|right)\.|(?<!\\)\\!"
    r"|\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits)(?![A-Za-z])"
)
_UPRIGHT = re.compile(
    r"\\(?:text|math)(?:bf|it|rm|sf|normal|up)?\s*\{|\\(?:mbox|textnormal)\s*\{"
    r"|\{\s*\\(?:rm|bf|it)\s"
)


def characters(text: str) -> str:
    """Replaces Unicode signs by LaTeX, full-width characters by plain ones, "½" by a fraction."""
    text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1].strip('()')}}}", text.translate(_SYMBOLS))
    text = re.sub(r"(?<=[A-Za-z)\]}])'+", lambda m: "^{" + r"\prime" * len(m[0]) + "}", text)
    found = []
    for c in text:
        kind, _, value = unicodedata.decomposition(c).partition(" ")
        if kind == "<fraction>":
            above, _, below = "".join(chr(int(v, 16)) for v in value.split()).partition("\u2044")
            c = rf"\frac{{{above}}}{{{below}}}"
        found.append(unicodedata.normalize("NFKC", c))
    return "".join(found)


def separators(text: str) -> str:
    r"""Removes separators between thousands ("5,\!525", "1{,}234", "3_828"); "3{,}5" is 3.5."""
    text = re.sub(r"(?<=\d)(?:\{,\}|,\\!\s*)(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<![\w.])\d{1,3}(?:_\d{3})+(?!\d)", lambda m: m[0].replace("_", ""), text)
    return re.sub(r"(?<=\d)\{,\}(?=\d)", ".", text)


def layout(text: str) -> str:
    r"""Replaces spacing commands and line ends by one space, \dfrac by \frac, and \mathrm{...},
    \mbox{...} and {\rm ...} by \text{...}; removes \left, \! and the like.
    """
    if "\\begin" not in text:  # inside an environment \\ ends a row
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", _LAYOUT.sub("", text))
    text = _UPRIGHT.sub(r"\\text{", _SPACE.sub(" ", text))
    text = re.sub(r"\\text\{\s*([-+]?(?:\\?\$)?[\d.,/]+)\s*\}", r"\1", text)  # an upright number
    text = re.sub(r"\\text\{\s*([-+]?\$?[\d.,]*\d)\s+", r"\1 \\text{", text)  # \text{12 cm}
    text = re.sub(r"(?<=\d)(and|or)(?=[A-Z\d\\(])", r" \1 ", text)
    return " ".join(re.sub(r"\\text\{\s*\}", "", text).split())


def sentence(text: str) -> str:
    r"""Removes the final full stop or comma of a sentence, and a leading = or \approx."""
    text = re.sub(r"^(?:\\approx(?![A-Za-z])|≈|=)\s*", "", text)
    return re.sub(r"(?<![\s.\\])\s*[.,;]$", "", text)


def currency(text: str) -> str:
    """Removes currency signs, and the dollars around formulas."""
    text = re.sub(r"\\text\{\s*(\\?[$€£¥₹])\s*\}", r"\1", text)
    text = re.sub(
        r"^([-+]?)\s*(?:\\text\{)?\s*(?:US|USD|EUR|GBP|Rs\.?)\s*\}?\s*(?=\\?\$|\d)", r"\1", text
    )
    return re.sub(
        r"\\?[$€£¥₹]|\\(?:pounds|euro|texteuro|textsterling)(?![A-Za-z])", "", text
    ).strip()


_CIRCLE = r"\s*(?:\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z]))"
_TRIGONOMETRY = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")


def degrees(text: str) -> str:
    r"""Removes degree signs; inside a sine or the like they become \pi/180."""
    if _TRIGONOMETRY.search(text):
        return re.sub(rf"(\d+(?:\.\d+)?){_CIRCLE}", r"\\frac{\1\\pi}{180}", text)
    return re.sub(
        rf"(?<=[\d}})A-Za-z]){_CIRCLE}\s*(?:[CF](?![A-Za-z])|\\text\{{\s*[CF]\s*\}})?", "", text
    )


def percent_words(text: str) -> str:
    r"""Replaces percent, pct and % by \%."""
    text = re.sub(
        r"\s*(?:\\text\{\s*(?:percent|pct|\\?%)\s*\}|(?<![A-Za-z\\{])(?:percent|pct)(?![A-Za-z]))",
        r"\\%",
        text,
    )
    return re.sub(r"\s*\\?%", r"\\%", text)


# Units even after letters, and without \text; one letter alone is a name.
_UNITS = frozenset(
    "mm cm dm km nm kg mg lb lbs oz ft yd mi mph kph kmh km/h m/s km/s ml mL cc sec secs min "
    "mins hr hrs hour hours minute minutes second seconds day days week weeks month months year "
    "years inch inches foot feet yard yards mile miles meter meters metre metres centimeter "
    "centimeters kilometer kilometers gram grams kilogram kilograms pound pounds ounce ounces "
    "liter liters litre litres gallon gallons degree degrees deg radian radians rad unit units "
    "sq square cubic cents cent dollars dollar euros USD EUR GBP rupees points point in Hz kHz "
    "MHz kW kJ mol kPa Pa per".split()
)  # fmt: skip
# Words that describe a number and are not counted things.
_PROSE = frozenset(
    "is are if when for where all every not no with only even odd prime such that positive "
    "negative integer integers real to else otherwise than mod must and or at least most more "
    "less from then so infinity infinite none undefined".split()
)  # fmt: skip
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\s*\d\s*\}|-?\d))?"
_WORDS = r"[A-Za-zμ][A-Za-zμ .,/^\-()]*(?:\^?[23])?"
_UNIT = re.compile(
    # \text{cm}^2, perhaps after a slash; \frac{\text{m}}{\text{s}}; words without \text
    rf"(?:(?:\s|/|\\cdot|\\times)*\\text\{{\s*(?P<upright>{_WORDS})\s*\}}{_POWER}"
    rf"|\s*\\frac\{{\s*\\text\{{(?P<above>{_WORDS})\}}{_POWER}\s*\}}"
    rf"\{{\s*\\text\{{(?P<below>{_WORDS})\}}{_POWER}\s*\}}"
    rf"|(?<=[\d}}])(?P<words>\s*[A-Za-zμ]+(?:[ /]+[A-Za-zμ]+)*){_POWER})"
    r"(?=\s*(?:$|[,;)=<>/]|\\text\{|\\le|\\ge|\\cdot))"
)


def units(text: str) -> str:
    r"""Removes units and other counted things after a number: 5 \text{ cm}^2, 5 cm, 12 apples."""
    before = None
    while text != before:
        before = text
        text = _UNIT.sub(_without_unit, text).strip()
    return text


def _without_unit(found: re.Match) -> str:
    head = re.split(r"[,;=<>]", found.string[: found.start()])[-1]
    words = re.findall(r"[A-Za-zμ/]+", " ".join(filter(None, found.groupdict().values())))
    known = all(word in _UNITS or set(word.split("/")) <= _UNITS for word in words)
    if not head or not re.search(r"[\w)}\]!%]$", head) or len(words) > 4 or _PROSE & {*words}:
        return found[0]
    if not known and not re.search(r"\d|\\pi|\\sqrt", head):
        return found[0]
    if found["words"] and not known and (len(words) > 3 or not found["words"].startswith(" ")):
        return found[0]
    if found["words"] and not known and min(map(len, words)) < 4:
        return found[0]  # 2 xy is a product
    return ""


def thousands(text: str) -> str:
    """Removes spaces between thousands, and commas that separate nothing else: in "1,234", not in
    "(1,234)".
    """
    text = re.sub(r"(?<![\w.,^])\d{1,3}(?: \d{3})+(?![\d/.]\d|\d|/)", _joined, text)
    text = re.sub(r"\.\d{3}(?: \d{3})+(?: \d{1,2})?(?![\d ])", _joined, text)
    text = arguments(text)
    text = re.sub(r"^([-+]?0),(?=\d{3}$)", r"\1.", text)
    joined = re.sub(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)", _joined, text)
    left = re.findall(r"[,;]\s?", joined)
    listed = re.search(r"[(\[]|\\\{", joined) or any(mark != ", " for mark in left)
    return text if listed else joined


def arguments(text: str) -> str:
    r"""\frac{1}{21,000} without commas: in an argument they only separate thousands; a set has
    \{.
    """
    return re.sub(r"(?<=[A-Za-z}]\{)\d{1,3}(?:,\d{3})+(?=\})", _joined, text)


def _joined(found: re.Match) -> str:
    return re.sub(r"[ ,]", "", found[0])


_E_NOTATION = re.compile(
    r"(?<![\w.^_/}\\])(\d+(?:\.\d+)?|\.\d+)"  # a number that is not part of another, or of a power
    r"(?:[eE]([-+]?\d{1,3})"  # e15
    r"|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*"  # \times 10^
    r"(?:\{\s*([-+]?\d{1,3})\s*\}|([-+]?\d{1,3})))"  # {15} or 15
    r"(?![\w.!^])"
)


def e_notation(text: str) -> str:
    r"""Replaces 6.2e15 and 6.2\times10^{15} by digits."""
    return _E_NOTATION.sub(lambda m: _shifted(m[1], int(m[2] or m[3] or m[4])), text)


def _shifted(mantissa: str, exponent: int) -> str:
    whole, _, part = mantissa.partition(".")
    digits = whole + part
    point = len(whole) + exponent
    digits = "0" * max(0, 1 - point) + digits
    point = max(point, 1)
    digits = digits.ljust(point, "0")
    whole = digits[:point].lstrip("0") or "0"
    part = digits[point:].rstrip("0")
    return f"{whole}.{part}" if part else whole


_REPEATING = re.compile(
    r"(?<![\w.])(\d*)\.(\d*)"  # digits before the period
    r"(?:\\(?:overline|bar)\s*(?:\{(\d+)\}|(\d))"  # \overline{3}, \bar 3
    r"|\\dot\s*(?:\{(\d)\}|(\d))"  # \dot{3}
    r"|\((\d+)\))"  # (3)
    r"(?![\d.\\])"
)


def repeating_decimals(text: str) -> str:
    r"""Replaces 0.\overline{3}, 0.\dot{3} and 0.(3) by \frac{1}{3}."""

    def fraction(m: re.Match) -> str:
        if m[7] and int(m[1] or "0"):
            return m[0]  # 1.5(2) may be a product
        fixed = m[2]
        period = next(filter(None, m.groups()[2:]))
        value = Fraction(int((m[1] or "0") + fixed), 10 ** len(fixed))
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"

    return _REPEATING.sub(fraction, text)


_LETTER = r"\\(?:pi|theta|phi|alpha|beta|gamma|delta|lambda|mu|omega|sigma|tau)"
_BARE_FRACTION = re.compile(
    rf"\\([dt]?frac)\s*(?:({_LETTER})\s*({_LETTER}|\w)|(\w)\s*({_LETTER}))(?![A-Za-z{{\[])"
)


def braced_fractions(text: str) -> str:
    r"""Replaces \frac \pi4 by \frac{\pi}{4}: math-verify drops the former and reads the rest of an
    answer as the answer.
    """
    return _BARE_FRACTION.sub(lambda m: rf"\{m[1]}{{{m[2] or m[4]}}}{{{m[3] or m[5]}}}", text)


def fractions(text: str) -> str:
    r"""Replaces all \frac forms that TeX reads without braces by \frac{...}{...}."""
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", braced_fractions(text))
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    return re.sub(r"\\frac\s*\{([^{}]*)\}\s*(\d)", r"\\frac{\1}{\2}", text)


_MIXED = re.compile(
    r"(?<![\w.^_})/\\])(\d+)\s*"  # a whole number that is not part of another, or of a power
    r"(?:\s\s*(\d+)\s*/\s*(\d+)"  # 1/2
    r"|\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\})"  # \frac{1}{2}
    r"(?![\d./^!])"
)


def mixed_numbers(text: str) -> str:
    r"""Replaces 3 1/2 and 3\frac{1}{2} by \frac{7}{2}, if the fraction is below 1."""

    def fraction(m: re.Match) -> str:
        whole = int(m[1])
        above = int(m[2] or m[4])
        below = int(m[3] or m[5])
        proper = 0 < above < below
        return rf"\frac{{{whole * below + above}}}{{{below}}}" if proper else m[0]

    return _MIXED.sub(fraction, text)


def percent_of_fraction(text: str) -> str:
    r"""Writes \frac{200}{3}\% as a product that the library can read."""
    return re.sub(
        r"(?<=[})])\\%", r" \\cdot 1\\%", re.sub(r"(\d+)/(\d+)\\%", r"\\frac{\1}{\2}\\%", text)
    )


STAGES = (
    bare,
    characters,
    separators,
    layout,
    sentence,
    currency,
    percent_words,
    degrees,
    units,
    thousands,
    e_notation,
    repeating_decimals,
    fractions,
    mixed_numbers,
    percent_of_fraction,
)


# Names of one unit each; the first is the one returned.
_SAME_UNITS = (
    "mm millimeter millimeters, cm centimeter centimeters, m meter meters metre metres, "
    "km kilometer kilometers, in inch inches, ft foot feet, yd yard yards, mi mile miles, mg, "
    "g gram grams, kg kilogram kilograms, lb lbs pound pounds, oz ounce ounces, "
    "s sec secs second seconds, min mins minute minutes, h hr hrs hour hours, day days, "
    "week weeks, month months, year years, cent cents, dollar dollars"
)
_UNIT_OF = {word: g.split()[0] for g in _SAME_UNITS.split(", ") for word in g.split()}
_LAST_UNIT = re.compile(rf"(?:\\text\{{\s*([A-Za-z]+)\s*\}}|[\d}}]\s*([A-Za-z]{{2,}})){_POWER}$")


def unit(text: str) -> str | None:
    """The unit at the end of an answer, by one of its names, without powers; None if no known unit
    is there.
    """
    for stage in STAGES[: STAGES.index(units)]:
        text = stage(text)
    found = _LAST_UNIT.search(text.strip())
    return _UNIT_OF.get(found[1] or found[2]) if found else None


def normalise(text: str) -> str:
    """The form in which an answer is read and compared: all `STAGES` applied in order."""
    for stage in STAGES:
        text = stage(text)
    return text.strip()


_PARTIAL = {
    "dots leave something out": r"\\[lcv]?dots[a-z]?(?![A-Za-z])|\.\.",
    "numbers side by side": r"(?<![\w.^\\])[\d.]*\d\s+\.?\d|\d\.\d*\.\d",
    "words": r"(?<![A-Za-z\\{])(?!(?:and|or|sin|cos|tan|log|ln|mod)\b)"
    r"[A-Za-z]{2,}\s+(?:[A-Za-z]{2,}(?![A-Za-z(])|\d)",
    "text within": r"\\text\{(?!\s*(?:,?\s*and|,?\s*or)\s*\})[^{}]*\}\s*[A-Za-z\d\\]",
}
_PARTIAL_RES = {why: re.compile(pattern) for why, pattern in _PARTIAL.items()}


def partial(text: str) -> str | None:
    """Reason why a parser would read only part of a normal form; None if it may be tried."""
    if not text:
        return "nothing"
    return next((why for why, found in _PARTIAL_RES.items() if found.search(text)), None)
