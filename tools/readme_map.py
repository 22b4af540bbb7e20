"""Writes the README's map anew from the files' docstrings: `python -m tools.readme_map`. Knows nothing of what files do."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- map -->\n", "<!-- end of map -->"
ROOMS = {
    "minserve": "The root: settings, command line, process tree, and the words between processes. Never imports torch.",
    "minserve/server": "The edge: HTTP to token ids and back. Knows nothing of torch, models or the engine.",
    "minserve/runtime": "The engine process: when to run what.",
    "minserve/models": "What a forward is.",
    "minserve/models/layers": "The parts of a model.",
    "minserve/kernels": "The tool wall: vendor libraries and Triton are imported here and nowhere else.",
    "minserve/clients": "Programs that talk to a server over HTTP.",
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


def main() -> None:
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    readme.write_text(before + BEGIN + "\n".join(map(room, ROOMS)) + END + after)


if __name__ == "__main__":
    main()
