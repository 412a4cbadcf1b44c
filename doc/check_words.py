"""List what makes a reader read twice: long sentences, blocks that show nothing, private idioms.

    python doc/check_words.py

It reads all pages, README.md, texts and comments of the examples, public docstrings of the package,
and the sentences that it prints, in errors and warnings too. The exit status is 0 where nothing is
found.
"""

import ast
import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
MAX_WORDS = 32
doctest.register_optionflag("NUMBER")  # of pytest
# what only this project says, and words that make a reader ask "of what?"
PRIVATE = (
    r"rulers?", r"foret(?:el|old)\w*", r"ow(?:e|es|ed)",
    r"go(?:es|ne)? over (?:the )?(?:rows|parts)",
    r"gone over", r"lengths? (?:a|per) column", r"tak(?:e|es|en|ing) turns", r"took turns",
    r"dense truth", r"truth is dense", r"err together", r"rooms? of the package",
    r"(?:that|those) of (?:that|those) of", r"is told (?!which)", r"told one from", r"lies in the",
    r"temper", r"stands for the posterior", r"nothing to learn beyond", r"drawn to the common mean",
    r"price of none", r"at the price of", r"side by side", r"to be had", r"after \.\d+",
    r"speaks? the", r"what \w+ gives away", r"knows? next to nothing", r"runs away",
    r"(?:comes?|came) to rest", r"held to be", r"lattices?", r"in earnest", r"nobody has to",
    r"for anybody", r"next to nothing", r"makes? of it", r"of one's own",
)  # fmt: skip
IDIOMS = re.compile(rf"\b(?:{'|'.join(PRIVATE)})\b", re.IGNORECASE)
SHAPE = re.compile(r"\(?(?:True|False)(?:, (?:True|False))*\)?|\(\d+,( ?\d+,?)*\)")


def clean(text):
    """Return text without roles and markup, each literal and formula as one word."""
    text = re.sub(r":[\w:+-]+:`([^`]*?)(?:\s*<[^`]*>)?`", "X", text)
    text = re.sub(r"``.*?``|`[^`]*`_{0,2}", "X", text, flags=re.S)
    return re.sub(r"\s+", " ", text)


def sentences(paragraph):
    """Split a paragraph at full stops, question marks, semicolons and colons."""
    parts = re.split(r"(?<=[.?!;])\s+|(?<=:)\s+(?=\w)", clean(paragraph))
    return [part for part in parts if part]


def paragraphs(text):
    """Yield (line, paragraph) of prose: no code, directives, formulas or options."""
    kept, start, skip = [], 0, None
    for number, line in enumerate([*text.splitlines(), ""], 1):
        indent = len(line) - len(line.lstrip())
        body = line.strip()
        if skip is not None and body and indent <= skip:
            skip = None
        if skip is not None:
            continue
        opens = re.match(r"\.\. (?!\[)|```|>>>|\.\.\. |\|", body)
        if opens and not re.match(r"\.\. (?:note|warning|versionadded|list-table)", body):
            skip = indent if body.startswith("..") else None
        item = re.match(r"(?:[-*] |\* - |\d+\. )", body)
        if not body or opens or item or re.fullmatch(r"[=~^-]{4,}", body):
            if kept:
                yield start, " ".join(kept)
            kept = []
        if body and not opens and not re.fullmatch(r"[=~^-]{4,}|:[\w-]+:.*", body):
            start = start if kept else number
            kept.append(re.sub(r"^(?:[-*] |\* - |- |\d+\. )+", "", body))


def without_code(text):
    """Blank doctests with their output, and fenced or literal blocks, keeping line numbers."""
    lines, inside, fenced = text.splitlines(), False, False
    for k, line in enumerate(lines):
        if line.strip().startswith("```"):
            fenced = not fenced
            lines[k] = ""
        inside = line.lstrip().startswith(">>>") or (inside and bool(line.strip()))
        if inside or fenced:
            lines[k] = ""
    return "\n".join(lines)


