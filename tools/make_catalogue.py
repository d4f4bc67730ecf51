"""Make ``labextension/jupyter_agentbox.pot``: ``python tools/make_catalogue.py``, then commit it.

It holds the texts of the extension for those who make language packs of JupyterLab: the ones in the sources, and the
words of its settings, which the server translates. ``tests/lab`` looks whether this was done.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.pofile import write_po

SOURCES = Path(__file__).parents[1] / "labextension"
TARGET = SOURCES / "jupyter_agentbox.pot"
_HEADER = (
    "# Texts of the JupyterLab extension of jupyter_agentbox. Made by tools/make_catalogue.py.\n"
    "# %1, %2 and so on stand for what is filled in.\n"
)
_TEXT = r"'((?:[^'\\]|\\.)*)'"
#: A call of ``trans.__`` or ``trans._n``, with its text or the beginning of it.
_CALL = re.compile(rf"trans\.(__|_n)\(\s*(?:{_TEXT}(?:,\s*{_TEXT})?)?")
#: What is shown of a settings schema, in the context that JupyterLab looks it up in.
_SHOWN = {"title", "description", "jupyter.lab.setting-icon-label"}


def make_catalogue() -> Catalog:
    """Gather all texts, each with the names of the files that it is in.

    Raises
    ------
    ValueError
        A text is no literal, so that it can't be found.
    """
    catalogue = Catalog(project="jupyter_agentbox")
    for path in sorted((SOURCES / "src").glob("*.ts*")):
        for call, one, many in _CALL.findall(path.read_text()):
            if not one or (call == "_n" and not many):
                raise ValueError(f"{path.name}: a text for trans.{call} has to stand in single quotes in the call")
            texts = tuple(re.sub(r"\\(.)", r"\1", text) for text in (one, many))
            catalogue.add(texts if call == "_n" else texts[0], locations=[(f"src/{path.name}", 1)])
    schema = json.loads((SOURCES / "schema" / "plugin.json").read_text())
    for context, part in [("schema", schema), *(("settings", item) for item in schema["properties"].values())]:
        for key in sorted(_SHOWN & part.keys()):
            found = "settings" if "." in key else context
            catalogue.add(part[key], context=found, locations=[("schema/plugin.json", 1)])
    return catalogue


def write(catalogue: Catalog) -> bytes:
    """Return the file's content; the same for the same texts, as it has no date in it."""
    target = io.BytesIO()
    write_po(target, catalogue, omit_header=True, include_lineno=False, width=118)
    header = f'{_HEADER}msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=utf-8\\n"\n\n'
    return header.encode() + target.getvalue()


if __name__ == "__main__":
    TARGET.write_bytes(write(make_catalogue()))
