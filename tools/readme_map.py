"""Writes anew what documents repeat from the code: the README's map, from the files' docstrings, and the flags of operating.md.

`python -m tools.readme_map`. Knows nothing of what files and flags do.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from minserve.flags import usage

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- map -->\n", "<!-- end of map -->"
FLAGS_BEGIN, FLAGS_END = "<!-- flags -->\n", "<!-- end of flags -->"
ROOMS = {
    "minserve": "The root: settings, command line, process tree, and the words between processes. Never imports torch.",
    "minserve/server": "The edge: HTTP to token ids and back. Knows nothing of torch, models or the engine.",
    "minserve/runtime": "The engine process: when to run what.",
    "minserve/models": "What a forward is.",
    "minserve/models/layers": "The parts of a model.",
    "minserve/kernels": "The tool wall: vendor libraries and Triton are imported here and nowhere else.",
    "minserve/clients": "Programs that talk to a server over HTTP.",
    "tools": "Programs of those who work on it: the embedded model's training, benches, soaks. No part of the package.",
}


def first_sentence(file: Path) -> str:
    """The first sentence of a module's docstring, on one line and without its full stop."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.match(r".*?\.(?=\s|$)", paragraph)
    return (sentence.group() if sentence else paragraph).rstrip(".")


def room(folder: str) -> str:
    files = sorted(file for file in (ROOT / folder).glob("*.py") if file.name != "__init__.py")
    lines = [f"- `{file.relative_to(ROOT)}`: {first_sentence(file)}" for file in files]
    return "\n".join([f"**{folder}/** {ROOMS[folder]}", "", *lines, ""])


def flags() -> str:
    """`minserve launch --help`, as a block of a document."""
    return f"```\n{usage()}\n```\n"


def replace(document: Path, begin: str, text: str, end: str) -> None:
    """Puts `text` between two marks."""
    before, _, rest = document.read_text().partition(begin)
    after = rest.partition(end)[2]
    document.write_text(before + begin + text + end + after)


def main() -> None:
    replace(ROOT / "README.md", BEGIN, "\n".join(map(room, ROOMS)), END)
    replace(ROOT / "docs" / "operating.md", FLAGS_BEGIN, flags(), FLAGS_END)


if __name__ == "__main__":
    main()
