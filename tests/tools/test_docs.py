"""The documents name files, symbols and headings that exist, and link to the lines that define symbols."""

import os
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import anchors  # noqa: E402

LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
SUFFIXES = "py pyi cu cuh cc h md json toml txt png pdf".split()
FILE = re.compile(rf"[\w.-]+(?:/[\w.-]+)*\.(?:{'|'.join(SUFFIXES)})")
FOLDER = re.compile(r"[\w.-]+(?:/[\w.-]+)*/")
SKIPPED = {".git", "build", "runs", "__pycache__"}

pages = pytest.mark.parametrize("page", anchors.PAGES, ids=lambda page: page.name)


def repository():
    """Every file and folder, as a path from the root with a slash in front; folders end with one."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.startswith(".venv")]
        start = f"/{pathlib.Path(folder).relative_to(ROOT).as_posix()}/".replace("/./", "/")
        found += [start + name for name in files] + [f"{start}{name}/" for name in folders]
    return found


@pytest.fixture(scope="module")
def paths():
    return repository()


def missing_paths(text, paths):
    """What `text` names in backticks as a file or a folder, and no path ends with."""
    named = {code for code in CODE.findall(text) if FILE.fullmatch(code) or FOLDER.fullmatch(code)}
    return sorted(name for name in named if not any(path.endswith(f"/{name}") for path in paths))


def slug(heading):
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(page):
    text = page.read_text()
    for match in LINK.finditer(text):
        target, _, anchor = match["target"].partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            yield f"{match[0]}: no such file"
            continue
        code = CODE.fullmatch(match["text"])
        if anchor and path.suffix == ".md":
            if anchor not in map(slug, re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)):
                yield f"{match[0]}: no such heading"
        elif code and re.fullmatch(r"[\w.:]+(\(\))?", code[1]) and not FILE.fullmatch(code[1]):
            name = re.split(r"\.|::", code[1].removesuffix("()"))[-1]
            files = [path] if path.is_file() else [x for x in path.rglob("*") if x.suffix[1:] in SUFFIXES[:6]]
            if not any(re.search(rf"\b{name}\b", x.read_text()) for x in files):
                yield f"{match[0]}: {name} is not in it"


@pages
def test_links_lead_somewhere(page):
    assert list(broken_links(page)) == []


@pages
def test_files_named_exist(page, paths):
    assert missing_paths(page.read_text(), paths) == []


@pages
def test_links_to_lines_are_up_to_date(page):
    """`python docs/anchors.py` sets them."""
    assert anchors.with_anchors(page) == page.read_text()


def test_a_name_without_a_file_is_found(paths):
    text = (
        "`_attention.py`, `cuda/kernels/`, `a / b`, `no_file.py`, `sm90/nowhere/`, `jax_flash/_attention.cu`"
    )
    assert missing_paths(text, paths) == ["jax_flash/_attention.cu", "no_file.py", "sm90/nowhere/"]


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "code.py").write_text("def here():\n    pass\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# One heading\n[`here`](code.py) [`gone`](code.py) [x](no.py) [y](page.md#one-heading) [z](#two)\n"
    )
    assert [problem.rpartition(": ")[2] for problem in broken_links(page)] == [
        "gone is not in it",
        "no such file",
        "no such heading",
    ]


@pytest.mark.parametrize(
    ("line", "symbol"),
    [
        ("def name(x):", "name"),
        ("@overload\ndef name(x):\n    ...\ndef name(x):", "name"),
        ("    def name(self):", "Class.name"),
        ("class name(Base):", "name"),
        ("name: dict[str, int] = {}", "name"),
        ('extern "C" __global__ void name(const Parameters p) {', "name"),
        ("__device__ __forceinline__ float name(float x) {", "Struct::name"),
        ("struct name {", "name"),
        ("    static constexpr int name = 4;", "name"),
        ("#define name(x) x", "name"),
    ],
)
def test_finds_the_line_that_defines_a_symbol(tmp_path, line, symbol, monkeypatch):
    monkeypatch.setattr(anchors, "ROOT", tmp_path)
    source = tmp_path / "source"
    source.write_text(f"# name\nresult = name(3)\n    name(4);\nnames = 3\n{line}\n{line}\n")
    assert anchors.definition(source, symbol) == 5 + line.count("\n")
    with pytest.raises(LookupError, match="does not define other"):
        anchors.definition(source, "other")


def test_the_first_example_runs(capsys):
    text = (ROOT / "README.md").read_text()
    example = text.partition("## First example")[2].partition("```python\n")[2].partition("```")[0]
    names = {}
    exec(example, names)
    assert names["d_key"].shape == (2, 1024, 2, 64)
    assert "implementation=None picks" in capsys.readouterr().out