def in_prose(name, text):
    """Return findings of long sentences and idioms in one text."""
    found = []
    for line, paragraph in paragraphs(without_code(text)):
        for sentence in sentences(paragraph):
            length = len(re.findall(r"[\w.'%/-]*\w[\w.'%/-]*", sentence))
            if length > MAX_WORDS:
                found.append(f"{name}:{line}: {length} words: {sentence[:160]}")
            found += [
                f"{name}:{line}: idiom '{hit.group()}': {sentence[:120]}"
                for hit in IDIOMS.finditer(sentence)
            ]
    return found


def in_blocks(name, text):
    """Return findings of blocks of code all of whose output is True, False or a shape."""
    blocks, last = [], None
    for example in doctest.DocTestParser().get_examples(text):
        end = example.lineno + example.source.count("\n") + example.want.count("\n")
        if last is not None and example.lineno == last:
            blocks[-1].append(example)
        else:
            blocks.append([example])
        last = end
    found = []
    for block in blocks:
        wants = [example.want.strip() for example in block if example.want]
        if wants and all(SHAPE.fullmatch(want) for want in wants):
            found.append(f"{name}:{block[0].lineno + 1}: prints only {', '.join(wants)}")
    return found


def public_docstrings():
    """Yield (name, docstring) of what the public modules list, and of public methods."""
    rooms = [room.name for room in pkgutil.iter_modules([str(ROOT / "sklearn_ep")])]
    for name in (f"sklearn_ep.{room}" for room in rooms if not room.startswith("_")):
        module = importlib.import_module(name)
        for item in module.__all__:
            thing = getattr(module, item)
            yield f"{name}.{item}", inspect.getdoc(thing) or ""
            for kind in getattr(thing, "__mro__", ()):
                if kind.__module__.startswith("sklearn_ep"):
                    for method, value in vars(kind).items():
                        if not method.startswith("_"):
                            yield f"{kind.__name__}.{method}", inspect.getdoc(value) or ""


def texts(node):
    """Return the string that an expression builds, with X for what is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(texts(part) or "X" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (texts(node.left) or "X") + (texts(node.right) or "X")
    return ""


def messages(tree):
    """Yield (line, text) of strings that are sentences: errors, warnings, and what is printed."""
    nodes = list(ast.walk(tree))
    docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
    built = [node for node in nodes if isinstance(node, ast.JoinedStr | ast.BinOp)]
    inner = [part for node in built for part in ast.walk(node) if part is not node]
    skipped = {id(node) for node in [*docstrings, *inner]}
    for node in nodes:
        if id(node) not in skipped and len(texts(node).split()) > 3:
            yield node.lineno, texts(node)


def main():
    """Print all findings and return their number."""
    found = []
    pages = [
        p
        for p in ROOT.glob("doc/**/*.rst")
        if not {"_build", "generated", "auto_examples", "_templates"} & set(p.parts)
    ]
    pages += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "doc/README.md")]
    for path in sorted([*pages, *ROOT.glob("examples/**/*.rst")]):
        text = path.read_text()
        name = path.relative_to(ROOT)
        found += in_prose(name, text) + in_blocks(name, text)
    for path in sorted(ROOT.glob("examples/**/*.py")):
        source, name = path.read_text(), path.relative_to(ROOT)
        found += in_prose(name, ast.get_docstring(ast.parse(source)) or "")
        found += in_prose(name, re.sub(r"^(?!#).*$", "", source, flags=re.M).replace("#", " "))
    for path in sorted(ROOT.glob("sklearn_ep/**/*.py")):
        tree, name = ast.parse(path.read_text()), path.relative_to(ROOT)
        for line, text in messages(tree):
            found += in_prose(f"{name}:{line}", text)
    for owner, doc in dict(public_docstrings()).items():
        found += in_prose(owner, doc) + in_blocks(owner, doc)
    print("\n".join(found))
    return len(found)


if __name__ == "__main__":
    sys.exit(bool(main()))
