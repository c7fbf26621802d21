"""Links from these pages to lines of the sources: `[`symbol`](../folder/file.py#L12)`.

    python docs/anchors.py

sets the line of each link to the one that defines the symbol which the link is named after.
`tests/tools/test_docs.py` fails where a link is out of date.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

LINE_LINK = re.compile(r"\[`(?P<symbol>[^`\]]+)`\]\((?P<path>[^)#\s]+)#L(?P<line>\d+)\)")

# What stands before and after a name in the line that defines it: in Python, C++ and CUDA.
_DEFINITIONS = (
    r"^\s*(?:async )?def {}\b",
    r"^\s*(?:class|struct|enum class|namespace) {}\b",
    r"^\s*(?:static )?(?:constexpr|const|using) (?:[\w:<>]+ )?{}\b",
    r"^#define {}\b",
    r"^{}\b(?:: [^=]+)? =",
    # A function in C++: what it returns, its name, its parameters; not a call or a declaration.
    r"^(?:[\w:<>,*&\"\s]+[\s*&]){}\((?!.*;\s*$)",
)


def definition(path: pathlib.Path, symbol: str) -> int:
    """The number of the first line in the file that defines `symbol`, of which the last part is looked for.

    Raises LookupError where there is none.
    """
    name = re.escape(re.split(r"\.|::", symbol.removesuffix("()"))[-1])
    lines = path.read_text().splitlines()
    for pattern in _DEFINITIONS:
        for number, line in enumerate(lines, 1):
            is_overload = number > 1 and lines[number - 2].strip().endswith("overload")
            if re.search(pattern.format(name), line) and not is_overload:
                return number
    raise LookupError(f"{path.relative_to(ROOT)} does not define {symbol}")


def with_anchors(page: pathlib.Path) -> str:
    """The page's text, with every link to a line pointing where its symbol is defined.

    Raises LookupError for a link whose file does not define its symbol.
    """

    def anchored(match: re.Match[str]) -> str:
        symbol, path = match["symbol"], match["path"]
        return f"[`{symbol}`]({path}#L{definition((page.parent / path).resolve(), symbol)})"

    return LINE_LINK.sub(anchored, page.read_text())


def main() -> None:
    for page in PAGES:
        try:
            text = with_anchors(page)
        except (LookupError, OSError) as error:
            sys.exit(f"{page.relative_to(ROOT)}: {error}")
        if text != page.read_text():
            page.write_text(text)
            print(f"{page.relative_to(ROOT)}: lines of links updated")


if __name__ == "__main__":
    main()
