"""Everything that the documentation names exists: files, modules, links, commands and their options, settings,
variables; and the page on the architecture agrees with its test.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from realtime.cli import build_parser
from realtime.config import ENVIRONMENT_PREFIX, known_keys
from tests import file_index

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FOLDERS = "engine|realtime|fleet|tests|training|benchmarks|examples|docs|deploy"
FILE = re.compile(rf"(?<![\w./-])((?:audio|{FOLDERS})/[\w./-]*\.(?:py|md|toml|js|json|svg|png|html))\b")
# `audio/...` without a file's ending is a media type.
FOLDER = re.compile(rf"`((?:{FOLDERS})/[\w/-]*)`")
MODULE = re.compile(r"(?:`|-m )((?:audio|engine|realtime|benchmarks)(?:\.[a-z]\w*)+)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
# Where one command ends: at the next one, at a comment, or at the end of a line that does not go on in the next.
END = re.compile(r"&&|\||#|;|\n")
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
OPTION = re.compile(r"--[a-z][\w.-]*")
# Sections whose keys no event of the wire is called like.
SETTING = re.compile(r"`((?:server|auth|limits|model)\.[a-z]\w*)\b")
VARIABLE = re.compile(rf"\b{ENVIRONMENT_PREFIX}[A-Z0-9_]+")
# Variables that are no settings: those of the commands, that of docker-compose.yml, and the pattern of all others.
OTHER_VARIABLES = {ENVIRONMENT_PREFIX + name for name in ("CACHE", "API_KEY", "DEBUG", "MODEL_FOLDER", "SECTION_KEY")}


def defined_in(path: Path) -> set[str]:
    """Names at the top of a module."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def exists(dotted: str) -> bool:
    """Whether a name like `engine.models.mel.item_features` is a module of ours, or something at the top of one."""
    path = ROOT / dotted.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    module = path.parent.with_suffix(".py")
    return module.is_file() and path.name in defined_in(module)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    missing = [name for name in FILE.findall(text) if not (ROOT / name).is_file()]
    missing += [name for name in FOLDER.findall(text) if not (ROOT / name).exists()]
    missing += [name for name in MODULE.findall(text) if not exists(name)]
    assert not missing, f"{page.name} names what is not there: {missing}"


def commands(page: Path) -> Iterator[list[str]]:
    """The command lines of a page as words: in spans of code, in indented lines and in fenced blocks."""
    text = page.read_text()
    blocks = "\n".join([*FENCE.findall(text), *re.findall(r"^    .*$", text, re.MULTILINE)]).replace("\\\n", " ")
    spans = [span.replace("\n", " ") for span in SPAN.findall(FENCE.sub("", text))]
    for line in [part for code in (blocks, *spans) for part in END.split(code)]:
        words = line.split()
        while words and ASSIGNMENT.fullmatch(words[0]):
            del words[0]
        if len(words) > 1:
            yield words


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a command and of all commands below it."""
    found = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            found |= {option for below in action.choices.values() for option in options_of(below)}
    return found


def missing_of(words: list[str], known: dict[str, set[str]], targets: set[str]) -> list[str]:
    """What a command line names and does not exist."""
    program, name, *rest = words
    options = set(OPTION.findall(" ".join(rest)))
    if program == "make":
        return [] if name in targets else [f"make {name}"]
    if program == "tickertape" and not name.isupper() and not name.startswith("-"):
        return sorted(options - known[name]) if name in known else [f"tickertape {name}"]
    if (program, name) == ("python", "-m") and rest[0].split(".")[0] in ("benchmarks", "training", "tests"):
        path = ROOT / rest[0].replace(".", "/")
        source = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        # Options that several programs take are defined in modules that they import.
        for module in re.findall(r"^from (benchmarks\.\w+) import", source, re.MULTILINE):
            source += (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
        return [f"{rest[0]} {option}" for option in sorted(options) if f'"{option}"' not in source]
    return []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    (below,) = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    known = {name: options_of(parser) for name, parser in below.choices.items()}
    targets = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = [name for words in commands(page) for name in missing_of(words, known, targets)]
    assert not missing, f"{page.name} names what is not there: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_and_variables_exist(page: Path) -> None:
    text, keys = page.read_text(), set(known_keys())
    variables = {ENVIRONMENT_PREFIX + key.replace(".", "_").upper() for key in keys} | OTHER_VARIABLES
    missing = (set(SETTING.findall(text)) - keys) | (set(VARIABLE.findall(text)) - variables)
    assert not missing, f"{page.name} names what is not there: {missing}"


def test_a_command_that_is_not_there_is_found() -> None:
    known, targets = {"serve": {"--port"}}, {"test"}
    line = ["--port", "1", "--gone"]
    assert missing_of(["tickertape", "serve", *line], known, targets) == ["--gone"]
    assert missing_of(["tickertape", "gone"], known, targets) == ["tickertape gone"]
    assert missing_of(["make", "gone"], known, targets) == ["make gone"]
    assert missing_of(["python", "-m", "benchmarks.start", "--gone"], known, targets) == ["benchmarks.start --gone"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to what is not there: {missing}"


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page: those that GitHub makes of its headings, and those that it sets itself."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_of_links_exist(page: Path) -> None:
    links = [link.partition("#") for link in LINK.findall(page.read_text()) if "://" not in link and "#" in link]
    targets = [(page.parent / path if path else page, anchor) for path, _, anchor in links]
    missing = [f"{to.name}#{anchor}" for to, anchor in targets if to.suffix == ".md" and anchor not in anchors_of(to)]
    assert not missing, f"{page.name} links to anchors that are not there: {missing}"


def test_the_index_of_files_is_up_to_date() -> None:
    assert file_index.PAGE.read_text() == file_index.page(), "run: python -m tests.file_index"


QUOTED = re.compile(r"(?<![*\w])\*([^*\n]+)\*(?![*\w])")
HOLE = "\0"


def sentences_of(path: Path) -> Iterator[str]:
    """The strings of a module, with a hole for each value that is put in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(?:\.\d)?[sdf]", HOLE, node.value)


def is_printed(quoted: str, texts: list[str]) -> bool:
    """Whether all parts of a quotation are in the code: each in one string. A sentence may be joined from two of them,
    begin with a small letter there, and have its full stop added."""
    parts = [part.strip(" ;:.") for part in quoted.split("...")]
    for part in filter(None, parts):
        spellings = (part, part[:1].lower() + part[1:])
        pieces = [[piece.strip() for piece in spelling.split("; ")] for spelling in spellings]
        if not any(all(any(piece in text for text in texts) for piece in spelled) for spelled in pieces):
            return False
    return True


def test_sentences_that_troubleshooting_quotes_are_those_of_the_code() -> None:
    packages = ("realtime", "audio", "engine/client", "engine/boundary", "engine/server", "engine/weights")
    modules = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    texts = [text for path in modules for text in sentences_of(path)]
    texts += [path.read_text() for path in (ROOT / "realtime" / "web").glob("*.js")]
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = QUOTED.findall(page.partition("## ")[2])
    missing = [sentence for sentence in quoted if not is_printed(sentence, texts)]
    assert len(quoted) > 40 and not missing, missing
    assert not is_printed("the server is sad; try again", texts)
