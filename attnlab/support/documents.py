"""Self-contained HTML documents: a folder's page.html, page.css and optional page.js in one file."""

import base64
import hashlib
import re
from pathlib import Path

BASE = Path(__file__).with_name("documents.css")  # colours, typography and controls of all documents


def document(folder: Path, parts: dict[str, str]) -> str:
    """Return a folder's page.html with each "{{name}}" replaced by `parts[name]`, or by its style, script or policy.

    The policy allows only this style, this script and images embedded in the document.
    """
    style = BASE.read_text(encoding="utf-8") + (folder / "page.css").read_text(encoding="utf-8")
    file = folder / "page.js"
    script = file.read_text(encoding="utf-8") if file.exists() else ""
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = parts | {"policy": policy, "style": style, "script": script}
    template = (folder / "page.html").read_text(encoding="utf-8")
    # In one pass, so that "{{script}}" in a title stays text.
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], template)


def valid_unicode(text: str) -> str:
    """The text with "?" in place of lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def _hash(text: str) -> str:
    """The Content-Security-Policy source expression that allows only this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
